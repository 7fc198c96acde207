"""Save models as MLflow does, by MLflow itself: `python save.py FOLDER`.

Beside each folder stand the network's answer to what was saved as its example, and what the export
has to be told of the class.
"""

import importlib.metadata
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import mlflow.onnx
import mlflow.pytorch
import numpy as np
import pandas
import torch
from mlflow.models import infer_signature
from nets import Attends, Residual, Tokens
from torch import nn

IS_3 = importlib.metadata.version("mlflow-skinny").startswith("3")
FLOATS = np.random.default_rng(0).random((3, 4), np.float32)

MODELS: dict[str, tuple[nn.Module, Any]] = {
    "mlp": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), FLOATS),
    "conv": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)),
        np.ones((2, 1, 6, 6), np.float32),
    ),
    "meta": (nn.Sequential(), FLOATS),
    "residual": (Residual(), FLOATS),
    "tokens": (Tokens(), np.array([[1, 2, 3, 4], [5, 6, 7, 0]])),
    "attends": (Attends(), np.ones((2, 5, 4), np.float32)),
}
MODELS["meta"][0].add_module("meta", nn.Linear(4, 3))


def _save(folder: Path, name: str, kind: str) -> None:
    model, example = MODELS[name]
    model.eval()
    rows = torch.from_numpy(example)
    with torch.no_grad():
        answer = model(rows).numpy()
    place = folder / f"{kind}-{name}"
    common: dict[str, Any] = {"pip_requirements": ["torch"]}
    if "unsigned" not in kind:
        common["signature"] = infer_signature(example, answer)
    if "table" in kind:
        columns = pandas.DataFrame(example, columns=[f"c{at}" for at in range(example.shape[1])])
        common |= {"input_example": columns, "signature": infer_signature(columns, answer)}
    elif "example" in kind:
        common["input_example"] = example
    elif "tensor" in kind:
        common["input_example"] = rows
    if kind.startswith("onnx"):
        program = torch.onnx.export(
            model, (rows,), dynamo=True, verbose=False, dynamic_shapes=({0: "batch"},)
        )
        mlflow.onnx.save_model(program.model_proto, str(place), **common)
    else:
        if IS_3 and kind.startswith("pickle"):
            common["serialization_format"] = "pickle"
        mlflow.pytorch.save_model(model, str(place), **common)
    expected = {"input": example.tolist(), "answer": answer.tolist()}
    own = type(model).__name__ if type(model) is not nn.Sequential else None
    needs = own if kind.startswith("pickle") else None
    (folder / f"{place.name}.json").write_text(json.dumps({**expected, "class": needs}))


def _save_others(folder: Path) -> None:
    """Save what is not a network of one input: of two, and of scikit-learn."""
    import mlflow.sklearn
    from sklearn.linear_model import LinearRegression, LogisticRegression

    class Both(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left @ torch.ones(4, 2) + right

    left, right = torch.from_numpy(FLOATS), torch.ones(3, 2)
    shapes = ({0: "batch"}, {0: "batch"})
    program = torch.onnx.export(
        Both(), (left, right), dynamo=True, verbose=False, dynamic_shapes=shapes
    )
    given = {"left": left.numpy(), "right": right.numpy()}
    signature = infer_signature(given, Both()(left, right).numpy())
    common: dict[str, Any] = {"pip_requirements": ["torch"]}
    place = folder / "onnx-both"
    mlflow.onnx.save_model(program.model_proto, str(place), signature=signature, **common)
    expected = {name: each.tolist() for name, each in given.items()}
    known = {"input": expected, "answer": Both()(left, right).tolist(), "class": None}
    place.with_suffix(".json").write_text(json.dumps(known))
    for kind in (LogisticRegression, LinearRegression):
        model = kind().fit(FLOATS, [0, 1, 1])
        place = folder / f"sklearn-{kind.__name__}"
        mlflow.sklearn.save_model(model, str(place), input_example=FLOATS, **common)
        place.with_suffix(".json").write_text("{}")


def main(folder: Path) -> None:
    folder.mkdir()
    kinds = {"pickle-example": list(MODELS), "onnx": ["mlp", "residual"]}
    kinds["pickle"] = ["residual"]
    kinds["pickle-table"] = ["mlp"]
    if IS_3:
        kinds |= {"example": list(MODELS), "tensor": ["mlp", "conv", "tokens", "attends"]}
        kinds |= {"unsigned-example": ["mlp", "conv", "tokens"], "onnx-table": ["mlp"]}
        kinds["onnx"] += ["conv", "tokens", "attends"]
        _save_others(folder)
    else:
        kinds |= {"pickle-unsigned": ["mlp", "conv"]}
    for kind, names in kinds.items():
        for name in names:
            _save(folder, name, kind)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    main(Path(sys.argv[1]))
