"""`from ts.torch_handler.object_detector import ObjectDetector`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from modelyard.handlers.tasks.pictures import ImageSettings
from ts.torch_handler.image_processing import ImageProcessing, ToTensor
from ts.torch_handler.vision_handler import VisionHandler
from ts.utils.util import map_class_to_label


class ObjectDetector(VisionHandler):
    """Pictures in, a list of {label: [x1, y1, x2, y2], "score": s} for each out.

    The model returns {"boxes", "labels", "scores"} for every picture; scores below `threshold` are
    left out.
    """

    image_processing: ToTensor = ImageProcessing(ImageSettings())
    threshold = 0.5

    def postprocess(self, data: Sequence[Mapping[str, Tensor]]) -> list[list[dict[str, Any]]]:
        """Turn boxes, labels and scores into lists, in the model's order."""
        return [self._describe(picture) for picture in data]

    def _describe(self, picture: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        kept = picture["scores"] >= self.threshold
        boxes, labels, scores = (
            picture[key][kept].tolist() for key in ("boxes", "labels", "scores")
        )
        named = map_class_to_label([[box] for box in boxes], self.mapping, [[i] for i in labels])
        return [answer | {"score": score} for answer, score in zip(named, scores, strict=True)]
