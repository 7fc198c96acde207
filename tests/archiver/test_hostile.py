"""Archives that must be refused whole. Their bytes are written field by field, because zipfile
refuses to write most of them; none is kept as a file in the repository.
"""

import json
import stat
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from modelyard.archiver import open_archive
from modelyard.archiver.errors import RefusedArchive

MANIFEST = json.dumps({"runtime": "python", "model": {"modelName": "m"}}).encode()
UTF8 = 1 << 11
ZEROS = b"\0" * 1_000_000


@dataclass(frozen=True)
class Entry:
    """One entry as an attacker writes it; what is None is told truthfully."""

    name: bytes
    data: bytes = b"x"
    packed: bytes | None = None
    method: int = 0
    flags: int = UTF8
    mode: int = stat.S_IFREG | 0o644
    declared_bytes: int | None = None
    crc: int | None = None
    local_name: bytes | None = None
    local_method: int | None = None
    local_bytes: int | None = None
    header_offset: int | None = None
    extra: bytes = b""

    @property
    def stored(self) -> bytes:
        return self.data if self.packed is None else self.packed

    @property
    def size(self) -> int:
        return len(self.data) if self.declared_bytes is None else self.declared_bytes

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.data) if self.crc is None else self.crc


def local(entry: Entry) -> bytes:
    name = entry.name if entry.local_name is None else entry.local_name
    method = entry.method if entry.local_method is None else entry.local_method
    size = entry.size if entry.local_bytes is None else entry.local_bytes
    head = (b"PK\3\4", 20, entry.flags, method, 0, 33, entry.checksum, len(entry.stored), size)
    return struct.pack("<4s5H3L2H", *head, len(name), 0) + name + entry.stored


def central(entry: Entry, offset: int) -> bytes:
    offset = offset if entry.header_offset is None else entry.header_offset
    head = (b"PK\1\2", 20, 3, 20, 0, entry.flags, entry.method, 0, 33, entry.checksum)
    sizes = (len(entry.stored), entry.size, len(entry.name), len(entry.extra), 0, 0, 0)
    record = struct.pack("<4s4B4H3L5H2L", *head, *sizes, entry.mode << 16, offset)
    return record + entry.name + entry.extra


def end(count: int, size: int, offset: int, comment: bytes = b"") -> bytes:
    return (
        struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, offset, len(comment)) + comment
    )


def zip_of(*entries: Entry, gap: bytes = b"", prefix: bytes = b"") -> bytes:
    """Write the entries, and a sound manifest after them."""
    body, directory = prefix, b""
    every = (*entries, Entry(b"MAR-INF/MANIFEST.json", MANIFEST))
    for entry in every:
        directory += central(entry, len(body) - len(prefix))
        body += local(entry) + gap
    start = len(body) - len(prefix)
    return body + directory + end(len(every), len(directory), start)


def deflated(data: bytes) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    return compressor.compress(data) + compressor.flush()


def overlapping(count: int) -> bytes:
    """Let every entry's data be the headers and data of all later ones.

    Source: David Fifield, "A better zip bomb", https://www.bamsoftware.com/hacks/zipbomb/
    """
    kernel = deflated(ZEROS)
    entries = [Entry(b"%d" % i, ZEROS, kernel, method=8) for i in range(count)]
    shared = local(entries[0])
    directory = b"".join(central(entry, 0) for entry in entries)
    return shared + directory + end(count, len(directory), len(shared))


def endless_entries(count: int) -> bytes:
    """Claim more entries than are read, each a true record of the directory."""
    first = local(Entry(b"a"))
    directory = b"".join(central(Entry(b"%d" % i), 0) for i in range(count))
    return first + directory + end(count, len(directory), len(first))


def wide_end(count: int) -> bytes:
    """Hide a count beyond 16 bits in the zip64 record."""
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, 0, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
    return record + locator + end(0xFFFF, 0, 0)


def lying_wide_end() -> bytes:
    """Let the zip64 record and the plain one disagree."""
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 0, 0, 0, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
    return record + locator + end(1, 0, 0)


def wide_size(size: int) -> bytes:
    """Declare a size of 64 bits for an entry of one byte."""
    extra = struct.pack("<2HQ", 1, 8, size)
    return zip_of(Entry(b"a", declared_bytes=0xFFFFFFFF, extra=extra))


def named(name: bytes) -> bytes:
    return zip_of(Entry(name))


def moded(kind: int, name: bytes = b"a") -> bytes:
    return zip_of(Entry(name, b"/etc/passwd", mode=kind | 0o777))


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "parent folder": (lambda: named(b"../x"), '"../x": the path holds the part ".."'),
    "parent folder inside": (lambda: named(b"a/../../x"), 'the path holds the part ".."'),
    "parent folder at the end": (lambda: named(b"a/.."), 'the path holds the part ".."'),
    "absolute": (lambda: named(b"/etc/x"), '"/etc/x": the name is an absolute path'),
    "network share": (lambda: named(b"//host/share/x"), "the name is an absolute path"),
    "drive": (lambda: named(b"C:x"), '"C:x": the path names a drive'),
    "backslashes": (lambda: named(b"a\\..\\x"), "the name holds a backslash"),
    "NUL": (lambda: named(b"a.py\0.txt"), '"a.py\\x00.txt": the name holds a NUL'),
    "empty name": (lambda: named(b""), '"": the name is empty'),
    "slash only": (lambda: zip_of(Entry(b"/", b"")), "the name is empty"),
    "dot": (lambda: named(b"."), 'the path holds the part "."'),
    "dot part": (lambda: named(b"a/./b"), 'the path holds the part "."'),
    "empty part": (lambda: named(b"a//b"), 'the path holds the part ""'),
    "4096 letters": (lambda: named(b"a" * 4096), "the name is longer than 1024 bytes"),
    "bytes that are not UTF-8": (lambda: named(b"\xff.py"), "its name is not UTF-8"),
    "CP437 name": (lambda: zip_of(Entry(b"\x84.py", flags=0)), "neither ASCII nor marked as UTF-8"),
    "trailing dot": (lambda: named(b"a."), "ends with a dot or a space"),
    "trailing space": (lambda: named(b"a /b"), "ends with a dot or a space"),
    "CON": (lambda: named(b"CON"), '"CON" is a device on Windows'),
    "aux.txt": (lambda: named(b"sub/aux.txt"), '"aux.txt" is a device on Windows'),
    "line end in a name": (lambda: named(b"a\nb"), "control or invisible characters"),
    "symbolic link": (lambda: moded(stat.S_IFLNK), '"a": it is a symbolic link'),
    "symbolic link as a folder": (
        lambda: zip_of(Entry(b"d/", b"", mode=stat.S_IFLNK | 0o777), Entry(b"d/x")),
        '"d/": it is a symbolic link',
    ),
    "named pipe": (lambda: moded(stat.S_IFIFO), '"a": it is a named pipe'),
    "socket": (lambda: moded(stat.S_IFSOCK), '"a": it is a socket'),
    "character device": (lambda: moded(stat.S_IFCHR), '"a": it is a character device'),
    "block device": (lambda: moded(stat.S_IFBLK), '"a": it is a block device'),
    "folder named like a file": (lambda: moded(stat.S_IFDIR), "disagree on whether it is a folder"),
    "folder with content": (lambda: zip_of(Entry(b"d/", mode=0)), "it is a folder with content"),
    "name twice": (lambda: zip_of(Entry(b"a"), Entry(b"a", b"y")), '"a" is there twice'),
    "manifest twice": (
        lambda: zip_of(Entry(b"MAR-INF/MANIFEST.json", MANIFEST)),
        '"MAR-INF/MANIFEST.json" is there twice',
    ),
    "names that differ in case": (
        lambda: zip_of(Entry(b"A.py"), Entry(b"a.py")),
        '"A.py" and "a.py" are one name where case does not count',
    ),
    "names that differ in Unicode form": (
        lambda: zip_of(Entry("é".encode()), Entry("e\u0301".encode())),
        "are one name where case does not count",
    ),
    "file that is a folder": (
        lambda: zip_of(Entry(b"a"), Entry(b"a/b")),
        '"a" is a file, and a folder in "a/b"',
    ),
    "own header with another name": (
        lambda: zip_of(Entry(b"good.py", local_name=b"evil.py")),
        '"good.py": its own header names it "evil.py"',
    ),
    "own header with another method": (
        lambda: zip_of(Entry(b"a", local_method=8)),
        '"a": its own header and the directory differ',
    ),
    "own header with another size": (
        lambda: zip_of(Entry(b"a", local_bytes=5)),
        '"a": its own header and the directory differ',
    ),
    "second name in an extra field": (
        lambda: zip_of(Entry(b"a", extra=struct.pack("<2HBL", 0x7075, 6, 1, 0) + b"b")),
        '"a": it carries a second name',
    ),
    "two zip64 fields": (
        lambda: zip_of(Entry(b"a", extra=struct.pack("<2HQ", 1, 8, 1) * 2)),
        '"a": it carries an extra field twice',
    ),
    "no header at the offset": (
        lambda: zip_of(Entry(b"a", header_offset=3)),
        '"a": there is no header where the directory says',
    ),
    "offset outside the file": (
        lambda: zip_of(Entry(b"a", header_offset=2**31)),
        '"a": it ends before byte',
    ),
    "encrypted": (lambda: zip_of(Entry(b"a", flags=UTF8 | 1)), '"a": it is encrypted'),
    "strongly encrypted": (lambda: zip_of(Entry(b"a", flags=UTF8 | 64)), '"a": it is encrypted'),
    "unknown method": (
        lambda: zip_of(Entry(b"a", method=99)),
        '"a": compression method 99 is unknown',
    ),
    "bzip2": (lambda: zip_of(Entry(b"a", method=12)), '"a": compression method 12 is unknown'),
    "wrong CRC": (lambda: zip_of(Entry(b"a", crc=1)), '"a": its CRC-32 is 8cdc1683, the directory'),
    "more than declared": (
        lambda: zip_of(Entry(b"a", ZEROS[:9000], deflated(ZEROS[:9000]), 8, declared_bytes=10)),
        '"a": it unpacks to more than the 10 bytes it declares',
    ),
    "less than declared": (
        lambda: zip_of(Entry(b"a", b"abc", deflated(b"abc"), 8, declared_bytes=10)),
        '"a": it unpacks to 3 bytes and declares 10',
    ),
    "stored with another size": (
        lambda: zip_of(Entry(b"a", declared_bytes=10)),
        '"a": stored in 1 bytes, it cannot have 10',
    ),
    "zip64 size that lies": (lambda: wide_size(2**62), "it cannot have 4611686018427387904"),
    "damaged compressed data": (
        lambda: zip_of(Entry(b"a", b"abc", b"\xff\xff\xff", 8)),
        '"a": its compressed data is damaged',
    ),
    "compressed data cut off": (
        lambda: zip_of(Entry(b"a", b"abc" * 99, deflated(b"abc" * 99)[:-3], 8)),
        '"a": its compressed data ends too early',
    ),
    "bytes behind compressed data": (
        lambda: zip_of(Entry(b"a", b"abc", deflated(b"abc") + b"hidden", 8)),
        '"a": bytes follow the end of its compressed data',
    ),
    "ratio": (
        lambda: zip_of(Entry(b"a", ZEROS, deflated(ZEROS), 8)),
        "bytes that unpack to 1000000 are a ratio over 200",
    ),
    "ratio of many small ones": (
        lambda: zip_of(
            *(Entry(b"%d" % i, ZEROS[:99_999], deflated(ZEROS[:99_999]), 8) for i in range(50))
        ),
        "over 200 times as many",
    ),
    "overlap": (lambda: overlapping(250), '"0" and "1" overlap'),
    "10001 entries": (lambda: endless_entries(10_001), "it claims 10001 entries; at most 10000"),
    "a million entries": (lambda: wide_end(1_000_000), "it claims 1000000 entries; at most 10000"),
    "two ends that differ": (lying_wide_end, "its two end-of-directory records differ"),
    "bytes in front": (lambda: zip_of(prefix=b"#!/bin/sh\n"), "bytes were added, removed or cut"),
    "bytes between entries": (
        lambda: zip_of(Entry(b"a"), gap=b"hidden"),
        '6 bytes between "a" and "MAR-INF/MANIFEST.json" belong to no entry',
    ),
    "bytes at the end": (lambda: zip_of() + b"more", "bytes were added or cut off after its end"),
    "directory that points back": (
        lambda: local(Entry(b"a")) + central(Entry(b"a"), 0) + end(1, 47, 0),
        "bytes were added, removed or cut off",
    ),
    "fewer entries counted than there are": (
        lambda: local(Entry(b"a")) + central(Entry(b"a"), 0) * 2 + end(1, 94, 32),
        "its directory holds more than the entries it counts",
    ),
    "more entries counted than there are": (
        lambda: local(Entry(b"a")) + central(Entry(b"a"), 0) + end(2, 47, 32),
        "its directory ends before the last entry",
    ),
    "damaged directory": (
        lambda: local(Entry(b"a")) + b"?" * 47 + end(1, 47, 32),
        "its directory is damaged at its byte 0",
    ),
    "several files": (
        lambda: struct.pack("<4s4H2LH", b"PK\5\6", 1, 0, 0, 0, 0, 0, 0),
        "it is one part of a zip of several files",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_archive_is_refused_whole(tmp_path: Path, case: str) -> None:
    build, problem = REFUSED[case]
    archive, folder = tmp_path / "hostile.mar", tmp_path / "out"
    archive.write_bytes(build())
    folder.mkdir()

    with pytest.raises(RefusedArchive) as caught, open_archive(archive) as opened:
        opened.unpack(folder)

    assert problem in "\n".join(caught.value.problems)
    assert str(caught.value).startswith("hostile.mar is refused: ")
    assert sorted(tmp_path.rglob("*")) == [archive, folder]


def test_archive_built_here_without_a_flaw_opens(tmp_path: Path) -> None:
    path = tmp_path / "sound.mar"
    path.write_bytes(zip_of(Entry(b"a"), Entry(b"b", b"abc" * 99, deflated(b"abc" * 99), 8)))

    with open_archive(path) as opened:
        assert opened.read("b") == b"abc" * 99


def test_problems_of_all_kinds_are_one_error(tmp_path: Path) -> None:
    path = tmp_path / "hostile.mar"
    entries = [Entry(b"../x"), Entry(b"a"), Entry(b"A"), Entry(b"l", mode=stat.S_IFLNK)]
    entries += [Entry(b"e", flags=UTF8 | 1), Entry(b"n", local_name=b"m")]
    path.write_bytes(zip_of(*entries))

    with pytest.raises(RefusedArchive) as caught:
        open_archive(path)

    assert len(caught.value.problems) == 5
    assert str(caught.value).startswith("hostile.mar is refused: 5 problems\n  - ")


def test_message_of_a_thousand_problems_stays_short(tmp_path: Path) -> None:
    path = tmp_path / "hostile.mar"
    path.write_bytes(zip_of(*(Entry(b"../%d" % i) for i in range(1000))))

    with pytest.raises(RefusedArchive) as caught:
        open_archive(path)

    assert len(caught.value.problems) == 1000
    assert str(caught.value).endswith("… and 980 more")


def test_own_header_of_a_streamed_entry_must_not_hide_another_name(tmp_path: Path) -> None:
    path = tmp_path / "hostile.mar"
    streamed = Entry(b"good.py", flags=UTF8 | 8)
    path.write_bytes(zip_of(replace(streamed, local_name=b"evil.py")))

    with pytest.raises(RefusedArchive, match=r"its own header names it"):
        open_archive(path)


@pytest.mark.parametrize("case", ["overlap", "a million entries", "10001 entries", "ratio"])
def test_refusing_a_bomb_takes_little_memory(tmp_path: Path, case: str) -> None:
    (tmp_path / "bomb.mar").write_bytes(REFUSED[case][0]())
    code = (
        "import resource, sys\nfrom modelyard import archiver\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    archiver.open_archive(sys.argv[1])\n"
        "except archiver.ArchiveError:\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bomb.mar")],
        capture_output=True,
        text=True,
        check=True,
    )

    assert int(done.stdout) < 64 * 1024  # kilobytes
