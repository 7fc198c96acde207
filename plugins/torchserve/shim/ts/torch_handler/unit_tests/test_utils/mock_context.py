"""`from ts.torch_handler.unit_tests.test_utils.mock_context import MockContext`."""

import uuid
from pathlib import Path
from typing import Any

import torch

from ts.metrics.metrics_store import MetricsStore
from ts.utils.util import get_yaml_config


class MockContext:
    """A context for `initialize` and `handle` without a server.

    Args:
        model_pt_file: the artifact in `model_dir`, None for none.
        model_dir: the folder of the archive's files.
        model_file: the model file, None for none.
        gpu_id: the device's number, used where there is a device.
        model_name: the name in metrics.
        model_yaml_config_file: model-config.yaml in `model_dir`.
    """

    def __init__(
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str = "ts/torch_handler/unit_tests/models/tmp",
        model_file: str | None = "model.py",
        gpu_id: str | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
    ) -> None:
        files = {"serializedFile": model_pt_file, "modelFile": model_file}
        self.model_name = model_name
        self.manifest = {"model": {key: file for key, file in files.items() if file}}
        self.system_properties: dict[str, Any] = {"model_dir": model_dir}
        if torch.cuda.is_available() and gpu_id:
            self.system_properties["gpu_id"] = gpu_id
        self.explain = False
        self.metrics = MetricsStore(uuid.uuid4(), model_name)
        self.model_yaml_config: dict[str, Any] = {}
        if model_yaml_config_file:
            self.model_yaml_config = get_yaml_config(str(Path(model_dir) / model_yaml_config_file))

    def get_request_header(self, idx: int, exp: str) -> bool:
        """Return whether `explain` is set, for all requests but the first, as TorchServe's does."""
        return bool(idx and exp and self.explain)

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return no id: there is no request."""
        return None
