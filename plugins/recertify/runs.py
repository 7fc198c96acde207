"""Cases → what a runtime gives for them, computed by a runner in a process behind walls.

A runner stays for further tasks, so that its library is imported once for many archives.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from modelyard.archiver.errors import DoesNotRun
from modelyard.base.threads import thread_environment
from modelyard.plugins.recertify.environments import HERE_PYTHON
from modelyard.plugins.recertify.runtimes import HERE, RUNNERS, Runtime
from modelyard.serve.control.sandbox import Sandbox, own_variables
from modelyard.serve.settings import load_settings
from modelyard.serve.walls.environment import choose_variables

TIMEOUT_S = 600.0
CHUNK_BYTES = 64 << 20
"""Inputs that a runner gets at a time, unless one case alone has more."""

Case = Mapping[str, Tensor]
"""Input → its values."""
Where = tuple[Runtime, Path]
"""What runs an artifact, and the interpreter of its environment."""


@dataclass(frozen=True)
class Program:
    """An artifact as a runner is told of it."""

    path: Path
    format: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def here(self) -> Where:
        """What runs it in a server here."""
        return HERE[self.format], HERE_PYTHON


@dataclass(frozen=True)
class Outcome:
    """What a runner wrote; tensors stay in its files until they are asked for."""

    places: tuple[tuple[Path, str], ...]
    """Case → its file, and its name there."""
    told: Mapping[str, str]
    """Versions and times."""

    def outputs(self, case: int) -> dict[str, Tensor]:
        """Return what was computed for a case, in the order in which it was."""
        file, name = self.places[case]
        with safetensors.safe_open(file, "pt") as opened:
            return {
                each.partition("/")[2]: opened.get_tensor(each)
                for each in opened.offset_keys()
                if each.startswith(f"{name}/")
            }

    def discard(self) -> None:
        """Remove the files."""
        for file, _ in self.places:
            file.unlink(missing_ok=True)


class Runners(ExitStack):
    """Runners that were started, and the folder that they read; closing it ends them."""

    def __init__(self) -> None:
        super().__init__()
        root = self.enter_context(tempfile.TemporaryDirectory(prefix="modelyard-"))
        self._root, self._numbers = Path(root), itertools.count()
        self._started: dict[tuple[str, Path], Runner] = {}

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """Make a folder that all of them read, and none writes."""
        return tempfile.TemporaryDirectory(dir=self._root)

    def run(
        self, where: Where, program: Program, cases: Iterable[Case], every_value: bool = False
    ) -> Outcome:
        """Run all cases, some at a time.

        Args:
            where: what runs them.
            program: the artifact, in a folder of `folder`; its file was judged.
            cases: inputs, by name.
            every_value: whether what is computed in between is kept.

        Raises:
            DoesNotRun: the runner's own sentence.
        """
        key = where[0].name, where[1]
        places: list[tuple[Path, str]] = []
        told: dict[str, str] = {}
        seconds = 0.0
        for chunk in _chunks(cases):
            names = [str(len(places) + place) for place in range(len(chunk))]
            given = {
                f"{name}/{key}": value.contiguous()
                for name, case in zip(names, chunk, strict=True)
                for key, value in case.items()
            }
            file, out = (self._root / f"{next(self._numbers)}.{of}" for of in ("cases", "out"))
            save_file(given, file)
            task = {
                "artifact": str(program.path),
                "format": program.format,
                "cases": str(file),
                "every_value": every_value,
                "options": {"inputs": program.inputs, "outputs": program.outputs},
            }
            if key not in self._started or self._started[key].process.returncode is not None:
                self._started[key] = runner = Runner(where, self._root)
                self.callback(runner.end)
            told = self._started[key].run(task, out)
            file.unlink()
            seconds += float(told.get("seconds", 0))
            places += [(out, name) for name in names]
        return Outcome(tuple(places), {**told, "seconds": f"{seconds:.3f}"})


def _chunks(cases: Iterable[Case]) -> Iterator[list[Case]]:
    chunk: list[Case] = []
    held = 0
    for case in cases:
        size = sum(value.nbytes for value in case.values())
        if chunk and held + size > CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
        chunk.append(case)
        held += size
    if chunk:
        yield chunk


class Runner:
    """A process that runs one task after the other, and may write a folder of its own."""

    def __init__(self, where: Where, root: Path) -> None:
        runtime, python = where
        self._name = runtime.name
        own = Path(tempfile.mkdtemp(dir=root), "task-own")
        own.mkdir()
        self._out, self._said = own / "out.safetensors", own.with_name("said")
        threads = thread_environment()
        self._options = {"threads": int(threads["OMP_NUM_THREADS"]), **runtime.options}
        walls = Sandbox(load_settings({})).plan(own, "none", "own", may_write=True)
        environment = {**choose_variables(os.environ), **threads}
        for name in [each for each in environment if each.startswith("PYTHON")]:
            del environment[name]  # what is said of this interpreter
        if walls is not None:
            reads = (python.parents[1], python.resolve().parents[1], RUNNERS, root)
            walls = replace(walls, reads=(*walls.reads, *map(str, reads)))
            environment |= own_variables(own)
        command = [
            *(sys.executable, "-P", "-m", "modelyard.plugins.recertify.walled"),
            json.dumps(walls and asdict(walls)),
            *(each.format(python=python) for each in runtime.command),
            str(RUNNERS / runtime.program),
        ]
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
                env=environment, cwd=own, start_new_session=True,
            )  # fmt: skip

    def run(self, task: Mapping[str, Any], out: Path) -> dict[str, str]:
        """Have a task run; return what is told of it.

        Args:
            task: without what is the runner's own.
            out: file that gets the outputs.

        Raises:
            DoesNotRun: the runner's own sentence; or it ended, or said nothing in time.
        """
        whole = {**task, "out": str(self._out), "options": {**task["options"], **self._options}}
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):  # why, it has said
            print(json.dumps(whole), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], TIMEOUT_S)[0]:
            self.end()
            raise DoesNotRun(f"{self._name} did not end within {TIMEOUT_S:g} s")
        if not (answer := self.process.stdout.readline()):
            self.end()
            text = self._said.read_text(encoding="utf-8", errors="replace")
            answer = ([*filter(str.strip, text.splitlines())] or ["it said nothing"])[-1]
        if answer.strip():
            raise DoesNotRun(answer.strip()[:600])
        try:
            self._out.rename(out)
            with safetensors.safe_open(out, "pt") as opened:
                return dict(opened.metadata() or {})
        except (OSError, safetensors.SafetensorError) as error:
            raise DoesNotRun(f"{self._name} left no outputs that can be read: {error}") from error

    def end(self) -> None:
        """End it, and what it has started."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, 9)
            self.process.communicate()
