"""A fresh process that answers questions, one JSON object per line: its caller, and its own loop.

`python -P -m MODULE FOLDER` keeps files of the working folder from being imported. Large values lie
as files in FOLDER, where what libraries print goes, too: nobody empties a pipe meanwhile.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from modelyard.base.exits import describe_exit
from modelyard.base.threads import thread_environment

_LAST_WORDS_BYTES = 64 * 1024


class ChildEnded(Exception):
    """The process is gone without an answer; the message says how, with its last words."""


class Child:
    """The process from outside; it starts with the first question, and again when it has died.

    Args:
        module: what runs in it.
        folder: an empty folder for the exchange.
        threads: the number for torch and for onnxruntime; None for those of this process.
    """

    def __init__(self, module: str, folder: Path, threads: int | None = None) -> None:
        self.folder = folder.absolute()
        self._command = [sys.executable, "-P", "-m", module, str(self.folder)]
        self._environment = os.environ | thread_environment(threads)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """Start the process, which imports its libraries meanwhile."""
        with (self.folder / "stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                env=self._environment,
            )
        return self._process

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a question.

        Raises:
            ChildEnded: there is none.
        """
        process = self._process or self.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:
            ended = describe_exit(self.close(patience_s=None))
            raise ChildEnded(f"ended with {ended} and no result: {self._last_words()}") from error
        return answer

    def close(self, patience_s: float | None = 0) -> int:
        """End the process, so that the next question starts another; return its exit code.

        Args:
            patience_s: how long it may take to end by itself, now that its input ends; None for
                one that has ended.
        """
        if self._process is None:
            return 0
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what was written for a process that is gone
                if pipe is not None:
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(patience_s)
        process.kill()
        return process.wait()

    def _last_words(self) -> str:
        with (self.folder / "stderr").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "no message")


def answer_questions(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer every line of stdin inside the process, until it ends.

    What libraries print on stdout goes to stderr: stdout is for the answers alone.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answers:
        for line in sys.stdin:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
            answers.flush()
