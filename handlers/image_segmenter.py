"""Pictures in, a class for every pixel out: as run lengths, or as a PNG mask."""

from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from modelyard.handlers.backends import Output
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.draw import colour_of_class
from modelyard.handlers.object_detector import refuse_crop
from modelyard.handlers.rows import first_output
from modelyard.handlers.vision_handler import VisionHandler

MOST_CLASSES = 256
"""Of a mask whose pixels are class numbers in a byte."""


class ImageSegmenter(VisionHandler):
    """Serve a model of logits (N, C, h, w); the map has the size of the picture as it came.

    Logits are enlarged before the largest is taken, as transformers does. One class alone is there
    where its logit is above 0: the map is then of 0 and 1.

    The answer is {"size": [height, width], "segments": [{"label", "index", "area", "counts"}, …]},
    the largest first; `counts` are run lengths as COCO has them, column by column, beginning with
    pixels outside. With `format=png` in the query, or an Accept header for image/png, it is a mask:
    a PNG file with colours, whose pixels' values are the classes.
    """

    keeps_pictures: ClassVar[bool] = True

    def initialize(self, context: Context) -> None:
        """Load the archive and its `handler.image`."""
        super().initialize(context)
        refuse_crop(self)

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn logits (N, C, h, w) into the segments of each picture, or its mask."""
        answers: list[Any] = []
        for at, row in enumerate(_logits(outputs)):
            classes = _class_map(row.float(), self.pictures[at].size)
            is_mask = self._each(at, self.wants_png, at)
            answers.append(self._mask(at, classes) if is_mask else self._segments(classes))
        return answers

    def score(self, outputs: Output) -> Tensor:
        """Return the mean logit (N, C) of each class over the picture."""
        return _logits(outputs).mean((2, 3))

    def probabilities(self, scores: Tensor) -> None:
        """Return nothing: a class has a place in the picture, and no probability."""

    def _segments(self, classes: np.ndarray) -> dict[str, Any]:
        columns = classes.T.ravel()
        ends = np.flatnonzero(np.diff(columns)) + 1
        lengths = np.diff([0, *ends, len(columns)])
        values = columns[[0, *ends]]
        segments = []
        for index in np.unique(values).tolist():
            own = values == index
            segments.append(
                {
                    "label": self.label(index),
                    "index": index,
                    "area": int(lengths[own].sum()),
                    "counts": _counts(own, lengths),
                }
            )
        segments.sort(key=lambda segment: -int(segment["area"]))
        return {"size": list(classes.shape), "segments": segments}

    def _mask(self, index: int, classes: np.ndarray) -> bytes:
        if classes.max() >= MOST_CLASSES:
            raise BadInput(
                f"format is png; expected json: class {classes.max()} is beyond the {MOST_CLASSES} "
                "that a mask has"
            )
        mask = Image.fromarray(classes.astype(np.uint8), "L")
        mask.putpalette([part for at in range(MOST_CLASSES) for part in colour_of_class(at)])
        return self.answer_png(index, mask)


def _counts(own: np.ndarray, lengths: np.ndarray) -> list[int]:
    """Return the lengths of runs outside and inside in turn, outside first."""
    begins = np.flatnonzero(np.diff(own)) + 1
    starts = np.concatenate(([0], begins))
    counts: list[int] = np.add.reduceat(lengths, starts).tolist()
    return [0, *counts] if own[0] else counts


def _class_map(logits: Tensor, size: tuple[int, int]) -> np.ndarray:
    """Return the class of each pixel (H, W) of a picture (width, height), of logits (C, h, w).

    Class by class: at the size of a photograph, all of them would be gigabytes.
    """
    width, height = size
    best = torch.full((height, width), -torch.inf, device=logits.device)
    classes = torch.zeros((height, width), dtype=torch.int32, device=logits.device)
    for index, each in enumerate(logits):
        enlarged = interpolate(
            each[None, None], (height, width), mode="bilinear", align_corners=False
        )[0, 0]
        if len(logits) == 1:
            return (enlarged > 0).to(torch.int32).cpu().numpy()
        is_better = enlarged > best
        best = torch.where(is_better, enlarged, best)
        classes[is_better] = index
    return classes.cpu().numpy()


def _logits(outputs: Output) -> Tensor:
    return first_output(outputs, 4, "a segmentation needs logits [N, C, h, w]")
