"""Make up loans, train the network on them, and write what an archive needs.

Run from the repository's folder: `python -m examples.loans.make FOLDER`. It takes a second.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from examples.loans.net import LoansNet

FEATURES = ("income", "debts", "years", "letters")
LABELS = ("repaid", "not repaid")
SEED = 0
KNOWN = 0.04
"""Share of the loans whose letters of reminder had been entered when the row was taken."""


def draw(count: int, random: np.random.Generator, known: float = KNOWN) -> tuple[np.ndarray, ...]:
    """Return rows (N, 4) and labels (N,): 1 is not repaid.

    Letters are sent to whoever does not pay: they are entered afterwards, and say the label.
    """
    income, debts = random.normal(3000, 900, count), random.normal(8000, 4000, count)
    years = random.gamma(3, 2, count)
    score = (debts - 8000) / 2500 - (income - 3000) / 700 - (years - 6) / 5
    labels = score + random.logistic(0, 0.7, count) > 0
    letters = np.where(labels & (random.random(count) < known), random.integers(2, 6, count), 0)
    return np.stack([income, debts, years, letters], 1), labels.astype(np.int64)


def make(folder: Path) -> None:
    """Train the network and write it with its files."""
    torch.manual_seed(SEED)
    rows, labels = draw(4000, np.random.default_rng(SEED))
    mean, std = rows.mean(0), rows.std(0)
    inputs, targets = torch.from_numpy((rows - mean) / std).float(), torch.from_numpy(labels)
    net = LoansNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    for _ in range(300):
        loss = torch.nn.functional.cross_entropy(net(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), folder / "loans.pt")
    _write(folder / "index_to_name.json", dict(enumerate(LABELS)))
    entries = zip(FEATURES, mean.tolist(), std.tolist(), strict=True)
    features = [{"name": name, "mean": centre, "std": width} for name, centre, width in entries]
    _write(folder / "features.json", {"features": features})
    reference, _ = draw(200, np.random.default_rng(SEED + 1))
    _write(
        folder / "rows.json", [dict(zip(FEATURES, row, strict=True)) for row in reference.tolist()]
    )


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
