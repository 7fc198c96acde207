"""Images in: decode, resize, crop, normalise; shared by every handler of pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from modelyard.archiver.signature import Size, TensorSpec, fits
from modelyard.handlers.base import BaseHandler, Classifier, Inputs
from modelyard.handlers.body import body_of, decode_base64
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.explain.attribute.attribution import Tensors
from modelyard.handlers.explain.attribute.methods import METHODS
from modelyard.handlers.explain.draw import page
from modelyard.handlers.explain.draw.picture import Heat, render, stack, transparent
from modelyard.handlers.explain.explanation import Explanation
from modelyard.handlers.explain.regions import TINY, ninths, summed_up
from modelyard.handlers.models.backends import as_tuple
from modelyard.handlers.models.rows import read_numbers
from modelyard.handlers.proof.mutation import Mutation
from modelyard.handlers.tasks import pictures


class VisionHandler(BaseHandler):
    """Serve a model of one image input; answers are the model's numbers.

    A request's body is an image file, the base64 text of one, or nested JSON lists that are the
    model's input (C, H, W) already.
    """

    formats: ClassVar[tuple[str, ...]] = ("json", "png", "html", "overlay", "npy")
    keeps_pictures: ClassVar[bool] = False
    """Whether answers need the pictures as they came, which `pictures` then holds."""

    def __init__(self) -> None:
        super().__init__()
        self.image = pictures.DEFAULT_SETTINGS
        self.table = pictures.colour_table(pictures.DEFAULT_SETTINGS)
        self.max_pixels: int | None = pictures.MAX_PIXELS
        self.image_spec = TensorSpec("")
        self.pictures: list[Image.Image] = []
        self._is_any_size = False
        """Whether the size of a picture decides over that of the model's input."""
        self.sizes: list[tuple[int, int] | None] = []
        """(width, height) of the pictures of the current batch; None for numbers."""

    def initialize(self, context: Context) -> None:
        """Load the archive and its `handler.image`; refuse settings that the model cannot take."""
        super().initialize(context)
        folder = Path(context.system_properties["model_dir"])
        self.image = pictures.find_settings(self.handler_settings.get("image"), folder)
        self.table = pictures.colour_table(self.image)
        self.max_pixels = context.system_properties.get("max_image_pixels") or pictures.MAX_PIXELS
        if not context.system_properties.get("limit_max_image_pixels", True):
            # Only an explicit limit_max_image_pixels=false lifts Pillow's guard.
            self.max_pixels = Image.MAX_IMAGE_PIXELS = None
        self.image_spec = self._find_image()
        _check_shape(self.image, self.image_spec)
        self._is_any_size = self.image.shape[1] is None and len(self.image_spec.shape) == 4

    def mutations(self) -> Iterator[Mutation]:
        """Yield other colours, sizes and ways to resize."""
        yield from super().mutations()
        image, channels = self.image, pictures.CHANNELS[self.image.mode]
        mean, std = image.mean or (0.0,) * channels, image.std or (1.0,) * channels
        a_picture = "that is a picture"
        changed = {
            "mean": (replace(image, mean=tuple(each + 0.01 for each in mean)), a_picture),
            "std": (replace(image, std=tuple(each * 0.99 for each in std)), a_picture),
            "scale": (replace(image, scale=image.scale * 0.99), a_picture),
            "resample": (
                replace(image, resample="box" if image.resample != "box" else "nearest"),
                "of another size than the model takes",
            ),
        }
        if image.resize:
            changed["size"] = (replace(image, resize=image.resize + 8), a_picture)
        if image.mode == "RGB":
            swapped = self.preprocess
            yield Mutation(
                "channel order",
                {"preprocess": lambda data: _channels_turned(swapped(data))},
                "that has colours",
            )
        for name, (settings, advice) in changed.items():
            yield Mutation(
                name, {"image": settings, "table": pictures.colour_table(settings)}, advice
            )

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Inputs:
        """Turn pictures into the model's input (N, C, H, W)."""
        self.pictures, self.sizes = [], []
        return super().preprocess(data)

    def baseline(self, name: str, inputs: Tensor, seed: int = 0) -> Tensor:
        """Return the picture that stands for "no information", for one request's (1, C, H, W).

        It is made before normalisation: `black`, `white`, the request's `mean` colour, the
        request's picture under a `blur` of a tenth of its longer side, or `noise` of even colours.
        `zero` is zeros as the model sees them.
        """
        if name == "zero":
            return super().baseline(name, inputs)
        height, width = inputs.shape[2:]
        if name in ("black", "white"):
            pixels = np.full((height, width, len(self.table)), 255 * (name == "white"), np.uint8)
        elif name == "noise":
            noise = np.random.default_rng(seed)
            pixels = noise.integers(0, 256, (height, width, len(self.table)), dtype=np.uint8)
        elif name == "mean":
            return inputs.mean((2, 3), keepdim=True).expand_as(inputs)
        elif name == "blur":
            blurred = self.picture(inputs[0]).filter(
                ImageFilter.GaussianBlur(max(height, width) / 10)
            )
            pixels = np.asarray(blurred).reshape(height, width, -1)
        else:
            raise BadInput(
                f'baseline is "{name}"; expected zero, black, white, mean, blur, noise or '
                "file:NAME for images"
            )
        return torch.from_numpy(pictures.normalise(pixels, self.table))[None]

    def window(self, sizes: torch.Size, side: int | None) -> tuple[int, ...]:
        """Return a square over all channels, by default an eighth of the longer side."""
        if len(sizes) != 3:
            return super().window(sizes, side)
        side = side or -(-max(sizes[1:]) // 8)
        return sizes[0], side, side

    def aggregate(self, attributions: Tensor) -> Tensor:
        """Sum attributions (C, H, W) over the channels."""
        return attributions.sum(0)

    def describe(self, index: int, explanation: Explanation) -> dict[str, Any]:
        """Return how large the picture was that came, and which part of it the model saw."""
        size = self.sizes[index]
        if size is None:
            return {}
        box = pictures.placement(size, self.image).box_in(size)
        crop = [round(side, 2) for side in box]
        return {"picture": {"width": size[0], "height": size[1], "crop": crop}}

    def heat_map(self, index: int, inputs: Tensors, explanations: Sequence[Explanation]) -> bytes:
        """Draw attributions (C, H, W) over the picture as the model saw it."""
        image = self.picture(inputs[0])
        drawn = []
        for each in explanations:
            if (heat := self._heat(inputs[0], each)) is None:
                return super().heat_map(index, inputs, explanations)
            part = page.part_of(each, self._said(index, each, heat), heat.drawn)
            drawn.append(render(image, heat, part.texts))
        return stack(drawn)

    def page(self, index: int, inputs: Tensors, explanations: Sequence[Explanation]) -> bytes:
        """Draw attributions over the picture, with a slider to look below them."""
        image = self.picture(inputs[0])
        parts = []
        for each in explanations:
            if (heat := self._heat(inputs[0], each)) is None:
                return super().page(index, inputs, explanations)
            plain, figure = page.picture(image, heat, each.label)
            parts.append(page.part_of(each, self._said(index, each, heat), heat.drawn, figure))
        return page.render(parts, plain)

    def overlay(self, index: int, inputs: Tensors, explanation: Explanation) -> bytes:
        """Draw attributions as a transparent picture of the size of the one that came."""
        heat = self._heat(inputs[0], explanation)
        if heat is None:
            raise BadInput(
                f"format is overlay; expected json, html or png: layer {explanation.options.layer} "
                f"has the shape {list(explanation.attributions[0].shape)}, which is not of places "
                "in a picture"
            )
        height, width = inputs[0].shape[1:]
        size = self.sizes[index]
        if size is None:
            return transparent(heat, (0, 0, width, height), (width, height))
        return transparent(heat, pictures.placement(size, self.image).box_in(size), size)

    def regions(
        self, index: int, inputs: Tensors, explanation: Explanation
    ) -> dict[str, Any] | None:
        """Return the regions of a photograph, or of any picture where they are asked for."""
        heat = self._heat(inputs[0], explanation)
        return heat.regions.as_json() if heat and heat.regions else None

    def _said(self, index: int, explanation: Explanation, heat: Heat) -> dict[str, Any]:
        """Return the fields that are told of in a picture or on a page."""
        fields = self.fields_of(index, explanation)
        return fields | ({"regions": heat.regions.brief()} if heat.regions else {})

    def _heat(self, picture: Tensor, explanation: Explanation) -> Heat | None:
        """Return what is coloured over a picture (C, H, W): its pixels, or regions of it.

        A layer's values are stretched to its size; None where they have no such places.
        """
        size, method = tuple(picture.shape[1:]), METHODS[explanation.options.method]
        (attributions,) = explanation.attributions

        def plane(every: Tensors | None) -> np.ndarray | None:
            if every is None:
                return None
            (values,) = every
            summed = self.aggregated(explanation, values) if values.dim() == 3 else values
            if tuple(summed.shape) != size:
                summed = torch.nn.functional.interpolate(summed[None, None].float(), size)[0, 0]
            return summed.float().cpu().numpy()

        if attributions.dim() != 3 and tuple(attributions.shape) != size:
            return None
        values, errors = plane(explanation.attributions), plane(explanation.errors)
        assert values is not None
        heat = Heat(values, errors, method.has_signs, explanation.strength, explanation.sides)
        wanted = explanation.options.regions
        if wanted is False or (wanted is None and max(size) <= TINY):
            return heat
        # What is stretched stands at several pixels; so does what belongs to a whole window.
        weight = attributions.shape[-2] * attributions.shape[-1] / (size[0] * size[1])
        return heat.over(
            summed_up(
                self.picture(picture),
                values,
                None if method.repeats else weight,
                errors=errors,
                differences=plane(explanation.differences),
                gap=explanation.unaccounted,
                in_windows=method.needs_windows,
            )
        )

    def name_parts(self, index: int, explanation: Explanation) -> Mapping[str, float]:
        """Return what falls into each ninth of the picture as the model sees it."""
        return ninths(explanation.attributions[0])

    def picture(self, inputs: Tensor) -> Image.Image:
        """Turn a model input (C, H, W) back into the picture that it was made of."""
        scale = self.table[:, 255] - self.table[:, 0]
        values = inputs.float().cpu().numpy() - self.table[:, :1, None]
        pixels = np.rint(values * (255 / scale)[:, None, None]).clip(0, 255).astype(np.uint8)
        return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))

    def _read_row(self, row: Mapping[str, Any]) -> list[np.ndarray]:
        """Return one request's model input (C, H, W)."""
        body = body_of(row)
        if isinstance(body, str):
            body = decode_base64(body, "the image file")
        if not isinstance(body, bytes | bytearray):
            numbers = read_numbers(self.inputs[0], body)
            self.sizes.append(None)
            if self.keeps_pictures:
                self.pictures.append(self.picture(torch.from_numpy(numbers)))
            return [numbers]
        return [self.read_picture(body)]

    def read_picture(self, body: bytes | bytearray) -> np.ndarray:
        """Return the model input (C, H, W) of an image file; see `keeps_pictures`."""
        picture = pictures.open_picture(body, self.image, self.max_pixels, self._check_size)
        self.sizes.append(picture.size)
        if self.keeps_pictures:
            self.pictures.append(picture)
        return pictures.normalise(np.asarray(pictures.to_size(picture, self.image)), self.table)

    def _check_size(self, width: int, height: int) -> None:
        """Refuse a picture that becomes one of a size that the model was not exported for."""
        if self._is_any_size:
            made = pictures.resized(width, height, self.image)
            dims = self.image_spec.shape[2:]
            if not all(map(fits, reversed(made), dims)):
                made_of = "" if made == (width, height) else f", {made[0]} × {made[1]} as resized"
                expected = " and ".join(map(str, dims))
                raise BadInput(
                    f"the image is {width} × {height} pixels{made_of}; the model takes {expected}"
                )

    def _find_image(self) -> TensorSpec:
        """Return the input that takes pictures."""
        if len(self.inputs) != 1:
            names = ", ".join(spec.name for spec in self.inputs)
            raise LoadError(f"the artifact takes {names}; an image handler serves one input")
        return self.inputs[0]


class ImageClassifier(Classifier, VisionHandler):
    """Serve a classifier of pictures."""


def _channels_turned(inputs: Inputs) -> Inputs:
    """Return pictures (N, 3, H, W) whose channels are in the other order."""
    turned = (each.flip(1) if each.dim() == 4 else each for each in as_tuple(inputs))
    return next(turned) if isinstance(inputs, Tensor) else tuple(turned)


def _check_shape(settings: pictures.ImageSettings, spec: TensorSpec) -> None:
    """Refuse settings whose pictures the artifact cannot take."""
    if not spec.dtype:  # TorchScript without a report says nothing about shapes
        return
    dims = spec.shape[1:]
    is_fit = len(dims) == 3 and all(
        size is None or fits(size, dim) for size, dim in zip(settings.shape, dims, strict=True)
    )
    if not is_fit:
        channels, height, width = ("any" if size is None else size for size in settings.shape)
        raise LoadError(
            f"the artifact takes {spec}, handler.image gives [{channels}, {height}, {width}]; set "
            f"it in model-config.yaml, as in `handler: {{image: {_suggestion(dims)}}}`, or choose "
            "a handler for other inputs"
        )


def _suggestion(dims: Sequence[Size]) -> str:
    by_channels = {count: mode for mode, count in pictures.CHANNELS.items()}
    channels = dims[0] if len(dims) == 3 and isinstance(dims[0], int) else 3
    mode = by_channels.get(channels, "RGB")
    sizes = [dim if isinstance(dim, int) else 224 for dim in dims[1:3]] or [224, 224]
    count = pictures.CHANNELS[mode]
    return f"{{mode: {mode}, size: {sizes}, mean: {[0.0] * count}, std: {[1.0] * count}}}"
