"""Archives that are folders, read through one open folder descriptor."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.untrusted import container
from modelyard.archiver.untrusted.container import Damaged, Member
from modelyard.archiver.untrusted.names import name_problems, quoted

_MAX_DEPTH = 64


class FolderReader:
    """A folder behind one descriptor: renaming or replacing it changes nothing that is read.

    Files below it may still change. What was hashed is compared with what is used whenever a file
    is read again, as for the other containers. No path is followed through a link.
    """

    kind = "folder"

    def __init__(self, path: Path) -> None:
        """Open the folder, or the one folder that is all it holds.

        Raises:
            ArchiveError: it cannot be read.
        """
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            inside = _names(self._fd)
            if len(inside) == 1 and stat.S_ISDIR(_status(self._fd, inside[0]).st_mode):
                outer, self._fd = self._fd, _open_folder(self._fd, inside[0])
                os.close(outer)
        except OSError as error:
            raise ArchiveError(f"cannot open {path}: {error.strerror}") from error
        self.members: tuple[Member, ...] = ()
        self.digests: dict[str, str] = {}
        self.is_readable = False

    def close(self) -> None:
        """Close the folder; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def check(self, progress: container.Progress) -> list[str]:
        """List all files; return all problems of kinds and names."""
        problems: list[str] = []
        members: list[Member] = []
        try:
            for member in _walk(self._fd, "", problems):
                members.append(member)
                if len(members) > container.MAX_ENTRIES:
                    return [f"it holds more than {container.MAX_ENTRIES} files"]
        except OSError as error:
            return [f"it cannot be read: {error.strerror}"]
        self.is_readable = not problems
        self.members = tuple(members)
        return problems + name_problems([member.name for member in members])

    def map(self, member: Member) -> memoryview:
        """Map a file; a later change of its size is noticed here, of its content nowhere.

        Raises:
            Damaged: the file has gone, is another kind, or has another size.
        """
        try:
            fd = self._open(member.name)
            try:
                mapped = container.map_file(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise Damaged(f"it cannot be read any more: {error.strerror}") from error
        if len(mapped) != member.size_bytes:
            raise Damaged("its size has changed")
        return mapped

    def chunks(self, member: Member) -> Iterator[bytes]:
        """Yield a file's content, at most 1 MiB at a time.

        Raises:
            Damaged: the file has gone, is another kind, or has another size.
        """
        try:
            with open(self._open(member.name), "rb", buffering=0) as file:  # noqa: PTH123
                size = 0
                while chunk := file.read(container.CHUNK_BYTES):
                    size += len(chunk)
                    if size > member.size_bytes:
                        break
                    yield chunk
        except OSError as error:
            raise Damaged(f"it cannot be read any more: {error.strerror}") from error
        if size != member.size_bytes:
            raise Damaged("its size has changed")

    def _open(self, name: str) -> int:
        """Open a file below the folder without following a link anywhere on the way."""
        *folders, file = name.split("/")
        at = os.dup(self._fd)
        try:
            for folder in folders:
                inner = _open_folder(at, folder)
                os.close(at)
                at = inner
            fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Damaged("it is not a file any more")
        return fd


def _walk(fd: int, prefix: str, problems: list[str]) -> Iterator[Member]:
    """Yield what lies below a folder, sorted; note links, devices and the like."""
    if prefix.count("/") > _MAX_DEPTH:
        problems.append(f"{quoted(prefix)}: folders are nested deeper than {_MAX_DEPTH}")
        return
    for name in _names(fd):
        status = _status(fd, name)
        if stat.S_ISREG(status.st_mode):
            yield Member(prefix + name, status.st_size)
        elif stat.S_ISDIR(status.st_mode):
            yield Member(f"{prefix}{name}/", 0)
            inner = _open_folder(fd, name)
            try:
                yield from _walk(inner, f"{prefix}{name}/", problems)
            finally:
                os.close(inner)
        else:
            kind = (
                "a symbolic link" if stat.S_ISLNK(status.st_mode) else "neither a file nor a folder"
            )
            problems.append(f"{quoted(prefix + name)}: it is {kind}")


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return sorted(entry.name for entry in entries)


def _status(fd: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=fd, follow_symlinks=False)


def _open_folder(fd: int, name: str) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
