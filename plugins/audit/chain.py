"""A file of entries, each of which holds the SHA-256 of the line before it.

    {"n":2,"at":"2026-11-26T14:00:00.000Z","who":"ops","what":"promoted",…,"before":"9f86d0…"}

Whoever changes, removes, inserts or moves a line breaks the chain at the line behind it, unless all
lines from there on are written anew. That, and lines missing at the end, only shows beside a head
that somebody keeps elsewhere: of the state file, or of an export.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from modelyard.archiver.untrusted.json import parse_json
from modelyard.base.disk import flush

FIRST = "0" * 64
"""What stands in the first entry for the line before it."""
MOST_LINE_BYTES = 64 << 10
"""Longest line; what is longer is not an entry of ours."""
MOST_TEXT = 2000
"""Characters of one text; the rest is cut."""
OWN = ("n", "at", "who", "what", "before")
"""Keys that every entry has, in order but for the last, which ends the line."""


@dataclass(frozen=True)
class Head:
    """Where a chain ends."""

    entries: int = 0
    sha256: str = FIRST
    """SHA-256 of the last line, without its line break."""

    def to_json(self) -> dict[str, Any]:
        """Return it as the state file and exports hold it."""
        return {"entries": self.entries, "sha256": self.sha256}


@dataclass(frozen=True)
class Chain:
    """What was read of a file."""

    entries: tuple[dict[str, Any], ...]
    head: Head
    torn: bytes = b""
    """Half a line at the end, which was being written when the server was killed."""
    broken: str = ""
    """Where and how the chain breaks; empty where it holds. Entries are those before that."""
    heads: tuple[str, ...] = ()
    """SHA-256 of each line."""


def format_entry(entry: Mapping[str, Any]) -> bytes:
    """Return the line of an entry, without its line break: one form, so that it can be repeated."""
    return json.dumps(entry, separators=(",", ":"), allow_nan=False).encode()


def read_chain(lines: bytes) -> Chain:
    """Follow a chain from its first line on, as far as it holds."""
    whole, _, torn = lines.rpartition(b"\n")
    return follow(whole.split(b"\n") if whole else [], torn)


def follow(lines: Iterable[bytes], torn: bytes = b"") -> Chain:
    """Follow a chain of lines."""
    entries: list[dict[str, Any]] = []
    heads: list[str] = []
    head = Head()
    for number, line in enumerate(lines, 1):
        try:
            entry = _parse(line)
            problem = _problem(entry, head)
        except ValueError as error:
            problem = f"it is not an entry ({error}): it was changed, or written by something else"
        if problem:
            return Chain(tuple(entries), head, torn, f"line {number}: {problem}", tuple(heads))
        head = Head(number, hashlib.sha256(line).hexdigest())
        entries.append(entry)
        heads.append(head.sha256)
    return Chain(tuple(entries), head, torn, "", tuple(heads))


def _parse(line: bytes) -> dict[str, Any]:
    entry = parse_json(line, MOST_LINE_BYTES)
    if not isinstance(entry, dict) or not set(OWN) <= entry.keys():
        raise ValueError(f"expected an object with {', '.join(OWN)}")
    if format_entry(entry) != line:
        raise ValueError("it is not written as entries are")
    return entry


def _problem(entry: Mapping[str, Any], head: Head) -> str:
    """Return why an entry does not follow a head; empty where it does."""
    if entry["before"] != head.sha256:
        where = f"line {head.entries}" if head.entries else "the beginning"
        return (
            f"it does not follow {where}: that line was changed after this one was written, or "
            "lines were removed, inserted or moved here"
        )
    if entry["n"] != head.entries + 1:
        return f"its number is {entry['n']}; expected {head.entries + 1}"
    return ""


def check_head(chain: Chain, known: Mapping[str, Any], whose: str) -> str:
    """Return how a chain contradicts a head that was kept elsewhere; empty where it goes on.

    Args:
        known: `entries` and `sha256`.
        whose: whose head it is, for the message.
    """
    count, digest = known.get("entries"), known.get("sha256")
    if not isinstance(count, int) or not isinstance(digest, str) or count < 0:
        return f"{whose} holds no head of this file"
    if count == 0:
        return ""
    if len(chain.heads) < count:
        missing = count - len(chain.heads)
        return f"{missing} entries are missing at the end: {whose} knows {count}"
    if chain.heads[count - 1] != digest:
        return f"line {count} is not the one that {whose} knows: entries up to it were written anew"
    return ""


class Trail:
    """The file of a running server, which only it appends to.

    Raises:
        OSError: it cannot be read or written.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        content = file.read_bytes() if file.exists() else b""
        self.found = read_chain(content)
        """What was there before."""
        whole = content[: len(content) - len(self.found.torn)]
        lines = whole.splitlines()
        self.head = Head(len(lines), hashlib.sha256(lines[-1]).hexdigest() if lines else FIRST)
        self._descriptor = os.open(
            file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        if self.found.torn:  # it was never acknowledged, and would spoil the next line
            os.ftruncate(self._descriptor, len(whole))
        flush(file.parent)

    def append(self, who: str, what: str, **more: Any) -> None:
        """Write an entry, durably.

        Raises:
            OSError, TypeError, ValueError: it could not be written; nothing of it is left.
        """
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        said = {name: _cut(value) for name, value in more.items() if value not in (None, "")}
        entry = {"n": self.head.entries + 1, "at": at, "who": who, "what": what, **said}
        line = format_entry({**entry, "before": self.head.sha256})
        if len(line) > MOST_LINE_BYTES:
            short = {
                **entry,
                "evidence": f"{len(line)} bytes are too many",
                "before": self.head.sha256,
            }
            line = format_entry(short)
        size = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, line + b"\n") != len(line) + 1:
                raise OSError("the disk is full")
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise
        self.head = Head(entry["n"], hashlib.sha256(line).hexdigest())

    def close(self) -> None:
        """Write nothing more."""
        os.close(self._descriptor)


def _cut(value: Any) -> Any:
    return value[:MOST_TEXT] if isinstance(value, str) else value
