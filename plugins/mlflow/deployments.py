"""`mlflow deployments … -t modelyard`: models of MLflow, exported, archived and served.

MLflow imports this by the entry points `mlflow.deployments`, and nobody else.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException
from mlflow.utils.proto_json_utils import dump_input_data

from modelyard.archiver import ArchiveError, archive
from modelyard.exporter import ExportError, PartialExportError, export
from modelyard.serve.cli import state_folder
from modelyard.serve.errors import ServeError
from modelyard.serve.tools.client import Endpoint, call, find_endpoint
from modelyard.serve.tools.models_cli import all_versions

Config = dict[str, Any] | None
OPTIONS = ("model", "format", "workers", "model_store")


def target_help() -> str:
    """Return what a target and its configuration are."""
    return """\
-t modelyard: the server of MODELYARD_STATE_DIR; -t modelyard:http://HOST:8081 with MODELYARD_TOKEN.
  -C model=file.py:Class -C format=onnx|pt2 -C workers=N -C model_store=DIR of the server
"""


def run_local(
    target: str, name: str, model_uri: str, flavor: str | None = None, config: Config = None
) -> None:
    """Refuse: a server is started by `modelyard serve start`."""
    raise MlflowException("start a server with `modelyard serve start`, then `create` on it")


@contextmanager
def _told() -> Iterator[None]:
    """Raise our errors as MLflow's."""
    try:
        yield
    except (ExportError, ArchiveError, ServeError) as error:
        raise MlflowException(str(error)) from error


class ModelyardDeployments(BaseDeploymentClient):  # type: ignore[misc]
    """One server's models."""

    def create_deployment(
        self, name: str, model_uri: str, flavor: str | None = None, config: Config = None
    ) -> dict[str, Any]:
        """Export, archive and serve a model under a new name."""
        if self._versions(name):
            raise MlflowException(f'"{name}" is served; `update` replaces it')
        return self._deploy(name, "1", model_uri, config or {})

    def update_deployment(
        self, name: str, model_uri: Any = None, flavor: str | None = None, config: Config = None
    ) -> dict[str, Any]:
        """Serve another model under a name, as its next version, in place of those before."""
        before = self.get_deployment(name)["versions"]
        if model_uri is None:
            raise MlflowException("update needs --model-uri; workers are `modelyard models scale`")
        numbers = [int(v) for each in before if (v := each["modelVersion"]).isdecimal()]
        version = str(max(numbers, default=0) + 1)
        deployed = self._deploy(name, version, model_uri, config or {})
        self._ask("PUT", f"/models/{quote(name)}/{version}/set-default")
        for each in before:
            self._ask("DELETE", f"/models/{quote(name)}/{quote(each['modelVersion'])}")
        return deployed

    def delete_deployment(self, name: str, config: Config = None) -> None:
        """End serving every version of a name; one that is not there is no error."""
        for each in sorted(self._versions(name), key=lambda each: bool(each["isDefault"])):
            self._ask("DELETE", f"/models/{quote(name)}/{quote(each['modelVersion'])}")

    def list_deployments(self) -> list[dict[str, Any]]:
        """Return what is served, a name each."""
        names = dict.fromkeys(each["modelName"] for each in self._versions())
        return [{"name": name} for name in names]

    def get_deployment(self, name: str) -> dict[str, Any]:
        """Return every version of a name, as the management API describes it."""
        if not (versions := self._versions(name)):
            raise MlflowException(f'"{name}" is not served')
        return {"name": name, "versions": versions}

    def predict(
        self, deployment_name: str | None = None, inputs: Any = None
    ) -> PredictionsResponse:
        """Return the predictions for a table, an array, or a body of the scoring protocol."""
        body, headers = dump_input_data(inputs).encode(), {"content-type": "application/json"}
        path = f"/predictions/{quote(deployment_name or '')}"
        with _told():
            answer = call(self._at("inference"), "POST", path, body=body, headers=headers)
        return PredictionsResponse.from_json(answer.body.decode())

    def _versions(self, name: str | None = None) -> list[dict[str, Any]]:
        with _told():
            found = all_versions(self._at("management"))
        return [each for each in found if name in (None, each["modelName"])]

    def _deploy(
        self, name: str, version: str, model_uri: str, config: dict[str, Any]
    ) -> dict[str, Any]:
        if unknown := sorted({*config} - {*OPTIONS}):
            raise MlflowException(f"{unknown[0]} is unknown; expected some of {', '.join(OPTIONS)}")
        store = Path(config.get("model_store", "model_store"))
        if not store.is_dir():
            raise MlflowException(f"{store} is not a folder; -C model_store= names the server's")
        with _told(), tempfile.TemporaryDirectory(dir=store, prefix=".mlflow-") as folder:
            try:
                reports = export(
                    model_uri, config.get("model"), output_dir=folder, formats=config.get("format")
                )
            except PartialExportError as error:
                reports = [*error.reports]
            report = min(reports, key=lambda report: report.format != "onnx")
            packed = archive(
                name, artifact=report.artifact, handler="mlflow_scoring", version=version,
                output_dir=folder, examples=[*Path(folder).glob("*.example.json")],
            )  # fmt: skip
            file = packed.replace(store / f"{name}-{version}.mar")
        self._ask("POST", "/models", url=file.name, initial_workers=config.get("workers"))
        return {"name": name, "flavor": "onnx" if report.checkpoint_kind == "ONNX" else "pytorch"}

    def _at(self, api: str) -> Endpoint:
        _, _, url = str(self.target_uri).partition(":")
        if url and api == "inference":
            raise MlflowException(f"{url} is the management API; ask the inference API itself")
        return find_endpoint(
            api, state_folder(None), url or None, os.environ.get("MODELYARD_TOKEN")
        )

    def _ask(self, method: str, path: str, **query: Any) -> None:
        with _told():
            call(self._at("management"), method, path, query=query)
