"""Where lines of logs go: files of a size, of which full ones are put aside; and the console.

Threads write them: neither a slow disk nor a reader that has stopped holds up whoever logs.
"""

import asyncio
import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

READ_BYTES = 1 << 16
"""Size of one read of a pipe: what a pipe holds."""
WAITING_BYTES = 8 << 20
"""Lines that wait for the disk, or for a reader of the console; what comes beyond is lost."""
CLOSE_S = 2.0
"""Time that the last lines have."""
MOST_LEFT_BYTES = 1 << 20
"""Read of a pipe whose worker has ended; a process that it left behind may write without end."""


class WriterThread:
    """A thread that writes lines.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], int]] = queue.SimpleQueue()
        self._taken = self._written = self._lost = 0
        threading.Thread(target=self._run, name=name, daemon=True).start()
        atexit.register(self.finish, lambda: None, CLOSE_S)

    def put(self, write: Callable[[bytes], int], data: bytes) -> int:
        """Have lines written; return how many are lost since the last time."""
        if self._taken - self._written > WAITING_BYTES:
            return data.count(b"\n")
        self._taken += len(data)
        self._waiting.put((partial(write, data), len(data)))
        lost, self._lost = self._lost, 0
        return lost

    def finish(self, end: Callable[[], object], wait_s: float) -> None:
        """Call something after what was put so far, and wait a short while for that."""
        done = threading.Event()
        self._waiting.put((end, 0))
        self._waiting.put((done.set, 0))
        done.wait(wait_s)

    def _run(self) -> None:
        while True:
            run, size = self._waiting.get()
            self._lost += run() or 0
            self._written += size


@cache
def files() -> WriterThread:
    """Return the thread that writes all files."""
    return WriterThread("log-files")


@dataclass(eq=False)
class LogFile:
    """A file that is put aside when it is full: FILE.1 is the newest of those.

    Raises:
        OSError: it cannot be opened.
    """

    file: Path
    """Its folder is made."""
    max_bytes: int | None
    """Its size; None never puts it aside."""
    keep: int
    """Files put aside; beyond that the oldest goes."""
    appends: bool = True
    """Whether what is there stays."""
    on_open: Callable[[int], object] = lambda descriptor: None
    """Called with the descriptor of each file that is opened."""
    _descriptor = -1

    def __post_init__(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._open(0 if self.appends else os.O_TRUNC)

    def append(self, data: bytes) -> int:
        """Write lines, and return how many were lost; a file is full after a whole line."""
        limit, lost = self.max_bytes, 0
        while limit is not None and self._size + len(data) >= limit:
            end = data.find(b"\n", max(0, limit - self._size - 1)) + 1 or len(data)
            lost += self._put(data[:end])
            data = data[end:]
            self._roll()
        return lost + self._put(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _open(self, flags: int = 0) -> None:
        """Open the file, where there may be one already, which stays open when that fails."""
        flags |= os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.file, flags, 0o666)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._size = os.fstat(self._descriptor).st_size
        self.on_open(descriptor)

    def _put(self, data: bytes) -> int:
        self._size += len(data)
        return write_all(self._descriptor, data) if data else 0

    def _roll(self) -> None:
        """Put the file aside; where that fails it goes on as it is."""
        try:
            self._put_aside()
            self._open()
        except OSError:
            self._size = 0  # tried again after as many bytes

    def _put_aside(self) -> None:
        """Rename the file, so that another one can be opened.

        Raises:
            OSError: it cannot be renamed.
        """
        make_room(lambda index: Path(f"{self.file}.{index}"), self.keep)
        self.file.replace(f"{self.file}.1")


def write_all(descriptor: int, data: bytes) -> int:
    """Write everything; return how many lines could not be."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:  # the disk is full, or nobody reads any more
        return bytes(rest).count(b"\n")
    return 0


def make_room(name: Callable[[int], Path], keep: int) -> None:
    """Make room for a file of index 1; the oldest goes."""
    for index in range(keep - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            name(index).replace(name(index + 1))


class LogWriter:
    """A file that a thread writes."""

    def __init__(self, file: LogFile) -> None:
        self._write, self._end, self._writer = file.append, file.close, files()

    def append(self, data: bytes) -> int:
        """Have lines written; return how many are lost since the last time."""
        return self._writer.put(self._write, data)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """End once all is written, and wait a short while for that."""
        self._writer.finish(self._end, wait_s)


class Console(LogWriter):
    """Standard output or standard error, by its descriptor; it has a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        self._write, self._end = partial(write_all, descriptor), lambda: None
        self._writer = WriterThread("log-console")


class Pipe:
    """A pipe that is read on the event loop, so that who writes into it waits only for that.

    Args:
        take: called with what comes, and with nothing at its end.
        gather_s: time from a read of less than a pipe holds to the next one: to be woken for each
            line takes more of the event loop than the line is worth.
        read_bytes: bytes of one read.
    """

    def __init__(
        self, take: Callable[[bytes], None], gather_s: float = 0, read_bytes: int = READ_BYTES
    ) -> None:
        self._take = take
        self._read_bytes = read_bytes
        self._gather_s = gather_s
        reading, self.writing = os.pipe()
        self._pipe = os.fdopen(reading, "rb", 0)
        self._loop = asyncio.get_running_loop()
        os.set_blocking(reading, False)
        self._watch()

    def _watch(self) -> None:
        if not self._pipe.closed:
            self._loop.add_reader(self._pipe.fileno(), self._read)

    def _read(self) -> bool:
        """Read what is there; return whether there may be more."""
        if self._pipe.closed:
            return False
        try:
            data = os.read(self._pipe.fileno(), self._read_bytes)
        except BlockingIOError:
            return False
        self._take(data)
        if not data:
            self._close()
        elif self._gather_s and len(data) < self._read_bytes:
            self._loop.remove_reader(self._pipe.fileno())
            self._loop.call_later(self._gather_s, self._watch)
        return bool(data)

    def _close(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    def finish(self) -> None:
        """Take the rest, after its writer has ended, and close the pipe."""
        for _ in range(MOST_LEFT_BYTES // self._read_bytes):
            if not self._read():
                break
        if not self._pipe.closed:  # a process that it has left behind holds the other end
            self._close()
            self._take(b"")
