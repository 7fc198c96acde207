"""The tracking server's REST, the scoring protocol, and all of it against MLflow itself."""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import numpy as np
import pytest
import torch
from torch import nn

from modelyard.archiver import write_archive
from modelyard.archiver.signature import Dim, TensorSpec
from modelyard.exporter import CheckpointError
from modelyard.exporter.sources import find_source
from modelyard.handlers import Context
from modelyard.handlers.errors import BadInput
from modelyard.plugins.mlflow.handler import MlflowHandler
from tests.serve.live import LiveServer, running

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
BODIES = runpy.run_path(str(HERE / "bodies.py"))
ANSWERS = json.loads((HERE / "answers.json").read_text())
PEER = ROOT / ".peers" / "mlflow" / "bin"
needs_mlflow = pytest.mark.skipif(not (PEER / "mlflow").exists(), reason="scripts/peers mlflow")

# -- a tracking server ---------------------------------------------------------------------------

RUN, MODEL = "5ddd928d349e4f76bb644648f4ea4dfc", "m-e62b13e4967742039d57c1f814f7f551"
ARTIFACTS = f"mlflow-artifacts:/1/models/{MODEL}/artifacts"
VERSION = {
    "model_version": {
        "name": "digits", "version": "3", "source": f"models:/{MODEL}", "run_id": RUN,
        "status": "READY", "aliases": ["champion"],
    }
}  # fmt: skip
REST: dict[str, Any] = {
    "mlflow/model-versions/get?name=digits&version=3": VERSION,
    "mlflow/registered-models/alias?alias=champion&name=digits": VERSION,
    "mlflow/model-versions/get-download-uri?name=digits&version=3": {"artifact_uri": ARTIFACTS},
    f"mlflow/logged-models/{MODEL}": {
        "model": {"info": {"name": "net", "artifact_uri": ARTIFACTS, "source_run_id": RUN}}
    },
    f"mlflow/runs/get?run_id={RUN}": {
        "run": {
            "info": {"artifact_uri": f"mlflow-artifacts:/1/{RUN}/artifacts"},
            "outputs": {"model_outputs": [{"model_id": MODEL, "step": 0}]},
        }
    },
    "mlflow/model-versions/get?name=strange&version=1": ["unexpected"],
}
"""What MLflow 3.17.2 answers, as far as it is read."""
FILES = {"MLmodel": b"flavors: {}\n", "data/model.pt2": b"PK"}


@contextmanager
def tracking(files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve what MLflow's server says of one model; yield its URL, and the credentials it saw."""
    seen: list[str] = []
    place = f"1/models/{MODEL}/artifacts"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("authorization", ""))
            path = urlsplit(self.path).path.removeprefix("/api/2.0/")
            query = {name: value for name, (value,) in parse_qs(urlsplit(self.path).query).items()}
            asked = "&".join(f"{name}={query[name]}" for name in sorted(query))
            if path == "mlflow-artifacts/artifacts":
                below = f"{query['path']}/".removeprefix(f"{place}/")
                names = {
                    name.removeprefix(below).partition("/")
                    for name in files
                    if name.startswith(below) and query["path"].startswith(place)
                }
                listed = [{"path": name, "is_dir": bool(rest)} for name, rest, _ in names]
                self.send({"files": listed})
            elif (name := path.removeprefix(f"mlflow-artifacts/artifacts/{place}/")) in files:
                self.send(files[name])
            elif (key := f"{path}?{asked}".rstrip("?")) in REST:
                self.send(REST[key])
            else:
                said = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": f"{path} not found"}
                self.send(said, 404)

        def send(self, content: Any, status: int = 200) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


def fetched(location: str, said: list[str] | None = None) -> tuple[Any, list[str]]:
    fetch = find_source(location)
    assert fetch is not None
    with fetch(location, (said if said is not None else []).append) as found:
        names = sorted(
            path.relative_to(found.folder).as_posix() for path in found.folder.rglob("*.*")
        )
        assert (found.folder / "MLmodel").is_file()
    assert not found.folder.exists()
    return found, names


@pytest.mark.parametrize(
    ("location", "exact", "name"),
    [
        ("models:/digits/3", "models:/digits/3", "digits"),
        ("models:/digits@champion", "models:/digits/3", "digits"),
        (f"models:/{MODEL}", f"models:/{MODEL}", "net"),
        (f"runs:/{RUN}/net", f"models:/{MODEL}", "net"),
    ],
)
def test_a_model_of_a_tracking_server_is_fetched_with_where_it_is_from(
    location: str, exact: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracking(FILES) as (url, _):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        said: list[str] = []
        found, names = fetched(location, said)
    assert names == ["data/model.pt2"]
    assert found.name == name
    about = dict(found.origin)
    assert re.fullmatch("[0-9a-f]{64}", about.pop("sha256"))
    expected = {"location": exact, "run_id": RUN, "model_id": MODEL, "tracking_uri": url}
    assert about == expected
    assert said == ([] if exact == location else [f"{location} is {exact}"])


BASIC = "Basic " + base64.b64encode(b"me:secret").decode()


@pytest.mark.parametrize(
    ("variables", "user", "header"),
    [
        ({"USERNAME": "me", "PASSWORD": "secret"}, "", BASIC),
        ({"TOKEN": "secret"}, "", "Bearer secret"),
        ({}, "me:secret@", BASIC),
        ({}, "", ""),
    ],
)
def test_credentials_are_shown_to_the_server_and_noted_nowhere(
    variables: Mapping[str, str], user: str, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracking(FILES) as (url, seen):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url.replace("//", f"//{user}"))
        for name, value in variables.items():
            monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)
        found, _ = fetched("models:/digits/3")
    assert set(seen) == {header}
    assert "secret" not in str(found.origin)


@pytest.mark.parametrize(
    ("location", "files", "words"),
    [
        ("models:/digits/4", FILES, "RESOURCE_DOES_NOT_EXIST"),
        ("models:/digits/latest", FILES, "expected models:/NAME/VERSION"),
        ("models:/strange/1", FILES, "answers in another form"),
        (f"runs:/{RUN}/other", FILES, "has no MLmodel, of 0 files"),
        ("models:/digits/3", {"data/model.pt2": b""}, "has no MLmodel, of 1 files"),
        ("models:/digits/3", {**FILES, "../evil": b""}, "is not a file's name"),
        ("models:/digits/3", {f"{at}": b"" for at in range(1001)}, "more than 1000 files"),
    ],
)
def test_what_a_tracking_server_does_not_have_or_should_not_say_is_refused(
    location: str, files: Mapping[str, bytes], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracking(files) as (url, _):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        with pytest.raises(CheckpointError, match=re.escape(words)):
            fetched(location)


def test_without_a_tracking_server_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    with pytest.raises(CheckpointError, match="mlflow server --backend-store-uri"):
        fetched("models:/digits/3")


# -- bodies --------------------------------------------------------------------------------------


def answered(name: str, body: str, kind: str) -> tuple[int, Any]:
    """Return what the handler says to a body, for one of the models of bodies.py."""
    net = nn.Linear(3, 2, bias=False).eval()
    net.weight.data = torch.tensor(BODIES["WEIGHTS"])
    handler = MlflowHandler()
    handler.context = Context("net", "/models/net", None)
    handler.inputs = (TensorSpec("input", "float32", (Dim("batch", 1, 8), 3)),)
    handler.output_names, handler.model, handler.device = ("scores",), net, torch.device("cpu")
    is_table, handler.is_named = name.endswith("table"), name.startswith("onnx")
    handler.columns = tuple(BODIES["COLUMNS"]) if is_table else ()
    handler.read_any_number_of_rows()
    row = body if kind == BODIES["CSV"] else bytearray(body.encode())
    try:
        (found,) = handler.handle([{"body": row}], handler.context)
    except BadInput:
        return 400, None
    return 200, found


LAXER = {
    "tensor": {"inputs of records", "columns", "csv"},
    "table": {"inputs", "instances", "split without columns", "no params"},
}
"""Bodies that MLflow refuses and the handler answers, as it can: columns of a tensor in the order
in which they come, rows of a table without names by their places."""


@pytest.mark.parametrize("name", BODIES["MODELS"])
@pytest.mark.parametrize("body", [name for name in BODIES["BODIES"] if name != "another type"])
def test_bodies_are_answered_as_by_mlflow(name: str, body: str) -> None:
    status, answer = ANSWERS[name][body]
    kind, text = BODIES["BODIES"][body]
    found = answered(name, text, kind)
    if status != 200:
        assert (found[0] == 200) == (body in LAXER[name.removeprefix("onnx-")])
        return
    assert found[0] == 200
    assert json.loads(json.dumps(found[1])) == answer  # these numbers are exact


def test_parameters_that_an_artifact_has_not_are_refused() -> None:
    given = {"inputs": BODIES["ROWS"], "params": {"temperature": 1}}
    assert answered("tensor", json.dumps(given), BODIES["JSON"])[0] == 400
    assert answered("tensor", json.dumps({**given, "params": {}}), BODIES["JSON"])[0] == 200


# -- the route -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, digits_artifacts: dict[str, Path]
) -> Iterator[LiveServer]:
    """Start a server whose `/invocations` asks digits."""
    folder = tmp_path_factory.mktemp("invocations")
    (store := folder / "store").mkdir()
    write_archive(
        "digits", artifact=digits_artifacts["onnx"], handler="mlflow_scoring", output_dir=store,
        dry_run=False,
    )  # fmt: skip
    (folder / "config.yaml").write_text("invocations: digits")
    with running(folder / "state", store, f"--config={folder / 'config.yaml'}") as server:
        yield server


def test_invocations_reach_the_named_model_in_mlflows_form(server: LiveServer) -> None:
    rows = np.random.default_rng(7).random((20, 1, 8, 8)).round(3)  # in three calls of the model
    ask, given = server.client.post, {"inputs": rows.tolist()}
    url = "/invocations"
    missing = ask(url, json=given)
    assert missing.status_code == 404
    assert missing.json()["error_code"] == "RESOURCE_DOES_NOT_EXIST"
    server.register_all("digits.mar", initial_workers=1)
    found = ask(url, json=given)
    assert found.status_code == 200
    alone = [ask(url, json={"instances": [row]}).json() for row in rows[[0, 19]].tolist()]
    each = [answer["predictions"][0] for answer in alone]
    np.testing.assert_allclose([found.json()["predictions"][at] for at in (0, 19)], each, atol=1e-5)
    same = ask("/predictions/digits", json=given)
    assert same.json() == found.json()
    tensor = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": rows[0].tolist()}
    named = ask("/v2/models/digits/infer", json={"inputs": [tensor]})
    np.testing.assert_allclose(named.json()["outputs"][0]["data"], each[0], atol=1e-5)
    for body, kind, status in (
        (b"{", "application/json", 400),
        (b'{"inputs": [[1]]}', "application/json; charset=utf-8", 400),
        (b'{"inputs": [[1]], "params": {"a": 1}}', "application/json", 400),
        (b"1", "text/x", 415),
    ):
        wrong = ask(url, content=body, headers={"content-type": kind})
        assert wrong.status_code == status
        if status == 400:
            assert wrong.json().keys() == {"error_code", "message"}
            assert wrong.json()["error_code"] == "BAD_REQUEST"
    probes = [server.client.get(f"/{path}") for path in ("ping", "health", "version")]
    assert [each.status_code for each in probes] == [200, 200, 200]


# -- MLflow itself -------------------------------------------------------------------------------


@pytest.mark.slow
@needs_mlflow
@pytest.mark.timeout(900)
def test_the_recorded_answers_are_those_of_mlflow(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    command: list[str | Path] = [PEER / "python", "-W", "ignore", HERE / "bodies.py"]
    subprocess.run([*command, tmp_path / "models", tmp_path / "answers.json"], check=True)
    assert json.loads((tmp_path / "answers.json").read_text()) == ANSWERS


@pytest.mark.slow
@needs_mlflow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("store", ["sqlite:///mlflow.db", "./mlruns"])
def test_the_commands_of_the_page_run_against_a_real_server(store: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "mlflow.md").read_text()
    (train,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "train.py").write_text(train)
    (tmp_path / "rows.json").write_text('[{"a": 1, "b": 2, "c": 3, "d": 4}]')
    (tmp_path / "model_store").mkdir()
    probe = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1])"
    ports = {
        port: subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout
        for port in ("5000", "8080", "8081", "8082")
    }
    ports = {port: found.strip() for port, found in ports.items()}
    modelyard = tmp_path / "bin" / "modelyard"
    modelyard.parent.mkdir()
    modelyard.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m modelyard "$@"\n')
    modelyard.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{modelyard.parent}:{PEER}:{os.environ['PATH']}",
        "MODELYARD_STATE_DIR": str(tmp_path / "state"),
        "MODELYARD_WORKERS": "1",
        "MODELYARD_PORT": ports["8080"],
        "MODELYARD_MANAGEMENT_PORT": ports["8081"],
        "MODELYARD_METRICS_PORT": ports["8082"],
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "OMP_NUM_THREADS": "1",
    }
    command = ["mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1"]
    command += ["--artifacts-destination", "./artifacts", "--workers", "1"]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--port", ports["5000"]], cwd=tmp_path, env=environment, stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{ports['5000']}/health", tmp_path / "server.log")
        blocks = re.findall(r"^```console\n(.*?)^```$", page, re.M | re.S)
        commands = re.findall(r"^\$ (.*)$", "".join(blocks), re.M)
        for port, found in ports.items():
            commands = [
                line.replace(f"127.0.0.1:{port}", f"127.0.0.1:{found}") for line in commands
            ]
        assert len(commands) > 12
        ran = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", "\n".join(commands)], cwd=tmp_path,
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert ran.stdout.count('{"predictions":[[') == 1, ran.stdout
        assert ran.stdout.count('{"predictions": [[') == 1, ran.stdout
        assert "deployment net is created" in ran.stdout
        report = json.loads((tmp_path / "build" / "digits.onnx.report.json").read_text())
        assert report["checkpoint"]["origin"]["location"] == "models:/digits/1"
        assert report["checkpoint"]["origin"].keys() >= {"run_id", "model_id", "sha256"}
    finally:
        subprocess.run(
            [modelyard, "serve", "stop"], env=environment, capture_output=True, check=False
        )
        os.killpg(server.pid, 9)  # it waits long for processes of its own, in the same group
        server.wait(60)


def wait_for(url: str, log: Path) -> None:
    for _ in range(600):
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    raise AssertionError(log.read_text())
