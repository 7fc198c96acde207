"""Pictures in, boxes with labels and scores out: as JSON, or drawn on the picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from modelyard.handlers.base import Inputs
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, HandlerError, LoadError, NoGradients
from modelyard.handlers.explain.draw.picture import font_of
from modelyard.handlers.explain.request.targets import Target, at_place
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.rows import read_section
from modelyard.plugins.tasks.drawn_answers import DrawnAnswers, colour_of_class

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
