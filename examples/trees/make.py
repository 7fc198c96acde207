"""Make up loans, boost trees on them with scikit-learn, and write them as ONNX with what it takes.

Run from the repository's folder: `python -m examples.trees.make examples/trees`. It needs skl2onnx,
which nothing else here does, and so the files lie beside it as it wrote them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from skl2onnx import convert_sklearn
from skl2onnx.common.data_types import FloatTensorType
from sklearn.ensemble import GradientBoostingClassifier

NUMBERS = ("income", "debts", "years", "children")
HOUSING = ("rent", "own", "parents")
LABELS = ("repaid", "not repaid")


def draw(count: int, seed: int) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return rows, and labels (N,): 1 is not repaid."""
    random = np.random.default_rng(seed)
    income, debts = random.normal(3000, 900, count), random.normal(8000, 4000, count)
    years, children = random.gamma(3, 2, count), random.integers(0, 4, count)
    housing = random.choice(3, count, p=(0.5, 0.3, 0.2))
    score = (debts - 8000) / 2500 - (income - 3000) / 700 - (years - 6) / 5
    score += 0.9 * (housing == 0) * (children > 0) - 0.7 * (housing == 1)
    labels = (score + random.logistic(0, 0.5, count) > 0).astype(int)
    rows = [
        {
            "income": round(float(income[at])),
            "debts": round(float(max(debts[at], 0))),
            "years": round(float(years[at]), 1),
            "children": int(children[at]),
            "housing": HOUSING[housing[at]],
        }
        for at in range(count)
    ]
    return rows, labels


def encode(rows: list[dict[str, Any]]) -> np.ndarray:
    """Return what `features.json` makes of rows: (N, 7) float32."""
    numbers = [[row[name] for name in NUMBERS] for row in rows]
    kinds = [[float(row["housing"] == each) for each in HOUSING] for row in rows]
    return np.concatenate([numbers, kinds], 1).astype(np.float32)


def make(folder: Path) -> None:
    """Train the trees and write them with their files."""
    rows, labels = draw(3000, 0)
    model = GradientBoostingClassifier(n_estimators=60, max_depth=3, random_state=0)
    model.fit(encode(rows), labels)
    others, theirs = draw(2000, 1)
    print(f"accuracy {model.score(encode(others), theirs):.3f}")
    inputs = [("row", FloatTensorType([None, len(NUMBERS) + len(HOUSING)]))]
    options = {id(model): {"zipmap": False}}
    file = convert_sklearn(model, initial_types=inputs, options=options)
    (folder / "loans.onnx").write_bytes(file.SerializeToString())
    features = [*({"name": each} for each in NUMBERS), {"name": "housing", "one_hot": HOUSING}]
    _write(folder / "features.json", {"features": features})
    _write(folder / "index_to_name.json", dict(enumerate(LABELS)))
    _write(folder / "rows.json", others[:200])
    _write(folder / "background.json", others[200:250])
    loan = {"income": 2450, "debts": 8900, "years": 4.5, "children": 2, "housing": "rent"}
    _write(folder / "loan.json", loan)


def _write(file: Path, content: Any) -> None:
    rows = content if isinstance(content, list) else None
    text = ",\n ".join(map(json.dumps, rows)) if rows else json.dumps(content)
    file.write_text(f"[{text}]\n" if rows else f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
