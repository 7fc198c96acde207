"""What each cloud says to its containers by variables, and what is served for that."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from modelyard.archiver import ArchiveError, write_archive
from modelyard.plugins.clouds import SHIM
from modelyard.serve.control.model_config import ModelSpec
from modelyard.serve.errors import FileNotInStore, StartError
from modelyard.serve.policy import Policy

NAME = "model"
"""What a single model is called."""
OF_BATCHES = {
    "batchSize": "BATCH_SIZE",
    "maxBatchDelay": "MAX_BATCH_DELAY",
    "minWorkers": "MIN_WORKERS",
    "maxWorkers": "MAX_WORKERS",
    "responseTimeout": "RESPONSE_TIMEOUT",
}
"""Key of model-config.yaml → end of SageMaker's variable for it."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a container of one cloud is asked."""

    cloud: str
    folder: Path
    """Folder of the model; of several models, the folder that holds theirs."""
    health: str
    """Route that says whether the model answers."""
    predict: str
    settings: Mapping[str, Any]
    """Settings of the server that the variables say; None says nothing."""
    run: Mapping[str, Any] = field(default_factory=lambda: {"batchSize": 1})
    """Keys of model-config.yaml that they say."""
    has_several: bool = False
    """Whether models come and go while it serves, by routes of their own."""
    reads: tuple[Path, ...] = ()
    """Further folders that its code reads."""
    installs: bool = False
    """Whether the user said to install `code/requirements.txt`."""

    def requirements(self, folder: Path) -> Path | None:
        """Return the file of what a model folder's code imports, if there is one."""
        file = folder / "code" / "requirements.txt"
        return file if file.is_file() else None

    def archive(self, name: str, folder: Path, store: Path) -> Path:
        """Write the archive that stands for a model folder, and return it.

        Raises:
            FileNotInStore: there is no such folder.
            StartError: the archive cannot be written.
        """
        if not folder.is_dir():
            raise FileNotInStore(f"there is no model folder {folder}")
        config = store / f"{name}.yaml"
        handler = {"folder": str(folder), "contract": self.cloud}
        try:
            store.mkdir(parents=True, exist_ok=True)
            config.write_text(yaml.safe_dump({**self.run, "handler": handler}))
            return write_archive(
                name,
                output_dir=store,
                handler=f"{Path(__file__).with_name('cloud_handler.py')}:CloudHandler",
                config_file=config,
                requirements_file=self.requirements(folder) if self.installs else None,
                force=True,
            )
        except (ArchiveError, OSError) as error:
            raise StartError(f"the model folder {folder} cannot be served: {error}") from error


class CloudPolicy(Policy):
    """A container's decisions: its environment is the author's, and a model that fails is told."""

    is_strict = False
    passed_variables = ("*",)

    def __init__(self, contract: Contract, settings: Any) -> None:
        super().__init__(settings)
        self.contract = contract
        self.worker_keys["decode_input"] = False

    def models_at_start(self, is_trial: bool = False) -> list[ModelSpec]:
        """Return the one model, if it is one: a container remembers nothing."""
        several = self.contract.has_several
        return [] if several else [ModelSpec(f"{NAME}.mar", NAME, at_start=True)]


def read_sagemaker(model_dir: Path | None) -> Contract:
    """Return what SageMaker's variables say, as its toolkit reads them."""
    sys.path.append(str(SHIM))
    from sagemaker_inference import environment

    said, first = environment.Environment(), None
    if said.safe_port_range:
        first = int(said.safe_port_range.partition("-")[0])
    values = {key: os.environ.get(f"SAGEMAKER_TS_{end}") for key, end in OF_BATCHES.items()}
    seconds = said.model_server_timeout_seconds or said.model_server_timeout
    run = {"batchSize": 1, "responseTimeout": seconds}
    return Contract(
        cloud="sagemaker",
        folder=model_dir or Path(environment.model_dir),
        health="/ping",
        predict="/invocations",
        settings={
            "port": said.inference_http_port,
            "workers": said.model_server_workers,
            "max_request_bytes": said.max_request_size,
            "management_port": first,
            "metrics_port": first and first + 1,
        },
        run=run | {key: int(value) for key, value in values.items() if value},
        has_several=environment.is_multi_model,
    )


def read_vertex(model_dir: Path | None) -> Contract:
    """Return what Vertex AI's variables say."""
    get = os.environ.get
    return Contract(
        cloud="vertex",
        folder=model_dir or Path(get("AIP_STORAGE_URI") or Path.cwd()),
        health=get("AIP_HEALTH_ROUTE", "/ping"),
        predict=get("AIP_PREDICT_ROUTE", "/predict"),
        settings={"port": get("AIP_HTTP_PORT")},
    )


def read_azureml(model_dir: Path | None) -> Contract:
    """Return what Azure ML's variables say."""
    get = os.environ.get
    return Contract(
        cloud="azureml",
        folder=model_dir or Path(get("AML_APP_ROOT") or Path.cwd()),
        health="/",
        predict="/score",
        settings={
            "port": get("AZUREML_INFERENCE_SERVER_PORT", "5001"),
            "workers": get("WORKER_COUNT"),
        },
        reads=(Path(models),) if (models := get("AZUREML_MODEL_DIR")) else (),
    )
