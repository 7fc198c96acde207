"""Image files → pixels of the size that a model takes: decode, resize, crop; and their values."""

import io
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from modelyard.archiver.untrusted.json import is_number
from modelyard.handlers.body import why_not_json
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.models.folder import read_processor
from modelyard.handlers.models.rows import read_flag, read_one_of, read_section

MAX_PIXELS = 89_478_485
"""Largest image decoded: Pillow's own limit, a quarter of a gigabyte as 24 bits a pixel."""

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

CHANNELS = {"L": 1, "RGB": 3}

RESAMPLINGS = {
    name: Image.Resampling[name.upper()]
    for name in ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
}
"""Resampling filters, in the order of their numbers in Hugging Face's files."""

_FOREIGN_STEPS = (
    *("do_flip_channel_order", "do_pan_scan", "do_image_splitting", "do_thumbnail"),
    *("do_align_long_axis", "do_crop_margin", "do_affine_transform", "pad_size", "size_divisor"),
)
"""Steps of processors that are not among ours."""

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

    Without any: RGB, shorter side 256, centre 224 × 224, ImageNet's colours.
    """

    mode: str = "RGB"
    """L or RGB."""
    resize: int | None = None
    """Shorter side in pixels; the other keeps the proportion."""
    crop: tuple[int, int] | None = None
    """(height, width) cut from the centre, after `resize`."""
    size: tuple[int, int] | None = None
    """(height, width) whatever the proportion; excludes `resize`."""
    mean: tuple[float, ...] = ()
    """Means of the channels, subtracted from values in [0, 1]."""
    std: tuple[float, ...] = ()
    """Standard deviations of the channels, which divide the difference."""
    longest: int | None = None
    """The longer side in pixels at most, after `resize`, which then is not reached."""
    resample: str = "bilinear"
    """One of `RESAMPLINGS`."""
    scale: float = 1 / 255
    """What a pixel is multiplied with before that."""
    pads: bool = False
    """Whether a picture smaller than `crop` gets a black frame, as in transformers; else it is
    refused."""
    upright: bool = True
    """Whether a photo is turned as its file says that the camera was held."""

    @property
    def shape(self) -> tuple[int, int | None, int | None]:
        """(C, H, W) of a model input; None where it follows the picture's size."""
        height, width = self.crop or self.size or (None, None)
        return CHANNELS[self.mode], height, width


DEFAULT_SETTINGS = ImageSettings(
    resize=256, crop=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)


def read_settings(section: Any) -> ImageSettings:
    """Read `handler.image` of model-config.yaml.

    Raises:
        LoadError: an unknown key or a value that cannot be meant; the message names it.
    """
    if section is None:
        return DEFAULT_SETTINGS
    known = ("mode", "resize", "longest", "crop", "size", "resample", "mean", "std", "upright")
    section = read_section({"image": section}, "image", known)
    mode = read_one_of("handler.image.mode", section.get("mode", "RGB"), CHANNELS)
    resize = section.get("resize")
    if resize is not None and not _is_size(resize):
        raise LoadError(f"handler.image.resize is {resize!r}; expected the shorter side in pixels")
    crop, size = _read_pair(section, "crop"), _read_pair(section, "size")
    if size is not None and (resize is not None or crop is not None):
        raise LoadError("handler.image has size and also resize or crop; expected one or the other")
    if resize is not None and crop is not None and resize < min(crop):
        raise LoadError(f"handler.image.resize is {resize}; expected at least crop's {min(crop)}")
    longest = section.get("longest")
    if longest is not None and not (_is_size(longest) and resize and longest >= resize):
        raise LoadError(
            f"handler.image.longest is {longest!r}; expected the longer side in pixels, with a "
            "shorter one as resize"
        )
    filters = section.get("resample", "bilinear")
    resample = read_one_of("handler.image.resample", filters, RESAMPLINGS)
    mean, std = _read_colours(section, "mean", mode), _read_colours(section, "std", mode)
    if 0.0 in std:
        raise LoadError(f"handler.image.std is {list(std)}; expected no zero, it divides")
    upright = read_flag("handler.image.upright", section.get("upright", True))
    return ImageSettings(mode, resize, crop, size, mean, std, longest, resample, upright=upright)


def find_settings(section: Any, folder: Path) -> ImageSettings:
    """Return `handler.image`, else what Hugging Face's file of the archive says, else the defaults.

    Raises:
        LoadError: as `read_settings`, or a step of the file is not among ours.
    """
    found = read_processor(folder) if section is None else None
    return read_settings(section) if found is None else _from_processor(*found)


def _from_processor(file: str, content: Mapping[str, Any]) -> ImageSettings:
    """Read a processor of transformers; what its file leaves out is as most classes have it."""
    if foreign := [step for step in _FOREIGN_STEPS if content.get(step)]:
        raise LoadError(
            f"{file} asks for {foreign[0]}, which this handler does not do; say how pictures "
            "become inputs as handler.image in model-config.yaml"
        )
    try:
        return _read_processor(content)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise LoadError(
            f"{file} cannot be read as the file of an image processor ({error!r}); say how "
            "pictures become inputs as handler.image in model-config.yaml"
        ) from error


def _read_processor(content: Mapping[str, Any]) -> ImageSettings:
    kind = str(content.get("image_processor_type") or content.get("feature_extractor_type") or "")
    resize = longest = size = crop = None
    if content.get("do_resize", True):
        sides = content.get("size", 224)
        keeps_proportion = kind.startswith(("CLIP", "ConvNext", "Detr", "Yolos", "Levit"))
        if isinstance(sides, int):
            sides = {"shortest_edge": sides} if keeps_proportion else [sides, sides]
        if isinstance(sides, list):
            sides = dict(zip(("height", "width"), sides, strict=True))
        if "shortest_edge" in sides:
            resize, longest = int(sides["shortest_edge"]), sides.get("longest_edge")
        else:
            size = int(sides["height"]), int(sides["width"])
    if resize is not None and kind.startswith("ConvNext"):
        # Its own way of cutting the frame off, except from large pictures.
        crop = (resize, resize)
        if resize < 384:
            resize = int(resize / float(content.get("crop_pct") or 224 / 256))
        else:
            resize, size, crop = None, crop, None
    if content.get("do_center_crop"):
        sides = content.get("crop_size", 224)
        crop = (sides, sides) if isinstance(sides, int) else (sides["height"], sides["width"])
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if content.get("do_normalize", True):
        mean, std = (tuple(map(float, content[key])) for key in ("image_mean", "image_std"))
        if not len(mean) == len(std) or 0.0 in std:
            raise ValueError(f"image_mean {mean} and image_std {std}")
    numbers = list(RESAMPLINGS)
    return ImageSettings(
        mode="L" if len(mean) == 1 else "RGB",
        resize=resize,
        crop=crop,
        size=size,
        mean=mean,
        std=std,
        longest=None if longest is None else int(longest),
        resample=numbers[int(content.get("resample") or 2)],
        scale=float(content.get("rescale_factor", 1 / 255)) if content.get("do_rescale", True)
        else 1.0,
        pads=True,
    )  # fmt: skip


def colour_table(settings: ImageSettings) -> np.ndarray:
    """Tabulate the normalisation of a pixel, (C, 256) float32: a lookup replaces the arithmetic."""
    channels = CHANNELS[settings.mode]
    mean = np.asarray(settings.mean or (0.0,) * channels, np.float32)[:, None]
    std = np.asarray(settings.std or (1.0,) * channels, np.float32)[:, None]
    scaled = (np.arange(256) * settings.scale).astype(np.float32)
    return (scaled - mean) / std


def normalise(pixels: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Turn pixels (H, W) or (H, W, C) into a model input (C, H, W), by a `colour_table`."""
    if pixels.ndim == 2:
        return table[:, pixels]
    return np.stack([row[pixels[:, :, c]] for c, row in enumerate(table)])


def decode(body: bytes | bytearray, settings: ImageSettings, max_pixels: int | None) -> np.ndarray:
    """Decode an image file into pixels (H, W) or (H, W, 3) uint8 of the size that is wanted.

    Raises:
        BadInput: not an image of `IMAGE_FORMATS`, damaged, too small, or over the limit.
    """
    return np.asarray(to_size(open_picture(body, settings, max_pixels), settings))


def open_picture(
    body: bytes | bytearray,
    settings: ImageSettings,
    max_pixels: int | None,
    check: Callable[[int, int], None] = lambda width, height: None,
) -> Image.Image:
    """Decode an image file into a picture of its own size, of mode L or RGB.

    Transparency is left out: what is seen is the colour below it, as in torchvision.

    Args:
        body: the file.
        settings: settings with the mode, and whether it is turned upright.
        max_pixels: its limit.
        check: called with the picture's size before it is decoded, to refuse it.

    Raises:
        BadInput: not an image of `IMAGE_FORMATS`, damaged, or over the limit.
    """
    mode = settings.mode
    try:
        image: Image.Image = Image.open(io.BytesIO(body), formats=IMAGE_FORMATS)
        width, height = image.size
        if max_pixels is not None and width * height > max_pixels:
            raise BadInput(
                f"the image is {width} × {height} pixels; the limit is {max_pixels} in all "
                "(max_image_pixels)"
            )
        turn = _orientation(image) if settings.upright else UPRIGHT
        check(*((height, width) if turn in LYING else (width, height)))
        if turn != UPRIGHT:
            image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):
            # Pillow clips 16 bits to 255 instead of scaling them.
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode != mode:
            return image.convert(mode)
        image.load()
        return image
    except _DECODE_ERRORS as error:
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else f"{error}"
        if said := why_not_json(body):
            reason += f", and {said}"
        raise BadInput(
            f"the body ({len(body)} bytes) cannot be read as an image: {reason}; "
            f"send one file of {', '.join(IMAGE_FORMATS)}"
        ) from error


UPRIGHT = 1
LYING = (5, 6, 7, 8)
"""Orientations of EXIF that exchange width and height."""


def _orientation(image: Image.Image) -> int:
    """Return how the file says that the picture lies, of EXIF's numbers; TIFF files lie right."""
    # Asking a PNG file without EXIF would decode it.
    if "exif" not in image.info or image.format == "TIFF":
        return UPRIGHT
    found = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    return found if found in range(1, 9) else UPRIGHT


def resized(width: int, height: int, settings: ImageSettings) -> tuple[int, int]:
    """Return (width, height) of a picture after resizing, before it is cropped.

    Raises:
        BadInput: it would be too large.
    """
    size = width, height
    if settings.size is not None:
        height, width = settings.size
    elif settings.resize is not None:
        shorter, longer = min(size), max(size)
        side: float = settings.resize
        if settings.longest is not None and longer * side > settings.longest * shorter:
            side = settings.longest * shorter / longer
        # The longer side by the unrounded shorter one, as DETR's processor has it.
        width, height = (
            round(side) if each == shorter else int(side * each / shorter) for each in size
        )
        if not (width > 0 and height > 0 and width * height <= MAX_PIXELS):
            raise BadInput(
                f"the image is {size[0]} × {size[1]} pixels, of which {width} × {height} "
                "would be made; send one of a more usual shape"
            )
    return width, height


class Placement(NamedTuple):
    """How a picture becomes an input: its size after resizing, and the box that is cut out."""

    width: int
    height: int
    left: int
    top: int
    crop_width: int
    crop_height: int

    def box_in(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of that box in a picture of (width, height).

        Where a frame was added, it reaches beyond the picture.
        """
        across, down = size[0] / self.width, size[1] / self.height
        right, bottom = self.left + self.crop_width, self.top + self.crop_height
        return self.left * across, self.top * down, right * across, bottom * down


def placement(size: tuple[int, int], settings: ImageSettings) -> Placement:
    """Place a picture (width, height) as torchvision's Resize and CenterCrop, or transformers, do.

    Raises:
        BadInput: nothing could be made of that size.
    """
    width, height = resized(*size, settings)
    if settings.crop is None or settings.crop == (height, width):
        return Placement(width, height, 0, 0, width, height)
    crop_height, crop_width = settings.crop
    if settings.pads:
        top, left = (height - crop_height) // 2, (width - crop_width) // 2
    elif crop_height > height or crop_width > width:
        raise BadInput(
            f"the image is {width} × {height} pixels after resizing; "
            f"expected at least {crop_width} × {crop_height}"
        )
    else:
        top, left = round((height - crop_height) / 2), round((width - crop_width) / 2)
    return Placement(width, height, left, top, crop_width, crop_height)


def to_size(image: Image.Image, settings: ImageSettings) -> Image.Image:
    """Resize and crop a picture, see `placement`."""
    at = placement(image.size, settings)
    if (at.width, at.height) != image.size:
        image = image.resize((at.width, at.height), RESAMPLINGS[settings.resample])
    if (at.crop_width, at.crop_height) == image.size:
        return image
    return image.crop((at.left, at.top, at.left + at.crop_width, at.top + at.crop_height))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65_535


def _read_pair(section: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    value = section.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_size, value)):
        raise LoadError(f"handler.image.{key} is {value!r}; expected [height, width] in pixels")
    return value[0], value[1]


def _read_colours(section: Mapping[str, Any], key: str, mode: str) -> tuple[float, ...]:
    value = section.get(key)
    if value is None:
        return ()
    count = CHANNELS[mode]
    are_numbers = isinstance(value, list) and all(map(is_number, value))
    if not are_numbers or len(value) != count:
        raise LoadError(f"handler.image.{key} is {value!r}; mode {mode} expects {count} numbers")
    return tuple(map(float, value))
