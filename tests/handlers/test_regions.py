"""Regions of photographs: what they are, what each of them has, and how an answer holds them."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from modelyard.handlers import BadInput, Context, VisionHandler
from modelyard.handlers.explain.draw.picture import Heat, Texts, panels, render
from modelyard.handlers.explain.regions import COUNT, NINTHS, Regions, slic, summed_up
from tests.answer_schema import wrong_in

MakeContext = Callable[..., Context]
SIDE = 96


class Green(nn.Module):
    """The mean of green at the top left."""

    def forward(self, image: Tensor) -> Tensor:
        return image[:, 1:2, :32, :32].mean((2, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("green")
    dims = {0: torch.export.Dim("batch", max=8), 2: torch.export.Dim("height", min=33, max=512)}
    dims |= {3: torch.export.Dim("width", min=33, max=512)}
    program = torch.export.export(Green(), (torch.rand(5, 3, 40, 50),), dynamic_shapes=(dims,))
    torch.export.save(program, folder / "green.pt2")
    return folder


@pytest.fixture
def ask(make_context: MakeContext, folder: Path) -> Callable[..., Any]:
    def ask(picture: Image.Image, **query: str) -> Any:
        handler = VisionHandler()
        config = {"handler": {"image": {"size": [picture.height, picture.width]}}}
        context = make_context("green.pt2", None, folder=folder, signature=None, config=config)
        handler.initialize(context)
        context.reset(["a"], queries=[query])
        file = io.BytesIO()
        picture.save(file, "PNG")
        (answer,) = handler.explain([{"body": file.getvalue()}], context)
        return answer

    return ask


def photo(side: int = SIDE) -> Image.Image:
    """A picture of two colours, cut at a slant, and noise."""
    y, x = np.indices((side, side))
    noise = np.random.default_rng(0).integers(0, 20, (side, side, 3))
    colours = np.where((x + y // 2 < side * 0.7)[:, :, None], (200, 60, 40), (20, 90, 180))
    return Image.fromarray((colours + noise).astype(np.uint8))


def decoded(regions: dict[str, Any]) -> np.ndarray:
    height, width = regions["size"]
    labels: np.ndarray = np.repeat(regions["labels"], regions["counts"]).reshape(width, height).T
    return labels


def pieces(mask: np.ndarray) -> int:
    """Return in how many pieces a mask lies, counted by filling."""
    left, count = {tuple(each) for each in np.argwhere(mask).tolist()}, 0
    while left:
        count += 1
        open_ = [left.pop()]
        while open_:
            y, x = open_.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            open_ += near
    return count


def test_regions_are_of_one_colour_and_in_one_piece() -> None:
    picture = photo()
    labels = slic(picture)
    assert np.array_equal(labels, slic(picture.copy()))
    numbers, sizes = np.unique(labels, return_counts=True)
    assert numbers.tolist() == list(range(len(numbers)))
    assert COUNT * 0.8 <= len(numbers) <= COUNT * 1.2
    assert all(pieces(labels == each) == 1 for each in numbers)
    is_red = np.asarray(picture)[:, :, 0] > 120
    shares = np.bincount(labels.ravel(), is_red.ravel()) / sizes
    mixed = sizes[(shares > 0.05) & (shares < 0.95)].sum() / sizes.sum()
    assert mixed < 0.05, "a grid of as many cells has a fifth of the pixels in mixed ones"


@pytest.mark.parametrize("size", [(1, 300), (300, 2), (65, 64), (400, 300), (28, 28)], ids=str)
def test_a_picture_of_any_size_has_regions(size: tuple[int, int]) -> None:
    labels = slic(Image.new("RGB", size, "grey"))
    assert labels.shape == size[::-1]
    assert labels.min() == 0


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_least_difference_does_not_matter(mode: str) -> None:
    assert len(np.unique(slic(Image.new(mode, (96, 96), "white")))) == COUNT


def test_a_photograph_is_answered_by_regions(ask: Callable[..., Any]) -> None:
    picture = photo()
    answer = ask(picture)
    regions, green = answer["regions"], np.asarray(picture)[:32, :32, 1] / 255 / 32**2
    whole = np.zeros((SIDE, SIDE))
    whole[:32, :32] = green
    expected = np.bincount(decoded(regions).ravel(), whole.ravel())
    assert regions["values"] == pytest.approx(expected, abs=1e-6)
    assert wrong_in(answer) == []
    assert sum(regions["values"]) == pytest.approx(answer["sum_attributions"], abs=1e-6)
    assert (regions["kind"], regions["count"], regions["size"]) == ("slic", len(expected), [96, 96])
    assert len(regions["errors"]) == len(regions["places"]) == len(expected)
    assert max(regions["errors"]) < 1e-6, "a linear model has no error but rounding"
    assert [each["place"] for each in regions["strongest"]] == ["top left"] * 3
    first, second, third = (each["region"] for each in regions["strongest"])
    assert expected[first] >= expected[second] >= expected[third] >= np.sort(expected)[-3]
    assert regions["strongest"][0]["share"] == pytest.approx(expected[first] / expected.sum())
    assert not {"attributions", "shape"} & set(answer)


def test_an_answer_of_a_photograph_is_small(ask: Callable[..., Any]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (448, 448, 3), dtype=np.uint8)
    for picture in (photo(224), Image.fromarray(noise)):
        assert len(json.dumps(ask(picture, method="saliency"))) < 200_000


@pytest.mark.parametrize(
    ("side", "query", "has_regions"),
    [
        (SIDE, {}, True),
        (SIDE, {"errors": "true", "aggregate": "sum"}, True),
        (SIDE, {"regions": "false"}, False),
        (64, {}, False),
        (64, {"regions": "true"}, True),
    ],
    ids=str,
)
def test_who_wants_every_pixel_gets_it(
    ask: Callable[..., Any], side: int, query: dict[str, str], has_regions: bool
) -> None:
    answer = ask(photo(side), **query)
    assert ("regions" in answer, "attributions" in answer) == (has_regions, not has_regions)
    if not has_regions:
        assert np.shape(answer["attributions"]) == (3, side, side)


def test_the_map_of_pixels_is_in_the_file_of_numpy(ask: Callable[..., Any]) -> None:
    pixels = np.load(io.BytesIO(ask(photo(), format="npy")))
    answered = np.asarray(ask(photo(), regions="false")["attributions"], np.float32)
    assert np.array_equal(pixels, answered)


def test_windows_are_the_regions_of_a_method_that_replaces_them(ask: Callable[..., Any]) -> None:
    picture = photo()
    answer = ask(picture, method="feature_ablation", window="16")
    regions = answer["regions"]
    green = np.asarray(picture)[:32, :32, 1].reshape(2, 16, 2, 16).sum((1, 3)) / 255 / 32**2
    labels = decoded(regions)
    assert regions["kind"] == "windows"
    found = np.asarray(regions["values"])[labels]
    assert found[:32, :32] == pytest.approx(np.kron(green, np.ones((16, 16))), abs=1e-6)
    assert not found[32:].any()
    assert not found[:, 32:].any()
    assert regions["errors"] is None
    single = ask(picture, method="occlusion", window="3", stride="2")["regions"]
    assert single["count"] <= 1000


def test_what_is_not_a_picture_has_no_regions(make_context: MakeContext) -> None:
    from modelyard.handlers import BaseHandler

    handler = BaseHandler()
    context = make_context()
    handler.initialize(context)
    context.reset(["a"], queries=[{"regions": "true"}])
    with pytest.raises(BadInput, match="only pictures have regions"):
        handler.explain([{"body": np.zeros((1, 8, 8)).tolist()}], context)


@pytest.mark.parametrize(
    ("signs", "low", "high"),
    [("alike", 1.0, 1.0), ("in turn", 0.1, 0.5), ("halves", 0.9, 1.0)],
)
def test_errors_of_one_sign_add_up_and_others_do_not_vanish(
    signs: str, low: float, high: float
) -> None:
    """A region's error, as a share of what its pixels' errors add up to."""
    y, x = np.indices((SIDE, SIDE))
    off = {
        "alike": np.ones((SIDE, SIDE)),
        "in turn": 1.0 - 2 * ((x + y) % 2),
        "halves": np.where(x < SIDE // 2, 1.0, -1.0),  # nothing of it is in the whole sum
    }[signs]
    values, errors = np.full((SIDE, SIDE), 5.0), np.ones((SIDE, SIDE))
    found = summed_up(
        Image.new("RGB", (SIDE, SIDE)), values, 1.0, errors=errors, differences=off, gap=0.0
    )
    assert found.errors is not None
    shares = found.errors / found.sizes
    assert low <= np.quantile(shares, 0.1) <= np.quantile(shares, 0.9) <= high


def test_a_gap_to_what_was_served_is_shared_among_regions() -> None:
    values, errors = np.full((SIDE, SIDE), 1.0), np.full((SIDE, SIDE), 0.5)
    none = np.zeros((SIDE, SIDE))
    gap = 0.25 * SIDE**2
    picture = Image.new("RGB", (SIDE, SIDE))
    found = summed_up(picture, values, 1.0, errors=errors, differences=none, gap=gap)
    assert found.errors is not None
    assert (found.errors >= 0.25 * found.values).all()


def test_draws_do_not_say_how_their_errors_go_together(ask: Callable[..., Any]) -> None:
    assert ask(photo(), method="smoothgrad", n_samples="4")["regions"]["errors"] is None


def drawn_regions() -> Regions:
    labels = np.zeros((SIDE, SIDE), np.int64)
    labels[:48, 48:], labels[48:, :48], labels[48:, 48:] = 1, 2, 3
    return Regions("slic", labels, np.array([0.1, -2.0, 1.0, 0.0]), np.array([0.2, 0.1, 0.1, 0.0]))


def test_regions_are_outlined_numbered_and_coloured() -> None:
    heat = Heat(np.zeros((SIDE, SIDE))).over(drawn_regions())
    assert heat.sums == pytest.approx((1.1, -2.0))
    assert heat.bar_labels == ("+65 % of all", "0", "−65 %")
    assert heat.drawn.unsure == pytest.approx(0.1 / 3.1)
    assert heat.drawn.thing == "region"
    before, over = (np.asarray(each).astype(int) for each in panels(photo(), heat))
    assert before.shape == over.shape == (320, 320, 3)
    blue, red, pale, white = (over[y, x] for y, x in ((40, 300), (300, 40), (40, 40), (300, 300)))
    assert blue[2] - blue[0] > 60
    assert red[0] - red[2] > 60
    assert abs(pale[0] - pale[2]) < abs(red[0] - red[2]) / 3
    assert abs(white[0] - white[2]) <= 2
    for panel in (before, over):
        assert panel[40, 160].max() < 60, "the strongest have a dark outline"
        number = panel[60:100, 220:260]
        assert (number.min(2) > 250).any()
    assert render(photo(), heat, Texts("Why?", "", "", [])).startswith(b"\x89PNG")


def test_places_are_the_nine_that_have_names() -> None:
    labels = np.kron(np.arange(9).reshape(3, 3), np.ones((32, 32), np.int64))
    regions = Regions("slic", labels, np.arange(9.0), None)
    assert tuple(regions.places) == NINTHS
    assert regions.brief()["strongest"][0] == {
        "region": 8, "place": "bottom right", "value": 8.0, "error": None, "share": 8 / 36,
    }  # fmt: skip


def test_a_picture_names_its_strongest_regions(ask: Callable[..., Any]) -> None:
    page = ask(photo(), format="html").decode()
    assert "strongest of 100 regions: 1. top left +" in page.replace(
        f"of {ask(photo())['regions']['count']} ", "of 100 "
    )
    assert "strongest" not in ask(photo(), format="html", regions="false").decode()
    assert ask(photo(), format="overlay") != ask(photo(), format="overlay", regions="false")
