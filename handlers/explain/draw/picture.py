"""Attributions → a picture that shows them over the input, or a transparent one to lay over it."""

import io
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from modelyard.base import explain_words as words
from modelyard.handlers.explain.regions import TINY, Regions

PANEL, LARGEST_PANEL = 320, 640
"""Longer side of a panel in pixels: the least, and the most for inputs of more pixels."""

CLIPPED_SHARE = 0.005
"""Share of the pixels of a large input whose colour may be cut off, so that few do not hide all."""

LEAST_WIDTH = 420
"""Least width of a sheet, in pixels: texts need room beside a narrow picture, too."""

PALE = 0.3
"""How much of its colour is left to a value that is below its own error."""

MOST_OVERLAY_PIXELS = 16_000_000
"""Most pixels of an overlay; of a larger input it has the proportion only."""

INK, SOFT = (28, 32, 38), (110, 116, 124)
MARGIN = 24
_STRONG = 0.8
"""The one red and the one blue of what is transparent."""
_GAP = 20
_BAR = 14
_TITLE, _TEXT = 26, 15
_LINE = _TEXT + 7
_FRAME, _TRACE = (214, 217, 221), (96, 102, 110)

# Blue – white – red, evenly spaced in lightness on both sides (ColorBrewer's RdBu, reversed).
_COLOURS = np.frombuffer(
    bytes.fromhex("053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f"),
    np.uint8,
).reshape(-1, 3)

_ASCII_SIGNS = str.maketrans("–—−‘’“”", "---''\"\"")

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Drawn(NamedTuple):
    """What a picture or a figure shows, in numbers."""

    sums: tuple[float, float]
    """What speaks for the target and what speaks against it, each added up."""
    unsure: float
    """Share of all sizes that is below its own error."""
    thing: str
    """What has an attribution: a pixel, a feature."""


@dataclass(frozen=True)
class Heat:
    """What is coloured: numbers in the size of the picture."""

    values: np.ndarray
    """(H, W)."""
    errors: np.ndarray | None = None
    """(H, W): how far off each may be."""
    has_signs: bool = True
    strength: float = 1.0
    """Share of full colour that the largest gets."""
    sides: tuple[float, float] | None = None
    """What speaks for the target and against it, each added up, where each value of a window has
    what belongs to all of it; None where the values say it."""
    regions: Regions | None = None
    """Each pixel has what the region that it is of has as a whole."""

    def over(self, regions: Regions) -> "Heat":
        """Return the same over regions."""
        labels, off = regions.labels, regions.errors
        errors = None if off is None else off[labels]
        return replace(self, values=regions.values[labels], errors=errors, regions=regions)

    @property
    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """What has a number of its own, and where that is below its error."""
        if self.regions is None:
            return self.values, self.is_unsure
        values, errors = self.regions.values, self.regions.errors
        return values, np.zeros(len(values), bool) if errors is None else np.abs(values) < errors

    @cached_property
    def limit(self) -> float:
        """The size of what has full colour."""
        sizes = np.abs(self.values)
        most = float(sizes.max(initial=0.0))
        if self.regions or max(self.values.shape) <= TINY:
            return most
        return float(np.quantile(sizes, 1 - CLIPPED_SHARE)) or most

    @cached_property
    def is_unsure(self) -> np.ndarray:
        """(H, W): where a value is below its own error."""
        if self.errors is None:
            return np.zeros(self.values.shape, bool)
        sizes = np.abs(self.values)
        unsure: np.ndarray = (sizes > 0) & (sizes < self.errors)
        return unsure

    @property
    def colours(self) -> np.ndarray:
        """(H, W) in [−1, 1]: blue to red."""
        shares = (self.values / self.limit if self.limit else self.values).clip(-1, 1)
        coloured: np.ndarray = shares * self.strength * np.where(self.is_unsure, PALE, 1.0)
        return coloured

    @property
    def sums(self) -> tuple[float, float]:
        """What speaks for the target and what speaks against it, each added up."""
        if self.sides is not None:
            return self.sides
        values = self._parts[0].astype(np.float64)
        return float(values.clip(0).sum()), float(values.clip(None, 0).sum())

    @property
    def drawn(self) -> Drawn:
        """What it shows."""
        values, is_unsure = self._parts
        sizes = np.abs(values).astype(np.float64)
        whole = float(sizes.sum())
        unsure = float(sizes[is_unsure].sum()) / whole if whole else 0.0
        return Drawn(self.sums, unsure, "region" if self.regions else "pixel")

    @property
    def bar_labels(self) -> tuple[str, str, str]:
        """What a colour bar says at its top, in the middle and at its end."""
        positive, negative = self.sums
        if not self.limit:
            return "", "0", ""
        share = words.percent(self.limit / (positive - negative))
        if not self.has_signs:
            return f"{share} of all", "", "0"
        return f"+{share} of all", "0", f"−{share}"


@dataclass(frozen=True)
class Texts:
    """What is written around a picture."""

    title: str
    tail: str
    """Behind the title, whole."""
    about: str
    """Rest of the title, whole."""
    notes: Sequence[str]
    """Line below the title."""


def render(image: Image.Image, heat: Heat, texts: Texts) -> bytes:
    """Draw the input beside its attributions, with a colour bar that gives their shares.

    Args:
        image: mode L or RGB, the picture that was explained.
        heat: heat of its size.
        texts: around it.

    Returns:
        A PNG file.
    """
    legend = (
        "red raises the output, blue lowers it"
        if heat.has_signs
        else "the redder, the more the output depends on it"
    )
    left, right = panels(image, heat)
    bar = _BAR + 8 + max(int(font_of(_TEXT).getlength(label)) for label in heat.bar_labels)
    width = 2 * (left.width + _GAP) + bar
    sheet = Sheet(width, left.height + _LINE + 4, texts)
    for place, (panel, caption) in enumerate(((left, "input"), (right, legend))):
        at = MARGIN + place * (left.width + _GAP)
        sheet.image.paste(panel, (at, sheet.top))
        frame = (at - 1, sheet.top - 1, at + left.width, sheet.top + left.height)
        sheet.draw.rectangle(frame, outline=_FRAME)
        room = left.width + (0 if place == 0 else bar)
        text = shorten(caption, sheet.text, room)
        sheet.draw.text((at, sheet.top + left.height + 6), text, fill=SOFT, font=sheet.text)
    _colour_bar(sheet, MARGIN + 2 * (left.width + _GAP), left.height, heat)
    return sheet.png()


def panels(image: Image.Image, heat: Heat) -> tuple[Image.Image, Image.Image]:
    """Return the input and its attributions over it, enlarged alike."""
    size = _panel_size(image.size)
    both = _enlarge(image.convert("RGB"), size), _overlay(image, heat, size)
    if heat.regions is None:
        return both
    before, over = (_outlined(each, heat.regions, every=each is both[1]) for each in both)
    return before, over


def transparent(heat: Heat, box: tuple[float, float, float, float], size: tuple[int, int]) -> bytes:
    """Draw attributions as a PNG file to lay over the picture that was sent.

    Args:
        heat: heat of what the model saw.
        box: left, top, right and bottom of that in the picture that was sent.
        size: width and height of that picture; one of very many pixels is drawn smaller.
    """
    scale = min(1.0, (MOST_OVERLAY_PIXELS / (size[0] * size[1])) ** 0.5)
    width, height = (max(1, int(side * scale)) for side in size)
    left, top, right, bottom = (round(side * scale) for side in box)
    colours = heat.colours
    pixels = np.dstack((_colour(_STRONG * np.sign(colours)), _alpha(colours)))
    # Premultiplied, so that colours of what is transparent are not mixed in.
    layer = Image.fromarray(pixels, "RGBA").convert("RGBa")
    smooth = Image.Resampling.NEAREST if max(layer.size) <= TINY else Image.Resampling.BILINEAR
    layer = layer.resize((max(1, right - left), max(1, bottom - top)), smooth).convert("RGBA")
    sheet = Image.new("RGBA", (width, height))
    sheet.paste(layer, (left, top))
    return png(sheet)


def stack(pictures: Sequence[bytes]) -> bytes:
    """Put PNG files below one another; one alone stays as it is."""
    if len(pictures) == 1:
        return pictures[0]
    sheets = [Image.open(io.BytesIO(each)) for each in pictures]
    size = max(each.width for each in sheets), sum(each.height for each in sheets)
    whole, top = Image.new("RGB", size, "white"), 0
    for sheet in sheets:
        whole.paste(sheet, (0, top))
        top += sheet.height
    return png(whole)


def png(image: Image.Image) -> bytes:
    """Return a picture as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class Sheet:
    """A white sheet with texts above and below a place for what is drawn.

    Args:
        width: width of that place, which begins at (`MARGIN`, `top`).
        height: height of that place.
        texts: around it.
    """

    def __init__(self, width: int, height: int, texts: Texts) -> None:
        self.text, heading = font_of(_TEXT), font_of(_TITLE)
        width = max(width, LEAST_WIDTH)
        self.top = MARGIN + _TITLE + 12 + _LINE + 8
        notes = [line for note in texts.notes for line in _wrap(note, self.text, width)]
        bottom = self.top + height + 10
        self.image = Image.new(
            "RGB", (width + 2 * MARGIN, bottom + len(notes) * _LINE + MARGIN - 6), "white"
        )
        self.draw = ImageDraw.Draw(self.image)
        tail = f" · {texts.tail}" if texts.tail else ""
        title = shorten(texts.title, heading, width, tail)
        self.draw.text((MARGIN, MARGIN - 4), title, fill=INK, font=heading)
        about = shorten(texts.about, self.text, width)
        self.draw.text((MARGIN, MARGIN + _TITLE + 12), about, fill=SOFT, font=self.text)
        for at, line in enumerate(notes):
            self.draw.text((MARGIN, bottom + at * _LINE), line, fill=INK, font=self.text)

    def png(self) -> bytes:
        """Return the sheet as a PNG file."""
        return png(self.image)


def _colour_bar(sheet: Sheet, left: int, height: int, heat: Heat) -> None:
    values = np.linspace(1, -1 if heat.has_signs else 0, height)[:, None].repeat(_BAR, axis=1)
    top = sheet.top
    sheet.image.paste(Image.fromarray(_colour(values)), (left, top))
    right = left + _BAR
    sheet.draw.rectangle((left - 1, top - 1, right, top + height), outline=_FRAME)
    places = (top, top + height // 2, top + height)
    for y, label, anchor in zip(places, heat.bar_labels, ("lt", "lm", "lb"), strict=True):
        text = printable(label)
        sheet.draw.text((right + 8, y), text, fill=INK, font=sheet.text, anchor=anchor)


def _panel_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return (width, height) of a panel: whole multiples of a tiny input, the same proportion."""
    longer = max(size)
    large = min(max(longer, PANEL), LARGEST_PANEL) / longer
    scale = PANEL // longer if longer <= TINY else large
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _overlay(image: Image.Image, heat: Heat, size: tuple[int, int]) -> Image.Image:
    """Colour the values; lines (tiny inputs) or a pale copy show where they lie."""
    colours = heat.colours
    grey = np.asarray(image.convert("L"))
    if max(grey.shape) <= TINY:
        panel = _enlarge(Image.fromarray(_colour(colours)), size)
        _outline(ImageDraw.Draw(panel), grey, size[0] // grey.shape[1])
        return panel
    pale = 255 * (0.55 + 0.42 * grey[:, :, None] / 255.0)
    weight = _alpha(colours)[:, :, None] / 255.0
    mixed = weight * _colour(colours) + (1 - weight) * pale
    return _enlarge(Image.fromarray(np.rint(mixed).astype(np.uint8)), size)


def _alpha(colours: np.ndarray) -> np.ndarray:
    """Return how much of what lies below is covered, (H, W) uint8, by colours in [−1, 1]."""
    covered: np.ndarray = np.rint(255 * np.abs(colours) ** 0.6).astype(np.uint8)
    return covered


def _outline(draw: ImageDraw.ImageDraw, grey: np.ndarray, scale: int) -> None:
    """Trace the borders between light and dark pixels, which outline a digit or a letter."""
    is_light = grey > (int(grey.min()) + int(grey.max())) / 2
    for y, x in np.argwhere(is_light[:, 1:] != is_light[:, :-1]).tolist():
        edge = (x + 1) * scale
        draw.line((edge, y * scale, edge, (y + 1) * scale), fill=_TRACE, width=2)
    for y, x in np.argwhere(is_light[1:] != is_light[:-1]).tolist():
        edge = (y + 1) * scale
        draw.line((x * scale, edge, (x + 1) * scale, edge), fill=_TRACE, width=2)


def _outlined(panel: Image.Image, regions: Regions, *, every: bool) -> Image.Image:
    """Outline the strongest regions, with their numbers from 1, and faintly every other one."""
    height, width = regions.labels.shape
    rows, columns = np.arange(panel.height), np.arange(panel.width)
    rows, columns = rows * height // panel.height, columns * width // panel.width
    labels = regions.labels[np.ix_(rows, columns)]
    pixels = np.array(panel)
    if every:
        pixels[_borders(labels)] = _FRAME
    for at in regions.strongest:
        pixels[_borders(labels == at)] = INK
    outlined = Image.fromarray(pixels)
    draw, scale = ImageDraw.Draw(outlined), panel.height / height
    for number, at in enumerate(regions.strongest, 1):
        y, x = ((each + 0.5) * scale for each in regions.centres[at])
        draw.text(
            (x, y), str(number), fill=INK, font=font_of(_TEXT), anchor="mm",
            stroke_width=2, stroke_fill="white",
        )  # fmt: skip
    return outlined


def _borders(labels: np.ndarray) -> np.ndarray:
    """Return the pixels (H, W) on both sides of a border, but for those of the picture's edge."""
    found = np.zeros(labels.shape, bool)
    for plane, each in ((labels, found), (labels.T, found.T)):
        border = plane[1:] != plane[:-1]
        each[1:] |= border
        each[:-1] |= border
    return found


def _colour(values: np.ndarray) -> np.ndarray:
    """Return the colours (…, 3) uint8 of values in [−1, 1]."""
    places = (values + 1) / 2 * (len(_COLOURS) - 1)
    channels = [np.interp(places, np.arange(len(_COLOURS)), channel) for channel in _COLOURS.T]
    colours: np.ndarray = np.rint(np.stack(channels, axis=-1)).astype(np.uint8)
    return colours


def colours_of(share: float) -> tuple[int, int, int]:
    """Return red, green and blue of a share in [−1, 1]."""
    red, green, blue = _colour(np.array(share)).tolist()
    return red, green, blue


def _enlarge(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    is_tiny = max(image.size) <= TINY
    return image.resize(size, Image.Resampling.NEAREST if is_tiny else Image.Resampling.LANCZOS)


def printable(text: str) -> str:
    """Spell a text with what Pillow's built-in font holds: é becomes e, 猫 becomes ?."""
    text = unicodedata.normalize("NFKD", text).translate(_ASCII_SIGNS)
    plain = (c for c in text if not unicodedata.combining(c))
    return "".join(c if (c.isascii() and c.isprintable()) or c in "·°±" else "?" for c in plain)


def shorten(text: str, font: _Font, room: float, tail: str = "") -> str:
    """Return a text as it can be printed, cut off where the room ends, but for its tail."""
    text, tail = printable(text), printable(tail)
    if font.getlength(text + tail) <= room:
        return text + tail
    while text and font.getlength(f"{text}…{tail}") > room:
        text = text[:-1]
    return f"{text}…{tail}"


def _wrap(text: str, font: _Font, room: float) -> list[str]:
    """Return a text as lines that fit."""
    lines = [""]
    for word in printable(text).split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return [shorten(line, font, room) for line in lines]


def font_of(size: int) -> _Font:
    """Return the font of all drawings, which travels with Pillow."""
    return ImageFont.load_default(size=size)
