"""The same inputs through eager, torch.compile and artifacts → how fast, how big, how equal.

Each subject runs in a fresh process of its own for every thread count (`exporter/bench_child.py`),
since threads are fixed once torch is imported and one backend's memory must not count as
another's. The processes of a thread count are alive together, and take turns in rounds: what
disturbs the machine for a while disturbs all of them.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from modelyard.archiver.signature import Dim, Signature, parse_signature, with_dims
from modelyard.archiver.threads import thread_environment
from modelyard.exporter.errors import UsageError
from modelyard.exporter.machine import Machine, describe_machine
from modelyard.exporter.report import report_path
from modelyard.handlers.agree import compare
from modelyard.handlers.backends import detect_format
from modelyard.handlers.errors import LoadError

Progress = Callable[[str, int, int], None]
"""Called before each step with its name, its number from 0, and the number of steps."""


@dataclass(frozen=True)
class Subject:
    """One thing to measure: how a child process opens it."""

    name: str
    kind: str
    """"eager", "compile", or an artifact's format."""
    path: Path
    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_artifact(self) -> bool:
        """Whether it is a file that an export wrote."""
        return self.kind not in ("eager", "compile")


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    subjects: tuple[Subject, ...]
    signature: Signature
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int = 5
    cell_s: float = 2.0
    """Time for one cell (subject, threads, batch), over all rounds; one call runs in any case."""
    device: str = "cpu"
    profile: Path | None = None
    """Folder for a trace of each subject."""


@dataclass(frozen=True)
class Cell:
    """One subject at one batch size and thread count; `error` says why there is no figure."""

    subject: str
    threads: int
    batch: int
    calls: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    items_per_s: float | None = None
    round_p50_ms: tuple[float, ...] = ()
    """The median of each round: how far they spread is how quiet the machine was."""
    max_abs: float | None = None
    """Largest difference of an output value to the reference; None for the reference itself."""
    max_rel: float | None = None
    """max_abs over the largest value of the reference."""
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the form that `--json` prints."""
        return {**vars(self), "round_p50_ms": list(self.round_p50_ms)}


@dataclass(frozen=True)
class Footprint:
    """What one subject costs before and beside its calls, at one thread count."""

    subject: str
    threads: int
    kind: str
    file: str
    file_bytes: int
    load_s: float | None = None
    peak_bytes: int | None = None
    """Most memory of its process, with Python and torch."""
    own_bytes: int | None = None
    """Of these, what came after torch was imported: the model and its work space."""
    cuda_peak_bytes: int | None = None
    parameters: int | None = None
    flops_per_item: int | None = None
    flops_note: str = ""
    compile_s: float | None = None
    """Time of the first calls, all batch sizes together, where they compile."""
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the form that `--json` prints."""
        return dict(vars(self))


@dataclass(frozen=True)
class BenchReport:
    """Everything that a bench found."""

    machine: Machine
    signature: Signature
    reference: str
    """The subject that the others' outputs are compared with."""
    footprints: tuple[Footprint, ...]
    cells: tuple[Cell, ...]
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the form that `--json` prints; no number in it is NaN or infinite."""
        found = {
            "schema": 1,
            "machine": self.machine.to_json(),
            "signature": self.signature.to_json(),
            "reference": self.reference,
            "settings": dict(self.settings),
            "footprints": [footprint.to_json() for footprint in self.footprints],
            "cells": [cell.to_json() for cell in self.cells],
        }
        plain: dict[str, Any] = _finite(found)
        return plain


def read_signature(artifact: Path) -> Signature:
    """Read inputs and proven ranges from an artifact's report.

    Raises:
        UsageError: there is no report, or none that states a signature.
    """
    path = report_path(artifact)
    try:
        return parse_signature(json.loads(path.read_text(encoding="utf-8"))["signature"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f'"{artifact.name}" has no report that states its inputs ({path.name}); give --input'
        ) from error


def choose_subjects(
    artifacts: Sequence[Path],
    checkpoint: Path | None,
    model: str | None,
    model_args: Mapping[str, Any],
    *,
    compiled: bool = True,
) -> tuple[Subject, ...]:
    """Name what is measured: the checkpoint's model eager and compiled, then the artifacts.

    Raises:
        UsageError: nothing to measure, or a file that is not an artifact.
    """
    subjects = []
    if checkpoint is not None:
        subjects.append(Subject("eager", "eager", checkpoint, model, model_args))
        if compiled:
            subjects.append(Subject("torch.compile", "compile", checkpoint, model, model_args))
    for path in artifacts:
        try:
            format = detect_format(path)
        except (LoadError, OSError) as error:
            raise UsageError(f"{error}; expected artifacts of modelyard export") from error
        subjects.append(Subject(path.name, format, path))
    names = [subject.name for subject in subjects]
    if not subjects:
        raise UsageError("nothing to measure; give artifacts, or --checkpoint with --model")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f'two artifacts are named "{twice[0]}"; rename one, to tell them apart')
    return tuple(subjects)


def choose_batches(signature: Signature, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the batch sizes to measure: those wanted, else 1 and the largest that is proven.

    Raises:
        UsageError: the batch is one fixed size, and another is wanted.
    """
    batch = signature.batch
    if not isinstance(batch, int):
        return tuple(dict.fromkeys(wanted or (1, batch.max if batch else 1)))
    if any(size != batch for size in wanted):
        raise UsageError(f"--batch {wanted[0]}: the model takes batches of {batch} only")
    return (batch,)


def fix_sizes(signature: Signature, sizes: Mapping[str, int]) -> Signature:
    """Choose the size of dims other than the batch; the largest proven one is the default.

    Raises:
        UsageError: no such dim.
    """
    known = [name for name, dim in signature.dims.items() if dim != signature.batch]
    if unknown := [name for name in sizes if name not in known]:
        rest = ", ".join(known) or "none"
        raise UsageError(f'--size names "{unknown[0]}"; beside the batch the dims are {rest}')
    dims = {name: Dim(name, size, size) for name, size in sizes.items()}
    return replace(signature, inputs=tuple(with_dims(signature.inputs, dims)))


def bench(plan: Plan, progress: Progress | None = None) -> BenchReport:
    """Measure every subject at every thread count and batch size.

    A subject that cannot be opened or run has the reason in place of figures; the others run on.
    """
    steps = _Steps(plan, progress)
    machine = describe_machine()
    footprints: list[Footprint] = []
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as exchange:
        for threads in plan.threads:
            found, timed = _bench_threads(plan, threads, Path(exchange), steps)
            footprints += found
            cells += timed
    return BenchReport(
        machine=machine,
        signature=plan.signature,
        reference=plan.subjects[0].name,
        footprints=tuple(_share_flops(footprints)),
        cells=tuple(cells),
        settings={
            "batches": list(plan.batches),
            "threads": list(plan.threads),
            "rounds": plan.rounds,
            "cell_s": plan.cell_s,
            "device": plan.device,
        },
    )


class _Steps:
    """Counts the steps for a progress bar: each subject's start, and each of its cells."""

    def __init__(self, plan: Plan, progress: Progress | None) -> None:
        per_subject = 2 + len(plan.batches) * plan.rounds
        self.total = len(plan.threads) * len(plan.subjects) * per_subject
        self.done = 0
        self._progress = progress

    def __call__(self, name: str) -> None:
        if self._progress is not None:
            self._progress(name, min(self.done, self.total - 1), self.total)
        self.done += 1


class _ChildError(Exception):
    """A child said why it cannot go on, or ended."""


class _Child:
    """One subject in a process of its own, which takes one JSON order per line.

    Args:
        subject: what to open there.
        plan: signature and device.
        threads: of torch and of onnxruntime.
        folder: where it leaves its outputs.
    """

    def __init__(self, subject: Subject, plan: Plan, threads: int, folder: Path) -> None:
        self.subject, self.threads, self.folder = subject, threads, folder
        self.failure: str | None = None
        self.latencies: dict[int, list[list[float]]] = {batch: [] for batch in plan.batches}
        self.failures: dict[int, str] = {}
        self.facts: dict[str, Any] = {}
        self._errors = (folder / "stderr.txt").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "modelyard.exporter.bench_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | thread_environment(threads),
        )

    def ask(self, order: str, **arguments: Any) -> dict[str, Any]:
        """Send one order and wait for the answer.

        Raises:
            _ChildError: the order failed there, or the process ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"order": order, **arguments}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise _ChildError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _ChildError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process: closed input is its order to stop."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # it is gone already
                    stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        said = [line for line in self._errors.read().splitlines() if line.strip()]
        return f"its process ended with code {code}: {said[-1] if said else 'no message'}"


def _bench_threads(
    plan: Plan, threads: int, exchange: Path, steps: _Steps
) -> tuple[list[Footprint], list[Cell]]:
    """Measure all subjects at one thread count."""
    with ExitStack() as stack:
        children = []
        for place, subject in enumerate(plan.subjects):
            folder = exchange / f"{threads}-{place}"
            folder.mkdir()
            child = _Child(subject, plan, threads, folder)
            stack.callback(child.close)
            children.append(child)
        for child in children:  # all import torch before the first load is timed
            _wait(child)
        for child in children:
            steps(f"open {child.subject.name} with {_counted(threads, 'thread')}")
            _open(child, plan)
        for _ in range(plan.rounds):
            for batch in plan.batches:
                for child in children:
                    steps(f"{child.subject.name}, batch {batch}, {_counted(threads, 'thread')}")
                    _time(child, batch, plan.cell_s / plan.rounds)
        for child in children:
            steps(f"sum up {child.subject.name}")
            _finish(child, plan)
    reference = children[0]
    return (
        [_footprint(child) for child in children],
        [_cell(child, batch, reference) for child in children for batch in plan.batches],
    )


def _wait(child: _Child) -> None:
    try:
        child.ask("wait")
    except _ChildError as error:
        child.failure = str(error)


def _open(child: _Child, plan: Plan) -> None:
    subject = child.subject
    if child.failure is not None:
        return
    try:
        child.facts |= child.ask(
            "open",
            kind=subject.kind,
            path=str(subject.path.absolute()),
            model=subject.model,
            model_args=dict(subject.model_args),
            signature=plan.signature.to_json(),
            device=plan.device,
            folder=str(child.folder),
        )
    except _ChildError as error:
        child.failure = str(error)


def _time(child: _Child, batch: int, seconds: float) -> None:
    if child.failure is not None or batch in child.failures:
        return
    try:
        answer = child.ask("time", batch=batch, seconds=seconds)
        child.latencies[batch].append(answer["latencies_ms"])
    except _ChildError as error:
        child.failures[batch] = str(error)


def _finish(child: _Child, plan: Plan) -> None:
    """Ask for what must come after the clock: tracing and counting slow the calls down."""
    if child.failure is not None:
        return
    try:
        child.facts |= child.ask("facts")  # first: a trace is kept in memory
        if plan.profile is not None and child.threads == plan.threads[0]:
            name = f"{child.subject.name}.trace.json"
            child.ask("profile", batch=plan.batches[0], path=str(plan.profile.absolute() / name))
    except _ChildError as error:
        child.failure = str(error)


def _footprint(child: _Child) -> Footprint:
    subject, facts = child.subject, child.facts
    return Footprint(
        subject=subject.name,
        threads=child.threads,
        kind=subject.kind,
        file=subject.path.name,
        file_bytes=_size(subject.path),
        error=child.failure,
        **{name: facts[name] for name in _FACTS if name in facts},
    )


_FACTS = (
    *("load_s", "peak_bytes", "own_bytes", "cuda_peak_bytes", "parameters"),
    *("flops_per_item", "flops_note", "compile_s"),
)


def _cell(child: _Child, batch: int, reference: _Child) -> Cell:
    rounds = [found for found in child.latencies[batch] if found]
    every = sorted(latency for found in rounds for latency in found)
    error = child.failure or child.failures.get(batch)
    if error is not None or not every:
        return Cell(child.subject.name, child.threads, batch, error=error or "it made no call")
    apart = _difference(child, reference, batch)
    return Cell(
        subject=child.subject.name,
        threads=child.threads,
        batch=batch,
        calls=len(every),
        p50_ms=quantile(every, 0.5),
        p99_ms=quantile(every, 0.99),
        items_per_s=batch * len(every) / sum(every) * 1e3,
        round_p50_ms=tuple(statistics.median(found) for found in rounds),
        **apart,
    )


def _difference(child: _Child, reference: _Child, batch: int) -> dict[str, Any]:
    """Compare the outputs of the same inputs; nothing where one of the two has none."""
    mine, other = (one.folder / f"{batch}.pt" for one in (child, reference))
    if child is reference or not mine.exists() or not other.exists():
        return {}
    found = torch.load(mine, weights_only=True)
    wanted = torch.load(other, weights_only=True)
    if [value.shape for value in found] != [value.shape for value in wanted]:
        return {"error": f"its outputs have other shapes than those of {reference.subject.name}"}
    apart = [compare(one, two) for one, two in zip(wanted, found, strict=True)]
    return {name: max(each[name] for each in apart) for name in ("max_abs", "max_rel")}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the sorted values that at least `share` of them do not exceed."""
    return values[min(max(math.ceil(share * len(values)), 1), len(values)) - 1]


def _share_flops(footprints: Sequence[Footprint]) -> Iterator[Footprint]:
    """Yield every subject the count of the one that could be counted: the model is the same."""
    counted = next((one for one in footprints if one.flops_per_item is not None), None)
    for footprint in footprints:
        if footprint.flops_per_item is None and counted is not None:
            note = f"counted on {counted.subject}"
            yield replace(footprint, flops_per_item=counted.flops_per_item, flops_note=note)
        else:
            yield footprint


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for by null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
