"""Answers about places in a picture: as data, or drawn on the picture as it came."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn.functional import interpolate

from modelyard.handlers.base import Inputs
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, HandlerError, LoadError, NoGradients
from modelyard.handlers.explain.draw.picture import font_of, png
from modelyard.handlers.explain.request.options import Region, preferred_format
from modelyard.handlers.explain.request.targets import (
    Target,
    at_place,
    class_index,
    first_of,
    known_classes,
    sum_over,
)
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.rows import first_output, read_section
from modelyard.handlers.tasks.vision_handler import VisionHandler

PNG_OR_JSON = ("json", "png")


class DrawnAnswers(VisionHandler):
    """A handler that keeps the pictures of a batch, and sees all of each."""

    keeps_pictures: ClassVar[bool] = True

    def initialize(self, context: Context) -> None:
        """Load the archive; refuse settings that cut off a part, in which nothing would be found.

        Raises:
            LoadError: they do.
        """
        super().initialize(context)
        if self.image.crop is not None:
            raise LoadError(
                f"handler.image.crop is {list(self.image.crop)}: what lies outside would not be "
                "seen; give handler.image a size, or resize alone"
            )

    def wants_png(self, index: int) -> bool:
        """Return whether request `index` asks for a picture, by `format` or its Accept header.

        Raises:
            BadInput: it asks for another format.
        """
        accept = self.context.get_request_header(index, "accept")
        wanted = self.context.query[index].get(
            "format", preferred_format(accept or "", PNG_OR_JSON)
        )
        if wanted not in PNG_OR_JSON:
            raise BadInput(f'format is "{wanted}"; expected one of {", ".join(PNG_OR_JSON)}')
        return wanted == "png"

    def answer_png(self, index: int, picture: Image.Image) -> bytes:
        """Return a picture as the PNG file that answers request `index`."""
        self.context.set_response_content_type(index, "image/png")
        return png(picture)


def colour_of_class(index: int) -> tuple[int, int, int]:
    """Return the colour of a class, as the PASCAL VOC data set has them; class 0 is black."""
    red = green = blue = 0
    for bit in range(7, -1, -1):
        red |= (index & 1) << bit
        green |= (index >> 1 & 1) << bit
        blue |= (index >> 2 & 1) << bit
        index >>= 3
    return red, green, blue


# -- a class for every pixel: as run lengths, or as a PNG mask -------------------------------------


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


# -- boxes with labels and scores: as JSON, or drawn on the picture --------------------------------


THRESHOLD = 0.5
FUNCTIONS = ("softmax", "sigmoid")
SIGMOID_MODELS = (
    *("conditional_detr", "d_fine", "dab-detr", "deformable_detr", "rt_detr", "rt_detr_v2"),
    *("owlvit", "owlv2", "lw_detr", "deimv2"),
)
"""`model_type` of Hugging Face models whose classes do not exclude each other."""

_READY = ("boxes", "labels", "scores")


@dataclass(frozen=True)
class Box:
    """One object; sides in pixels of the picture as it came."""

    label: str
    index: int
    score: float
    sides: tuple[float, float, float, float]
    """Left, top, right, bottom."""

    def as_json(self) -> dict[str, Any]:
        """Return the form of an answer, transformers' own."""
        names = ("xmin", "ymin", "xmax", "ymax")
        sides = (round(side, 2) for side in self.sides)
        return {
            "label": self.label,
            "score": self.score,
            "box": dict(zip(names, sides, strict=True)),
        }


class ObjectDetector(DrawnAnswers):
    """Serve a detector; the answer is [{"label", "score", "box"}, …], the surest first.

    The model gives logits (N, Q, C) and boxes (N, Q, 4) as DETR does: centre, width and height as
    shares of the picture. Or it gives `boxes`, `labels` and `scores`, as torchvision's do: corners
    in pixels of its input, of one picture or with a batch in front. With `format=png` in the query,
    or an Accept header for image/png, the boxes are drawn on the picture.

    `handler.detection` of model-config.yaml: `threshold` (a request may say its own in the query)
    and `function`: `softmax`, whose last class is "no object", or `sigmoid`.
    """

    class_dim: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        self.threshold = THRESHOLD
        self.function = FUNCTIONS[0]
        self.input_size = (1, 1)
        """(height, width) of the current batch's input."""

    def initialize(self, context: Context) -> None:
        """Load the archive, its `handler.image` and its `handler.detection`."""
        super().initialize(context)
        section = read_section(self.handler_settings, "detection", ("threshold", "function"))
        self.threshold = read_share(
            "handler.detection.threshold", section.get("threshold", THRESHOLD)
        )
        is_sigmoid = self.config.get("model_type") in SIGMOID_MODELS
        self.function = section.get("function", FUNCTIONS[is_sigmoid])
        if self.function not in FUNCTIONS:
            raise LoadError(
                f"handler.detection.function is {self.function!r}; expected one of "
                f"{', '.join(FUNCTIONS)}"
            )

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Inputs:
        """Turn pictures into the model's input (N, C, H, W)."""
        inputs = super().preprocess(data)
        shape = (inputs if isinstance(inputs, Tensor) else inputs[0]).shape
        self.input_size = (shape[-2], shape[-1])
        return inputs

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn logits and boxes into the objects of each picture."""
        found = self._boxes(outputs)
        return [
            self.answer_png(at, _drawn(self.pictures[at], boxes))
            if self._each(at, self.wants_png, at)
            else [box.as_json() for box in boxes]
            for at, boxes in enumerate(found)
        ]

    def score(self, outputs: Output) -> Tensor:
        """Return the logits (N, Q, C); boxes that come ready have none."""
        if self._is_ready():
            raise NoGradients(
                "the model gives boxes, labels and scores, and no logits that could be explained"
            )
        return _logits_and_boxes(outputs)[0]

    def find_target(
        self, index: int, target: str, scores: Tensor, inside: Tensor | None
    ) -> Sequence[Target] | None:
        """Find the box (Q, C) that is surest of a label; `predicted` is the surest of all."""
        classes = scores.shape[1] - (self.function == "softmax")
        labels = [self.label(at) for at in range(classes)]
        if target != "predicted" and target not in labels:
            return None
        chances = self._chances(scores)[:, :classes]
        if inside is not None:
            chances[~inside] = 0
        if target == "predicted":
            box, label = divmod(int(chances.argmax()), classes)
        else:
            label = labels.index(target)
            box = int(chances[:, label].argmax())
        return [at_place(box * scores.shape[1] + label)]

    def name_place(self, index: int, place: tuple[int, ...]) -> str:
        """Return a label and the number of its box."""
        return f"{self.label(place[1])} in box {place[0]}"

    def _is_ready(self) -> bool:
        return set(_READY) <= set(self.output_names)

    def _chances(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        return logits.softmax(-1) if self.function == "softmax" else logits.sigmoid()

    def _boxes(self, outputs: Output) -> list[list[Box]]:
        if self._is_ready():
            columns = dict(zip(self.output_names, outputs, strict=True))
            ready = [columns[name] for name in _READY]
            if ready[0].dim() == 2:
                ready = [each.unsqueeze(0) for each in ready]
            height, width = self.input_size
            scaled = ready[0].float() / torch.tensor([width, height, width, height])
            rows = zip(scaled, ready[1], ready[2].float(), strict=True)
            return [self._kept(at, *row) for at, row in enumerate(rows)]
        logits, boxes = _logits_and_boxes(outputs)
        chances = self._chances(logits)[..., : -1 if self.function == "softmax" else None]
        centre, size = boxes[..., :2].float(), boxes[..., 2:].float()
        corners = torch.cat((centre - size / 2, centre + size / 2), -1)
        found = []
        for at, (each, sides) in enumerate(zip(chances, corners, strict=True)):
            if self.function == "softmax":
                scores, labels = each.max(-1)
                found.append(self._kept(at, sides, labels, scores))
            else:
                top, places = each.flatten().topk(min(len(each), each.numel()))
                classes = each.shape[1]
                found.append(self._kept(at, sides[places // classes], places % classes, top))
        return found

    def _kept(self, index: int, sides: Tensor, labels: Tensor, scores: Tensor) -> list[Box]:
        """Return the boxes above the threshold, the surest first; sides (D, 4) are shares."""
        width, height = self.pictures[index].size
        pixels = sides * torch.tensor([width, height, width, height], device=sides.device)
        kept = (scores > self._each(index, self._threshold_of, index)).nonzero()[:, 0]
        kept = kept[scores[kept].argsort(descending=True, stable=True)]
        return [
            Box(self.label(label), label, score, tuple(corners))
            for label, score, corners in zip(
                labels[kept].tolist(), scores[kept].tolist(), pixels[kept].tolist(), strict=True
            )
        ]

    def _threshold_of(self, index: int) -> float:
        text = self.context.query[index].get("threshold")
        if text is None:
            return self.threshold
        try:
            return read_share("threshold", float(text))
        except (ValueError, LoadError) as error:
            raise BadInput(f'threshold is "{text}"; expected a number from 0 to 1') from error


def read_share(name: str, value: Any) -> float:
    """Read a number from 0 to 1 of model-config.yaml.

    Raises:
        LoadError: it is something else.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise LoadError(f"{name} is {value!r}; expected a number from 0 to 1")
    return float(value)


def _logits_and_boxes(outputs: Output) -> tuple[Tensor, Tensor]:
    tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
    shapes = [list(each.shape) for each in tensors]
    if [*map(len, shapes[:2])] != [3, 3] or shapes[1][2] != 4:
        raise HandlerError(
            f"the model gave {shapes}; expected logits (N, Q, C) and boxes (N, Q, 4), or outputs "
            f"named {', '.join(_READY)}"
        )
    return tensors[0], tensors[1]


def _drawn(picture: Image.Image, boxes: Sequence[Box]) -> Image.Image:
    """Draw boxes with their labels and scores; small pictures are enlarged to be readable."""
    scale = max(1, -(-320 // max(picture.size)))
    sheet = picture.convert("RGB").resize(
        (picture.width * scale, picture.height * scale), Image.Resampling.NEAREST
    )
    draw = ImageDraw.Draw(sheet)
    side = max(12, max(sheet.size) // 40)
    font, line = font_of(side), max(2, side // 6)
    for box in reversed(boxes):  # the surest is drawn last, on top
        colour = colour_of_class(box.index + 1)  # none is black
        left, top, right, bottom = (edge * scale for edge in box.sides)
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=line)
        text = f"{box.label} {box.score:.2f}"
        width = draw.textlength(text, font=font)
        above = top - side - 6 if top >= side + 6 else top
        start = min(max(0.0, left), max(0.0, sheet.width - width - 8))
        draw.rectangle((start, above, start + width + 8, above + side + 6), fill=colour)
        draw.text((start + 4, above + 1), text, fill="white", font=font)
    return sheet
