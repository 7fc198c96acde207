"""`from ts.torch_handler.distributed.base_deepspeed_handler import BaseDeepSpeedHandler`."""

from __future__ import annotations

import os

from modelyard.handlers.context import Context
from ts.torch_handler.base_handler import BaseHandler


class BaseDeepSpeedHandler(BaseHandler):
    """One process of a DeepSpeed model."""

    def initialize(self, context: Context) -> None:
        """Take this process's device; the subclass loads the model."""
        self.device = int(os.environ.get("LOCAL_RANK", "0"))
