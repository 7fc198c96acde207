"""Two small networks for drawn shapes: one finds them, one colours them in.

Run from the repository's folder: `python -m examples.tasks.shapes FOLDER`. It trains both in
seconds and writes FOLDER/detector.pt and FOLDER/segmenter.pt; for each a folder with its labels and
model-config.yaml; and a picture, FOLDER/shapes.png.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss

SIDE, GRID = 32, 8
SHAPES = ("circle", "square")
PICTURE, PICTURE_SEED = (160, 120), 7
SEED = 0


def draw(random: np.random.Generator, size: tuple[int, int] = (SIDE, SIDE)) -> tuple[
    Image.Image, list[tuple[int, tuple[int, int, int, int]]], np.ndarray
]:  # fmt: skip
    """Return a picture of up to three shapes on noise, their kinds and boxes, and the class map."""
    width, height = size
    picture = Image.fromarray(random.integers(90, 160, (height, width, 3), dtype=np.uint8))
    classes = Image.new("L", size)
    boxes: list[tuple[int, tuple[int, int, int, int]]] = []
    for _ in range(random.integers(1, 4)):
        kind, side = int(random.integers(2)), int(random.integers(min(size) // 6, min(size) // 3))
        left, top = (int(random.integers(0, each - side)) for each in size)
        box = (left, top, left + side, top + side)
        if any(left < b[2] and b[0] < box[2] and top < b[3] and b[1] < box[3] for _, b in boxes):
            continue
        boxes.append((kind, box))
        bright, dark = (int(random.integers(*ends)) for ends in ((190, 256), (0, 60)))
        colour = (bright, dark, dark) if kind == 0 else (dark, dark, bright)
        for sheet, ink in ((picture, colour), (classes, kind + 1)):
            pencil = ImageDraw.Draw(sheet)
            (pencil.ellipse if kind == 0 else pencil.rectangle)(box, fill=ink)
    return picture, boxes, np.asarray(classes)


def _block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU())


class Detector(nn.Module):
    """A grid of cells, each with logits of circle, square and nothing, and one box."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_block(3, 12, 2), _block(12, 24, 2), _block(24, 24, 1),
                                  _block(24, 24, 1))  # fmt: skip
        self.head = nn.Conv2d(24, len(SHAPES) + 1 + 4, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 3, 32, 32) to logits (N, 64, 3) and boxes (N, 64, 4): centre and size as shares."""
        cells = self.head(self.body(image)).flatten(2).transpose(1, 2)
        logits, box = cells[..., : len(SHAPES) + 1], cells[..., len(SHAPES) + 1 :].sigmoid()
        place = torch.arange(GRID * GRID, device=image.device)
        corner = torch.stack((place % GRID, place // GRID), -1)
        return logits, torch.cat(((corner + box[..., :2]) / GRID, box[..., 2:]), -1)


class Segmenter(nn.Module):
    """Logits of background, circle and square at half the picture's size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(_block(3, 12, 2), _block(12, 12, 1),
                                    nn.Conv2d(12, len(SHAPES) + 1, 1))  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, 3, H / 2, W / 2)."""
        return self.layers(image)  # type: ignore[no-any-return]


def make(folder: Path, steps: int = 150) -> Path:
    """Train both networks and write them with their labels; return the folder."""
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    detector, segmenter = Detector(), Segmenter()
    parameters = [*detector.parameters(), *segmenter.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    drawn = [draw(random) for _ in range(192)]
    images = torch.stack([_tensor(picture) for picture, _, _ in drawn])
    cells = [_cells(boxes) for _, boxes, _ in drawn]
    kinds, boxes = (torch.stack(each) for each in zip(*cells, strict=True))
    maps = torch.from_numpy(np.stack([classes[::2, ::2] for *_, classes in drawn])).long()
    for _ in range(steps):
        rows = torch.from_numpy(random.choice(len(images), 24, replace=False))
        logits, found = detector(images[rows])
        has_shape = kinds[rows] < len(SHAPES)
        loss = cross_entropy(logits.flatten(0, 1), kinds[rows].flatten(),
                             weight=torch.tensor([4.0, 4.0, 1.0]))  # fmt: skip
        loss = loss + 5 * l1_loss(found[has_shape], boxes[rows][has_shape])
        loss = loss + cross_entropy(segmenter(images[rows]), maps[rows])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    for name, net, labels in (
        ("detector", detector, SHAPES),
        ("segmenter", segmenter, ("background", *SHAPES)),
    ):
        torch.save(net.state_dict(), folder / f"{name}.pt")
        (folder / name).mkdir(exist_ok=True)
        names = {str(at): label for at, label in enumerate(labels)}
        (folder / name / "index_to_name.json").write_text(json.dumps(names))
        (folder / name / "model-config.yaml").write_text(
            f"handler: {{image: {{mode: RGB, size: [{SIDE}, {SIDE}]}}}}\n"
        )
    draw(np.random.default_rng(PICTURE_SEED), PICTURE)[0].save(folder / "shapes.png")
    return folder


def _tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255


def _cells(boxes: list[tuple[int, tuple[int, int, int, int]]]) -> tuple[Tensor, Tensor]:
    """Return the kind and box that each cell is to find: a shape belongs to its centre's cell."""
    kinds = torch.full((GRID * GRID,), len(SHAPES))
    wanted = torch.zeros(GRID * GRID, 4)
    for kind, (left, top, right, bottom) in boxes:
        x, y = (left + right) / 2 / SIDE, (top + bottom) / 2 / SIDE
        cell = int(y * GRID) * GRID + int(x * GRID)
        kinds[cell] = kind
        wanted[cell] = torch.tensor([x, y, (right - left) / SIDE, (bottom - top) / SIDE])
    return kinds, wanted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
