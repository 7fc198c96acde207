"""Time integrated gradients on ResNet-50 beside what they are made of, and beside captum's.

    python benchmarks/explain.py [--steps 50] [--rounds 5] [--threads 1]

Three things take turns in every round, on one image and the same threads: `ours`; `passes`, as many
forward and backward passes as steps, at the batch size that a trial finds best; and `captum`, its
own call with its defaults. Prints medians and ratios, of wall and of processor time: the latter is
what counts on a machine with other work. Weights are random, from a fixed seed.
"""

import argparse
import os
import platform
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # as the command does, before torch is loaded

import captum
import torch
from captum.attr import IntegratedGradients
from torch import Tensor, nn

from modelyard.handlers.backends import Artifact, open_artifact
from modelyard.handlers.explain.attribution import DEFAULT_TOLERANCE
from modelyard.handlers.explain.explanation import ExplainedModel, explain_batch
from modelyard.handlers.explain.options import parse_options

NETWORKS = Path(__file__).parent.parent / "tests" / "networks.py"
BATCHES = (1, 2, 4, 8, 16)
TARGET = 0


class Seconds(NamedTuple):
    """What a call took."""

    wall: float
    processor: float


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model: nn.Module = runpy.run_path(str(NETWORKS))["ResNet50"]().eval()
    image = torch.rand(1, 3, 224, 224)
    artifact = _exported(model)
    print(f"{platform.machine()}, {os.cpu_count()} cores, {given.threads} threads,", end=" ")
    print(f"torch {torch.__version__}, captum {captum.__version__}, {given.steps} steps")
    size = _best_batch(model, image)
    print(f"passes at batch {size}; ours chooses its own\n")
    contestants = {
        "ours": lambda: _ours(artifact, image, given.steps),
        "passes": lambda: _passes(model, image, given.steps, size),
        "captum": lambda: _captum(model, image, given.steps),
    }
    _compare(contestants)
    taken: dict[str, list[Seconds]] = {name: [] for name in contestants}
    for _ in range(given.rounds):
        for name, run in contestants.items():
            taken[name].append(_time(run))
    for at, kind in enumerate(Seconds._fields):
        for name, times in taken.items():
            each = [seconds[at] for seconds in times]
            spread = (max(each) - min(each)) / 2
            print(f"{kind:9} {name:8} {statistics.median(each):7.2f} s ± {spread:.2f}")
        for other in ("passes", "captum"):
            pairs = zip(taken["ours"], taken[other], strict=True)
            ratio = statistics.median(ours[at] / theirs[at] for ours, theirs in pairs)
            print(f"{kind:9} ours / {other}: {ratio:.3f} (median of the rounds' ratios)")


def _exported(model: nn.Module) -> Artifact:
    """Export a model and open it as a worker does."""
    batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(model, (torch.rand(5, 3, 224, 224),), dynamic_shapes=batch)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        torch.export.save(program, file)
        return open_artifact(file, "pt2")


def _ours(artifact: Artifact, image: Tensor, steps: int) -> Tensor:
    version = ExplainedModel(
        artifact,
        artifact,
        None,
        str,
        lambda _name, inputs, _seed: tuple(map(torch.zeros_like, inputs)),
        lambda sizes, _side: tuple(sizes),
    )
    options = parse_options({"n_steps": str(steps), "target": str(TARGET)})
    ((explanation,),) = explain_batch(version, (image,), [options])
    assert options.tolerance == DEFAULT_TOLERANCE
    return explanation.attributions[0]


def _passes(model: nn.Module, image: Tensor, steps: int, size: int) -> None:
    for begin in range(0, steps, size):
        count = min(size, steps - begin)
        rows = image.repeat(count, 1, 1, 1).requires_grad_()
        torch.autograd.grad(model(rows)[:, TARGET].sum(), rows)


def _captum(model: nn.Module, image: Tensor, steps: int) -> Tensor:
    explainer: Any = IntegratedGradients(model)
    found: Tensor = explainer.attribute(
        image, target=TARGET, n_steps=steps, method="riemann_middle"
    )
    return found[0]


def _best_batch(model: nn.Module, image: Tensor) -> int:
    """Return the batch size whose passes take the least time per row."""
    per_row = {}
    for size in BATCHES:
        times = [_time(partial(_passes, model, image, size, size)) for _ in range(3)]
        per_row[size] = min(seconds.processor for seconds in times) / size
        print(f"batch {size:2}: {per_row[size] * 1000:6.0f} ms per forward and backward pass")
    return min(per_row, key=per_row.__getitem__)


def _compare(contestants: dict[str, Callable[[], Any]]) -> None:
    """Run each once, so that nothing is measured cold, and see that the answers are the same."""
    found = {name: run() for name, run in contestants.items()}
    apart = float((found["ours"] - found["captum"]).abs().max())
    print(
        f"ours and captum differ by {apart:.1e}; "
        f"the largest value is {float(found['captum'].abs().max()):.1e}"
    )


def _time(run: Callable[[], Any]) -> Seconds:
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return Seconds(time.perf_counter() - wall, time.process_time() - processor)


if __name__ == "__main__":
    main()
