"""The fresh process that runs artifacts beside the checkpoint's outputs, and its one caller.

`python -P -m modelyard.exporter.prove.checker FOLDER` opens artifacts as a worker opens them and
knows nothing of the model's Python. One process serves all formats of an export: it starts while the
first is written, and only ever holds one artifact and one case. Each line on its stdin is one of

    {"open": {"artifact": …, "format": …, "device": …, "outputs": [[name, dtype, tolerance], …]}}
    {"case": text}      whose tensors lie in FOLDER/case.pt, which is read with weights_only

and is answered by one line, {"measured": …} or {"error": …}.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from torch import Tensor

from modelyard.base.exits import describe_exit
from modelyard.base.threads import thread_environment
from modelyard.exporter.errors import ParityError, cause
from modelyard.handlers.models.backends import Artifact, open_artifact, type_name
from modelyard.handlers.proof.agree import compare, run

_LAST_WORDS_BYTES = 64 * 1024


class Checker:
    """The process from outside; it is started when it is entered, and again when it has died.

    Args:
        folder: an empty folder for the exchange; what lies there does not grow with the cases.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._end()

    def open(
        self,
        artifact: Path,
        format: str,
        device: str,
        outputs: Sequence[tuple[str, str, float]],
        trusted: Sequence[str] = (),
    ) -> None:
        """Load an artifact in the place of the one before.

        Args:
            artifact: the file, complete and closed.
            format: as in `modelyard.handlers.models.backends`.
            device: where it is to run.
            outputs: name, dtype and tolerance of each.
            trusted: operators that a program may call beside those of the list.

        Raises:
            ParityError: it does not load; as for `measure`, the message names no format.
        """
        task = {"artifact": str(artifact.absolute()), "format": format, "device": device}
        self._ask({"open": {**task, "outputs": outputs, "trusted": trusted}})

    def measure(
        self, case: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[dict[str, Any]]:
        """Run one case; return per output what `modelyard.handlers.proof.agree.compare` finds.

        Args:
            case: names it in messages.
            inputs: on the CPU.
            outputs: the checkpoint's.

        Raises:
            ParityError: the artifact does not run, or gives other outputs than these.
        """
        torch.save({"inputs": list(inputs), "outputs": list(outputs)}, self._folder / "case.pt")
        measured: list[dict[str, Any]] = self._ask({"case": case})["measured"]
        return measured

    def _start(self) -> subprocess.Popen[str]:
        """Start this module as a program; -P keeps files of the working folder from being imported.

        What libraries write to stderr goes to a file: nobody empties a pipe meanwhile.
        """
        command = [sys.executable, "-P", "-m", __name__, str(self._folder)]
        with (self._folder / "stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                env=os.environ | thread_environment(),
            )
        return self._process

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:
            raise ParityError(
                f"the process that checks the artifact ended with {describe_exit(self._end())} "
                f"and no result: {self._last_words()}"
            ) from error
        if "error" in answer:
            raise ParityError(answer["error"])
        return answer

    def _end(self) -> int:
        """Reap the process, so that the next question starts another; return its exit code."""
        assert self._process is not None
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was written for a process that is gone
                pipe.close()
        return process.wait()

    def _last_words(self) -> str:
        with (self._folder / "stderr").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "no message")


# -- inside the process ----------------------------------------------------------------------------


def main(folder: Path) -> None:
    """Answer every line of stdin; end with it."""
    with _own_stdout() as answers:
        artifact: Artifact | None = None
        specs: list[tuple[str, str, float]] = []
        for line in sys.stdin:
            question = json.loads(line)
            try:
                if "open" in question:
                    artifact = None  # before the next is there: memory holds one
                    artifact, specs = _open(question["open"]), question["open"]["outputs"]
                    answer: dict[str, Any] = {}
                else:
                    assert artifact is not None
                    answer = {"measured": _run_case(artifact, specs, folder, question["case"])}
            except ParityError as error:
                answer = {"error": str(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _own_stdout() -> TextIO:
    """Return stdout for the answers alone; what libraries print there goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _open(task: Mapping[str, Any]) -> Artifact:
    try:
        artifact = Path(task["artifact"])
        return open_artifact(artifact, task["format"], task["device"], trusted=task["trusted"])
    # Each format's library fails in its own ways; all mean that a worker could not load it.
    except Exception as error:
        raise ParityError(f"the artifact does not load: {cause(error)}") from error


def _run_case(
    artifact: Artifact, specs: Sequence[tuple[str, str, float]], folder: Path, case: str
) -> list[dict[str, Any]]:
    tensors = torch.load(folder / "case.pt", weights_only=True)
    try:
        outputs = run(artifact, tensors["inputs"])
    except Exception as error:
        raise ParityError(f"the artifact does not run at {case}: {cause(error)}") from error
    return _measure(specs, tensors["outputs"], outputs, case)


def _measure(
    specs: Sequence[tuple[str, str, float]],
    expected: Sequence[Tensor],
    actual: Sequence[Tensor],
    case: str,
) -> list[dict[str, Any]]:
    """Compare one case's outputs: their number, then dtypes and shapes, then values."""
    if len(actual) != len(expected):
        listed = ", ".join(name for name, _, _ in specs)
        raise ParityError(f"the artifact gives {len(actual)} outputs, expected {listed}")
    measured = []
    for (name, dtype, tolerance), target, tensor in zip(specs, expected, actual, strict=True):
        right = f"{dtype}[{','.join(map(str, target.shape))}]"
        if (seen := type_name(tensor)) != right:
            raise ParityError(f'output "{name}" is {seen} at {case}, expected {right}')
        measured.append(compare(target, tensor, tolerance))
    return measured


if __name__ == "__main__":
    main(Path(sys.argv[1]))
