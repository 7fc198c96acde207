"""A small network that continues two waves, with the quantiles of what may come.

Run from the repository's folder: `python -m examples.tasks.series FOLDER`. It trains in a second
and writes FOLDER/series.pt, a folder with its scaler and settings, and FOLDER/window.json, a
request.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

LENGTH, HORIZON, SERIES = 24, 6, 2
QUANTILES = (0.1, 0.5, 0.9)
SEED = 0


class Quantiles(nn.Module):
    """A linear function of the window, for each series alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, HORIZON * len(QUANTILES))

    def forward(self, values: Tensor) -> Tensor:
        """(N, 24, 2) to (N, 6, 2, 3)."""
        found = self.layer(values.transpose(1, 2))
        shaped: Tensor = found.unflatten(-1, (HORIZON, len(QUANTILES)))
        return shaped.transpose(1, 2)


def windows(count: int, random: np.random.Generator) -> np.ndarray:
    """Return (count, 30, 2): two waves around 20 and 500, with noise."""
    time = np.arange(LENGTH + HORIZON) + random.uniform(0, 100, (count, 1))
    waves = np.stack((np.sin(time * 2 * np.pi / 12), np.cos(time * 2 * np.pi / 8)), -1)
    waves = waves * [5, 80] + [20, 500]
    noisy: np.ndarray = waves + random.normal(0, 1, waves.shape) * [0.5, 8]
    return noisy


def make(folder: Path, steps: int = 300) -> Path:
    """Train the network and write it with its files; return the folder."""
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    drawn = windows(512, random)
    mean, std = drawn.mean((0, 1)), drawn.std((0, 1))
    values = torch.from_numpy(((drawn - mean) / std).astype(np.float32))
    net = Quantiles()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    levels = torch.tensor(QUANTILES)
    for _ in range(steps):
        rows = values[torch.from_numpy(random.choice(len(values), 64, replace=False))]
        error = rows[:, LENGTH:, :, None] - net(rows[:, :LENGTH])
        loss = torch.maximum(levels * error, (levels - 1) * error).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    (folder / "series").mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), folder / "series.pt")
    scaler = {"mean": mean.tolist(), "std": std.tolist()}
    (folder / "series" / "scaler.json").write_text(json.dumps(scaler))
    settings = f"handler: {{series: {{quantiles: {list(QUANTILES)}}}}}\n"
    (folder / "series" / "model-config.yaml").write_text(settings)
    window = windows(1, random)[0, :LENGTH].round(2)
    (folder / "window.json").write_text(json.dumps(window.tolist()))
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
