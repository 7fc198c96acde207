"""Cases → what a runtime gives for them, computed by a runner in a process behind walls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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


def run(
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
        folder: a folder for files, of which the outputs' stay.
        every_value: whether what is computed in between is kept.

    Raises:
        DoesNotRun: the runner's own sentence.
    """
    places: list[tuple[Path, str]] = []
    told: dict[str, str] = {}
    seconds = 0.0
    for number, chunk in enumerate(_chunks(cases)):
        with _own_folder(folder) as own:
            out = folder / f"{own.parent.name}-{number}.out"
            names = [str(len(places) + place) for place in range(len(chunk))]
            given = {
                f"{name}/{key}": value.contiguous()
                for name, case in zip(names, chunk, strict=True)
                for key, value in case.items()
            }
            save_file(given, own / "cases.safetensors")
            told = _run(runtime, python, program, own, every_value)
            (own / "out.safetensors").rename(out)
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


@contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that a runner may write; what it wrote beside it goes with it."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        own = Path(name, "task-own")
        own.mkdir()
        yield own


def _run(
    runtime: Runtime, python: Path, program: Program, own: Path, every_value: bool
) -> dict[str, str]:
    threads = thread_environment()
    task = {
        "artifact": str(program.path),
        "format": program.format,
        "cases": str(own / "cases.safetensors"),
        "out": str(own / "out.safetensors"),
        "every_value": every_value,
        "options": {
            "inputs": program.inputs,
            "outputs": program.outputs,
            "threads": int(threads["OMP_NUM_THREADS"]),
            **runtime.options,
        },
    }
    (own / "task.json").write_text(json.dumps(task), encoding="utf-8")
    command = [each.format(python=python) for each in runtime.command]
    command += [str(RUNNERS / runtime.program), str(own / "task.json")]
    walled = [sys.executable, "-P", "-m", "modelyard.plugins.recertify.walled"]
    settings = load_settings({})
    walls = Sandbox(settings).plan(own, "none", "own", may_write=True)
    if walls is not None:
        real = python.resolve()
        reads = (python.parents[1], real.parents[1], RUNNERS, program.path.parent)
        walls = replace(walls, reads=(*walls.reads, *map(str, reads)))
    environment = {**choose_variables(os.environ), **threads}
    for name in [each for each in environment if each.startswith("PYTHON")]:
        del environment[name]  # what is said of this interpreter
    if walls is not None:
        environment |= own_variables(own)
    try:
        done = subprocess.run(
            [*walled, json.dumps(walls and asdict(walls)), *command],
            capture_output=True, text=True, check=False, env=environment, cwd=own,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise DoesNotRun(f"{runtime.name} did not end within {TIMEOUT_S:g} s") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise DoesNotRun(said[-1][:600])
    try:
        with safetensors.safe_open(own / "out.safetensors", "pt") as opened:
            return dict(opened.metadata() or {})
    except (OSError, safetensors.SafetensorError) as error:
        raise DoesNotRun(f"{runtime.name} left no outputs that can be read: {error}") from error
