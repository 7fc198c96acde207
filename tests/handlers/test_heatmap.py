import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelyard.handlers.explain.draw import picture as draw


def drawn(
    image: np.ndarray,
    attributions: np.ndarray,
    label: str = "7",
    note: str = "",
    **heat: Any,
) -> np.ndarray:
    png = draw.render(
        Image.fromarray(image),
        draw.Heat(attributions, **heat),
        draw.Texts(f"Why “{label}”?", "p = 0.998", "digits 1.0", [note]),
    )
    sheet = Image.open(io.BytesIO(png))
    assert (sheet.format, sheet.mode) == ("PNG", "RGB")
    pixels: np.ndarray = np.asarray(sheet).astype(int)
    return pixels


def panels(sheet: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut both panels out: they begin 24 pixels from the left, 92 from the top, 20 apart."""
    top, left = 92, 24
    right = left + side + 20
    rows = slice(top, top + side)
    return sheet[rows, left : left + side], sheet[rows, right : right + side]


def test_positive_is_red_negative_is_blue_and_zero_is_white() -> None:
    scan = np.zeros((8, 8), np.uint8)
    shares = np.zeros((8, 8))
    shares[2, 3], shares[5, 6] = 2.0, -2.0
    _, overlay = panels(drawn(scan, shares), 320)
    centre = [overlay[y * 40 + 20, x * 40 + 20].tolist() for y, x in ((2, 3), (5, 6), (0, 0))]
    assert centre == [[103, 0, 31], [5, 48, 97], [247, 247, 247]]


def test_tiny_input_is_enlarged_in_whole_squares() -> None:
    scan = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    shown, _ = panels(drawn(scan, np.zeros((8, 8))), 320)
    assert np.array_equal(shown[:, :, 0], scan.repeat(40, 0).repeat(40, 1))


def test_a_picture_does_not_depend_on_the_scale() -> None:
    scan = np.zeros((8, 8), np.uint8)
    shares = np.random.default_rng(0).normal(size=(8, 8))
    small, large = drawn(scan, shares), drawn(scan, 1000 * shares)
    assert np.array_equal(panels(small, 320)[1], panels(large, 320)[1])
    assert np.array_equal(small, large), "the bar says shares of the whole"


def test_few_large_values_of_a_photo_do_not_hide_the_others() -> None:
    photo = np.full((224, 224, 3), 128, np.uint8)
    shares = np.zeros((224, 224))
    shares[:, :112] = 1.0
    shares[0, 0] = 1000.0
    _, overlay = panels(drawn(photo, shares), 320)
    red, plain = overlay[160, 80], overlay[160, 240]
    assert red[0] - red[2] > 50
    assert abs(plain[0] - plain[2]) <= 2


@pytest.mark.parametrize(
    "shape", [(8, 8), (28, 28), (65, 64), (224, 224, 3), (100, 300, 3), (1, 900), (600, 2)], ids=str
)
def test_any_size_is_drawn(shape: tuple[int, ...]) -> None:
    image = np.zeros(shape, np.uint8)
    sheet = drawn(image, np.zeros(shape[:2]), note="integrated gradients " * 20)
    assert sheet.shape[0] <= 900
    assert sheet.shape[1] <= 1500


@pytest.mark.parametrize("label", ["", "a very long label " * 20, "Gänseblümchen", "猫"])
def test_any_label_fits_the_sheet(label: str) -> None:
    plain = drawn(np.zeros((8, 8), np.uint8), np.zeros((8, 8)))
    sheet = drawn(np.zeros((8, 8), np.uint8), np.zeros((8, 8)), label=label)
    assert sheet.shape == plain.shape
    assert (sheet[:, -10:] == 255).all()


def test_input_is_not_changed() -> None:
    shares = np.ones((8, 8))
    drawn(np.zeros((8, 8), np.uint8), shares)
    assert (shares == 1).all()


def test_pictures_are_put_below_one_another() -> None:
    one, other = (io.BytesIO() for _ in range(2))
    Image.new("RGB", (4, 2), "red").save(one, "PNG")
    Image.new("RGB", (6, 3), "blue").save(other, "PNG")
    both = Image.open(io.BytesIO(draw.stack([one.getvalue(), other.getvalue()])))
    assert both.size == (6, 5)
    assert [both.getpixel((0, y)) for y in (0, 2)] == [(255, 0, 0), (0, 0, 255)]
    assert draw.stack([one.getvalue()]) == one.getvalue()


def test_what_is_below_its_own_error_is_pale() -> None:
    values, errors = np.zeros((8, 8)), np.zeros((8, 8))
    values[0, 0] = values[0, 1] = values[1, 0] = 1.0
    errors[0, 1], errors[1, 0] = 0.9, 1.1
    heat = draw.Heat(values, errors)
    assert heat.colours[0].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert heat.colours[1, 0] == draw.PALE
    assert heat.drawn.unsure == pytest.approx(1 / 3)
    _, overlay = panels(drawn(np.zeros((8, 8), np.uint8), values, errors=errors), 320)
    assert overlay[20, 20].tolist() == [103, 0, 31]
    assert overlay[60, 20].min() > 150


def test_what_cancels_out_is_not_drawn_at_full_colour() -> None:
    values = np.array([[1.0, -1.0]] * 2)
    assert np.abs(draw.Heat(values, strength=0.3).colours).max() == 0.3


def test_sizes_have_no_blue_half() -> None:
    heat = draw.Heat(np.ones((8, 8)), has_signs=False)
    assert heat.bar_labels == ("1.6 % of all", "", "0")
    sheet = drawn(np.zeros((8, 8), np.uint8), np.ones((8, 8)), has_signs=False)
    bar = sheet[92:412, 24 + 2 * 340 + 7]
    assert bar[0].tolist() == [103, 0, 31]
    assert (bar[:, 0] >= bar[:, 2]).all()
    both = drawn(np.zeros((8, 8), np.uint8), np.ones((8, 8)))[92:412, 24 + 2 * 340 + 7]
    assert both[-1].tolist() == [5, 48, 97]


def test_sums_and_shares_are_of_what_is_seen() -> None:
    heat = draw.Heat(np.array([[3.0, -1.0], [0.0, 0.0]]))
    assert heat.sums == (3, -1)
    assert heat.bar_labels == ("+75 % of all", "0", "−75 %")
    assert draw.Heat(np.zeros((2, 2))).bar_labels == ("", "0", "")


def test_an_overlay_lies_where_the_model_looked() -> None:
    values = np.array([[2.0, 0.0], [0.0, -2.0]])
    png = draw.transparent(draw.Heat(values), (10, 0, 30, 20), (40, 20))
    sheet = Image.open(io.BytesIO(png))
    assert (sheet.mode, sheet.size) == ("RGBA", (40, 20))
    pixels = np.asarray(sheet)
    assert pixels[5, 15].tolist() == [178, 24, 43, 255]
    assert pixels[15, 25].tolist() == [33, 102, 172, 255]
    outside = np.ones((20, 40), bool)
    outside[:, 10:30] = False
    assert not pixels[outside][:, 3].any()
    assert not pixels[5, 25, 3] and not pixels[15, 15, 3]


def test_an_overlay_of_a_huge_picture_keeps_its_proportion() -> None:
    png = draw.transparent(draw.Heat(np.ones((2, 2))), (0, 0, 16_000, 4000), (16_000, 4000))
    width, height = Image.open(io.BytesIO(png)).size
    assert width * height <= draw.MOST_OVERLAY_PIXELS
    assert width == 4 * height
