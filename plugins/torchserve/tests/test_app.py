"""How the objects of a server in the dialect are built."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.plugins.torchserve.app import create_server
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.settings import Address
from tests.serve.test_app import check_build, settings_in

HERE = Address("127.0.0.1", 0)


@pytest.mark.parametrize("is_one_port", [False, True], ids=["ports", "one port"])
def test_every_object_is_initialised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_one_port: bool
) -> None:
    dialect = TorchServeSettings(
        directory=tmp_path,
        inference_address=HERE,
        management_address=HERE if is_one_port else Address("127.0.0.2", 0),
        metrics_address=HERE if is_one_port else Address("127.0.0.3", 0),
        grpc_inference_port=0,
        grpc_management_port=0,
    )
    settings = settings_in(tmp_path)
    check_build(lambda: create_server(dialect, None, settings), monkeypatch)
