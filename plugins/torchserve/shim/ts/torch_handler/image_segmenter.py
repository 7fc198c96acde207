"""`from ts.torch_handler.image_segmenter import ImageSegmenter`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelyard.handlers.tasks.pictures import DEFAULT_SETTINGS
from ts.torch_handler.image_processing import ImageProcessing, ToTensor
from ts.torch_handler.vision_handler import VisionHandler


class ImageSegmenter(VisionHandler):
    """Pictures in, [class, probability] of every pixel out.

    The model returns {"out": logits (N, K, H, W)}.
    """

    image_processing: ToTensor = ImageProcessing(DEFAULT_SETTINGS)

    def postprocess(self, data: Mapping[str, Tensor]) -> list[Any]:
        """Turn logits into lists (H, W, 2): the likeliest class, as a float, and its softmax."""
        best = torch.softmax(data["out"], dim=1).max(dim=1)
        pairs = torch.stack([best.indices.to(best.values.dtype), best.values], dim=3)
        return pairs.tolist()
