"""`from ts.torch_handler.distributed.base_pippy_handler import BasePippyHandler`."""

from __future__ import annotations

import os

import torch

from modelyard.handlers.context import Context
from ts.handler_utils.distributed.pt_pippy import initialize_rpc_workers
from ts.torch_handler.base_handler import BaseHandler


class BasePippyHandler(BaseHandler):
    """One process of a PiPPy pipeline, as torchrun starts it."""

    def initialize(self, context: Context) -> None:
        """Take this process's device and join the others; the subclass loads the model."""
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.device = self.local_rank % max(1, torch.cuda.device_count())
        initialize_rpc_workers(self.local_rank, self.world_size, context)
