"""Run an unpacked archive once, without a server: its golden requests and its parity.

The archiver starts `python -P -m modelyard.serve.worker --check FOLDER`, for a dry run before an
archive is written and to verify one that is. Both sides meet in files of FOLDER only:

    task.json    {"load": what a worker's LOAD message holds, without device number and batch size,
                  "proven_batch": largest batch that the report proved, or null,
                  "golden": the manifest's; an entry whose "expected" is null is recorded,
                  "parity": {"artifacts": [[file, format], [file, format]], "signature": …} or null}
    result.json  {"device": …, "golden": [{"answer": …, "difference": text or null}, …],
                  "parity": {"cases": count, "outputs": {name: {"max_abs": …, "at": …}}},
                            {"error": why they cannot be compared}, or null}
                 or {"error": why the archive does not load}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelyard.handlers.backends import Artifact, open_artifact
from modelyard.serve.worker import load
from modelyard.serve.worker.golden import answer_golden, compare_golden, value_of

DEFAULT_BATCH_SIZE = 8
SEED = 0
KINDS = ("random", "zeros", "large")
MOST_BATCHES = 8
"""Sizes of the batch dimension that are tried, from the smallest; the largest comes on top."""


def read_task(exchange: Path) -> dict[str, Any]:
    """Read what the archiver asks for."""
    task: dict[str, Any] = json.loads((exchange / "task.json").read_text(encoding="utf-8"))
    return task


def write_result(exchange: Path, result: dict[str, Any]) -> None:
    """Leave the result for the archiver."""
    (exchange / "result.json").write_text(json.dumps(result), encoding="utf-8")


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Load the handler as a worker does; replay the golden requests; compare the two artifacts.

    The archive is the working folder and its modules are the first that imports find.

    Raises:
        Exception: whatever loading raises.
    """
    message = {**task["load"], "worker": 1, "batch_size": _batch_size(task)}
    service = load.load_service(message)
    golden = [_replay(service, example, i) for i, example in enumerate(task["golden"])]
    result: dict[str, Any] = {"device": service.device, "golden": golden, "parity": None}
    if task["parity"]:
        result["parity"] = _compare(Path(message["folder"]), task["parity"], service.device)
    return result


def _batch_size(task: dict[str, Any]) -> int:
    """Return the batch size that the server would choose."""
    message = task["load"]
    config = load.read_config(Path(message["folder"]), message["config_file"])
    wanted = config.get("batchSize", DEFAULT_BATCH_SIZE)
    size = wanted if isinstance(wanted, int) and wanted > 0 else DEFAULT_BATCH_SIZE
    return min(size, task["proven_batch"] or size)


def _replay(service: load.Service, example: dict[str, Any], number: int) -> dict[str, Any]:
    answer = answer_golden(service, example, number)
    if example["expected"] is None:
        text = answer.body.decode("utf-8", "replace")
        refusal = None if answer.status == 200 else f"status {answer.status}: {text}"
        return {"answer": value_of(answer), "difference": refusal}
    expected = json.loads(Path(example["expected"]).read_bytes())
    difference = compare_golden(answer, expected, example["tolerance"])
    return {"answer": value_of(answer), "difference": difference}


def _compare(folder: Path, parity: dict[str, Any], device: str) -> dict[str, Any]:
    """Run both artifacts on the same seeded inputs; return how far they are apart."""
    torch.backends.cudnn.allow_tf32 = False  # as the exporter compared them
    try:
        return _differences(
            [open_artifact(folder / file, format, device) for file, format in parity["artifacts"]],
            parity["signature"],
        )
    # Each format's library fails in its own ways; all mean that the two cannot be compared.
    except Exception as error:
        return {"error": load.describe(error, folder)}


def _differences(artifacts: Sequence[Artifact], signature: dict[str, Any]) -> dict[str, Any]:
    one, other = artifacts
    names = [output["name"] for output in signature["outputs"]]
    worst = dict.fromkeys(names, (-1.0, ""))
    cases = 0
    for place, inputs in _cases(signature):
        cases += 1
        for name, *pair in zip(names, _call(one, inputs), _call(other, inputs), strict=True):
            worst[name] = max(worst[name], (max_abs(*pair), place))
    # JSON has no infinity; null says that values differ which no number can be put on.
    return {
        "cases": cases,
        "outputs": {
            name: {"max_abs": apart if math.isfinite(apart) else None, "at": place}
            for name, (apart, place) in worst.items()
        },
    }


def max_abs(got: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; infinite where shapes or special values differ."""
    if got.shape != expected.shape:
        return math.inf
    one, other = got.double(), expected.double()
    apart = (one - other).abs()
    same = (one == other) | (one.isnan() & other.isnan())
    apart = apart.masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    return float(apart.max()) if apart.numel() else 0.0


def _cases(signature: dict[str, Any]) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Yield inputs for every batch size with both ends of the other dynamic dimensions."""
    generator = torch.Generator().manual_seed(SEED)
    for sizes in _sizes(signature):
        for kind in KINDS:
            inputs = [_values(spec, sizes, kind, generator) for spec in signature["inputs"]]
            place = ", ".join(f"{name}={size}" for name, size in sizes.items())
            yield f"{place or 'the fixed shape'} ({kind} values)", inputs


def _sizes(signature: dict[str, Any]) -> Iterator[dict[str, int]]:
    dims = signature["dims"]
    batch = signature["inputs"][0]["shape"][:1] if signature["inputs"] else []
    name = batch[0] if batch and isinstance(batch[0], str) else None
    low, high = (dims[name]["min"], dims[name]["max"]) if name else (1, 1)
    tried = sorted({*range(low, min(high, low + MOST_BATCHES - 1) + 1), high})
    others = [other for other in dims if other != name]
    for end in ("min", "max") if others else ("min",):
        rest = {other: dims[other][end] for other in others}
        for size in tried:
            yield ({name: size} if name else {}) | rest


def _values(
    spec: dict[str, Any], sizes: dict[str, int], kind: str, generator: torch.Generator
) -> Tensor:
    shape = [size if isinstance(size, int) else sizes[size] for size in spec["shape"]]
    dtype: torch.dtype = getattr(torch, spec["dtype"])
    if kind == "zeros":
        return torch.zeros(shape, dtype=dtype)
    if dtype.is_floating_point:
        scale = 2.0 if kind == "large" else 1.0
        return (torch.randn(shape, generator=generator) * scale).to(dtype)
    # How many values an integer input takes is not in the report; every model takes 0 and 1.
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _call(artifact: Artifact, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    with torch.no_grad():
        output = artifact(*(value.to(artifact.device) for value in inputs))
    outputs = (output,) if isinstance(output, Tensor) else output
    return [value.detach().cpu() for value in outputs]
