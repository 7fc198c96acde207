"""Two workers hold the weights of an old archive's state dict once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelyard.archiver import write_archive
from modelyard.plugins.torchserve.archiver.archive import (
    ModelArchiverConfig,
    archive_for_torchserve,
)
from tests.handlers.conftest import export_all
from tests.serve.live import LiveServer
from tests.serve.test_shared_weights import (
    HANDLER,
    SMALL,
    WIDTH,
    check_edited,
    check_owned,
    check_shared,
    wide_net,
)

NET = f"""
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, {WIDTH}))
"""


@pytest.fixture(scope="module")
def server(shared_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    folder = tmp_path_factory.mktemp("weights")
    torch.save(wide_net().state_dict(), folder / "wide_weights.pt")
    (folder / "net.py").write_text(NET)
    (folder / "torchserve_handler.py").write_text(
        HANDLER.format(base="ts.torch_handler.base_handler")
    )
    wanted = ModelArchiverConfig(
        model_name="checkpoint",
        version="1.0",
        handler=str(folder / "torchserve_handler.py"),
        serialized_file=str(folder / "wide_weights.pt"),
        model_file=str(folder / "net.py"),
        export_path=str(shared_server.store),
    )
    archive_for_torchserve(wanted, warn=lambda message: None)
    (folder / "handler.py").write_text(HANDLER.format(base="modelyard.handlers"))
    small = nn.Linear(WIDTH, 1, bias=False).eval().requires_grad_(False)
    export_all(small, torch.rand(5, WIDTH), folder / SMALL)
    write_archive(
        SMALL,
        version="1.0",
        artifact=folder / f"{SMALL}.pt",
        handler=f"{folder / 'handler.py'}:Editing",
        output_dir=shared_server.store,
        dry_run=False,
        force=True,  # core's tests, in the same process, have left theirs
    )
    return shared_server


def test_workers_share_the_weights_of_a_checkpoint_until_one_edits_them(
    server: LiveServer,
) -> None:
    check_shared(server, "checkpoint")
    check_owned(server, "checkpoint")
    check_edited(server, "checkpoint")
