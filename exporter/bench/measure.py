"""The same inputs through eager, torch.compile and artifacts → how fast, how big, how equal.

Each subject runs in a fresh process of its own for every thread count (`child.py`), since threads
are fixed once torch is imported and one backend's memory must not count as another's. The processes
of a thread count are alive together, and take turns in rounds: what disturbs the machine for a
while disturbs all of them.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modelyard.base.exits import describe_exit
from modelyard.base.quantile import nearest_rank
from modelyard.base.threads import thread_environment
from modelyard.exporter.bench.machine import describe_machine
from modelyard.exporter.bench.plan import Plan, Subject
from modelyard.exporter.bench.report import BenchReport, Cell, Footprint
from modelyard.handlers.proof.agree import compare

Progress = Callable[[str, int, int], None]
"""Called before each step with its name, its number from 0, and the number of steps."""


def bench(plan: Plan, progress: Progress | None = None) -> BenchReport:
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
            opened, timed = _bench_threads(plan, threads, Path(exchange), step)
            footprints += opened
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


class _Child:
    """One subject in a process of its own, which takes one JSON order per line.

    Args:
        subject: what to open there.
        plan: whose batches are measured.
        threads: of torch and of onnxruntime.
        folder: where it leaves its outputs.
    """

    def __init__(self, subject: Subject, plan: Plan, threads: int, folder: Path) -> None:
        self.subject, self.threads, self.folder = subject, threads, folder
        self.failure: str | None = None
        """Why it can do nothing more."""
        self.failures: dict[int, str] = {}
        """Why it cannot take batches of a size."""
        self.latencies: dict[int, list[list[float]]] = {batch: [] for batch in plan.batches}
        self.used: dict[int, list[dict[str, Any]]] = {batch: [] for batch in plan.batches}
        """Memory and energy of each turn."""
        self.moved: dict[int, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}
        self._errors = (folder / "stderr.txt").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "modelyard.exporter.bench.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | thread_environment(threads),
        )

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the session there, or wait for torch with "ready".

        Returns:
            What the method returns; {"error": why} where it failed, there or before.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        if self.failure is None:
            with suppress(BrokenPipeError):
                if method != "ready":
                    self._process.stdin.write(json.dumps([method, arguments]) + "\n")
                    self._process.stdin.flush()
            if line := self._process.stdout.readline():
                answer: dict[str, Any] = json.loads(line)
                return answer
            self.failure = self._last_words()
        return {"error": self.failure}

    def learn(self, method: str, **arguments: Any) -> None:
        """Call a method without which there is no more to measure, and keep what it returns."""
        answer = self.call(method, **arguments)
        self.failure = answer.pop("error", None)
        self.facts |= answer

    def time(self, batch: int, seconds: float) -> None:
        """Measure calls for so long, unless this batch size failed before."""
        if batch not in self.failures:
            answer = self.call("time", batch=batch, seconds=seconds)
            if "error" in answer:
                self.failures[batch] = answer["error"]
            else:
                self.latencies[batch].append(answer.pop("latencies_ms"))
                self.used[batch].append(answer)

    def move(self, batch: int) -> None:
        """Measure what comes before and after a call on a device."""
        if self.failure is None and batch not in self.failures:
            answer = self.call("moves", batch=batch)
            self.moved[batch] = {} if "error" in answer else answer

    def close(self) -> None:
        """End the process, for which a closed input is the order to stop."""
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
        ended = describe_exit(self._process.wait())
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return f"its process ended with {ended}: {lines[-1] if lines else 'no message'}"


def _bench_threads(
    plan: Plan, threads: int, exchange: Path, step: Callable[[str], None]
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
            child.learn("ready")
        for child in children:
            step(f"open {child.subject.name} with {_counted(threads, 'thread')}")
            child.learn(
                "open",
                kind=child.subject.kind,
                path=str(child.subject.path.absolute()),
                model=child.subject.model,
                model_args=dict(child.subject.model_args),
                signature=plan.signature.to_json(),
                device=plan.device,
                folder=str(child.folder),
            )
        for _ in range(plan.rounds):
            for batch in plan.batches:
                for child in children:
                    step(f"{child.subject.name}, batch {batch}, {_counted(threads, 'thread')}")
                    child.time(batch, plan.cell_s / plan.rounds)
        for child in children:  # after the clock: counting and tracing slow the calls down
            step(f"sum up {child.subject.name}")
            for batch in plan.batches if plan.device != "cpu" else ():
                child.move(batch)
            child.learn("facts")  # first: a trace is kept in memory
            if plan.profile is not None and threads == plan.threads[0]:
                path = plan.profile.absolute() / f"{child.subject.name}.trace.json"
                child.learn("profile", batch=plan.batches[0], path=str(path))
    return (
        [_footprint(child) for child in children],
        [_cell(child, batch, children[0]) for child in children for batch in plan.batches],
    )


def _footprint(child: _Child) -> Footprint:
    subject, facts = child.subject, child.facts
    return Footprint(
        subject=subject.name,
        threads=child.threads,
        kind=subject.kind,
        file=subject.path.name,
        file_bytes=_size(subject.path),
        error=child.failure,
        **facts,
    )


def _cell(child: _Child, batch: int, reference: _Child) -> Cell:
    rounds = [latencies for latencies in child.latencies[batch] if latencies]
    every = sorted(latency for latencies in rounds for latency in latencies)
    error = child.failure or child.failures.get(batch)
    if error is not None or not every:
        return Cell(child.subject.name, child.threads, batch, error=error or "it made no call")
    apart = _difference(child, reference, batch)
    return Cell(
        subject=child.subject.name,
        threads=child.threads,
        batch=batch,
        calls=len(every),
        p50_ms=nearest_rank(every, 0.5),
        p99_ms=nearest_rank(every, 0.99),
        items_per_s=batch * len(every) / sum(every) * 1e3,
        round_p50_ms=tuple(statistics.median(latencies) for latencies in rounds),
        **apart,
        **child.moved.get(batch, {}),
        **_used(child.used[batch], batch * len(every)),
    )


def _used(turns: Sequence[dict[str, Any]], items: int) -> dict[str, Any]:
    """Return the memory before the first turn and after the last, and an item's energy."""
    joules = [turn["joules"] for turn in turns]
    return {
        "before_bytes": turns[0]["before_bytes"],
        "after_bytes": turns[-1]["after_bytes"],
        "joules_per_item": None if None in joules else sum(joules) / items,
    }


def _difference(child: _Child, reference: _Child, batch: int) -> dict[str, Any]:
    """Compare the outputs of the same inputs; nothing where one of the two has none."""
    mine, other = (one.folder / f"{batch}.pt" for one in (child, reference))
    if child is reference or not mine.exists() or not other.exists():
        return {}
    outputs = torch.load(mine, weights_only=True)
    expected = torch.load(other, weights_only=True)
    if [value.shape for value in outputs] != [value.shape for value in expected]:
        return {"error": f"its outputs have other shapes than those of {reference.subject.name}"}
    apart = [compare(one, two) for one, two in zip(expected, outputs, strict=True)]
    return {name: max(each[name] for each in apart) for name in ("max_abs", "max_rel")}


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
