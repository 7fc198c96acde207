"""What ingest finds: the weights, where they came from, and all that was beside them."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modelyard.exporter.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointFile:
    """One file that was read."""

    name: str
    """Relative to the checkpoint's folder."""
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class ClassHint:
    """What the checkpoint says of the class that its weights belong to; never imported from it."""

    name: str
    source: str
    """Where the name was found, as in `config.json`."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of any kind; reading it ran none of its code.

    The tensors are mapped: a page is read when it is looked at.
    """

    path: Path
    kind: str
    """As in `Lightning checkpoint` or `state dict`."""
    tensors: Mapping[str, Tensor]
    """The chosen weights, on the CPU, under names without wrappers' prefixes."""
    loader: str
    """`safetensors`, `weights_only`, `profile NAME`, `inert`, `dcp`, `json` or `trusted`."""
    files: tuple[CheckpointFile, ...]
    writer: str | None = None
    writer_version: str | None = None
    original_names: Mapping[str, str] = field(default_factory=dict)
    """Name in `tensors` → name in the file."""
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    """Entries `…_extra_state` of a state dict that are not tensors."""
    weights_key: str = ""
    """Path of the weights inside the checkpoint, dots between; empty when they are all of it."""
    alternatives: Mapping[str, int] = field(default_factory=dict)
    """Path of every other set of weights in it → its number of parameters."""
    ema_key: str | None = None
    """Path of averaged weights, when there are some."""
    prefixes: tuple[str, ...] = ()
    """What was stripped from every name, the outermost first."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names that share all of their numbers."""
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    hyper_parameters_name: str | None = None
    """How the class takes them: `kwargs`, the name of one argument, or None: not at all."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """What is found of the run: epoch, steps, optimizers, schedulers, callbacks …"""
    refused: tuple[str, ...] = ()
    """Names that the file wanted imported and that are on no allow-list; none was."""
    imports: tuple[str, ...] = ()
    """Names that were imported because the file was trusted."""
    class_hint: ClassHint | None = None
    labels: Mapping[int, str] = field(default_factory=dict)
    """Class index → label, when the checkpoint says so."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source text of classes that the file holds; never compiled."""
    notes: tuple[str, ...] = ()
    """What a person should know before using it, a sentence each."""
    module: nn.Module | None = None
    """The whole model, where none of the file's code is needed to build it."""

    @property
    def parameters(self) -> int:
        """Count the numbers in the chosen weights; tied ones once."""
        return count_parameters(self.tensors.values())

    @property
    def size_bytes(self) -> int:
        """Add up the bytes of the chosen weights; tied ones once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _distinct(self.tensors))

    @property
    def sha256(self) -> str:
        """Return one digest of all files: of one file its own, else of the sorted lines of all."""
        if len(self.files) == 1:
            return self.files[0].sha256
        lines = sorted(f"{file.sha256}  {file.name}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def count_parameters(tensors: Iterable[Tensor]) -> int:
    """Count numbers, those that tensors share once."""
    return sum(tensor.numel() for tensor in _distinct({str(i): t for i, t in enumerate(tensors)}))


def find_tied(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    """Group the names whose tensors are the same numbers in the same place."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(place_of(tensor), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def place_of(tensor: Tensor) -> object:
    """Return what is equal for two tensors only when they are the same numbers in memory."""
    if tensor.layout.__str__() != "torch.strided" or tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _distinct(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return list({place_of(tensor): tensor for tensor in tensors.values()}.values())


def digest_files(root: Path, paths: Iterable[Path]) -> tuple[CheckpointFile, ...]:
    """Hash the files that were read, each once, sorted by name."""
    found = []
    for path in sorted(set(paths)):
        name = path.relative_to(root).as_posix() if root.is_dir() else path.name
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f'"{path}" cannot be read: {error.strerror}') from error
        found.append(CheckpointFile(name, path.stat().st_size, digest))
    return tuple(found)


def parse_labels(value: Any) -> dict[int, str]:
    """Read labels by class index, as `id2label` or `index_to_name.json` hold them."""
    if not isinstance(value, Mapping):
        return {}
    labels = {}
    for key, label in value.items():
        if isinstance(label, list) and label:
            label = label[-1]
        if str(key).isdecimal() and isinstance(label, str):
            labels[int(key)] = label
    return labels
