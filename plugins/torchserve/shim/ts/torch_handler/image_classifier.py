"""`from ts.torch_handler.image_classifier import ImageClassifier`."""

from typing import Any

import torch
from torch import Tensor

from modelyard.handlers.tasks.pictures import DEFAULT_SETTINGS
from ts.handler_utils.timer import timed
from ts.torch_handler.image_processing import ImageProcessing, ToTensor
from ts.torch_handler.vision_handler import VisionHandler
from ts.utils.util import map_class_to_label


class ImageClassifier(VisionHandler):
    """Pictures in, the `topk` most likely labels out, as {"tabby": 0.41, …}."""

    topk = 5
    image_processing: ToTensor = ImageProcessing(DEFAULT_SETTINGS)

    def set_max_result_classes(self, topk: int) -> None:
        """Set how many labels an answer has."""
        self.topk = topk

    def get_max_result_classes(self) -> int:
        """Return how many labels an answer has at most."""
        return self.topk

    @timed
    def postprocess(self, data: Tensor) -> list[dict[str, Any]]:
        """Turn logits (N, K) into labels and their softmax, descending."""
        weights = torch.softmax(data, dim=1)
        best, classes = torch.topk(weights, min(self.topk, weights.shape[1]), dim=1)
        return map_class_to_label(best.tolist(), self.mapping, classes.tolist())
