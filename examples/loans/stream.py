"""Send loans to the running server, from the middle on with letters that leak the label.

Run from the repository's folder: `python -m examples.loans.stream FILE.svg`. It asks for
predictions as any client does, reads the metrics as Prometheus does, and draws what it saw.
"""

import argparse
import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.loans.make import FEATURES, LABELS, SEED, draw

HALF = 300
"""Predictions before the leak, and after it begins."""
EVERY = 10
"""Predictions from one look at the metrics to the next."""
RECENT = 100
"""Predictions that accuracy is of."""
PAUSE_S = 0.02
LEFT, TOP, WIDTH, HEIGHT = 60, 30, 620, 220
COLOURS = {"accuracy": "#4d4d4d", "drift": "#b2182b", "letters": "#2166ac"}


class Look(NamedTuple):
    """What was seen after so many predictions."""

    predictions: int
    accuracy: float
    drift: float
    letters: float
    """Mean share of the feature in the explanations since the last look."""


def stream(inference: str, metrics: str) -> list[Look]:
    """Ask for the predictions one after the other."""
    random = np.random.default_rng(SEED + 2)
    usual, leaking = draw(HALF, random), draw(HALF, random, known=1.0)
    rows, labels = (np.concatenate(pair) for pair in zip(usual, leaking, strict=True))
    hits: list[bool] = []
    looks: list[Look] = []
    before = _read(metrics)
    for at, (row, label) in enumerate(zip(rows.tolist(), labels, strict=True), 1):
        body = json.dumps(dict(zip(FEATURES, row, strict=True))).encode()
        request = urllib.request.Request(
            f"{inference}/predictions/loans", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            hits.append(next(iter(json.load(answer))) == LABELS[label])
        time.sleep(PAUSE_S)
        if at % EVERY == 0:
            now = _read(metrics)
            count, total = (now[name] - before[name] for name in ("share_count", "share_sum"))
            share = total / count if count else looks[-1].letters if looks else 0.0
            accuracy = float(np.mean(hits[-RECENT:]))
            looks.append(Look(at, accuracy, now["drift"], share))
            before = now
    return looks


def _read(metrics: str) -> dict[str, float]:
    """Return the samples of the model that the picture is of, by the ends of their names."""
    with urllib.request.urlopen(f"{metrics}/metrics") as answer:
        text = answer.read().decode()
    found = {"share_count": 0.0, "share_sum": 0.0, "drift": 0.0}
    for name, labels, value in re.findall(r"^modelyard_attribution_(\w+){(.*)} (.*)$", text, re.M):
        if name in found and 'model="loans"' in labels and ('part="letters"' in labels
                                                            or name == "drift"):  # fmt: skip
            found[name] = float(value)
    return found


def picture(looks: Sequence[Look]) -> str:
    """Draw three lines over the number of predictions, as SVG."""
    parts = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _height(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{value:g}</text>')
    middle = LEFT + WIDTH / 2
    parts.append(f'<path d="M{middle} {TOP}v{HEIGHT}" stroke="#888" stroke-dasharray="4"/>')
    parts.append(f'<text x="{middle - 2}" y="{TOP - 10}">letters are filled in</text>')
    names = {
        "accuracy": f"accuracy of the last {RECENT}, were the labels known at once",
        "drift": "modelyard_attribution_drift",
        "letters": f"mean share of letters, {EVERY} predictions each",
    }
    last = looks[-1].predictions
    for place, (name, text) in enumerate(names.items()):
        points = " ".join(
            f"{LEFT + WIDTH * look.predictions / last:.1f},{_height(getattr(look, name)):.1f}"
            for look in looks
        )
        line = f'fill="none" stroke="{COLOURS[name]}" stroke-width="2"'
        parts.append(f'<polyline points="{points}" {line}/>')
        y = TOP + HEIGHT + 52 + 20 * place
        parts.append(f'<path d="M{LEFT} {y - 5}h24" {line}/>')
        parts.append(f'<text x="{LEFT + 32}" y="{y}">{text}</text>')
    parts.append(f'<text x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 22}" text-anchor="end">{last} '
                 "predictions</text>")  # fmt: skip
    size = f'width="{LEFT + WIDTH + 30}" height="{TOP + HEIGHT + 110}"'
    box = size.replace("width=", "").replace("height=", "").replace('"', "")
    style = "<style>text{font:14px sans-serif;fill:#1c2026}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box}" {size}>'
    return "\n".join([head, f'<rect {size} fill="#fff"/>', style, *parts, "</svg>", ""])


def _height(value: float) -> float:
    return TOP + HEIGHT * (1 - value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    status = json.loads(
        subprocess.run(
            ["modelyard", "serve", "status", "--json"], capture_output=True, check=True
        ).stdout
    )
    seen = stream(status["inference"], status["metrics"])
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    given.picture.write_text(picture(seen), encoding="utf-8")
    for look in (seen[len(seen) // 2 - 1], seen[-1]):
        print(f"after {look.predictions} predictions: accuracy {look.accuracy:.2f}, "
              f"drift {look.drift:.2f}, share of letters {look.letters:.2f}")  # fmt: skip
