"""Our artifacts beside onnxruntime's own best options, OpenVINO and AOTInductor: the bare call.

    python -m benchmarks.artifacts --folder DIR [--quick] [--model bert] [--threads 2]

ResNet-50, an encoder of BERT-base's size (64 tokens; weights are random) and 500 trees of LightGBM.
They are made in --folder by `modelyard export` when they are first needed, which takes some minutes
and needs transformers, lightgbm and onnxmltools; openvino is measured where it is installed.

    ours         the artifact as a worker opens and calls it: onnx, pt2, aoti
    ort          the same ONNX file in onnxruntime, by the settings of a grid that are fastest here
    openvino     the same ONNX file, in float32, by its latency and its throughput hint
    inductor     the same program in torch's own AOTInductor package, also with its weights frozen

Every subject has a process of its own. With --threads 1 and 2 a process makes one call at a time on
so many threads; `2x1` asks for as much as two cores give: two processes of one thread, or two
streams of OpenVINO. All have short turns in alternating order, and every figure is a median over
the rounds; a ratio is the median over the rounds of ours over the other in the same round. Results
are compared, too. Processor time moves less than time where others use the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.archives import ROOT, SEED, modelyard
from benchmarks.procfs import describe_machine
from modelyard.base.threads import thread_environment

ARCHITECTURES = ROOT / "tests" / "exporter" / "architectures.py"
EXPORTS: Mapping[str, tuple[str, ...]] = {
    "resnet50": (
        *("--model", f"{ROOT / 'tests' / 'networks.py'}:ResNet50"),
        *("--input", "image:float32[batch,3,224,224]", "--output", "logits"),
    ),
    "bert": (
        *("--model", f"{ARCHITECTURES}:bert", "--input", "input_ids:int64[batch,length=2..64]"),
        *("--input", "attention_mask:int64[batch,length]", "--output", "logits"),
    ),
    "trees": (),
}
SUFFIXES = {"onnx": "onnx", "pt2": "pt2", "aoti": "aoti.pt2"}
INDUCTOR: Mapping[str, Mapping[str, Any]] = {"plain": {}, "frozen": {"freezing": True}}
LOADS = {"1": (1, 1), "2": (2, 1), "2x1": (1, 2)}
"""Loads by name: threads of a process, and processes."""
ALIKE = 1e-4
"""Largest difference of two results, over the largest value, that is the same result."""
WARM_CALLS = 3
FINALISTS = 2
CHILD_PATIENCE_S = 120.0

Options = Mapping[str, Any]
Make = Callable[[int], Any]


@dataclass
class Subject:
    """One way to run a model, and its processes."""

    kind: str
    name: str
    path: Path
    options: Options
    is_slower: bool = False
    """Another setting of the same library was faster in a scan."""
    turns: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """Batch size → milliseconds of a call, and of its processor time, one pair a round."""
    failure: str = ""


def main() -> int:
    """Measure and print a table; 1 where results differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the artifacts are kept")
    parser.add_argument("--model", action="append", choices=EXPORTS)
    parser.add_argument("--threads", action="append", choices=LOADS)
    parser.add_argument("--batch", type=int, action="append", help="default: 1 and 8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one turn")
    parser.add_argument("--quick", action="store_true", help="a small grid, short turns, 5 rounds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return serve(**json.loads(given.child))
    if given.quick:
        given.rounds, given.seconds = min(given.rounds, 5), min(given.seconds, 0.15)
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores; ms of one call, median of {given.rounds}")
    print(f"{'model':9} {'load':4} {'batch':>5}  {'subject':34} {'ms':>8} {'±':>4} {'cpu ms':>8}"
          f" {'ours/it':>8} {'cpu':>6}  options")  # fmt: skip
    is_equal = True
    for model in given.model or EXPORTS:
        folder = make(model, given.folder / model)
        for load in given.threads or LOADS:
            subjects = choose(model, folder, load, given.quick)
            is_equal &= measure(subjects, load, given.batch or [1, 8], given.rounds, given.seconds)
            for batch in given.batch or [1, 8]:
                print("\n".join(table(model, load, batch, subjects)), flush=True)
    return 0 if is_equal else 1


# -- what is measured ----------------------------------------------------------------------------


def make(model: str, folder: Path) -> Path:
    """Export a model in every format, where that has not been done yet; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"{model}.onnx").exists():
        source = folder / (f"{model}-lightgbm.onnx" if model == "trees" else f"{model}.pt")
        (_save_trees if model == "trees" else _save_network)(model, source)
        formats = ("onnx",) if model == "trees" else tuple(SUFFIXES)
        asked = [part for format in formats for part in ("--format", format)]
        modelyard("export", source, *EXPORTS[model], *asked, "--quick", "--name", model,
                  "-o", folder)  # fmt: skip
    for name, options in INDUCTOR.items() if (folder / f"{model}.pt2").exists() else ():
        if not (package := folder / f"inductor-{name}.pt2").exists():
            _compile(folder / f"{model}.pt2", package, options)
    return folder


def _save_network(model: str, path: Path) -> None:
    import runpy

    import torch

    file, _, name = EXPORTS[model][1].rpartition(":")
    torch.manual_seed(SEED)
    torch.save(runpy.run_path(file)[name]().state_dict(), path)


def _save_trees(model: str, path: Path) -> None:
    import lightgbm  # type: ignore[import-not-found]
    import numpy as np
    import onnxmltools  # type: ignore[import-not-found]
    from onnxmltools.convert.common.data_types import (  # type: ignore[import-not-found]
        FloatTensorType,
    )

    random = np.random.default_rng(SEED)
    rows = random.standard_normal((8000, 50)).astype("float32")
    is_far = (rows[:, :5] ** 2).sum(1) + rows[:, 5] * rows[:, 6] > 5
    trees = lightgbm.LGBMClassifier(n_estimators=500, num_leaves=63, n_jobs=1, verbose=-1)
    types = [("features", FloatTensorType([None, 50]))]
    made = onnxmltools.convert_lightgbm(trees.fit(rows, is_far), initial_types=types)
    path.write_bytes(made.SerializeToString())


def _compile(source: Path, package: Path, options: Options) -> None:
    import torch

    from modelyard.exporter.bench.measure import read_signature
    from modelyard.handlers.proof.probes import Probe, example_sizes, make_inputs

    program = torch.export.load(source)
    signature = read_signature(source)
    program.example_inputs = make_inputs(signature, Probe("random", example_sizes(signature))), {}
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(package), inductor_configs=dict(options)
    )


def choose(model: str, folder: Path, load: str, quick: bool) -> list[Subject]:
    """Return the subjects; of onnxruntime's settings those that a scan finds the fastest."""
    threads, processes = LOADS[load]
    onnx = folder / f"{model}.onnx"
    found = [
        Subject("ours", f"ours {format}", path, {"format": format})
        for format, suffix in SUFFIXES.items()
        if (path := folder / f"{model}.{suffix}").exists()
    ]
    names = "spinning", "arena", "level", "parallel"
    every = [dict(zip(names, values, strict=True))
             for values in itertools.product((1, 0), (1, 0), (99, 2), (0, 1))
             if threads > 1 or not values[3]]  # fmt: skip
    grid = [each for each in every if each["level"] == 99 and not each["parallel"]]
    scan = Subject("scan", "onnxruntime", onnx, {"grid": grid if quick else every})
    with _child(scan, threads) as child:
        _answer(child)
        times = _ask([child], 0, 0.1 if quick else 0.3)[0]["ms"]
    fastest = {at for each in times for at in sorted(each, key=each.__getitem__)[:FINALISTS]}
    found += [
        Subject("ort", "onnxruntime", onnx, scan.options["grid"][int(at)]) for at in sorted(fastest)
    ]
    if find_spec("openvino"):
        hint = "LATENCY" if processes == 1 else "THROUGHPUT"
        found.append(Subject("openvino", f"OpenVINO {hint}", onnx, {"hint": hint}))
    found += [
        Subject("inductor", f"AOTInductor {name}", path, options)
        for name, options in INDUCTOR.items()
        if (path := folder / f"inductor-{name}.pt2").exists()
    ]
    return found


# -- turns ---------------------------------------------------------------------------------------


def measure(
    subjects: Sequence[Subject], load: str, batches: Sequence[int], rounds: int, seconds: float
) -> bool:
    """Let every subject have its turns; return whether all gave the same."""
    threads, processes = LOADS[load]
    results: dict[int, Any] = {}
    is_equal = True
    with ExitStack() as stack:
        running = {}
        for at, subject in enumerate(subjects):
            count = 1 if subject.kind == "openvino" else processes
            wide = threads * (processes if subject.kind == "openvino" else 1)
            children = [stack.enter_context(_child(subject, wide)) for _ in range(count)]
            lines = list(map(_answer, children))
            subject.failure = next((line["error"] for line in lines if line.get("error")), "")
            if not subject.failure:
                running[at] = children
        for turn in range(rounds):
            for at in sorted(running, reverse=turn % 2 == 1):
                subject = subjects[at]
                for batch in batches:
                    answers = _ask(running[at], batch, seconds)
                    ms = 1 / sum(1 / answer["ms"] for answer in answers)
                    cpu_ms = sum(answer["cpu_ms"] for answer in answers) / len(answers)
                    subject.turns.setdefault(batch, []).append((ms, cpu_ms))
                    expected = results.setdefault(batch, answers[0]["result"])
                    apart = _apart(answers[0]["result"], expected)
                    if apart > ALIKE:
                        is_equal = False
                        print(f"{subject.name} differs by {apart:.1e} at batch {batch}")
    return is_equal


def _child(subject: Subject, threads: int) -> subprocess.Popen[str]:
    about = {"kind": subject.kind, "path": str(subject.path), "options": subject.options}
    command = [sys.executable, "-m", "benchmarks.artifacts", "--folder", ".", "--child"]
    return subprocess.Popen(
        [*command, json.dumps({**about, "threads": threads})],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, **thread_environment(threads)},
    )  # fmt: skip


def _ask(
    children: Sequence[subprocess.Popen[str]], batch: int, seconds: float
) -> list[dict[str, Any]]:
    for child in children:
        assert child.stdin is not None
        print(json.dumps([batch, seconds]), file=child.stdin, flush=True)
    return [_answer(child) for child in children]


def _answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    answer: dict[str, Any] = json.loads(child.stdout.readline() or '{"error": "it ended"}')
    return answer


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    most = max(map(abs, other))
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) / max(most, 1e-9)


def table(model: str, load: str, batch: int, subjects: Sequence[Subject]) -> Iterator[str]:
    """Yield a row for each subject, with the ratio of our best one's times to its own."""

    def figure(subject: Subject, which: int) -> float:
        return median(turn[which] for turn in subject.turns[batch])

    able = [each for each in subjects if not each.failure]
    best = min((each for each in able if each.kind == "ours"), key=lambda each: figure(each, 0))
    for subject in subjects:
        head = f"{model:9} {load:4} {batch:>5}  {subject.name:34}"
        if subject.failure:
            yield f"{head} not run: {subject.failure[:80]}"
            continue
        times = sorted(turn[0] for turn in subject.turns[batch])
        spread = (times[-1 - len(times) // 4] - times[len(times) // 4]) / 2 / figure(subject, 0)
        pairs = list(zip(best.turns[batch], subject.turns[batch], strict=True))
        ratio, of_cpu = (median(ours[i] / its[i] for ours, its in pairs) for i in (0, 1))
        shown = " ".join(f"{key}={value}" for key, value in subject.options.items())
        mark = "<- best of ours" if subject is best else shown
        yield (f"{head} {figure(subject, 0):8.3f} {spread:4.0%} {figure(subject, 1):8.3f}"
               f" {ratio:8.2f} {of_cpu:6.2f}  {mark}")  # fmt: skip


# -- a subject's process -------------------------------------------------------------------------


def serve(kind: str, path: str, options: Options, threads: int) -> int:
    """Open the subject, then answer each line `[batch, seconds]` with what a call takes."""
    opened: dict[str, Callable[..., Callable[..., Any]]] = {
        "ours": _ours, "ort": _onnxruntime, "openvino": _openvino, "inductor": _inductor
    }  # fmt: skip
    import torch

    from modelyard.archiver.signature import Dim
    from modelyard.exporter.bench.measure import read_signature
    from modelyard.handlers.proof.probes import Probe, make_inputs

    file = Path(path)
    signature = read_signature(file.with_name(f"{file.parent.name}.onnx"))
    sizes = {name: dim.max for name, dim in signature.dims.items()}
    name = signature.batch.name if isinstance(signature.batch, Dim) else ""
    warm = set[int]()

    def make(batch: int) -> Any:
        return make_inputs(signature, Probe("random", {**sizes, name: batch}))

    def turn(batch: int, seconds: float, run: Callable[..., Any]) -> dict[str, Any]:
        inputs = make(batch)
        for _ in range(0 if batch in warm else WARM_CALLS):
            run(*inputs)
        warm.add(batch)
        return _turn(run, inputs, seconds)

    def scan(seconds: float) -> dict[str, Any]:
        """Measure one setting of the grid after the other, all of them twice."""
        times: list[dict[str, float]] = [{}, {}]
        for at, each in [*enumerate(options["grid"])] * 2:
            run = _onnxruntime(file, each, threads, make)
            for found, batch in zip(times, (1, 8), strict=True):
                warm.clear()
                ms = turn(batch, seconds, run)["ms"]
                found[str(at)] = min(ms, found.get(str(at), ms))
        return {"ms": times}

    try:
        run = opened[kind](file, options, threads, make) if kind in opened else None
    except Exception as error:  # each library fails in its own way
        print(json.dumps({"error": " ".join(str(error).split())[:300]}), flush=True)
        return 1
    print("{}", flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            batch, seconds = json.loads(line)
            done = turn(batch, seconds, run) if run is not None else scan(seconds)
            print(json.dumps(done), flush=True)
    return 0


def _turn(run: Callable[..., Any], inputs: Any, seconds: float) -> dict[str, Any]:
    times: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    while not times or time.perf_counter() < began + seconds:
        started = time.perf_counter()
        result = run(*inputs)
        times.append(time.perf_counter() - started)
    cpu_s = time.process_time() - cpu
    calls = getattr(run, "calls", 1)
    return {
        "ms": median(times) * 1e3 / calls,
        "cpu_ms": cpu_s * 1e3 / len(times) / calls,
        "result": [float(value) for value in result.ravel()],
    }


def _ours(path: Path, options: Options, threads: int, make: Make) -> Callable[..., Any]:
    from modelyard.handlers.models.backends import main_output, open_artifact

    artifact = open_artifact(path, options["format"], share=lambda: map(make, (1, 8)))
    return lambda *tensors: main_output(artifact(*tensors)).numpy()


def _onnxruntime(path: Path, options: Options, threads: int, make: Make) -> Callable[..., Any]:
    import onnxruntime

    asked = onnxruntime.SessionOptions()
    asked.graph_optimization_level = onnxruntime.GraphOptimizationLevel(options["level"])
    asked.enable_cpu_mem_arena = bool(options["arena"])
    asked.intra_op_num_threads = threads
    if options["parallel"]:
        asked.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
        asked.inter_op_num_threads = threads
    asked.add_session_config_entry("session.intra_op.allow_spinning", str(options["spinning"]))
    session = onnxruntime.InferenceSession(str(path), asked, ["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    output = _main(session)

    def run(*tensors: Any) -> Any:
        feed = {name: each.numpy() for name, each in zip(names, tensors, strict=True)}
        return session.run(None, feed)[output]

    return run


def _main(session: Any) -> int:
    """Return the place of the first output of floats, which is what artifacts of ours answer."""
    kinds = [node.type for node in session.get_outputs()]
    return next((at for at, kind in enumerate(kinds) if "float" in kind), 0)


def _openvino(path: Path, options: Options, threads: int, make: Make) -> Callable[..., Any]:
    import onnxruntime
    import openvino

    asked = {
        "PERFORMANCE_HINT": options["hint"],
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    model = openvino.Core().compile_model(str(path), "CPU", asked)
    output = _main(onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]))
    if options["hint"] == "LATENCY":
        request = model.create_infer_request()

        def run(*tensors: Any) -> Any:
            request.infer([each.numpy() for each in tensors], share_inputs=True)
            return request.get_output_tensor(output).data

        return run
    queue = openvino.AsyncInferQueue(model)
    last: list[Any] = []
    queue.set_callback(lambda request, _: last.append(request.get_output_tensor(output).data))

    class Many:
        calls = 4 * len(queue)

        def __call__(self, *tensors: Any) -> Any:
            last.clear()
            arrays = [each.numpy() for each in tensors]
            for _ in range(self.calls):
                queue.start_async(arrays, share_inputs=True)
            queue.wait_all()
            return last[-1]

    return Many()


def _inductor(path: Path, options: Options, threads: int, make: Make) -> Callable[..., Any]:
    import torch

    package: Any = torch._inductor.aoti_load_package(str(path))

    def run(*tensors: Any) -> Any:
        output = package(*tensors)
        return (output if isinstance(output, torch.Tensor) else output[0]).numpy()

    return run


if __name__ == "__main__":
    sys.exit(main())
