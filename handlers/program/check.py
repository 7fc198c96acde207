"""Exported program (`.pt2`) → proof that loading it runs nothing of its own, then the program.

`torch.export.load` trusts its file: it loads pickles, evaluates expressions, and pastes names into
source (`program_grammar` lists the fields). Here the file is first read as what it claims to be, a
zip of raw tensors and one JSON graph, with `zipfile`, `json` and `ast` alone. All of it but the raw
tensors is held in memory, and that is what torch then loads: nobody can exchange it in between.

Not covered: a program may ask for endless time or memory when it is called, as any model may.
"""

import bisect
import io
import itertools
import json
import math
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch

from modelyard.handlers.errors import UnsafeProgram
from modelyard.handlers.program.grammar import check_document, path_problem, shown

MAX_ENTRIES = 100_000
MAX_TEXT_BYTES = 256 << 20
MAX_FINDINGS = 20
# A tensor that repeats its payload (stride 0) may become this large when it is copied.
MAX_REPEATED_BYTES = 256 << 20

_PAYLOAD = re.compile(r"data/(weights/weight|constants/tensor)_\d+")
_CONFIG = re.compile(r"data/(weights|constants)/\w+_config\.json")
_MODEL = re.compile(r"models/\w+\.json")
_SAMPLES = re.compile(r"data/sample_inputs/\w+\.pt")
_INERT = re.compile(r"extra/[\w.-]+|\.data/\w+|archive_\w+|byteorder|version|\.\w+_\w+")
_NATIVE = re.compile(r"data/(aotinductor|executorch)/.*|.*\.(so|o|a|dylib|dll|pyd|cubin|cpp)")
_PICKLE = re.compile(r"data/(weights|constants)/(.+\.pt|custom_obj_.*|opaque_obj_.*)")

# Bytes per element, by the dtype's number in torch._export.serde.schema.ScalarType.
_ELEMENT_BYTES = dict(enumerate((1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 2), start=1)) | {
    **{28: 2, 34: 4, 35: 8},
    **dict.fromkeys(range(29, 34), 1),
}

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_DIRECTORY_END = struct.Struct("<4s4H2IH")
_DIRECTORY_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_TRAILER_BYTES = 24  # what may follow an entry: its sizes and checksum once more

DAMAGED_ZIP = (
    zipfile.BadZipFile,
    *(NotImplementedError, RuntimeError, OSError, EOFError, ValueError, OverflowError),
    struct.error,
)
"""What zipfile raises on a damaged file."""

_Finding = tuple[str, str]
_Range = tuple[int, int]
_Piece = tuple[int, int, bytearray | None]


def check_program(path: Path) -> None:
    """Refuse an exported program that could run code of its own; nothing of it is run.

    Raises:
        UnsafeProgram: lists every part that is refused.
    """
    with path.open("rb", buffering=0) as file:
        _check(path.name, file)


def load_program(path: Path) -> torch.export.ExportedProgram:
    """Load an exported program that holds nothing but a program.

    Raises:
        UnsafeProgram: lists every part that is refused; nothing of it was run.
    """
    with path.open("rb", buffering=0) as file:
        return torch.export.load(cast(IO[bytes], _check(path.name, file)))


def _check(name: str, file: IO[bytes]) -> "_Snapshot":
    try:
        snapshot = _Snapshot(file, _payload_ranges(file))
        with zipfile.ZipFile(snapshot) as container:
            findings = list(itertools.islice(_findings(snapshot, container), MAX_FINDINGS + 1))
    except DAMAGED_ZIP as error:
        findings = [("the file", f"it is not a zip that can be read ({error})")]
    if len(findings) > MAX_FINDINGS:
        findings[MAX_FINDINGS:] = [("the file", "and more")]
    if findings:
        raise UnsafeProgram(name, findings)
    snapshot.seek(0)
    return snapshot


class _Snapshot(io.RawIOBase):
    """A file of which everything but some ranges is held in memory, and cannot change any more.

    Args:
        file: open, unbuffered, and still read for the ranges.
        loose: (start, end) of the ranges left in the file, in their order.
    """

    def __init__(self, file: IO[bytes], loose: Sequence[_Range]) -> None:
        super().__init__()
        self.size = file.seek(0, io.SEEK_END)
        self.loose = tuple(loose)
        self._file = file
        self._position = 0
        borders = [0, *itertools.chain.from_iterable(loose), self.size]
        if sorted(borders) != borders:
            raise zipfile.BadZipFile("its entries overlap or end outside it")
        held = list(zip(borders[::2], borders[1::2], strict=True))
        if sum(end - start for start, end in held) > MAX_TEXT_BYTES:
            raise zipfile.BadZipFile(f"over {MAX_TEXT_BYTES >> 20} MB of it are not tensors")
        pieces: list[_Piece] = [(*piece, None) for piece in loose]
        pieces += [(start, end, self._hold(start, end)) for start, end in held]
        self._pieces = sorted((piece for piece in pieces if piece[0] < piece[1]), key=_first)
        self._starts = [start for start, *_ in self._pieces]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer unless the file ends before; torch asks for whole tensors at once."""
        target = memoryview(buffer).cast("B")
        first = self._position
        last = min(first + len(target), self.size)
        low = first
        for start, end, held in self._pieces[bisect.bisect_right(self._starts, first) - 1 :]:
            if low >= last:
                break
            high = min(end, last)
            part = target[low - first : high - first]
            if held is None:
                self._fill(part, low)
            else:
                part[:] = held[low - start : high - start]
            low = high
        self._position = max(first, last)
        return max(last - first, 0)

    def _hold(self, start: int, end: int) -> bytearray:
        data = bytearray(end - start)
        self._fill(memoryview(data), start)
        return data

    def _fill(self, target: memoryview, start: int) -> None:
        self._file.seek(start)
        filled = 0
        while filled < len(target):
            got = self._file.readinto(target[filled:])  # type: ignore[attr-defined]
            if not got:
                raise EOFError("it became shorter while it was read")
            filled += got


def _first(piece: _Piece) -> int:
    return piece[0]


def _payload_ranges(file: IO[bytes]) -> list[_Range]:
    """Find where the raw tensors lie; what lies there is never read as anything else."""
    with zipfile.ZipFile(file) as container:
        if len(container.filelist) > MAX_ENTRIES:
            raise zipfile.BadZipFile(f"it has over {MAX_ENTRIES} entries")
        payloads = [info for info in container.filelist if _PAYLOAD.fullmatch(_inner(info))]
    return sorted(data_range(file, info) for info in payloads if info.compress_size)


def data_range(file: IO[bytes], info: zipfile.ZipInfo) -> _Range:
    """Return where the content of a zip's entry starts and ends in the file, as stored."""
    file.seek(info.header_offset)
    *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    return start, start + info.compress_size


def _inner(info: zipfile.ZipInfo) -> str:
    """Return an entry's name below the folder that torch puts all entries in."""
    return info.orig_filename.partition("/")[2]


def _findings(snapshot: _Snapshot, container: zipfile.ZipFile) -> Iterator[_Finding]:
    """Read the zip, then each entry by what its name says it is."""
    problems = [*_layout(snapshot, container), *_names(container.filelist)]
    if problems:  # it cannot be said what a reader would find in such a file
        yield from problems
        return
    sizes = {_inner(info): info.file_size for info in container.filelist}
    for info in container.filelist:
        name = _inner(info)
        if _MODEL.fullmatch(name):
            yield from _model(name, container.read(info))
        elif _CONFIG.fullmatch(name):
            yield from _config(name, container.read(info), sizes)
        elif _SAMPLES.fullmatch(name):
            yield from _samples(name, container.read(info))


def _layout(snapshot: _Snapshot, container: zipfile.ZipFile) -> Iterator[_Finding]:
    """Ask for a zip that can be read in one way only: torch's reader is not Python's."""
    directory, entries = _directory(snapshot)
    if entries != len(container.filelist):
        yield "the file", f"its directory counts {entries} of {len(container.filelist)} entries"
    ends_at, payloads = 0, []
    for info in sorted(container.filelist, key=lambda info: info.header_offset):
        start, end = data_range(snapshot, info)  # type: ignore[arg-type]
        if not ends_at <= info.header_offset <= ends_at + _TRAILER_BYTES:
            yield info.orig_filename, "it overlaps another entry, or hidden bytes precede it"
        if _PAYLOAD.fullmatch(_inner(info)) and end > start:
            payloads.append((start, end))
        ends_at = end
    if not ends_at <= directory <= ends_at + _TRAILER_BYTES:
        yield "the file", "hidden bytes lie before its directory"
    if tuple(payloads) != snapshot.loose:
        yield "the file", "it changed while it was read"


def _directory(snapshot: _Snapshot) -> tuple[int, int]:
    """Return where the directory starts and its number of entries, as the file's last bytes say."""
    at = snapshot.size - _DIRECTORY_END.size
    magic, *_, entries, size, start, comment = _DIRECTORY_END.unpack(_read(snapshot, at))
    if magic != b"PK\5\6" or comment:
        raise zipfile.BadZipFile("something follows its directory")
    locator_at = at - _LOCATOR_64.size
    magic, _, end_at, _ = _LOCATOR_64.unpack(_read(snapshot, locator_at)[: _LOCATOR_64.size])
    if magic == b"PK\6\7":
        if end_at + _DIRECTORY_END_64.size != locator_at:
            raise zipfile.BadZipFile("it has two directories")
        snapshot.seek(end_at)
        fields = _DIRECTORY_END_64.unpack(snapshot.read(_DIRECTORY_END_64.size) or b"")
        at, (entries, size, start) = end_at, fields[-3:]
    if start + size != at:
        raise zipfile.BadZipFile("its directory is not where it says")
    return start, entries


def _read(snapshot: _Snapshot, at: int) -> bytes:
    snapshot.seek(max(at, 0))
    return snapshot.read(_DIRECTORY_END.size) or b""


def _names(entries: Sequence[zipfile.ZipInfo]) -> Iterator[_Finding]:
    seen: set[str] = set()
    folders = {info.orig_filename.partition("/")[0] for info in entries}
    if len(folders) > 1:
        yield "the file", f"its entries lie in {len(folders)} folders, expected one"
    for info in entries:
        name = info.orig_filename
        if name.casefold() in seen:  # torch's reader does not tell cases apart
            yield name, "two entries have this name"
        seen.add(name.casefold())
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            yield name, "it is compressed, which torch.export.save never does"
        elif info.flag_bits & 1:
            yield name, "it is encrypted"
        elif problem := _place_problem(name):
            yield name, problem


def _place_problem(name: str) -> str | None:
    """Return why an entry may not be in an exported program."""
    top, slash, inner = name.partition("/")
    if not slash or not top or top.startswith(".") or path_problem(top):
        return "it lies in no folder of the archive"
    known = (_PAYLOAD, _CONFIG, _MODEL, _SAMPLES, _INERT)
    if any(pattern.fullmatch(inner) for pattern in known) and ".." not in inner.split("/"):
        return None
    if _PICKLE.fullmatch(inner):
        return "it is a pickle or a custom object"
    if _NATIVE.fullmatch(inner):
        return "it is native code"
    return "it has no place in an exported program"


def _model(name: str, data: bytes) -> Iterator[_Finding]:
    document = _parse(data)
    if isinstance(document, str):
        yield name, document
    else:
        yield from ((name, problem) for problem in check_document(document))


def _parse(data: bytes) -> dict[str, Any] | str:
    """Read a JSON object, else say what is wrong."""
    try:
        document = json.loads(data.decode())
    except RecursionError:
        return "it is nested too deep"
    except ValueError as error:
        return f"it is not valid JSON ({error})"
    return document if isinstance(document, dict) else "it is not a JSON object"


def _config(name: str, data: bytes, sizes: Mapping[str, int]) -> Iterator[_Finding]:
    """Check that every tensor of a config is raw, and lies inside its payload."""
    document = _parse(data)
    if isinstance(document, str):
        yield name, document
        return
    tensors = document.get("config")
    if not isinstance(tensors, dict):
        yield name, "it lists no tensors"
        return
    folder = name.rpartition("/")[0]
    for key, entry in tensors.items():
        if problem := path_problem(key) or _tensor_problem(entry, folder, sizes):
            yield name, f"{shown(key)} {problem}"


def _tensor_problem(entry: object, folder: str, sizes: Mapping[str, int]) -> str | None:
    if not isinstance(entry, dict):
        return "is not a tensor"
    if entry.get("use_pickle") is not False:
        return f"is stored as a pickle (use_pickle {shown(entry.get('use_pickle'))})"
    place = f"{folder}/{entry.get('path_name')}"
    if not _PAYLOAD.fullmatch(place):
        return f"is stored in {shown(entry.get('path_name'))}, which holds no raw tensor"
    if place not in sizes:
        return f"is stored in {place}, which is not there"
    try:
        return _range_problem(entry["tensor_meta"], sizes[place])
    except (TypeError, KeyError, AttributeError):
        return f"has no tensor_meta that can be read: {shown(entry.get('tensor_meta'))}"


def _range_problem(meta: Mapping[str, Any], payload_bytes: int) -> str | None:
    """Return why a tensor does not lie inside its payload."""
    element_bytes = _ELEMENT_BYTES.get(meta["dtype"])
    if element_bytes is None:
        return f"has an unknown dtype ({shown(meta['dtype'])})"
    shape = [_whole(size) for size in meta["sizes"]]
    strides = [_whole(stride) for stride in meta["strides"]]
    if len(shape) != len(strides):
        return f"has {len(shape)} sizes and {len(strides)} strides"
    if not (elements := math.prod(shape)):
        return None
    last = _whole(meta["storage_offset"]) + sum(
        (size - 1) * stride for size, stride in zip(shape, strides, strict=True)
    )
    if (last + 1) * element_bytes > payload_bytes:
        return f"reaches {(last + 1) * element_bytes} bytes into a payload of {payload_bytes}"
    if elements * element_bytes > max(payload_bytes, MAX_REPEATED_BYTES):
        return f"repeats a payload of {payload_bytes} bytes to {elements * element_bytes}"
    return None


def _whole(value: Mapping[str, Any]) -> int:
    number = value["as_int"]
    if type(number) is not int or not 0 <= number < 2**62:
        raise TypeError
    return number


def _samples(name: str, data: bytes) -> Iterator[_Finding]:
    """Load sample inputs as torch first does; where that fails it would unpickle them freely."""
    if not data:
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as container:
            if any(info.compress_type != zipfile.ZIP_STORED for info in container.filelist):
                raise zipfile.BadZipFile("it is compressed")
        samples = torch.load(io.BytesIO(data), weights_only=True)
    # Whatever torch raises here is what would send it to the unsafe way.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        yield name, f"the sample inputs are not plain tensors ({type(error).__name__}: {reason})"
    else:
        yield from ((name, problem) for problem in _sample_problems(samples))


def _sample_problems(value: object) -> Iterator[str]:
    """Check the keys of dicts, which torch pastes into source."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, int | str) or path_problem(str(key)):
                yield f"the key {shown(key)} of a sample input is not plain text"
            yield from _sample_problems(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sample_problems(item)
    elif isinstance(value, str) and path_problem(value):
        yield f"the sample input {shown(value)} is not plain text"
