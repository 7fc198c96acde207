"""Time integrated gradients on ResNet-50 beside what they are made of, and beside captum's.

    python -m benchmarks.explain [--steps 50] [--rounds 5] [--threads 1]
    python -m benchmarks.explain --truth [--scans 150]
    python -m benchmarks.explain --trees [--rounds 5]
    python -m benchmarks.explain --coverage [--only NAME …]
    python -m benchmarks.explain --picture docs/images/error-bar.svg

Three things take turns in every round, on one image and the same threads: `ours`; `passes`, as many
forward and backward passes as steps, at the batch size that a trial finds best; and `captum`, its
own call with its defaults. Prints medians and ratios, of wall and of processor time: the latter is
what counts on a machine with other work. Weights are random, from a fixed seed.

`--truth` compares the stated errors of the digits network's explanations, in float32, with their
true ones, in float64 from 1000 points; it needs scikit-learn, which ships the scans. `--picture`
draws what the convergence delta does not see. `--coverage` prints the table of docs/explain.md: how
often errors cover the truth, on some sixty networks (see benchmarks/coverage.py). `--trees` times
tree_shap of 100 whole trees six deep over 30 features, and kernel_shap beside it.
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
import numpy as np
import onnx
import torch
from captum.attr import IntegratedGradients
from torch import Tensor, nn

from benchmarks.coverage import ask, print_table
from benchmarks.explained import NETWORKS as NETWORK_NAMES
from examples.digits.net import DigitsNet
from modelyard.handlers.explain.attribute.attribution import (
    DEFAULT_TOLERANCE,
    AttributionRequest,
    ForwardFunction,
    is_met,
    norms_of,
    sums_of,
)
from modelyard.handlers.explain.attribute.path import integrated_gradients
from modelyard.handlers.explain.explanation import explain_batch
from modelyard.handlers.explain.request.options import parse_options
from modelyard.handlers.explain.request.targets import ExplainedModel
from modelyard.handlers.models.backends import Artifact, open_artifact

DIGITS = Path(__file__).parent.parent / "examples" / "digits"
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
    parser.add_argument("--truth", action="store_true")
    parser.add_argument("--scans", type=int, default=150)
    parser.add_argument("--trees", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--only", nargs="+", choices=NETWORK_NAMES, default=NETWORK_NAMES)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    if given.picture:
        given.picture.write_text(_picture(), encoding="utf-8")
    elif given.trees:
        _time_trees(given.rounds)
    elif given.coverage:
        print_table(given.only)
    elif given.truth:
        _compare_errors(given.scans)
    else:
        _time_passes(given)


def _time_passes(given: argparse.Namespace) -> None:
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


def _model_of_rows(artifact: Artifact, starts: tuple[Tensor, ...]) -> ExplainedModel:
    """Return what explains numbers, compared with some rows."""
    return ExplainedModel(
        artifact, None, None, str, lambda name, inputs, seed: starts,
        lambda sizes, side: (side or 1,), probabilities=lambda scores: None,
    )  # fmt: skip


def _time_trees(rounds: int, trees: int = 100, depth: int = 6, width: int = 30) -> None:
    """Print what explanations of drawn trees take, by rows of the baseline."""
    random = np.random.default_rng(0)
    size = 2 ** (depth + 1) - 1
    inner = size // 2
    numbers = np.arange(size)
    is_leaf = numbers >= inner
    leaves = [(tree, int(at)) for tree in range(trees) for at in numbers[is_leaf]]
    node = onnx.helper.make_node(
        "TreeEnsembleRegressor", ["row"], ["y"], domain="ai.onnx.ml", n_targets=1,
        nodes_treeids=np.repeat(np.arange(trees), size).tolist(),
        nodes_nodeids=np.tile(numbers, trees).tolist(),
        nodes_modes=np.tile(np.where(is_leaf, "LEAF", "BRANCH_LEQ"), trees).tolist(),
        nodes_featureids=random.integers(width, size=size * trees).tolist(),
        nodes_values=random.random(size * trees).tolist(),
        nodes_truenodeids=np.tile(np.where(is_leaf, 0, 2 * numbers + 1), trees).tolist(),
        nodes_falsenodeids=np.tile(np.where(is_leaf, 0, 2 * numbers + 2), trees).tolist(),
        target_treeids=[tree for tree, _ in leaves], target_nodeids=[at for _, at in leaves],
        target_ids=[0] * len(leaves), target_weights=random.normal(size=len(leaves)).tolist(),
    )  # fmt: skip
    row, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])
        for name, size in (("row", width), ("y", 1))
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    graph = onnx.helper.make_graph([node], "trees", [row], [y])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trees.onnx"
        onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
        artifact = open_artifact(path, "onnx")
        inputs = torch.from_numpy(random.random((1, width)).astype(np.float32))
        print(
            "| rows of the baseline | `tree_shap`, CPU ms | `kernel_shap`, CPU ms | its `error` |"
        )
        for count in (1, 20, 50, 100):
            starts = torch.from_numpy(random.random((count, width)).astype(np.float32))
            model = _model_of_rows(artifact, (starts,))
            cells = []
            for method in ("tree_shap", "kernel_shap"):
                options = [parse_options({"method": method, "baseline": "file:x"})]
                explain = partial(explain_batch, model, (inputs,), options)
                ((found,),) = explain()
                cells.append(statistics.median(_time(explain).processor for _ in range(rounds)))
            error = "–" if found.error is None else f"{100 * found.error:.1f} %"
            print(f"| {count} | {1e3 * cells[0]:.0f} | {1e3 * cells[1]:.0f} | {error} |")


def _compare_errors(scans: int) -> None:
    """Print true errors beside stated ones, for three targets and two tolerances."""
    from examples.digits.train import held_out, to_input

    inputs = to_input(held_out()[0][:scans])
    net = _digits()
    exact = _digits().double()
    with torch.no_grad():
        likeliest = net(inputs).argsort(1, descending=True)
    targets = {
        "predicted": likeliest[:, 0],
        "runner-up": likeliest[:, 1],
        "at random": torch.randint(10, (scans,)),
    }
    print(f"digits, {scans} scans each; the truth: 1000 midpoints in float64")
    print("target     tolerance  points  met    true / stated: 50 % 95 % most   within 1.3")
    for name, target in targets.items():
        truth = integrated_gradients(ask(exact, inputs.double(), target), n_steps=1000)
        for tolerance in (0.01, 0.001):
            request = ask(net, inputs, target)
            found = integrated_gradients(request, tolerance=tolerance)
            assert found.error is not None
            apart = found.attributions[0].double() - truth.attributions[0]
            share = norms_of((apart,)) / norms_of(truth.attributions) / found.error
            quantiles = (float(share.quantile(at)) for at in (0.5, 0.95, 1))
            met = float(is_met(request, found, tolerance).double().mean())
            print(f"{name:10} {tolerance:9} {float(found.n_steps.double().mean()):7.0f} {met:5.0%}",
                  f"{' ' * 13}" + " ".join(f"{each:5.2f}" for each in quantiles),
                  f"{float((share <= 1.3).double().mean()):9.1%}")  # fmt: skip


def _digits() -> nn.Module:
    net = DigitsNet()
    net.load_state_dict(torch.load(DIGITS / "digits.pt", weights_only=True))
    return net.eval().requires_grad_(False)


def _steep_contrast(x: Tensor) -> Tensor:
    a, b, c = x.unbind(1)
    return torch.sigmoid(80 * (a - 0.52)) - torch.sigmoid(80 * (b - 0.52)) + c / 5


def _picture() -> str:
    """Draw the truth, and what few points make of it with the errors that they state, as SVG."""
    inputs = torch.tensor([[1.0, 1.0, 0.5]], dtype=torch.float64)
    starts = torch.zeros_like(inputs)
    request = AttributionRequest(
        ForwardFunction(_steep_contrast, torch.tensor([0])),
        (inputs,),
        ((starts,),),
        _steep_contrast(inputs),
        _steep_contrast(starts),
    )
    truth = integrated_gradients(request, n_steps=5000).attributions[0][0].tolist()
    groups = []
    for place, steps in enumerate((10, 30, 90)):
        found = integrated_gradients(request, n_steps=steps)
        assert found.errors is not None
        assert found.error is not None
        delta = float(sums_of(found.attributions) - request.f_input + request.f_baseline)
        left = 60 + 240 * place
        said = f"delta {abs(delta):.0e}, error {float(found.error):.1%}"
        marks = [
            f'<text x="{left}" y="28" class="t">{steps} points</text>',
            f'<text x="{left}" y="48">{said}</text>',
        ]
        rows = zip("abc", truth, found.attributions[0][0].tolist(), found.errors[0][0].tolist(),
                   strict=True)  # fmt: skip
        for at, (name, true, value, error) in enumerate(rows):
            x = left + 60 * at
            top, bottom = _height(value + error), _height(value - error)
            marks += [
                f'<rect x="{x}" y="{min(_height(value), _height(0)):.1f}" width="26"'
                f' height="{abs(_height(value) - _height(0)):.1f}" fill="#92c5de"/>',
                f'<path d="M{x + 13} {top:.1f}V{bottom:.1f}M{x + 8} {top:.1f}h10M{x + 8}'
                f' {bottom:.1f}h10" stroke="#1c2026" stroke-width="1.5"/>',
                f'<path d="M{x - 5} {_height(true):.1f}h36" stroke="#b2182b" stroke-width="2.5"/>',
                f'<text x="{x + 9}" y="300">{name}</text>',
            ]
        marks.append(f'<path d="M{left - 12} {_height(0):.1f}h184" stroke="#6e747c"/>')
        groups.append("\n".join(marks))
    legend = '<text x="60" y="330">red: the exact share. Blue: the answer, with its errors.</text>'
    style = "<style>text{font:14px sans-serif;fill:#1c2026}.t{font-size:18px}</style>"
    size = 'width="760" height="350"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 350" {size}>',
            f'<rect {size} fill="#fff"/>',
            style,
            *groups,
            legend,
            "</svg>",
            "",
        ]
    )


def _height(value: float) -> float:
    """Return where a value is drawn; 0 in the middle."""
    return 175 - 75 * value


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
