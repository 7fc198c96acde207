"""Train the digits network and write its checkpoint and ten held-out scans.

Run from the repository's folder: `python -m examples.digits.train`. It takes seconds on one CPU
thread, needs scikit-learn (which ships the scans) and no network. The same versions of torch and
scikit-learn give the same bytes.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from examples.digits.net import DigitsNet

HERE = Path(__file__).parent
SEED = 0
EPOCHS = 30
BATCH = 64
HELD_OUT = 0.25

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


def held_out() -> tuple[Pixels, Labels]:
    """Return the scans (450, 8, 8) in 0..255 and labels (450,) that training never sees."""
    _, pixels, _, labels = _split()
    return pixels, labels


def to_input(pixels: Pixels) -> torch.Tensor:
    """Turn scans (N, 8, 8) in 0..255 into the network's input (N, 1, 8, 8) in [0, 1]."""
    return torch.from_numpy(pixels).unsqueeze(1).float() / 255


def accuracy(model: nn.Module, pixels: Pixels, labels: Labels) -> float:
    """Return the share of scans whose largest logit is at their label, in eval mode."""
    model.eval()
    with torch.inference_mode():
        predicted = model(to_input(pixels)).argmax(dim=1)
    return float((predicted == torch.from_numpy(labels)).float().mean())


def train() -> DigitsNet:
    """Train on the scans that are not held out; the seed decides weights, order and shifts."""
    pixels, _, labels, _ = _split()
    inputs, targets = to_input(pixels), torch.from_numpy(labels)
    torch.manual_seed(SEED)
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    batches = len(inputs) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=EPOCHS * batches
    )
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs))[: batches * BATCH].view(batches, BATCH):
            loss = nn.functional.cross_entropy(model(_shifted(inputs[rows])), targets[rows])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return model.eval()


def _split() -> tuple[Pixels, Pixels, Labels, Labels]:
    """Split the scans into training and held-out parts, every digit in the same proportion."""
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # the scans hold 0..16
    labels = digits.target.astype(np.int64)
    train_pixels, test_pixels, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=HELD_OUT, stratify=labels, random_state=SEED
    )
    return train_pixels, test_pixels, train_labels, test_labels


def _shifted(images: torch.Tensor) -> torch.Tensor:
    """Move every scan (N, 1, 8, 8) by -1, 0 or 1 pixels sideways; digits are not centred alike."""
    padded = nn.functional.pad(images, (1, 1))
    start = torch.randint(0, 3, (len(images), 1))
    columns = (start + torch.arange(8)).view(-1, 1, 1, 8).expand(-1, 1, 8, 8)
    return padded.gather(3, columns)


def _write_checkpoint(model: nn.Module, path: Path) -> None:
    # torch.save keeps the file's stem inside the file: the temporary one must have the same.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        torch.save(model.state_dict(), temporary)
        temporary.replace(path)


def _write_scans(folder: Path) -> None:
    """Write the first held-out scan of each digit as `<digit>.png`, and labels.json."""
    folder.mkdir(exist_ok=True)
    pixels, labels = held_out()
    for digit in range(10):
        first = int(np.flatnonzero(labels == digit)[0])
        Image.fromarray(pixels[first]).save(folder / f"{digit}.png")
    named = {f"{digit}.png": str(digit) for digit in range(10)}
    (folder / "labels.json").write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train, print the held-out accuracy and write the files."""
    parser = argparse.ArgumentParser(description="Train the digits network.")
    parser.add_argument("-o", "--output-dir", type=Path, default=HERE)
    folder: Path = parser.parse_args().output_dir
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # one thread adds in one order: the same bytes on every run
    model = train()
    _write_checkpoint(model, folder / "digits.pt")
    _write_scans(folder / "scans")
    print(f"held-out accuracy {accuracy(model, *held_out()):.2%}")


if __name__ == "__main__":
    main()
