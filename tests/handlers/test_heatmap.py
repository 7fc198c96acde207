import io

import numpy as np
import pytest
from PIL import Image

from modelyard.handlers.explain import draw


def drawn(
    image: np.ndarray, attributions: np.ndarray, label: str = "7", footer: str = ""
) -> np.ndarray:
    png = draw.render(
        Image.fromarray(image),
        attributions,
        label=label,
        probability=0.998,
        legend="red is more",
        footer=footer,
    )
    sheet = Image.open(io.BytesIO(png))
    assert (sheet.format, sheet.mode) == ("PNG", "RGB")
    pixels: np.ndarray = np.asarray(sheet).astype(int)
    return pixels


def panels(sheet: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut both panels out: they begin 24 pixels from the left, 68 from the top, 20 apart."""
    top, left = 68, 24
    right = left + side + 20
    rows = slice(top, top + side)
    return sheet[rows, left : left + side], sheet[rows, right : right + side]


def test_positive_is_red_negative_is_blue_and_zero_is_white() -> None:
    scan = np.zeros((8, 8), np.uint8)
    shares = np.zeros((1, 8, 8))
    shares[0, 2, 3], shares[0, 5, 6] = 2.0, -2.0
    _, overlay = panels(drawn(scan, shares), 320)
    centre = [overlay[y * 40 + 20, x * 40 + 20].tolist() for y, x in ((2, 3), (5, 6), (0, 0))]
    assert centre == [[103, 0, 31], [5, 48, 97], [247, 247, 247]]


def test_tiny_input_is_enlarged_in_whole_squares() -> None:
    scan = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    shown, _ = panels(drawn(scan, np.zeros((1, 8, 8))), 320)
    assert np.array_equal(shown[:, :, 0], scan.repeat(40, 0).repeat(40, 1))


def test_channels_are_summed() -> None:
    photo = np.zeros((8, 8, 3), np.uint8)
    cancelling = np.zeros((3, 8, 8))
    cancelling[0], cancelling[2, 4, 4], cancelling[1] = 1.0, 3.0, -1.0
    _, overlay = panels(drawn(photo, cancelling), 320)
    assert overlay[20, 20].tolist() == [247, 247, 247]
    assert overlay[180, 180].tolist() == [103, 0, 31]


def test_colours_do_not_depend_on_the_scale_but_the_legend_does() -> None:
    scan = np.zeros((8, 8), np.uint8)
    shares = np.random.default_rng(0).normal(size=(1, 8, 8))
    small, large = drawn(scan, shares), drawn(scan, 1000 * shares)
    assert np.array_equal(panels(small, 320)[1], panels(large, 320)[1])
    assert not np.array_equal(small[:, -40:], large[:, -40:])


def test_few_large_values_of_a_photo_do_not_hide_the_others() -> None:
    photo = np.full((224, 224, 3), 128, np.uint8)
    shares = np.zeros((3, 224, 224))
    shares[0, :, :112] = 1.0
    shares[0, 0, 0] = 1000.0
    _, overlay = panels(drawn(photo, shares), 320)
    red, plain = overlay[160, 80], overlay[160, 240]
    assert red[0] - red[2] > 50
    assert abs(plain[0] - plain[2]) <= 2


@pytest.mark.parametrize(
    "shape", [(8, 8), (28, 28), (65, 64), (224, 224, 3), (100, 300, 3), (1, 900), (600, 2)], ids=str
)
def test_any_size_is_drawn(shape: tuple[int, ...]) -> None:
    image = np.zeros(shape, np.uint8)
    sheet = drawn(image, np.zeros((1, *shape[:2])), footer="integrated gradients")
    assert sheet.shape[0] <= 500
    assert sheet.shape[1] <= 900


@pytest.mark.parametrize("label", ["", "a very long label " * 20, "Gänseblümchen", "猫"])
def test_any_label_fits_the_sheet(label: str) -> None:
    plain = drawn(np.zeros((8, 8), np.uint8), np.zeros((1, 8, 8)))
    sheet = drawn(np.zeros((8, 8), np.uint8), np.zeros((1, 8, 8)), label=label)
    assert sheet.shape == plain.shape
    assert (sheet[:, -10:] == 255).all()


def test_input_is_not_changed() -> None:
    shares = np.ones((1, 8, 8))
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
