"""Attributions → a picture that shows them over the input."""

import io
import unicodedata
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

PANEL = 320
"""Longer side of a panel in pixels."""

TINY = 64
"""Up to this side the pixels of the input are drawn as squares, larger inputs smoothly."""

CLIPPED_SHARE = 0.005
"""Share of the pixels of a large input whose colour may be cut off, so that few do not hide all."""

_MARGIN = 24
_GAP = 20
_BAR = 14
_TITLE, _TEXT = 26, 15
_INK, _SOFT = (28, 32, 38), (110, 116, 124)
_FRAME, _TRACE = (214, 217, 221), (96, 102, 110)

# Blue – white – red, evenly spaced in lightness on both sides (ColorBrewer's RdBu, reversed).
_COLOURS = np.array(
    [
        (5, 48, 97),
        (33, 102, 172),
        (67, 147, 195),
        (146, 197, 222),
        (209, 229, 240),
        (247, 247, 247),
        (253, 219, 199),
        (244, 165, 130),
        (214, 96, 77),
        (178, 24, 43),
        (103, 0, 31),
    ],
    dtype=np.float64,
)

_ASCII_SIGNS = str.maketrans("–—−‘’“”", "---''\"\"")

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def render(
    image: Image.Image,
    attributions: np.ndarray,
    *,
    label: str,
    probability: float | None,
    legend: str,
    footer: str = "",
) -> bytes:
    """Draw the input beside its attributions, with a colour bar that gives their values.

    Args:
        image: mode L or RGB, the picture that was explained.
        attributions: (C, H, W) as the picture's size; channels are summed.
        label: the target's name.
        probability: of the label, 0 to 1; None leaves it out.
        legend: what positive values (red) and negative ones (blue) mean.
        footer: one line below the panels.

    Returns:
        A PNG file.
    """
    shares = attributions.sum(axis=0, dtype=np.float64)
    limit, is_clipped = _limit(shares)
    size = _panel_size(image.size)
    left = _enlarge(image.convert("RGB"), size)
    right = _overlay(image, shares / limit if limit else shares, size)
    canvas = _Canvas(size, _bar_labels(limit, is_clipped))
    canvas.title(label, probability)
    canvas.panel(0, left, "input")
    canvas.panel(1, right, legend)
    canvas.bar()
    canvas.footer(footer)
    return canvas.png()


def stack(pictures: Sequence[bytes]) -> bytes:
    """Put PNG files below one another; one alone stays as it is."""
    if len(pictures) == 1:
        return pictures[0]
    sheets = [Image.open(io.BytesIO(each)) for each in pictures]
    whole = Image.new(
        "RGB", (max(each.width for each in sheets), sum(each.height for each in sheets)), "white"
    )
    top = 0
    for sheet in sheets:
        whole.paste(sheet, (0, top))
        top += sheet.height
    file = io.BytesIO()
    whole.save(file, "PNG")
    return file.getvalue()


def colour_of_class(index: int) -> tuple[int, int, int]:
    """Return the colour of a class, as the PASCAL VOC data set has them; class 0 is black."""
    red = green = blue = 0
    for bit in range(7, -1, -1):
        red |= (index & 1) << bit
        green |= (index >> 1 & 1) << bit
        blue |= (index >> 2 & 1) << bit
        index >>= 3
    return red, green, blue


class _Canvas:
    """The sheet and where things are on it; every place follows from the panels' size."""

    def __init__(self, panel: tuple[int, int], bar_labels: Sequence[str]) -> None:
        self.text, self.heading = font_of(_TEXT), font_of(_TITLE)
        self.panel_size = panel
        self.bar_labels = bar_labels
        width, height = panel
        legend = _BAR + 8 + max(int(self.text.getlength(label)) for label in bar_labels)
        self.top = _MARGIN + _TITLE + 18
        self.bar_left = _MARGIN + 2 * (width + _GAP)
        self.caption_top = self.top + height + 8
        self.sheet = Image.new(
            "RGB",
            (self.bar_left + legend + _MARGIN, self.caption_top + 2 * _TEXT + 16 + _MARGIN),
            "white",
        )
        self.draw = ImageDraw.Draw(self.sheet)

    def title(self, label: str, probability: float | None) -> None:
        tail = "" if probability is None else f" · p = {probability:.3f}"
        room = self.sheet.width - 2 * _MARGIN - self.heading.getlength(tail)
        text = _shorten(_printable(label), self.heading, room) + tail
        self.draw.text((_MARGIN, _MARGIN - 4), text, fill=_INK, font=self.heading)

    def panel(self, place: int, picture: Image.Image, caption: str) -> None:
        width, height = self.panel_size
        left = _MARGIN + place * (width + _GAP)
        self.sheet.paste(picture, (left, self.top))
        frame = (left - 1, self.top - 1, left + width, self.top + height)
        self.draw.rectangle(frame, outline=_FRAME)
        self.draw.text((left, self.caption_top), caption, fill=_SOFT, font=self.text)

    def bar(self) -> None:
        height = self.panel_size[1]
        values = np.linspace(1, -1, height)[:, None].repeat(_BAR, axis=1)
        self.sheet.paste(Image.fromarray(_colour(values)), (self.bar_left, self.top))
        right = self.bar_left + _BAR
        frame = (self.bar_left - 1, self.top - 1, right, self.top + height)
        self.draw.rectangle(frame, outline=_FRAME)
        places = (self.top, self.top + height // 2, self.top + height)
        for y, label, anchor in zip(places, self.bar_labels, ("lt", "lm", "lb"), strict=True):
            self.draw.text((right + 8, y), label, fill=_INK, font=self.text, anchor=anchor)

    def footer(self, text: str) -> None:
        room = self.sheet.width - 2 * _MARGIN
        place = (_MARGIN, self.caption_top + _TEXT + 14)
        self.draw.text(place, _shorten(text, self.text, room), fill=_SOFT, font=self.text)

    def png(self) -> bytes:
        file = io.BytesIO()
        self.sheet.save(file, "PNG")
        return file.getvalue()


def _limit(shares: np.ndarray) -> tuple[float, bool]:
    """Return the value of full colour, and whether some values lie beyond it."""
    sizes = np.abs(shares)
    most = float(sizes.max(initial=0.0))
    if max(shares.shape) <= TINY:
        return most, False
    limit = float(np.quantile(sizes, 1 - CLIPPED_SHARE))
    return (limit, limit < most) if limit else (most, False)


def _bar_labels(limit: float, is_clipped: bool) -> tuple[str, str, str]:
    if not limit:
        return "", "0", ""
    value = f"{limit:.2g}"
    above, below = ("> +", "< -") if is_clipped else ("+", "-")
    return f"{above}{value}", "0", f"{below}{value}"


def _panel_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return (width, height) of a panel: whole multiples of a tiny input, the same proportion."""
    longer = max(size)
    scale = PANEL // longer if longer <= TINY else PANEL / longer
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _overlay(image: Image.Image, shares: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Colour the shares, in [−1, 1]; lines (tiny inputs) or a pale copy show where they lie."""
    shares = shares.clip(-1, 1)
    grey = np.asarray(image.convert("L"))
    if max(grey.shape) <= TINY:
        panel = _enlarge(Image.fromarray(_colour(shares)), size)
        _outline(ImageDraw.Draw(panel), grey, size[0] // grey.shape[1])
        return panel
    pale = 255 * (0.55 + 0.42 * grey[:, :, None] / 255.0)
    weight = np.abs(shares)[:, :, None] ** 0.6
    mixed = weight * _colour(shares) + (1 - weight) * pale
    return _enlarge(Image.fromarray(np.rint(mixed).astype(np.uint8)), size)


def _outline(draw: ImageDraw.ImageDraw, grey: np.ndarray, scale: int) -> None:
    """Trace the borders between light and dark pixels, which outline a digit or a letter."""
    is_light = grey > (int(grey.min()) + int(grey.max())) / 2
    for y, x in np.argwhere(is_light[:, 1:] != is_light[:, :-1]).tolist():
        edge = (x + 1) * scale
        draw.line((edge, y * scale, edge, (y + 1) * scale), fill=_TRACE, width=2)
    for y, x in np.argwhere(is_light[1:] != is_light[:-1]).tolist():
        edge = (y + 1) * scale
        draw.line((x * scale, edge, (x + 1) * scale, edge), fill=_TRACE, width=2)


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


def _printable(text: str) -> str:
    """Spell a text with what Pillow's built-in font holds: é becomes e, 猫 becomes ?."""
    text = unicodedata.normalize("NFKD", text).translate(_ASCII_SIGNS)
    plain = (c for c in text if not unicodedata.combining(c))
    return "".join(c if c.isascii() or c in "·°±" else "?" for c in plain)


def _shorten(text: str, font: _Font, room: float) -> str:
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(f"{text}…") > room:
        text = text[:-1]
    return f"{text}…"


def font_of(size: int) -> _Font:
    """Return the font of all drawings, which travels with Pillow."""
    return ImageFont.load_default(size=size)
