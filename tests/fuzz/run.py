"""The parent and its children: each runs programs until one of them ends it."""

import collections
import ctypes
import json
import mmap
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.__main__ import GUARD
from tests.fuzz.programs import operators

BATCH = 2000  # programs of one child
CPU_LIMIT_S = 5  # of one program
MEMORY_BYTES = 3 << 30
ENOUGH = 5  # findings of an operator, after which it is left out
FILLS = (0, 0xAA)
GRADIENTS = "gradients"
_SEED, _STEP, _OPERATOR, _PROGRAMS = range(4)

Finding = dict[str, Any]


class Fuzzer:
    """Runs programs of these operators, and keeps what was found."""

    def __init__(self, names: Sequence[str], make: Any, file: Path | None = None) -> None:
        self.make = make
        self.allowed = operators(names)
        self.file = file
        self.findings: list[Finding] = []
        self.slow: collections.Counter[str] = collections.Counter()
        self.left_out: set[int] = set()
        size = 8 * (4 + 2 * len(self.allowed) + 2)
        shared = mmap.mmap(-1, size)  # what a child was doing when it ended
        self.state = memoryview(shared).cast("q")
        self._found_read, self._found_write = os.pipe()
        os.set_blocking(self._found_read, False)
        guard = os.environ.get(GUARD)
        self._lay_out = _layout_of(guard) if guard else None
        torch.set_num_threads(1)

    def run(self, first: int, programs: int, seconds: float) -> None:
        """Run so many programs, or for so long, from this seed on."""
        end, seed = time.monotonic() + seconds, first
        self._last = first + programs
        while seed < self._last and time.monotonic() < end:
            self.state[_SEED] = seed
            child = os.fork()
            if not child:
                self._child(seed, end)
            _, status = os.waitpid(child, 0)
            self._read_differences()
            seed = self.state[_SEED] + 1
            if os.WIFSIGNALED(status):
                self._ended(os.WTERMSIG(status))

    def summary(self) -> str:
        """Return the figures."""
        called = [self.state[4 + i] for i in range(len(self.allowed))]
        ran = [self.state[4 + len(self.allowed) + i] for i in range(len(self.allowed))]
        never = [each.name for each, n in zip(self.allowed, ran, strict=True) if not n]
        lines = [
            f"torch {torch.__version__}, {len(self.allowed)} operators, "
            f"{'guard pages' if self._lay_out else 'no guard pages'}",
            f"{self.state[_PROGRAMS]} programs, {sum(called)} calls, of which {sum(ran)} returned",
            f"operators that never returned: {', '.join(never) or 'none'}",
            f"programs over {CPU_LIMIT_S} s: {dict(self.slow) or 'none'}",
            f"findings: {len(self.findings) or 'none'}",
        ]
        by_kind: dict[str, list[int]] = {}
        for each in self.findings:
            by_kind.setdefault(f"{each['kind']} {each['operator']}", []).append(each["seed"])
        lines += [f"  {kind}: seeds {seeds[:6]}" for kind, seeds in sorted(by_kind.items())]
        return "\n".join(lines)

    def _ended(self, number: int) -> None:
        index = self.state[_OPERATOR]
        name = self._name(index)
        if number == signal.SIGPROF:
            self.slow[name] += 1
        else:
            self._keep(
                {
                    "kind": signal.Signals(number).name,
                    "operator": name,
                    "seed": self.state[_SEED],
                    "step": self.state[_STEP],
                },
                index,
            )

    def _name(self, index: int) -> str:
        return self.allowed[index].name if index < len(self.allowed) else GRADIENTS

    def _keep(self, finding: Finding, index: int) -> None:
        self.findings.append(finding)
        if self.file:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finding) + "\n")
        same = [each for each in self.findings if each["operator"] == finding["operator"]]
        if len(same) >= ENOUGH and index < len(self.allowed):
            self.left_out.add(index)

    def _read_differences(self) -> None:
        try:
            data = os.read(self._found_read, 1 << 20)
        except BlockingIOError:
            return
        for line in data.decode().splitlines():
            kind, *numbers = line.split()
            seed, index = map(int, numbers)
            self._keep({"kind": kind, "operator": self._name(index), "seed": seed}, index)

    # -- inside a child ----------------------------------------------------------------------------

    def _child(self, seed: int, end: float) -> None:
        """Run programs from this seed on; never returns."""
        try:
            warnings.simplefilter("ignore")
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 2)
            bound_memory()
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            for each in range(seed, min(seed + BATCH, self._last)):
                self.state[_SEED] = each
                self._twice(each)
                self.state[_PROGRAMS] += 1
                if time.monotonic() > end:
                    break
        except BaseException as error:
            os.write(1, f"seed {self.state[_SEED]}: {type(error).__name__}: {error}\n".encode())
        os._exit(0)

    def _twice(self, seed: int) -> None:
        runs = []
        for fill in FILLS:
            signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
            if self._lay_out:
                self._lay_out(seed & 1, fill)
            program = self.make(
                seed, self.allowed, self._enter, self._leave, left_out=self.left_out
            )
            runs.append(list(program.run()))
            if program.lacked_memory:
                return
        differing = [one[0] for one, other in zip(*runs, strict=False) if one != other]
        if differing:
            os.write(self._found_write, f"unwritten {seed} {differing[0]}\n".encode())
        for each in program.wrong[:1]:
            os.write(self._found_write, f"wrong {seed} {each}\n".encode())

    def _enter(self, step: int, operator: int) -> None:
        self.state[_STEP], self.state[_OPERATOR] = step, operator
        if operator < len(self.allowed):
            self.state[4 + operator] += 1

    def _leave(self, operator: int) -> None:
        self.state[4 + len(self.allowed) + operator] += 1


def bound_memory() -> None:
    """Let allocations beyond what this process has and some more fail, instead of the machine."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    has = next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (has + MEMORY_BYTES, has + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _layout_of(library: str) -> Callable[[int, int], None]:
    return ctypes.CDLL(library).guard_layout


def replay(names: Sequence[str], make: Any, seed: int) -> int:
    """Show a program and run it, twice as in a child."""
    torch.set_num_threads(1)
    bound_memory()
    signal.setitimer(signal.ITIMER_PROF, 2 * CPU_LIMIT_S)
    guard = os.environ.get(GUARD)
    for fill in FILLS:
        if guard:
            _layout_of(guard)(seed & 1, fill)
        program = make(seed, operators(names), show=_show)
        for index, digest in program.run():
            _show(f"  {index} {digest}")
    return 0


def _show(text: str) -> None:
    os.write(1, f"{text}\n".encode())
