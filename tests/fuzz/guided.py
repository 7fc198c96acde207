"""Fuzz readers of bytes, led by which of our lines each input reaches.

    python -m tests.fuzz.guided [READER …] [--seconds 600] [--findings FOLDER]

Atheris (libFuzzer) changes what `readers.py` gives and what is kept of earlier runs. With --keep,
the shortest inputs that together reach all lines that were reached replace what was kept. A finding
is an error beside the refusals, a crash, more than 5 s or 2 GB for one input; it is written
to FOLDER, and to be kept in the corpus once it is mended: `make test` reads all of it.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.readers import Reader

MOST_BYTES = 4096
"""Longest input that is kept."""


def main() -> int:
    """Fuzz one reader after the other, each in a process of its own; return 1 at a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help="default: all")
    parser.add_argument("--seconds", type=float, default=600, help="for each")
    parser.add_argument("--findings", type=Path, default=Path("build/findings"))
    parser.add_argument("--keep", action="store_true", help="add to the corpus what is new")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return _fuzz(options.readers[0], options.one, options.seconds, options.findings)
    from tests.fuzz.readers import all_readers

    readers = all_readers()
    status = 0
    for name in options.readers or readers:
        folder = options.findings.absolute() / name.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="modelyard-corpus-") as corpus:
            command = [sys.executable, "-m", "tests.fuzz.guided", name, f"--one={corpus}"]
            command += [f"--seconds={options.seconds}", f"--findings={folder}"]
            ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            found = sorted(folder.iterdir())
            counted = [line for line in ran.stderr.splitlines() if line.startswith("Done ")]
            said = counted[-1] if counted else ran.stderr[-2000:]
            sys.stdout.write(f"{name}: {said}; findings: {len(found) or 'none'}\n")
            sys.stdout.flush()
            if found or ran.returncode:
                status = 1
            elif options.keep:
                _keep(Path(corpus), readers[name])
    return status


def _keep(found: Path, reader: "Reader") -> None:
    """Replace its corpus: the shortest inputs first, each that reaches a line of ours anew."""
    kept, seeds = reader.corpus, reader.seeds()
    reached = set().union(*(_lines(reader, content) for content in seeds))
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for content in sorted((each.read_bytes() for each in found.iterdir()), key=len):
        lines = _lines(reader, content) if len(content) <= MOST_BYTES else set()
        if not lines <= reached:
            reached |= lines
            (kept / sha256(content).hexdigest()[:16]).write_bytes(content)


def _lines(reader: "Reader", content: bytes) -> set[tuple[str, int]]:
    """Return which lines of ours an input reaches."""
    lines: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        if "/tests/" in file or "modelyard" not in frame.f_globals.get("__name__", ""):
            return None
        lines.add((file, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        with contextlib.suppress(*reader.refusals):
            reader.read(content)
    finally:
        sys.settrace(None)
    return lines


def _fuzz(name: str, corpus: Path, seconds: float, findings: Path) -> int:
    import atheris  # type: ignore[import-untyped]

    # The readers' own lines only: to count those of torch takes minutes and leads nowhere.
    with atheris.instrument_imports(include=["modelyard"], enable_loader_override=False):
        from tests.fuzz.readers import all_readers
    reader = all_readers()[name]
    for number, content in enumerate(reader.known()):
        (corpus / f"seed-{number}").write_bytes(content)

    def one(data: bytes) -> None:
        with contextlib.suppress(*reader.refusals):
            reader.read(data)

    arguments = [
        f"-max_total_time={seconds:.0f}", "-timeout=5", "-rss_limit_mb=2048", "-len_control=0",
        f"-max_len={max(MOST_BYTES, 2 * max(map(len, reader.seeds())))}",
        f"-artifact_prefix={findings}/", str(corpus),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
