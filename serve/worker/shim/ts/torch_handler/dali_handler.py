"""`from ts.torch_handler.dali_handler import DALIHandler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelyard.handlers.context import Context
from ts.handler_utils.preprocess.dali import get_dali_pipeline
from ts.torch_handler.vision_handler import VisionHandler


class DALIHandler(VisionHandler):
    """Pictures in, decoded by NVIDIA DALI, which has to be installed."""

    def initialize(self, context: Context) -> None:
        """Load the archive and its DALI pipeline.

        Raises:
            LoadError: there is no pipeline, or no DALI.
        """
        super().initialize(context)
        self.pipeline = get_dali_pipeline(context)

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Tensor:
        """Run the pipeline on the image files."""
        values = [row.get("data") or row.get("body") for row in data]
        files = [
            np.frombuffer(v, np.uint8) if isinstance(v, bytes | bytearray) else v for v in values
        ]
        (outputs, *_) = self.pipeline.run(source=files)
        rows = [torch.tensor(outputs.at(index)) for index in range(len(files))]
        return torch.stack(rows).to(self.device)
