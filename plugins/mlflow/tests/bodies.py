"""Bodies for `/invocations`, and MLflow's answers to them: `python bodies.py FOLDER ANSWERS`.

It runs where MLflow is installed: saves four models below FOLDER, serves each by MLflow, and writes
what was answered. Their weights are written out, so that a test has the same without MLflow.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

COLUMNS = ["a", "b", "c"]
WEIGHTS = [[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]]
ROWS = [[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]]
RECORDS = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
TURNED = {"columns": ["c", "a", "b"], "data": [[3.0, 1.0, 2.0], [0.0, -1.0, 0.5]]}
JSON, CSV = "application/json", "text/csv"
BODIES: dict[str, tuple[str, str]] = {
    "inputs": (JSON, json.dumps({"inputs": ROWS})),
    "instances": (JSON, json.dumps({"instances": ROWS})),
    "records": (JSON, json.dumps({"dataframe_records": RECORDS})),
    "inputs of records": (JSON, json.dumps({"inputs": RECORDS})),
    "split": (JSON, json.dumps({"dataframe_split": {"columns": COLUMNS, "data": ROWS}})),
    "split in another order": (JSON, json.dumps({"dataframe_split": TURNED})),
    "split without columns": (JSON, json.dumps({"dataframe_split": {"data": ROWS}})),
    "columns": (JSON, json.dumps({"inputs": {"a": [1.0], "b": [2.0], "c": [3.0]}})),
    "more columns": (JSON, json.dumps({"dataframe_records": [{**RECORDS[0], "d": 1.0}]})),
    "csv": (CSV, "a,b,c\n1,2,3\n-1,0.5,0\n"),
    "no params": (JSON, json.dumps({"inputs": ROWS, "params": {}})),
    "a column less": (JSON, json.dumps({"dataframe_records": [{"a": 1.0, "b": 2.0}]})),
    "a value less": (JSON, json.dumps({"inputs": [[1.0, 2.0]]})),
    "texts": (JSON, json.dumps({"inputs": [["x", "y", "z"]]})),
    "two forms": (JSON, json.dumps({"inputs": ROWS, "instances": ROWS})),
    "no form": (JSON, json.dumps({"rows": ROWS})),
    "not JSON": (JSON, "{"),
    "another type": ("text/x", "1"),
}
MODELS = ("tensor", "table", "onnx-tensor", "onnx-table")


def save(folder: Path) -> None:
    """Save a linear model: of a tensor and of a table, by both flavors."""
    import mlflow.onnx
    import mlflow.pytorch
    import numpy as np
    import pandas
    import torch
    from mlflow.models import infer_signature
    from torch import nn

    net = nn.Linear(3, 2, bias=False).eval()
    net.weight.data = torch.tensor(WEIGHTS)
    rows = np.array(ROWS, np.float32)
    answer = net(torch.from_numpy(rows)).detach().numpy()
    program = torch.onnx.export(
        net, (torch.from_numpy(rows),), dynamo=True, verbose=False,
        dynamic_shapes=({0: "batch"},), output_names=["scores"],
    )  # fmt: skip
    assert program is not None
    table = pandas.DataFrame(rows, columns=COLUMNS)
    for name in MODELS:
        example = table if name.endswith("table") else rows
        common: dict[str, Any] = {
            "signature": infer_signature(example, answer),
            "pip_requirements": ["torch"],
        }
        if name.startswith("onnx"):
            mlflow.onnx.save_model(program.model_proto, str(folder / name), **common)
        else:
            # A program has a signature of tensors alone.
            form = "pickle" if name == "table" else "pt2"
            given = {**common, "input_example": example, "serialization_format": form}
            mlflow.pytorch.save_model(net, str(folder / name), **given)


def ask(url: str, kind: str, body: str) -> tuple[int, Any]:
    """Return status and answer to a body."""
    request = urllib.request.Request(f"{url}/invocations", body.encode(), {"content-type": kind})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()


def serve(model: Path) -> dict[str, Any]:
    """Return MLflow's answers to all bodies."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    here = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}"}
    command: list[str | Path] = [here / "mlflow", "models", "serve", "-m", model]
    command += ["--env-manager", "local"]
    process = subprocess.Popen([*command, "-p", str(port)], env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/ping", timeout=5).close()
                break
            except OSError:
                time.sleep(0.3)
        found = {}
        for name, (kind, body) in BODIES.items():
            status, answer = ask(url, kind, body)
            if status != 200:  # the text differs from version to version
                answer = answer.get("error_code") if isinstance(answer, dict) else None
            found[name] = [status, answer]
        return found
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    save(place)
    answers = {name: serve(place / name) for name in MODELS}
    Path(sys.argv[2]).write_text(json.dumps(answers, indent=1) + "\n")
