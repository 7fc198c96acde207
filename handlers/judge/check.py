"""Exported program (`.pt2`) → proof that loading it runs nothing of its own, then the program.

`torch.export.load` trusts its file: it loads pickles, evaluates expressions, and pastes names into
source (`grammar` lists the fields). Here the file is first read as what it claims to be, a
zip of raw tensors and one JSON graph, by `archiver.untrusted` and `ast`. All of it but the raw
tensors is held in memory, and that is what torch then loads: nobody can exchange it in between.

Not covered: a program may ask for endless time or memory when it is called, as any model may.
"""

import bisect
import collections
import contextlib
import io
import itertools
import math
import operator
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export.passes import move_to_device_pass

from modelyard.archiver.untrusted.container import CHUNK_BYTES, Bytes, Damaged, Held, OpenFile
from modelyard.archiver.untrusted.json import RefusedJson, parse_json
from modelyard.archiver.untrusted.zip import TORCH_RULES, ZipMember, ZipReader
from modelyard.handlers.errors import UnsafeProgram
from modelyard.handlers.judge.checked import call_problem, calls, use_checked
from modelyard.handlers.judge.grammar import check_document, path_problem, shown

_RULES = replace(TORCH_RULES, may_deflate=lambda name: False)
_MAX_DEPTH = 500
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

DTYPES: Mapping[int, torch.dtype] = {
    number: getattr(torch, name)
    for first, names in (
        (1, "uint8 int8 int16 int32 int64 float16 float32 float64"),
        (9, "complex32 complex64 complex128 bool bfloat16"),
        (28, "uint16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"),
        (34, "uint32 uint64"),
    )
    for number, name in enumerate(names.split(), first)
}
"""The numbers of torch's `ScalarType` (torch._export.serde.schema) in a program."""

Finding = tuple[str, str]
"""A part of the file, and what is wrong with it."""
_Range = tuple[int, int]
_Piece = tuple[int, int, bytearray | None]


def check(source: Bytes, trusted: Collection[str] = ()) -> list[Finding]:
    """Find what an exported program holds beside a program; nothing of it is run.

    Args:
        source: the file.
        trusted: operators that it may call beside those of the list (`operators`), as
            `aten.segment_reduce.default`; `grammar.ANY` stands for all.

    Returns:
        At most 21 findings; none where loading it runs nothing of its own.
    """
    return _read(source, trusted)[1]


def load_program(
    path: Path, trusted: Collection[str] = (), device: torch.device | None = None
) -> torch.export.ExportedProgram:
    """Load an exported program that holds nothing but a program.

    Args:
        path: the file.
        trusted: as `check`'s.
        device: where its weights and what it makes are to be; by default where they were.

    Raises:
        UnsafeProgram: lists every part that is refused; nothing of it was run.
    """
    with contextlib.closing(OpenFile(os.open(path, os.O_RDONLY))) as file:
        try:
            program, findings = _load(file, trusted, device)
        # What the grammar leaves open torch takes for granted, and fails in every way there is.
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            said = f"torch {torch.__version__} cannot read it ({type(error).__name__}: {reason})"
            raise UnsafeProgram(path.name, [("the file", said)]) from error
    if program is None or findings:
        raise UnsafeProgram(path.name, findings)
    return program


def _load(
    file: Bytes, trusted: Collection[str], device: torch.device | None
) -> tuple[torch.export.ExportedProgram | None, list[Finding]]:
    snapshot, findings = _read(file, trusted)
    if findings:
        return None, findings
    snapshot.seek(0)
    program = torch.export.load(cast("IO[bytes]", snapshot))
    tensors = [*program.state_dict.values(), *program.constants.values()]
    if device and any(isinstance(each, Tensor) and each.device != device for each in tensors):
        program = move_to_device_pass(program, device)  # which knows torch's own operators alone
    return program, list(itertools.islice(_once(_call_findings(program)), MAX_FINDINGS))


def _read(source: Bytes, trusted: Collection[str]) -> "tuple[_Snapshot, list[Finding]]":
    """Hold all of a program but its tensors, and read what is held."""
    snapshot = _Snapshot(source)
    try:
        members = _members(source)
        payloads = [m.data for m in members if _PAYLOAD.fullmatch(_inner(m.name)) and m.data]
        snapshot = _Snapshot(source, sorted((data.start, data.stop) for data in payloads))
        reader = ZipReader(snapshot, _RULES)
        if reader.check() or reader.members != members:
            raise Damaged("it changed while it was read")
        findings = list(itertools.islice(_once(_findings(reader, trusted)), MAX_FINDINGS + 1))
    except Damaged as error:
        findings = [("the file", str(error))]
    if len(findings) > MAX_FINDINGS:
        findings[MAX_FINDINGS:] = [("the file", "and more")]
    return snapshot, findings


def _call_findings(program: torch.export.ExportedProgram) -> Iterator[Finding]:
    """Judge the calls by torch's own description of them, and let checked ones stand in."""
    for node in calls(program):
        if isinstance(node.target, OpOverload) and (
            problem := call_problem(node.target, node.args, node.kwargs)
        ):
            yield "the graph", f"{node.target} {problem}"
    try:
        use_checked(program)
    except ValueError as error:
        yield "the graph", f"{error}; export it in evaluation mode"


def _once(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield each finding once: a program calls the same operator many times."""
    seen: set[Finding] = set()
    for finding in findings:
        if finding not in seen:
            seen.add(finding)
            yield finding


def _members(source: Bytes) -> tuple[ZipMember, ...]:
    reader = ZipReader(source, _RULES)
    if problems := reader.check():
        raise Damaged("; ".join(problems[:MAX_FINDINGS]))
    return reader.members


class _Snapshot(io.RawIOBase):
    """A file of which everything but some ranges is held in memory, and cannot change any more.

    Args:
        source: still read for the ranges.
        loose: (start, end) of the ranges that are not held, in their order; by default all.
    """

    def __init__(self, source: Bytes, loose: Sequence[_Range] | None = None) -> None:
        super().__init__()
        self.size = source.size
        self._source = source
        self._position = 0
        loose = [(0, self.size)] if loose is None else loose
        borders = [0, *itertools.chain.from_iterable(loose), self.size]
        held = list(zip(borders[::2], borders[1::2], strict=True))
        if sum(end - start for start, end in held) > MAX_TEXT_BYTES:
            raise Damaged(f"over {MAX_TEXT_BYTES >> 20} MB of it are not tensors")
        pieces: list[_Piece] = [(*piece, None) for piece in loose]
        pieces += [(start, end, self._hold(start, end)) for start, end in held]
        self._pieces = sorted(
            (piece for piece in pieces if piece[0] < piece[1]), key=operator.itemgetter(0)
        )
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

    def read_at(self, offset: int, count: int) -> bytes:
        """Read `count` bytes, and fewer only where the file ends."""
        self.seek(offset)
        return self.read(count) or b""

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
        filled = 0
        while filled < len(target):
            chunk = self._source.read_at(start + filled, min(CHUNK_BYTES, len(target) - filled))
            if not chunk:
                raise Damaged("it became shorter while it was read")
            target[filled : filled + len(chunk)] = chunk
            filled += len(chunk)


def _inner(name: str) -> str:
    """Return an entry's name below the folder that torch puts all entries in."""
    return name.partition("/")[2]


def _findings(reader: ZipReader, trusted: Collection[str]) -> Iterator[Finding]:
    """Read each entry by what its name says it is."""
    problems = list(_place_problems([member.name for member in reader.members]))
    if problems:  # it cannot be said what a reader would find in such a file
        yield from problems
        return
    sizes = {_inner(member.name): member.size_bytes for member in reader.members}
    for member in reader.members:
        name = _inner(member.name)
        try:
            if _PAYLOAD.fullmatch(name):
                collections.deque(reader.chunks(member), maxlen=0)  # compares its CRC-32
                continue
            data = b"".join(reader.chunks(member))
        except Damaged as error:
            yield name, str(error)
            continue
        if _MODEL.fullmatch(name):
            yield from _model(name, data, trusted)
        elif _CONFIG.fullmatch(name):
            yield from _config(name, data, sizes)
        elif _SAMPLES.fullmatch(name):
            yield from _samples(name, data)


def _place_problems(names: Sequence[str]) -> Iterator[Finding]:
    folders = {name.partition("/")[0] for name in names}
    if len(folders) > 1:
        yield "the file", f"its entries lie in {len(folders)} folders, expected one"
    for name in names:
        if problem := _place_problem(name):
            yield name, problem


def _place_problem(name: str) -> str | None:
    """Return why an entry may not be in an exported program."""
    top, slash, inner = name.partition("/")
    if not slash or not top or top.startswith(".") or path_problem(top):
        return "it lies in no folder of the archive"
    known = (_PAYLOAD, _CONFIG, _MODEL, _SAMPLES, _INERT)
    if any(pattern.fullmatch(inner) for pattern in known):
        return None
    if _PICKLE.fullmatch(inner):
        return "it is a pickle or a custom object"
    if _NATIVE.fullmatch(inner):
        return "it is native code"
    return "it has no place in an exported program"


def _model(name: str, data: bytes, trusted: Collection[str]) -> Iterator[Finding]:
    document = _parse(data)
    if isinstance(document, str):
        yield name, document
    else:
        yield from ((name, problem) for problem in check_document(document, trusted))


def _parse(data: bytes) -> dict[str, Any] | str:
    """Read a JSON object, else return what is wrong."""
    try:
        document = parse_json(data, max_depth=_MAX_DEPTH)
    except RefusedJson as error:
        return str(error)
    except ValueError as error:
        return f"it is not valid JSON ({error})"
    return document if isinstance(document, dict) else "it is not a JSON object"


def _config(name: str, data: bytes, sizes: Mapping[str, int]) -> Iterator[Finding]:
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
    if (dtype := DTYPES.get(meta["dtype"])) is None:
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
    if (last + 1) * dtype.itemsize > payload_bytes:
        return f"reaches {(last + 1) * dtype.itemsize} bytes into a payload of {payload_bytes}"
    if elements * dtype.itemsize > max(payload_bytes, MAX_REPEATED_BYTES):
        return f"repeats a payload of {payload_bytes} bytes to {elements * dtype.itemsize}"
    return None


def _whole(value: Mapping[str, Any]) -> int:
    number = value["as_int"]
    if type(number) is not int or not 0 <= number < 2**62:
        raise TypeError
    return number


def _samples(name: str, data: bytes) -> Iterator[Finding]:
    """Load sample inputs as torch first does; where that fails it would unpickle them freely."""
    if not data:
        return
    try:
        _members(Held(data))
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
        for key in value:
            if not isinstance(key, int | str) or path_problem(str(key)):
                yield f"the key {shown(key)} of a sample input is not plain text"
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _sample_problems(item)
    elif isinstance(value, str) and path_problem(value):
        yield f"the sample input {shown(value)} is not plain text"
