"""Pictures in, a class for every pixel out: as run lengths, or as a PNG mask."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.request.options import Region
from modelyard.handlers.explain.request.targets import (
    Target,
    class_index,
    first_of,
    known_classes,
    sum_over,
)
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.rows import first_output
from modelyard.plugins.tasks.drawn_answers import DrawnAnswers, colour_of_class

MOST_CLASSES = 256
"""Most classes of a mask whose pixels are class numbers in a byte."""


class ImageSegmenter(DrawnAnswers):
    """Serve a model of logits (N, C, h, w); the map has the size of the picture as it came.

    Logits are enlarged before the largest is taken, as transformers does. One class alone is there
    where its logit is above 0: the map is then of 0 and 1.

    The answer is {"size": [height, width], "segments": [{"label", "index", "area", "counts"}, …]},
    the largest first; `counts` are run lengths as COCO has them, column by column, beginning with
    pixels outside. With `format=png` in the query, or an Accept header for image/png, it is a mask:
    a PNG file with colours, whose pixels' values are the classes.
    """

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn logits (N, C, h, w) into the segments of each picture, or its mask."""
        answers: list[Any] = []
        for at, row in enumerate(_logits(outputs)):
            classes = _class_map(row.float(), self.pictures[at].size)
            is_mask = self._each(at, self.wants_png, at)
            answers.append(self._mask(at, classes) if is_mask else self._segments(classes))
        return answers

    def score(self, outputs: Output) -> Tensor:
        """Return the logits (N, C, h, w)."""
        return _logits(outputs)

    def probabilities(self, scores: Tensor) -> None:
        """Return nothing: a class has a place in the picture, and no probability."""

    def find_target(
        self, index: int, target: str, scores: Tensor, inside: Tensor | None
    ) -> Sequence[Target] | None:
        """Find the mean logit of a class (C, h, w) over the region, or over the whole picture.

        `predicted` and `top-N` are the classes whose mean is largest.
        """
        count = len(scores)
        if inside is None:
            inside = torch.ones_like(scores[0], dtype=torch.bool)
        means = scores[:, inside].mean(1)
        number = 1 if target == "predicted" else first_of(target, count)
        if number is not None:
            classes = means.topk(number).indices.tolist()
        elif (found := class_index(target, count, self.label)) is not None:
            classes = [found]
        elif "," in target:
            return None
        else:
            raise BadInput(
                f'target is "{target}"; expected predicted, top-N, sum:CLASS, a place as 0,5,3, '
                f"{known_classes(count, self.label)}"
            )
        targets = []
        for each in classes:
            numbers = torch.zeros_like(scores, dtype=torch.bool)
            numbers[each] = inside
            targets.append(sum_over(numbers, each, self.label(each), is_mean=True))
        return targets

    def find_region(self, index: int, region: Region, sizes: tuple[int, ...]) -> Tensor:
        """Return which of the logits (h, w) are in a region of the picture as it came."""
        width, height = self.pictures[index].size
        return region.inside(sizes, (height, width))

    def name_place(self, index: int, place: tuple[int, ...]) -> str:
        """Return a class and a place of its logits."""
        return f"{self.label(place[0])} at row {place[1]}, column {place[2]}"

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
