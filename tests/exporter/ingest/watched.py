"""Child process: read files under an audit hook, and print what each did beside being read."""

import io
import json
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from modelyard.exporter.errors import ExportError
from modelyard.exporter.ingest import read_checkpoint
from modelyard.exporter.ingest.plain import Placeholder

_FORBIDDEN = (
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn"),
    *("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod"),
    *("os.putenv", "os.unsetenv", "os.truncate", "os.kill", "shutil", "tempfile"),
    *("subprocess", "socket", "urllib", "http", "ftplib", "smtplib", "webbrowser"),
    *("exec", "compile", "import", "ctypes", "pickle.find_class", "marshal", "code.__new__"),
    *("builtins.input", "builtins.breakpoint", "sys._getframe", "object.__setattr__"),
)
# Numpy and torch ask for these while they work, whatever the file is.
_QUIET = frozenset(["sys._getframe", "object.__setattr__"])
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_events: list[str] = []
_is_watching = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _is_watching:
        return
    if event == "open":
        _, mode, flags = args
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (
            isinstance(flags, int) and flags & _WRITES
        ):
            _events.append(f"open for writing: {args[0]!r}")
    elif event.startswith(_FORBIDDEN) and event not in _QUIET:
        _events.append(f"{event}: {str(args)[:200]}")


@contextmanager
def _watching() -> Iterator[list[str]]:
    global _is_watching
    _events.clear()
    _is_watching = True
    try:
        yield _events
    finally:
        _is_watching = False


def _read(path: Path) -> str:
    """Read a checkpoint and look at everything in it; give what a person is told."""
    try:
        found = read_checkpoint(path)
        total = sum(tensor.to_dense().double().sum().item() for tensor in found.tensors.values())
        placeholders = [v for v in found.hyper_parameters.values() if isinstance(v, Placeholder)]
        return f"{found.kind} {found.refused} {found.notes} {found.training} {placeholders} {total}"
    except ExportError as error:
        return f"refused: {error}"


def _naive(how: str, path: Path) -> str:
    """Open a file as a careless program would."""
    name, _, inner = how.partition(" ")
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "torch":
            torch.load(path / inner if inner else path, weights_only=False)
        elif name == "pickle":
            pickle.load(io.BytesIO((path / inner if path.is_dir() else path).read_bytes()))
        elif name == "pt2":
            torch.export.load(path)
        elif name == "dcp":
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

            dcp_to_torch_save(path, path.parent / "converted.pt")
    return ""


def main() -> None:
    """Take `[[name, path, how], …]` on standard input; `how` is empty for our own reader."""
    jobs = json.load(sys.stdin)
    warm = Path(sys.argv[1])
    for path in sorted(warm.iterdir()):
        _read(path)  # imports that any first file would cause
    "a".encode("cp437")  # as zipfile does for names of Python's own zips
    sys.addaudithook(_hook)
    results = {}
    for name, path, how in jobs:
        with _watching() as events:
            said = _naive(how, Path(path)) if how else _read(Path(path))
        results[name] = {"said": said, "events": list(events)}
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main()
