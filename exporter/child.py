"""A fresh process that answers questions, one JSON object per line: its caller, and its own loop.

`python -P -m MODULE FOLDER` keeps files of the working folder from being imported. Large values lie
as files in FOLDER, where what libraries print goes, too: nobody empties a pipe meanwhile.

A command that has imported what the process needs, and nothing of an author, forks it before it
does anything else (`fork_ahead`): importing torch costs 1.3 seconds.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from modelyard.base.exits import describe_exit
from modelyard.base.threads import thread_environment
from modelyard.exporter.errors import cause

_LAST_WORDS_BYTES = 64 * 1024


class _Forked:
    """A fork of this process, with what `Child` uses of subprocess.Popen."""

    def __init__(self, main: Callable[[Path], None]) -> None:
        (asked, ask), (answered, answer) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ask)
            os.close(answered)
            _serve_fork(main, asked, answer)
        os.close(asked)
        os.close(answer)
        self.stdin: IO[str] = os.fdopen(ask, "w", encoding="utf-8")
        self.stdout: IO[str] = os.fdopen(answered, encoding="utf-8")
        self._status: int | None = None

    def wait(self, patience_s: float | None = None) -> int:
        """Return the exit code, negative for a signal, once the process has ended."""
        if self._status is None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], patience_s)[0]:
                    raise subprocess.TimeoutExpired("fork", patience_s or 0)
            finally:
                os.close(ended)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def kill(self) -> None:
        """End the process."""
        os.kill(self.pid, signal.SIGKILL)


def _serve_fork(main: Callable[[Path], None], asked: int, answer: int) -> None:
    """Answer the questions of a fork, whose first line names the folder; never return."""
    code = 1
    try:
        os.dup2(asked, 0)
        os.dup2(answer, 1)
        os.closerange(3, max(asked, answer) + 1)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as it
        folder = Path(sys.stdin.readline().rstrip("\n"))
        if folder.name:  # else its caller had nothing to ask
            with (folder / "stderr").open("wb") as stderr:
                os.dup2(stderr.fileno(), 2)
            sys.path[:] = [path for path in sys.path if path and Path(path) != Path.cwd()]
            main(folder)
        code = 0
    finally:
        os._exit(code)


_ahead: dict[str, _Forked] = {}
"""Module → the fork that waits for the first question to it."""


def fork_ahead(module: str, main: Callable[[Path], None]) -> None:
    """Fork the process that the next `Child` of a module uses; only where nothing runs beside.

    Args:
        module: what a `Child` is made with.
        main: answers the questions, for a folder, until they end.
    """
    if sys.platform == "linux" and module not in _ahead:
        _ahead[module] = _Forked(main)


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
        self._forked = _ahead.pop(module, None) if threads is None else None
        self._process: subprocess.Popen[str] | _Forked | None = None

    def start(self) -> subprocess.Popen[str] | _Forked:
        """Start the process, which imports its libraries meanwhile."""
        forked, self._forked = self._forked, None
        if forked is not None:
            forked.stdin.write(f"{self.folder}\n")
            forked.stdin.flush()
            self._process = forked
            return forked
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

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Return what a method of the object in the process gives; "error" is why it failed.

        Raises:
            ChildEnded: there is no answer.
        """
        process = self._process or self.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"method": method, **arguments}) + "\n")
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


def answer_questions(methods: object) -> None:
    """Answer every line of stdin inside the process by a method of an object, until it ends.

    What libraries print on stdout goes to stderr: stdout is for the answers alone.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answers:
        for line in sys.stdin:
            question = json.loads(line)
            try:
                answer = getattr(methods, question.pop("method"))(**question) or {}
            # Every backend fails in its own ways, and the author's code in any.
            except Exception as error:
                answer = {"error": cause(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
