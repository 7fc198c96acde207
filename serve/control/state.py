"""Files of the state folder: written whole or not at all."""

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelyard.archiver.untrusted.json import parse_json
from modelyard.base.disk import flush
from modelyard.serve.errors import StartError

MAX_FILE_BYTES = 64 << 20


class StateDir:
    """The places in one server's state folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.server_file = root / "server.json"
        """Pid and addresses of the running server (JSON)."""
        self.key_file = root / "keys.json"
        """Bearer tokens (JSON, mode 0600)."""
        self.models_file = root / "models.json"
        """What is registered (JSON): the last acknowledged change."""
        self.previous_models_file = root / "models.previous.json"
        """What was registered before the last change; read when the other file is damaged."""
        self.log_file = root / "logs" / "server.log"
        """The server's log."""
        self.access_file = root / "logs" / "access.log"
        """A line for each request, where that is asked for."""
        self.unpacked = root / "unpacked"
        """Folder of unpacked archives; emptied at every start."""
        self.lock_file = root / "lock"
        """Held by the running server for as long as it lives."""

    def create(self) -> None:
        """Make the folders, readable by their owner only."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.log_file.parent, self.unpacked):
            folder.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder: one server each. A dead server's lock is free by itself.

        Raises:
            StartError: another server runs; the message says where.
        """
        with self.lock_file.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StartError(describe_running(self.running())) from None
            yield

    def is_locked(self) -> bool:
        """Return whether a server holds the folder."""
        try:
            with self.lock_file.open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise StartError(self.why_unusable(error)) from error
        return False

    def why_unusable(self, error: OSError) -> str:
        """Return what is wrong with the folder, and what to do."""
        reason = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        return (
            f"cannot use the state folder {self.root}: {reason}; --state-dir, or the variable "
            "MODELYARD_STATE_DIR, names another"
        )

    def running(self) -> dict[str, Any] | None:
        """Return the running server's file, or None when none runs."""
        if not self.is_locked():
            return None
        try:
            content = read_json(self.server_file)
        except (OSError, ValueError):
            return {}  # it is just starting
        return content if isinstance(content, dict) and content.keys() >= _OF_A_SERVER else {}

    def how_it_died(self) -> str | None:
        """Return that the last server died, where none runs: one that stops takes its file away."""
        try:
            pid = read_json(self.server_file)["pid"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return f"the server of this state folder, pid {pid}, died; {self.log_file} may say why"


_OF_A_SERVER = {"pid", "inference", "management", "metrics", "log", "started", "drain_timeout_s"}
"""Keys without one of which a server's file is damaged."""


def describe_running(server: dict[str, Any] | None) -> str:
    """Return that a server runs, and where."""
    if not server:
        return "a server is starting in this state folder; see `modelyard serve status`"
    return (
        f"already running: pid {server['pid']}, inference {server['inference']}, "
        f"management {server['management']}; stop it with `modelyard serve stop`, or give another "
        "--state-dir and --port to run a second one"
    )


def read_json(file: Path) -> Any:
    """Return what a file of the state folder holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not strict JSON, or too long or too deep for a file of ours.
    """
    with file.open("rb") as opened:
        return parse_json(opened.read(MAX_FILE_BYTES + 1), MAX_FILE_BYTES)


def write_json(file: Path, content: object) -> None:
    """Replace a file by new JSON, as `write_file` does."""
    write_file(file, json.dumps(content, indent=2).encode())


def write_file(file: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file's content, atomically and durably.

    A reader sees the old content or the new one; so does the next start after a power cut.
    """
    fd, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(content)
            out.flush()
            os.fchmod(out.fileno(), mode)
            os.fsync(out.fileno())
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    flush(file.parent)


APIS = ("management", "inference")


def make_keys(file: Path) -> dict[str, str]:
    """Write a new key per API (256 random bits) to `file`, mode 0600, and return them."""
    keys = {api: secrets.token_urlsafe(32) for api in APIS}
    write_json(file, keys)
    return keys


def read_key(file: Path, api: str) -> str:
    """Return the key of one API from the key file.

    Raises:
        StartError: there is no such file or key, or it belongs to somebody else.
    """
    try:
        return str(read_json(file)[api])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartError(
            f"no {api} key in {file} ({type(error).__name__}); a server writes it when it starts"
        ) from error
