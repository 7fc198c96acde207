"""`models:/NAME/VERSION` and its like → the folder that MLflow saved, from a tracking server.

By the server's REST API: https://mlflow.org/docs/latest/rest-api.html. MLflow itself need not be
installed (docs/decisions/0125-mlflow.md).
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import httpx

from modelyard.archiver.digest import digest_of_all
from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.value import digest_files
from modelyard.exporter.sources import Fetched, Tell

MOST_BYTES, MOST_FILES = 256 << 30, 1000
"""Size and number of the files of one model, at most."""
TIMEOUT_S = 60.0
_FILES = "/api/2.0/mlflow-artifacts/artifacts"
FORMS = "models:/NAME/VERSION, models:/NAME@ALIAS, models:/m-ID or runs:/RUN_ID/PATH"
_SECRETS = ("USERNAME", "PASSWORD", "TOKEN")
# A Path has one slash where the text had two; a version is fixed, `latest` and a stage are not.
_VERSION = re.compile(r"models:/{1,3}(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>[^/@]+))")
_LOGGED = re.compile(r"models:/{1,3}(?P<id>m-[\w-]+)")
_RUN = re.compile(r"runs:/{1,3}(?P<id>\w+)/(?P<path>.+)")


@contextmanager
def fetch(location: str, tell: Tell) -> Iterator[Fetched]:
    """Fetch the folder of a model from the server of `MLFLOW_TRACKING_URI`.

    Raises:
        CheckpointError: there is no such model, or no server, or what it sends is refused.
    """
    with _Server() as server, tempfile.TemporaryDirectory(prefix="modelyard-mlflow-") as place:
        with _asks(server.shown):
            place_of, name, origin = _find(server, location)
            folder = Path(place) / (re.sub(r"[^\w.-]", "_", name) or "model")
            folder = server.download(place_of, folder)
        if tell is not None and origin["location"] != location:
            tell(f"{location} is {origin['location']}")
        files = digest_files(folder, [path for path in folder.rglob("*") if path.is_file()])
        origin |= {"tracking_uri": server.shown, "sha256": digest_of_all(files)}
        yield Fetched(folder, folder.name, {key: each for key, each in origin.items() if each})


def _find(server: "_Server", location: str) -> tuple[str, str, dict[str, str]]:
    """Return where a model's files lie, its name, and what is noted of it."""
    if named := _LOGGED.fullmatch(location):
        return _logged(server, named["id"])
    if named := _VERSION.fullmatch(location):
        name, version = unquote(named["name"]), named["version"]
        if version is None:
            found = server.ask("mlflow/registered-models/alias", name=name, alias=named["alias"])
            version = str(found["model_version"]["version"])
        about = server.ask("mlflow/model-versions/get", name=name, version=version)["model_version"]
        place = server.ask("mlflow/model-versions/get-download-uri", name=name, version=version)
        logged = _LOGGED.fullmatch(str(about.get("source", "")))
        return place["artifact_uri"], name, {
            "location": f"models:/{name}/{version}",
            "run_id": about.get("run_id", ""),
            "model_id": about.get("model_id") or (logged["id"] if logged else ""),
        }  # fmt: skip
    if named := _RUN.fullmatch(location):
        id, path = named["id"], named["path"].strip("/")
        run = server.ask("mlflow/runs/get", run_id=id)["run"]
        # Models are artifacts of their run in MLflow 2, and outputs of it in MLflow 3.
        for output in run.get("outputs", {}).get("model_outputs", ()):
            if (logged_as := _logged(server, output["model_id"]))[1] == path:
                return logged_as
        place = f"{run['info']['artifact_uri'].rstrip('/')}/{path}"
        return place, path.rpartition("/")[2], {"location": f"runs:/{id}/{path}", "run_id": id}
    raise CheckpointError(f'"{location}": expected {FORMS}')


def _logged(server: "_Server", id: str) -> tuple[str, str, dict[str, str]]:
    info = server.ask(f"mlflow/logged-models/{id}")["model"]["info"]
    ids = {"run_id": info.get("source_run_id", ""), "model_id": id}
    return info["artifact_uri"], info["name"], {"location": f"models:/{id}", **ids}


class _Server(httpx.Client):
    """The tracking server that the environment names."""

    def __init__(self) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https"):
            raise CheckpointError(
                f'MLFLOW_TRACKING_URI is "{uri.rpartition("@")[2]}"; expected http:// or https:// '
                "of a tracking server, as `mlflow server --backend-store-uri …` starts one"
            )
        netloc = parts.netloc.rpartition("@")[2]
        self.shown = urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))
        user, password, token = (os.environ.get(f"MLFLOW_TRACKING_{each}", "") for each in _SECRETS)
        auth = (user, password) if user else None
        is_shown = token and not auth and not parts.username
        headers = {"authorization": f"Bearer {token}"} if is_shown else {}
        super().__init__(base_url=uri, auth=auth, headers=headers, timeout=TIMEOUT_S)

    def ask(self, call: str, /, **query: str) -> Any:
        """Return what the server says to a call."""
        answer = self.get(f"/api/2.0/{quote(call)}", params=query)
        if answer.status_code != 200:
            raise CheckpointError(f"{self.shown}: {_why(answer)}")
        return answer.json()

    def download(self, place: str, folder: Path) -> Path:
        """Return the folder of a place, which the server hands out or this machine has."""
        parts = urlsplit(place)
        if parts.scheme in ("", "file") and (Path(unquote(parts.path)) / "MLmodel").is_file():
            return Path(unquote(parts.path))
        if parts.scheme != "mlflow-artifacts":
            raise CheckpointError(
                f'its files are at "{place}", which the server does not hand out; take them '
                "with `mlflow artifacts download`, and export the folder"
            )
        root, left = parts.path.strip("/"), MOST_BYTES
        files = self._list(root)
        if "MLmodel" not in files:
            raise CheckpointError(f'"{place}" has no MLmodel, of {len(files)} files')
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            path = quote(f"{_FILES}/{root}/{name}")
            with self.stream("GET", path) as answer, (folder / name).open("xb") as file:
                if answer.status_code != 200:
                    answer.read()
                    raise CheckpointError(f"{self.shown}: {name}: {_why(answer)}")
                for chunk in answer.iter_bytes(1 << 20):
                    if (left := left - len(chunk)) < 0:
                        raise CheckpointError(f"{self.shown}: more than {MOST_BYTES} bytes")
                    file.write(chunk)
        return folder

    def _list(self, root: str) -> list[str]:
        """Return every file below a place, by its path from there."""
        folders, files, seen = [""], list[str](), 0
        while folders:
            below = folders.pop()
            path = f"{root}/{below}".rstrip("/")
            for each in self.ask("mlflow-artifacts/artifacts", path=path).get("files", ()):
                name, seen = str(each["path"]), seen + 1
                if "/" in name or name in ("", ".", "..") or not name.isprintable():
                    raise CheckpointError(
                        f"{self.shown} lists {name!r}, which is not a file's name"
                    )
                if seen > MOST_FILES:
                    raise CheckpointError(f"{self.shown} lists more than {MOST_FILES} files")
                (folders if each.get("is_dir") else files).append(f"{below}/{name}".lstrip("/"))
        return files


@contextmanager
def _asks(server: str) -> Iterator[None]:
    """Raise what a request fails by, and an answer of another form, as a CheckpointError."""
    try:
        yield
    except (httpx.HTTPError, OSError) as error:
        raise CheckpointError(f"{server} cannot be asked: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{server} answers in another form: {error!r}") from error


def _why(answer: httpx.Response) -> str:
    """Return what the server says of an error."""
    advice = "; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or …_TOKEN"
    is_refused = answer.status_code in (401, 403)
    return f"status {answer.status_code}: {answer.text[:300]}{advice * is_refused}"
