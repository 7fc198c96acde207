"""The bytes of a checkpoint, mapped and never copied, and what they are; JSON among them.

What a file or folder is, its bytes and its shape decide; its name and suffix say nothing.
"""

import io
import mmap
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from modelyard.archiver.untrusted.container import Damaged
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.untrusted.tar import BLOCK_BYTES, GZIP_MAGIC, Inflated, read_entries
from modelyard.archiver.untrusted.zip import TORCH_RULES, ZipReader
from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.tables import read_table
from modelyard.handlers.models.backends import is_onnx

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""The name of a file or folder that cannot lead elsewhere."""
MAX_JSON_BYTES = 256 << 20
_MAX_DEPTH = 200  # graphs lie in the nodes of graphs
_MAX_LINE = 64 * 1024
_PEEKED_BYTES = 64

# The magic number of the legacy format by its own opcode, behind the pickle's protocol (and, from
# 4 on, its frame).
LEGACY_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")
_TAR_MAGIC_AT = 257
_MAX_HEADER = 100_000_000
_MAX_PEEK = 1 << 20

ADVICE: Mapping[str, str] = read_table(__package__, "kinds")["advice"]
"""Formats without weights that are read here, and what to do instead."""


class Source:
    """Bytes with a name: a file, mapped copy-on-write, or a part of one.

    Attributes:
        name: what messages call it.
        path: the file, when these are all of its bytes.
        data: the bytes.
    """

    def __init__(self, name: str, data: memoryview, path: Path | None = None) -> None:
        self.name = name
        self.path = path
        self.data = data
        self._storage: torch.UntypedStorage | None = None

    @classmethod
    def of_file(cls, path: Path) -> "Source":
        """Map a file; its pages are read when they are looked at."""
        try:
            with path.open("rb") as file:
                if not path.stat().st_size:
                    raise CheckpointError(
                        f'"{path.name}" is empty; expected a checkpoint: copy it again'
                    )
                # Copy-on-write: tensors on it can be written to, and the file stays as it is.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f'"{path}" cannot be read: {error.strerror}') from error
        return cls(path.name, memoryview(mapped), path)

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return len(self.data)

    def read_at(self, offset: int, count: int) -> bytes:
        """Read `count` bytes, and fewer only where the bytes end."""
        return bytes(self.data[offset : offset + count])

    def part(self, name: str, start: int, size: int) -> "Source":
        """Return a range of the bytes, as a source of its own.

        Raises:
            CheckpointError: it leaves the bytes.
        """
        if start < 0 or size < 0 or start + size > len(self.data):
            raise CheckpointError(
                f'"{self.name}": {name} would be bytes {start} to {start + size} of '
                f"{len(self.data)}; the file is damaged or cut short: copy it again"
            )
        return Source(name, self.data[start : start + size])

    def storage(self, start: int, size: int) -> torch.UntypedStorage:
        """Return a range, checked by the caller, as a storage for tensors; no byte is copied."""
        if self._storage is None:
            self._storage = torch.frombuffer(self.data, dtype=torch.uint8).untyped_storage()
        part: torch.UntypedStorage = self._storage[start : start + size]
        return part

    def open(self) -> BinaryIO:
        """Return the bytes as a stream for `torch.load` and readers of headers."""
        return io.BytesIO(self.data)


class Window:
    """A stream over bytes that never allocates more than there is to read."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes."""
        taken = bytes(self._data[self._position : self._position + size])
        self._position += len(taken)
        return taken

    def readline(self) -> bytes:
        """Return bytes to the next newline; of a longer line, its first 64 KiB."""
        ahead = bytes(self._data[self._position : self._position + _MAX_LINE])
        line = ahead[: ahead.find(b"\n") + 1] or ahead
        self._position += len(line)
        return line

    def skip(self, count: int) -> None:
        """Go on behind so many bytes."""
        self._position += count

    def tell(self) -> int:
        """Return where the next read starts."""
        return self._position


def inside(folder: Path, name: str) -> Path:
    """Return the path of something in a folder, which a link must not lead out of.

    The hub's cache keeps the files of a snapshot as links to its own `blobs`; those are followed.

    Raises:
        CheckpointError: it is a link that leaves, or lies behind one; nothing of it was read.
    """
    path, real = folder / name, (folder / name).resolve()
    root = folder.resolve()
    is_hubs = any(
        place.name == "snapshots" and real.parent == place.parent / "blobs"
        for place in root.parents
    )
    if real.is_relative_to(root) or is_hubs:
        return path
    raise CheckpointError(
        f'"{folder.name}" is refused: "{name}" is a link that leaves the folder, which is not '
        "followed; copy the file in its place"
    )


def parse_object(content: bytes | memoryview, name: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: it is not strict JSON, or not an object.
    """
    try:
        value = parse_json(bytes(content), MAX_JSON_BYTES, max_depth=_MAX_DEPTH)
    except ValueError as error:
        raise CheckpointError(
            f'"{name}" is not valid JSON that can be read ({error}); copy the checkpoint again'
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f'"{name}" is a JSON {type(value).__name__}; expected an object')
    return value


def read_object(path: Path, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        CheckpointError: it is missing, too large, or not an object.
    """
    try:
        if path.stat().st_size > most_bytes:
            raise CheckpointError(f'"{path.name}" has more than {most_bytes} bytes')
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f'"{path}" cannot be read: {error.strerror}') from error
    return parse_object(content, path.name)


def read_object_or_nothing(path: Path) -> dict[str, Any]:
    """Read a file that may be there."""
    return read_object(path) if path.is_file() else {}


def sniff(path: Path) -> str:
    """Return what a file or folder is, in a word of this module.

    Raises:
        CheckpointError: it is not there, is empty, or is damaged.
    """
    if path.is_dir():
        return sniff_folder(path)
    if not path.is_file():
        seen = "is not a file" if path.exists() else "does not exist"
        raise CheckpointError(f'checkpoint "{path}" {seen}; expected a file or folder of weights')
    return sniff_source(Source.of_file(path))


def sniff_source(source: Source) -> str:
    """Return what some bytes are."""
    head = bytes(source.data[:512])
    if head[:4] == b"PK\x03\x04":
        return _sniff_zip(source)
    if head[:1] == b"\x80" and head.find(LEGACY_MAGIC) in (2, 11):
        return "torch legacy"
    for magic, at, format in _MAGICS:
        if head[at : at + len(magic)] == magic:
            return format
    if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return _sniff_tar(source)
    if head[:2] == GZIP_MAGIC:
        format = _sniff_tar(source)
        return format if format != "unknown" or packed_names(source) else "gzip"
    if 2 <= int.from_bytes(head[:8], "little") <= _MAX_HEADER and head[8:9] == b"{":
        return "safetensors"
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "pickle"
    return "ONNX" if is_onnx(head) else "unknown"


def _sniff_zip(source: Source) -> str:
    entries = zip_names(source)
    if "MAR-INF/MANIFEST.json" in entries:
        return "TorchServe archive"
    if any(name.endswith("/constants.pkl") for name in entries):
        return "TorchScript"
    if any(name.endswith("/archive_format") and entries[name] == b"pt2" for name in entries):
        return "exported program"
    if "serialized_exported_program.json" in entries:
        return "exported program 1"
    if any(name.endswith("/data.pkl") for name in entries):
        return "torch zip"
    return "unknown"


def zip_names(source: Source) -> Mapping[str, bytes]:
    """List a zip of any kind by name, with the content of what says its format.

    Raises:
        CheckpointError: it is cut short, or is not a zip.
    """
    reader = ZipReader(source, replace(TORCH_RULES, may_deflate=lambda name: True))
    problems = reader.check()
    if not reader.members and problems:
        raise CheckpointError(
            f'"{source.name}" is a zip that is damaged or cut short: {problems[0]}; copy it again'
        )
    names = {member.name: b"" for member in reader.members}
    for member in reader.members:
        if member.name.endswith("/archive_format") and member.size_bytes <= _PEEKED_BYTES:
            with suppress(Damaged):
                names[member.name] = b"".join(reader.chunks(member))
    return names


def packed_names(source: Source) -> list[str]:
    """List what a zip or tar holds; nothing of what is neither."""
    head = bytes(source.data[:512])
    with suppress(Damaged):
        if head[:4] == b"PK\x03\x04":
            return list(zip_names(source))
        if head[:2] == GZIP_MAGIC or head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
            return list(_tar_names(source))
    return []


def _sniff_tar(source: Source) -> str:
    names = set()
    try:
        for name in _tar_names(source):
            if name.endswith("MAR-INF/MANIFEST.json"):
                return "TorchServe archive"
            names.add(name)
    except Damaged:
        return "unknown"
    if {"storages", "tensors", "pickle"} <= names:
        return "torch tar"
    if any(name.endswith("model_config.yaml") for name in names):
        return "NeMo archive"
    return "unknown"


def _tar_names(source: Source) -> Iterator[str]:
    """Yield the names of a tar, or of a gzip'ed one."""
    is_packed = bytes(source.data[:2]) == GZIP_MAGIC
    stream = Inflated(source) if is_packed else Window(source.data)
    for entry in read_entries(stream.read):
        yield entry.name.removeprefix("./")
        stream.skip(entry.size_bytes + -entry.size_bytes % BLOCK_BYTES)


def sniff_folder(folder: Path) -> str:
    """Return what a folder is by the files that it holds."""
    names = {entry.name for entry in folder.iterdir()}
    for name, format in _FOLDERS:
        if name in names and (format != "Determined" or _is_determined(folder)):
            return format
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return "DCP"
    if "latest" in names and any(name.startswith(("checkpoint", "global_step")) for name in names):
        return "DeepSpeed"
    if any(name.endswith("model_states.pt") for name in names):
        return "DeepSpeed"
    if "MANIFEST.json" in names and folder.name == "MAR-INF":
        raise CheckpointError(f'"{folder}" is a part of an archive; give the folder above it')
    if (folder / "MAR-INF" / "MANIFEST.json").is_file():
        return "TorchServe archive"
    if "data.pkl" in names and "data" in names:
        return "unpacked zip"
    if _is_determined(folder):
        return "Determined"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "weights folder"
    if names & {"pytorch_model.bin", "pytorch_model.bin.index.json", "config.json"}:
        return "Hugging Face"
    return "unknown"


def _is_determined(folder: Path) -> bool:
    if any((folder / name).is_file() for name in DETERMINED_WEIGHTS):
        return True
    return "trial_type" in _peek(inside(folder, "load_data.json")) or (
        "determined_version" in _peek(inside(folder, "metadata.json"))
    )


def _peek(path: Path) -> Mapping[str, object]:
    """Read a small JSON object; nothing when it is none."""
    with suppress(CheckpointError):
        return read_object(path, _MAX_PEEK)
    return {}


DETERMINED_WEIGHTS = (
    "state_dict.pth",
    "state-dict.pth",
    "determined/state_dict.pth",
    "pedl/state_dict.pth",
)
# In this order: an adapter beside a config.json is an adapter; a run may keep several forms.
_FOLDERS = (
    ("adapter_config.json", "PEFT adapter"),
    ("load_data.json", "Determined"),
    ("MLmodel", "MLflow"),
    ("latest_checkpointed_iteration.txt", "Megatron checkpoint"),
    ("config.json", "Hugging Face"),
    (".metadata.json", "Ray Train"),
)
_MAGICS = (
    (b"GGUF", 0, "GGUF"),
    (b"\x89HDF", 0, "HDF5"),
    (b"ET", 4, "ExecuTorch program"),
    (b"<?xml", 0, "OpenVINO IR"),
)
