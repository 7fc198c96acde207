"""Images in: decode, resize, crop, normalise; shared by every handler of pictures."""

import base64
import binascii
import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageFilter, UnidentifiedImageError
from torch import Tensor

from modelyard.archiver.signature import Size, TensorSpec, fits
from modelyard.handlers.backends import Output
from modelyard.handlers.base import BaseHandler
from modelyard.handlers.body import body_of
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.explain import draw
from modelyard.handlers.explain.explanation import Explanation
from modelyard.handlers.rows import TopLabels, read_numbers

MAX_PIXELS = 89_478_485
"""Largest image decoded: Pillow's own limit, a quarter of a gigabyte as 24 bits a pixel."""

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

CHANNELS = {"L": 1, "RGB": 3}

# What Pillow's decoders raise on a damaged file, by their sources.
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


@dataclass(frozen=True)
class ImageSettings:
    """How pictures become model inputs: `handler.image` of model-config.yaml.

    Without any, TorchServe's defaults: RGB, shorter side 256, centre 224 × 224, ImageNet's colours.
    """

    mode: str = "RGB"
    """L or RGB."""
    resize: int | None = None
    """Shorter side in pixels; the other keeps the proportion."""
    crop: tuple[int, int] | None = None
    """(height, width) cut from the centre, after `resize`."""
    size: tuple[int, int] | None = None
    """(height, width) whatever the proportion; excludes `resize` and `crop`."""
    mean: tuple[float, ...] = ()
    """Per channel, subtracted from values in [0, 1]."""
    std: tuple[float, ...] = ()
    """Per channel, divides the difference."""

    @property
    def shape(self) -> tuple[int, int | None, int | None]:
        """(C, H, W) of a model input; None where it follows the picture's size."""
        height, width = self.size or self.crop or (None, None)
        return CHANNELS[self.mode], height, width


TORCHSERVE_SETTINGS = ImageSettings(
    resize=256, crop=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)


class VisionHandler(BaseHandler):
    """Serve a model of one image input; answers are the model's numbers.

    A request's body is an image file, the base64 text of one, or nested JSON lists that are the
    model's input (C, H, W) already.
    """

    formats: ClassVar[tuple[str, ...]] = ("json", "png")

    def __init__(self) -> None:
        super().__init__()
        self.settings: Mapping[str, Any] = {}
        self.image = TORCHSERVE_SETTINGS
        self.table = colour_table(TORCHSERVE_SETTINGS)
        self.max_pixels: int | None = MAX_PIXELS

    def initialize(self, context: Context) -> None:
        """Load the archive and its `handler.image`; refuse settings that the model cannot take."""
        super().initialize(context)
        section = self.model_yaml_config.get("handler") or {}
        if not isinstance(section, Mapping):
            raise LoadError(f"handler is {section!r} in model-config.yaml; expected entries")
        self.settings = section
        self.image = read_settings(section.get("image"))
        self.table = colour_table(self.image)
        if not context.system_properties.get("limit_max_image_pixels", True):
            # Only TorchServe's explicit limit_max_image_pixels=false lifts Pillow's guard.
            self.max_pixels = Image.MAX_IMAGE_PIXELS = None
        if len(self.inputs) != 1:
            names = ", ".join(spec.name for spec in self.inputs)
            raise LoadError(f"the artifact takes {names}; an image handler serves one input")
        _check_shape(self.image, self.inputs[0])

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
        return torch.from_numpy(self._normalise(pixels))[None]

    def window(self, sizes: torch.Size, side: int | None) -> tuple[int, ...]:
        """Return a square over all channels, by default an eighth of the longer side."""
        if len(sizes) != 3:
            return super().window(sizes, side)
        side = side or -(-max(sizes[1:]) // 8)
        return sizes[0], side, side

    def aggregate(self, attributions: Tensor) -> Tensor:
        """Sum attributions (C, H, W) over the channels."""
        return attributions.sum(0)

    def heat_map(self, inputs: Tensor, explanation: Explanation) -> bytes:
        """Draw attributions (C, H, W) over the picture as the model saw it."""
        (attributions,) = explanation.attributions
        if attributions.dim() != 3:
            raise BadInput(
                f"format is png; expected json: layer {explanation.options.layer} has the shape "
                f"{list(attributions.shape)}, which is none of pictures"
            )
        if attributions.shape[1:] != inputs.shape[1:]:
            shares = attributions.sum(0, keepdim=True)[None].float()
            attributions = torch.nn.functional.interpolate(shares, tuple(inputs.shape[1:]))[0]
        return draw.render(
            self.picture(inputs),
            attributions.float().cpu().numpy(),
            label=explanation.label,
            probability=explanation.probability,
            legend=explanation.legend,
            footer=explanation.footer,
        )

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
            body = _decode_base64(body)
        if not isinstance(body, bytes | bytearray):
            return [read_numbers(self.inputs[0], body)]
        return [self._normalise(decode(body, self.image, self.max_pixels))]

    def _normalise(self, pixels: np.ndarray) -> np.ndarray:
        """Turn pixels (H, W) or (H, W, C) into a model input (C, H, W)."""
        if pixels.ndim == 2:
            values: np.ndarray = self.table[:, pixels]
            return values
        return np.stack([table[pixels[:, :, c]] for c, table in enumerate(self.table)])


class ImageClassifier(VisionHandler):
    """Answer {"label": probability, …}, the likeliest first; `handler.top_k` says how many."""

    def __init__(self) -> None:
        super().__init__()
        self.top_labels = TopLabels({}, self.label)

    def initialize(self, context: Context) -> None:
        """Load the archive, its `handler.image` and its `handler.top_k`."""
        super().initialize(context)
        self.top_labels = TopLabels(self.settings, self.label, self.config)

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn logits (N, K) into one dict per request: labels and their softmax, descending."""
        return self.top_labels(outputs)


def read_settings(section: Any) -> ImageSettings:
    """Read `handler.image` of model-config.yaml.

    Raises:
        LoadError: an unknown key or a value that cannot be meant; the message names it.
    """
    if section is None:
        return TORCHSERVE_SETTINGS
    known = ("mode", "resize", "crop", "size", "mean", "std")
    if not isinstance(section, Mapping):
        raise LoadError(f"handler.image is {section!r}; expected entries of {', '.join(known)}")
    for key in section:
        if key not in known:
            raise LoadError(f"handler.image.{key} is unknown; expected some of {', '.join(known)}")
    mode = section.get("mode", "RGB")
    if mode not in CHANNELS:
        raise LoadError(f"handler.image.mode is {mode!r}; expected one of {', '.join(CHANNELS)}")
    resize = section.get("resize")
    if resize is not None and not _is_size(resize):
        raise LoadError(f"handler.image.resize is {resize!r}; expected the shorter side in pixels")
    crop, size = _read_pair(section, "crop"), _read_pair(section, "size")
    if size is not None and (resize is not None or crop is not None):
        raise LoadError("handler.image has size and also resize or crop; expected one or the other")
    if resize is not None and crop is not None and resize < min(crop):
        raise LoadError(f"handler.image.resize is {resize}; expected at least crop's {min(crop)}")
    mean, std = _read_colours(section, "mean", mode), _read_colours(section, "std", mode)
    if 0.0 in std:
        raise LoadError(f"handler.image.std is {list(std)}; expected no zero, it divides")
    return ImageSettings(mode, resize, crop, size, mean, std)


def colour_table(settings: ImageSettings) -> np.ndarray:
    """Tabulate the normalisation of a pixel, (C, 256) float32: a lookup replaces the arithmetic."""
    channels = CHANNELS[settings.mode]
    mean = np.asarray(settings.mean or (0.0,) * channels, np.float32)[:, None]
    std = np.asarray(settings.std or (1.0,) * channels, np.float32)[:, None]
    values: np.ndarray = (np.arange(256, dtype=np.float32) / np.float32(255) - mean) / std
    return values


def decode(body: bytes | bytearray, settings: ImageSettings, max_pixels: int | None) -> np.ndarray:
    """Decode an image file into pixels (H, W) or (H, W, 3) uint8 of the size that is wanted.

    Raises:
        BadInput: not an image of `IMAGE_FORMATS`, damaged, too small, or over the limit.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(body), formats=IMAGE_FORMATS)
        width, height = image.size
        if max_pixels is not None and width * height > max_pixels:
            raise BadInput(
                f"the image is {width} × {height} pixels; the limit is {max_pixels} in all"
            )
        if image.mode.startswith("I;16"):
            # Pillow clips 16 bits to 255 instead of scaling them.
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode != settings.mode:
            image = image.convert(settings.mode)
        return np.asarray(to_size(image, settings))
    except _DECODE_ERRORS as error:
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else f"{error}"
        raise BadInput(
            f"the body ({len(body)} bytes) cannot be read as an image: {reason}; "
            f"send one file of {', '.join(IMAGE_FORMATS)}"
        ) from error


def to_size(image: Image.Image, settings: ImageSettings) -> Image.Image:
    """Resize and crop as torchvision's Resize and CenterCrop do on a picture."""
    width, height = image.size
    if settings.size is not None:
        height, width = settings.size
    elif settings.resize is not None:
        shorter = min(width, height)
        width, height = settings.resize * width // shorter, settings.resize * height // shorter
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    if settings.crop is None or settings.crop == (height, width):
        return image
    crop_height, crop_width = settings.crop
    if crop_height > height or crop_width > width:
        raise BadInput(
            f"the image is {width} × {height} pixels after resizing; "
            f"expected at least {crop_width} × {crop_height}"
        )
    top, left = round((height - crop_height) / 2), round((width - crop_width) / 2)
    return image.crop((left, top, left + crop_width, top + crop_height))


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=False)
    except (binascii.Error, ValueError) as error:
        raise BadInput(f"the body is text but not base64 ({error}); send the image file") from error


def _check_shape(settings: ImageSettings, spec: TensorSpec) -> None:
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
    by_channels = {count: mode for mode, count in CHANNELS.items()}
    channels = dims[0] if len(dims) == 3 and isinstance(dims[0], int) else 3
    mode = by_channels.get(channels, "RGB")
    sizes = [dim if isinstance(dim, int) else 224 for dim in dims[1:3]] or [224, 224]
    count = CHANNELS[mode]
    return f"{{mode: {mode}, size: {sizes}, mean: {[0.0] * count}, std: {[1.0] * count}}}"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65_535


def _read_pair(section: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    value = section.get(key)
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(map(_is_size, value)):
        return value[0], value[1]
    raise LoadError(f"handler.image.{key} is {value!r}; expected [height, width] in pixels")


def _read_colours(section: Mapping[str, Any], key: str, mode: str) -> tuple[float, ...]:
    value = section.get(key)
    if value is None:
        return ()
    count = CHANNELS[mode]
    if (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)
    ):
        return tuple(float(v) for v in value)
    raise LoadError(f"handler.image.{key} is {value!r}; mode {mode} expects {count} numbers")
