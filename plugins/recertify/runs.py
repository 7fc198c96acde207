"""Cases → what a runtime gives for them, computed by a runner in a process behind walls.

A runner stays for further tasks, so that its library is imported once for many archives.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from modelyard.archiver.errors import DoesNotRun
from modelyard.base.threads import thread_environment
from modelyard.plugins.recertify.runtimes import RUNNERS, Runtime
from modelyard.serve.control.sandbox import Sandbox, own_variables
from modelyard.serve.settings import load_settings
from modelyard.serve.walls.environment import choose_variables

TIMEOUT_S = 600.0
CHUNK_BYTES = 64 << 20
"""Inputs that a runner gets at a time, unless one case alone has more."""

Case = Mapping[str, Tensor]
"""Input → its values."""


@dataclass(frozen=True)
class Program:
    """An artifact as a runner is told of it."""

    path: Path
    format: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


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
        with file.open("rb") as read:
            header = json.loads(read.read(int.from_bytes(read.read(8), "little")))
        with safetensors.safe_open(file, "pt") as opened:
            return {
                each.partition("/")[2]: opened.get_tensor(each)
                for each in header
                if each.partition("/")[0] == name and each != "__metadata__"
            }

    def discard(self) -> None:
        """Remove the files."""
        for file, _ in self.places:
            file.unlink(missing_ok=True)


class Runners:
    """Runners that were started, and the folder that they read."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._started: dict[tuple[str, Path], Runner] = {}

    def __enter__(self) -> Self:
        """Make the folder."""
        made = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="modelyard-"))
        self._root = Path(made)
        return self

    def __exit__(self, *exception: object) -> None:
        """End them all, and remove it."""
        for runner in self._started.values():
            runner.end()
        self._stack.close()

    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """Make a folder that all of them read, and none writes."""
        return tempfile.TemporaryDirectory(dir=self._root)

    def run(
        self,
        runtime: Runtime,
        python: Path,
        program: Program,
        cases: Iterable[Case],
        folder: Path,
        every_value: bool = False,
    ) -> Outcome:
        """Run all cases, some at a time.

        Args:
            runtime: what runs them.
            python: interpreter of its environment.
            program: the artifact; its file was judged.
            cases: inputs, by name.
            folder: of `folder`; the outputs' files stay in it.
            every_value: whether what is computed in between is kept.

        Raises:
            DoesNotRun: the runner's own sentence.
        """
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
            file, out = (Path(tempfile.mkstemp(dir=folder)[1]) for _ in range(2))
            save_file(given, file)
            task = {
                "artifact": str(program.path),
                "format": program.format,
                "cases": str(file),
                "every_value": every_value,
                "options": {"inputs": program.inputs, "outputs": program.outputs},
            }
            runner = self._started.get((runtime.name, python))
            if runner is None or runner.has_ended:
                runner = Runner(runtime, python, self._root)
                self._started[runtime.name, python] = runner
            told = runner.run(task, out)
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

    def __init__(self, runtime: Runtime, python: Path, root: Path) -> None:
        self._name = runtime.name
        own = Path(tempfile.mkdtemp(dir=root), "task-own")
        own.mkdir()
        self._out, self._said = own / "out.safetensors", own.with_name("said")
        threads = thread_environment()
        self._options = {"threads": int(threads["OMP_NUM_THREADS"]), **runtime.options}
        command = [each.format(python=python) for each in runtime.command]
        walls = Sandbox(load_settings({})).plan(own, "none", "own", may_write=True)
        environment = {**choose_variables(os.environ), **threads}
        for name in [each for each in environment if each.startswith("PYTHON")]:
            del environment[name]  # what is said of this interpreter
        if walls is not None:
            reads = (python.parents[1], python.resolve().parents[1], RUNNERS, root)
            walls = replace(walls, reads=(*walls.reads, *map(str, reads)))
            environment |= own_variables(own)
        walled = [sys.executable, "-P", "-m", "modelyard.plugins.recertify.walled"]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [*walled, json.dumps(walls and asdict(walls)), *command,
                 str(RUNNERS / runtime.program)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
                env=environment, cwd=own, start_new_session=True,
            )  # fmt: skip

    @property
    def has_ended(self) -> bool:
        """Whether it runs nothing any more."""
        return self._process.returncode is not None

    def run(self, task: Mapping[str, Any], out: Path) -> dict[str, str]:
        """Have a task run; return what is told of it.

        Args:
            task: without what is the runner's own.
            out: file that gets the outputs.

        Raises:
            DoesNotRun: the runner's own sentence; or it ended, or said nothing in time.
        """
        whole = {**task, "out": str(self._out), "options": {**task["options"], **self._options}}
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(whole).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # why, it has said
        if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
            self.end()
            raise DoesNotRun(f"{self._name} did not end within {TIMEOUT_S:g} s")
        answer = self._process.stdout.readline().decode("utf-8", "replace")
        if not answer:
            self.end()
            text = self._said.read_text(encoding="utf-8", errors="replace")
            raise DoesNotRun(([*filter(str.strip, text.splitlines())] or ["it said nothing"])[-1])
        if answer.strip():
            raise DoesNotRun(answer.strip())
        try:
            self._out.rename(out)
            with safetensors.safe_open(out, "pt") as opened:
                return dict(opened.metadata() or {})
        except (OSError, safetensors.SafetensorError) as error:
            raise DoesNotRun(f"{self._name} left no outputs that can be read: {error}") from error

    def end(self) -> None:
        """End it, and what it has started."""
        if not self.has_ended:
            os.killpg(self._process.pid, 9)
            self._process.communicate()
