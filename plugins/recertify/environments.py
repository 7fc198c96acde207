"""Versions that `--with` names → an interpreter that has them, and nothing of ours.

An environment is a venv in the user's cache, named by a digest of what it holds and of its Python.
It is built once, by one process at a time, and used only when it is whole.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from packaging.utils import canonicalize_name

from modelyard.archiver.errors import NothingCompared, WrongUsage
from modelyard.archiver.proven import installed_version
from modelyard.base.disk import build_once
from modelyard.plugins.recertify.runtimes import OTHERS, RUNTIMES, Runtime

HERE_PYTHON = Path(sys.executable)
SHOWN_LINES = 3
"""Lines of what pip or npm said, in an error."""
EXACT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)===?([0-9][A-Za-z0-9.+!_-]*)")


@dataclass(frozen=True)
class Environment:
    """An interpreter, and the runtimes that are looked at there."""

    name: str
    """What was asked for: `onnxruntime==1.32.0`, or the interpreter's path."""
    runtimes: tuple[Runtime, ...]
    python: Path
    requirements: tuple[str, ...] = ()
    """What is installed; nothing into an interpreter that is there already."""
    base: Path = HERE_PYTHON
    """The interpreter that it is made with."""

    def build(self) -> None:
        """Make it, unless it is there.

        Raises:
            NothingCompared: pip failed; nothing stays.
        """
        if self.requirements:
            build_once(self.python.parents[1], self._build)

    def _build(self) -> None:
        for command in self.commands():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
                said = [line for line in said if "err" in line.lower()] or said
                raise NothingCompared(
                    f"no environment with {self.name} can be made: {' | '.join(said[:SHOWN_LINES])}"
                )

    def commands(self) -> list[list[str]]:
        """Return what makes it, one after the other."""
        install = ["-m", "pip", "--python", str(self.python), "install", "--no-input", "--quiet"]
        return [
            [str(self.base), "-m", "venv", "--without-pip", str(self.python.parents[1])],
            [sys.executable, "-P", *install, "--disable-pip-version-check", *self.requirements],
        ]


class NodeEnvironment(Environment):
    """A folder of npm's, with a link to the `node` that runs what lies in it."""

    def commands(self) -> list[list[str]]:
        """Return what makes it, one after the other."""
        # No package's own script runs: what is downloaded is only read, behind walls.
        install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix"]
        packages = [text.replace("==", "@") for text in self.requirements]
        return [
            ["mkdir", "-p", str(self.python.parent)],
            ["ln", "-s", str(self.base), str(self.python)],
            [*install, str(self.python.parents[1]), *packages],
        ]


def plan(given: Sequence[str], python: Path | None = None) -> list[Environment]:
    """Return the environments that `--with` asks for, none of which is made.

    Packages of different names are in one environment; of a package that is named again, each
    further version is in a further one.

    Args:
        given: `NAME==VERSION`, in the order of the command line.
        python: another interpreter than this process's.

    Raises:
        WrongUsage: something else than exact versions, or nothing that runs artifacts.
    """
    versions: dict[str, list[str]] = {}
    for text in given:
        if not (found := EXACT.fullmatch(text)):
            raise WrongUsage(f"--with {text}: expected one exact version, as NAME==VERSION")
        versions.setdefault(canonicalize_name(found[1]), []).append(text)
    sets = [tuple(filter(None, each)) for each in zip_longest(*versions.values())]
    planned = []
    for each in sets:
        named = _names(each)
        runtimes = tuple(runtime for runtime in RUNTIMES.values() if runtime.package in named)
        if not runtimes:
            known = ", ".join(runtime.package for runtime in RUNTIMES.values())
            raise WrongUsage(f"--with {' '.join(each)} names nothing that runs artifacts: {known}")
        planned.append(_planned(" ".join(each), each, python or HERE_PYTHON, runtimes))
    return planned


def plan_other(text: str, python: Path | None = None) -> Environment:
    """Return the environment that `--runtime` asks for, which is not made.

    Args:
        text: a name of `OTHERS`, perhaps with `==VERSION`.
        python: another interpreter than this process's.

    Raises:
        WrongUsage: no such runtime, or the machine lacks a program that it needs.
    """
    name, _, version = text.partition("==")
    if name not in OTHERS:
        raise WrongUsage(f"--runtime {text}: expected one of {', '.join(OTHERS)}")
    runtime = OTHERS[name]
    for program, package in runtime.programs.items():
        if shutil.which(program) is None:
            raise WrongUsage(f"--runtime {name} needs {program}: apt-get install {package}")
    first = shutil.which(runtime.command[0]) or runtime.command[0]
    runtime = replace(runtime, command=(first, *runtime.command[1:]))
    version = version or runtime.version or installed_version(runtime.package).partition("+")[0]
    given = (f"{runtime.package}=={version}",)
    return _planned(text, given, python or HERE_PYTHON, (runtime,))


def _planned(
    name: str, given: tuple[str, ...], python: Path, runtimes: tuple[Runtime, ...]
) -> Environment:
    """Return an environment in its place, with these packages and what else the runtimes need."""
    node = shutil.which("node") if "node" in runtimes[0].programs else None
    python = Path(node or python)
    further = {each for runtime in runtimes for each in runtime.requirements}
    requirements = (*given, *sorted(further.difference(_names(given))))
    done = subprocess.run([python, "-VV"], capture_output=True, text=True, check=False)
    told = (done.stdout, str(python), platform.machine(), *requirements)
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "modelyard" / "environments" / key[:32]
    kind, program = (NodeEnvironment, "node") if node else (Environment, "python")
    return kind(name, runtimes, folder / "bin" / program, requirements, python)


def _names(given: Sequence[str]) -> list[str]:
    return [canonicalize_name(text.partition("==")[0]) for text in given]


def existing(python: Path) -> Environment:
    """Return the environment of an interpreter that is there, with whatever runtimes it has.

    Raises:
        WrongUsage: it has none.
    """
    code = (
        "import sys; from importlib.util import find_spec; print(*filter(find_spec, sys.argv[1:]))"
    )
    runtimes = RUNTIMES.values()
    names = [each.package for each in runtimes]
    try:
        done = subprocess.run(
            [python, "-s", "-c", code, *names], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise WrongUsage(f"--in {python} does not run: {error.strerror}") from error
    found = tuple(each for each in runtimes if each.package in done.stdout.split())
    if not found:
        raise WrongUsage(f"--in {python} has none of {', '.join(names)}")
    return Environment(str(python), found, Path(shutil.which(python) or python).absolute())
