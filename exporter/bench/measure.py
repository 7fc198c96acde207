"""The same inputs through eager, torch.compile and artifacts → how fast, how big, how equal.

Each subject runs in a fresh process of its own for every thread count (`child.py`), since threads
are fixed once torch is imported and one backend's memory must not count as another's. The processes
of a thread count are alive together, and take turns in rounds: what disturbs the machine for a
while disturbs all of them.
"""

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.report import parse_report
from modelyard.archiver.signature import Dim, Signature, with_dims
from modelyard.base.quantile import nearest_rank
from modelyard.base.terminal import OnStep
from modelyard.exporter.bench.report import BenchReport, Cell, Footprint, describe_machine
from modelyard.exporter.child import Child, ChildEnded
from modelyard.exporter.errors import UsageError
from modelyard.exporter.request import report_path
from modelyard.handlers.errors import LoadError
from modelyard.handlers.models.backends import detect_format
from modelyard.handlers.proof.agree import compare

_PATIENCE_S = 10


@dataclass(frozen=True)
class Subject:
    """One thing to measure: how a child process opens it."""

    name: str
    kind: str
    """"eager", "compile", or an artifact's format."""
    path: Path
    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)


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


def read_signature(artifact: Path) -> Signature:
    """Read inputs, proven ranges and the integers that were tried from an artifact's report.

    Raises:
        UsageError: there is no report, or none that states a signature.
    """
    path = report_path(artifact)
    try:
        report = parse_report(path.read_bytes(), path)
    except (OSError, CannotArchive) as error:
        raise UsageError(
            f'"{artifact.name}" has no report that states its inputs ({path.name}); give --input'
        ) from error
    # Static quantisation is compared on samples too, but takes any values.
    if report.parity and report.parity.extent == "none" and not report.parity.is_quantized:
        raise UsageError(
            f'"{artifact.name}" was compared on samples alone, since nothing made up may be a '
            "valid input; give --input with the values that it takes"
        )
    return report.tried


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


def choose_batches(signature: Signature, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the batch sizes to measure: those given, else 1 and the largest that is proven.

    Raises:
        UsageError: the batch is one fixed size, and another is given.
    """
    batch = signature.batch
    if not isinstance(batch, int):
        return tuple(dict.fromkeys(sizes or (1, batch.max if batch else 1)))
    if any(size != batch for size in sizes):
        raise UsageError(f"--batch {sizes[0]}: the model takes batches of {batch} only")
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


def bench(plan: Plan, progress: OnStep | None = None) -> BenchReport:
    """Measure every subject at every thread count and batch size.

    A subject that cannot be opened or run has the reason in place of figures; the others run on.
    """
    per_subject = 2 + len(plan.batches) * plan.rounds
    total = len(plan.threads) * len(plan.subjects) * per_subject
    done = itertools.count()

    def step(name: str) -> None:
        if progress is not None:
            progress(name, next(done), total)

    machine = describe_machine()
    footprints: list[Footprint] = []
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as exchange:
        for threads in plan.threads:
            runs = _bench_threads(plan, threads, Path(exchange), step)
            footprints += [run.footprint() for run in runs]
            cells += [run.cell(batch, runs[0]) for run in runs for batch in plan.batches]
    settings = ("batches", "threads", "rounds", "cell_s", "device")
    return BenchReport(
        machine=machine,
        signature=plan.signature,
        reference=plan.subjects[0].name,
        footprints=tuple(_share_flops(footprints)),
        cells=tuple(cells),
        settings={name: getattr(plan, name) for name in settings},
    )


class _Run:
    """One subject in a process of its own, at one thread count, and what it gave."""

    def __init__(self, subject: Subject, threads: int, folder: Path) -> None:
        self.subject, self.threads, self.folder = subject, threads, folder
        folder.mkdir()
        self.child = Child("modelyard.exporter.bench.child", folder, threads)
        self.child.start()
        self._failure: str | None = None
        """Why it can do nothing more."""
        self._failures: dict[int, str] = {}
        """Why it cannot take batches of a size."""
        self._turns: dict[int, list[dict[str, Any]]] = {}
        """Latencies, memory, energy and moves of each turn, by batch size."""
        self._facts: dict[str, Any] = {}

    def _ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        if self._failure is None:
            try:
                return self.child.ask(method, **arguments)
            except ChildEnded as error:
                self._failure = f"its process {error}"
        return {"error": self._failure}

    def learn(self, method: str, **arguments: Any) -> None:
        """Call a method without which there is no more to measure, and keep what it returns."""
        answer = self._ask(method, **arguments)
        self._failure = answer.pop("error", None)
        self._facts |= answer

    def time(self, batch: int, seconds: float) -> None:
        """Measure calls for so long, unless this batch size failed before."""
        if batch not in self._failures:
            answer = self._ask("time", batch=batch, seconds=seconds)
            if "error" in answer:
                self._failures[batch] = answer["error"]
            else:
                self._turns.setdefault(batch, []).append(answer)

    def footprint(self) -> Footprint:
        """Return what the subject costs beside its calls."""
        path = self.subject.path
        files = path.rglob("*") if path.is_dir() else [path]
        return Footprint(
            subject=self.subject.name,
            threads=self.threads,
            kind=self.subject.kind,
            file=path.name,
            file_bytes=sum(file.stat().st_size for file in files if file.is_file()),
            error=self._failure,
            **self._facts,
        )

    def cell(self, batch: int, reference: "_Run") -> Cell:
        """Return the figures of a batch size."""
        cell = Cell(self.subject.name, self.threads, batch)
        turns = self._turns.get(batch, [])
        every = sorted(latency for turn in turns for latency in turn["latencies_ms"])
        error = self._failure or self._failures.get(batch)
        if error is not None or not every:
            return replace(cell, error=error or "it made no call")
        joules = [turn["joules"] for turn in turns]
        return replace(
            cell,
            calls=len(every),
            p50_ms=nearest_rank(every, 0.5),
            p99_ms=nearest_rank(every, 0.99),
            items_per_s=batch * len(every) / sum(every) * 1e3,
            round_p50_ms=tuple(statistics.median(turn["latencies_ms"]) for turn in turns),
            before_bytes=turns[0]["before_bytes"],
            after_bytes=turns[-1]["after_bytes"],
            joules_per_item=None if None in joules else sum(joules) / (batch * len(every)),
            **self._difference(reference, batch),
            **turns[-1]["moves"],
        )

    def _difference(self, reference: "_Run", batch: int) -> dict[str, Any]:
        """Compare the outputs of the same inputs; nothing where one of the two has none."""
        mine, other = (run.folder / f"{batch}.pt" for run in (self, reference))
        if self is reference or not mine.exists() or not other.exists():
            return {}
        outputs = torch.load(mine, weights_only=True)
        expected = torch.load(other, weights_only=True)
        if [value.shape for value in outputs] != [value.shape for value in expected]:
            shapes = f"its outputs have other shapes than those of {reference.subject.name}"
            return {"error": shapes}
        apart = [compare(one, two) for one, two in zip(expected, outputs, strict=True)]
        return {name: max(each[name] for each in apart) for name in ("max_abs", "max_rel")}


def _bench_threads(
    plan: Plan, threads: int, exchange: Path, step: Callable[[str], None]
) -> list[_Run]:
    """Measure all subjects at one thread count."""
    on_threads = f"{threads} thread{'s' if threads > 1 else ''}"
    with ExitStack() as stack:
        runs = []
        for place, subject in enumerate(plan.subjects):
            runs.append(_Run(subject, threads, exchange / f"{threads}-{place}"))
            stack.callback(runs[-1].child.close, _PATIENCE_S)
        for run in runs:  # all import torch before the first load is timed
            run.learn("ready")
        for run in runs:
            step(f"open {run.subject.name} with {on_threads}")
            opened = {**vars(run.subject), "path": str(run.subject.path.absolute())}
            run.learn("open", **opened, signature=plan.signature.to_json(), device=plan.device)
        for _, batch, run in itertools.product(range(plan.rounds), plan.batches, runs):
            step(f"{run.subject.name}, batch {batch}, {on_threads}")
            run.time(batch, plan.cell_s / plan.rounds)
        for run in runs:  # after the clock: counting and tracing slow the calls down
            step(f"sum up {run.subject.name}")
            run.learn("facts")  # first: a trace is kept in memory
            if plan.profile is not None and threads == plan.threads[0]:
                path = plan.profile.absolute() / f"{run.subject.name}.trace.json"
                run.learn("profile", batch=plan.batches[0], path=str(path))
    return runs


def _share_flops(footprints: Sequence[Footprint]) -> Iterator[Footprint]:
    """Yield every subject the count of the one that could be counted: the model is the same."""
    counted = next((one for one in footprints if one.flops_per_item is not None), None)
    for footprint in footprints:
        if footprint.flops_per_item is None and counted is not None:
            note = f"counted on {counted.subject}"
            yield replace(footprint, flops_per_item=counted.flops_per_item, flops_note=note)
        else:
            yield footprint
