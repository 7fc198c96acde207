"""The weights of a checkpoint, the names of its tensors, and all that is known beside them."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modelyard.archiver.digest import DigestedFile, digest_of_all
from modelyard.base.nearest import did_you_mean
from modelyard.exporter.errors import CheckpointError, UsageError
from modelyard.exporter.ingest.pickles import UnresolvedCall

# Each is put in front of every name, or inside a name, by the wrapper of that name.
WRAPPERS = (
    "module.",
    "_orig_mod.",
    "_forward_module.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
)
_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
ATTRIBUTES = ("model.", "net.", "network.", "backbone.", "module.", "student.")
"""Names that a training module gives to the network inside it."""

KEYS_SHOWN = 20
_PROGRAMS = ("exported program", "ONNX")
_AVERAGED = "n_averaged"


@dataclass(frozen=True)
class ClassHint:
    """What the checkpoint says of the class that its weights belong to; never imported from it."""

    name: str
    source: str
    """Place where the name was found, as in `config.json`."""


@dataclass(frozen=True)
class Weights:
    """One set of weights inside a checkpoint."""

    tensors: Mapping[str, Tensor]
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    """Entries `…_extra_state` of a state dict that are not tensors."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Path of a module → the version of the form in which it wrote its tensors."""
    module: UnresolvedCall | None = None
    """The pickled module that they are the state dict of."""

    @property
    def parameters(self) -> int:
        """Count their numbers, shared ones once."""
        return count_parameters(self.tensors.values())


@dataclass(frozen=True, kw_only=True)
class Description:
    """What is known of a checkpoint of any kind beside its weights."""

    kind: str
    """The kind, such as `Lightning checkpoint` or `state dict`."""
    loader: str
    """`safetensors`, `weights_only`, `profile NAME`, `inert`, `dcp`, `json`, `protobuf`, or
    `trusted`."""
    writer: str | None = None
    writer_version: str | None = None
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    hyper_parameters_name: str | None = None
    """The way in which the class takes them: `kwargs`, the name of one argument, or None."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the run: epoch, steps, optimizers, schedulers, callbacks …"""
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
    inputs: tuple[str, ...] = ()
    """What its program takes, as `--input` is written, where the file holds one."""
    program: Path | None = None
    """The program's file, where that lies in a folder with other things."""
    example: Any = None
    """A request that was saved beside it: numbers, or numbers by the name of an input."""
    columns: tuple[str, ...] = ()
    """Names of the values of a row, where it takes a table."""
    module: nn.Module | None = None
    """The whole model, where the file was trusted or needs no code of its own."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What an artifact says of itself, in values of JSON, as `inspect` prints it."""
    findings: tuple[str, ...] = ()
    """Why no worker loads it; `part: what is wrong`."""

    @property
    def is_program(self) -> bool:
        """Whether it is an artifact that is exported as it is, without a class."""
        return self.kind in _PROGRAMS


@dataclass(frozen=True, kw_only=True)
class ParsedCheckpoint(Description):
    """What one reader returns: a checkpoint before its weights are chosen."""

    weights: Mapping[str, Weights]
    """Path → weights; an empty path is all of the checkpoint."""
    default: str | None = ""
    """The path that is chosen unless told otherwise; None when nothing tells which."""
    ema: str | None = None
    """Path of averaged weights, when there are some."""
    paths: tuple[Path, ...] = ()
    """Files that were read."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Description):
    """A checkpoint of any kind; reading it ran none of its code.

    The tensors are mapped: a page is read when it is looked at.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    """The chosen weights, on the CPU, under names without wrappers' prefixes."""
    files: tuple[DigestedFile, ...]
    """Files that were read, by their names in the checkpoint's folder."""
    original_names: Mapping[str, str] = field(default_factory=dict)
    """Name in `tensors` → name in the file."""
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    """Entries that are not tensors, as in `Weights`."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Versions of the modules' forms, as in `Weights`."""
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

    @property
    def parameters(self) -> int:
        """Count the numbers in the chosen weights; tied ones once."""
        return count_parameters(self.tensors.values())

    @property
    def size_bytes(self) -> int:
        """Add up the bytes of the chosen weights; tied ones once."""
        return sum(
            tensor.numel() * tensor.element_size() for tensor in _distinct(self.tensors.values())
        )

    @property
    def sha256(self) -> str:
        """Return one digest of all files: of one file its own, else of the sorted lines of all."""
        if len(self.files) == 1:
            return self.files[0].sha256
        return digest_of_all(self.files)

    def warnings(self) -> list[str]:
        """Return what a person should know of it, whatever becomes of the model."""
        lines = list(self.notes)
        if self.refused:
            lines.append(f"the checkpoint wants {', '.join(self.refused)}, which was not imported")
        if self.alternatives:
            others = ", ".join(f"{key} ({n:,} parameters)" for key, n in self.alternatives.items())
            lines.append(f'the weights are those of "{self.weights_key}"; it also has {others}')
        return lines

    def named_labels(self) -> dict[str, str]:
        """Return what it calls its classes; none where it only numbers them."""
        names = {str(index): label for index, label in self.labels.items()}
        are_numbers = all(label == f"LABEL_{index}" for index, label in names.items())
        return {} if are_numbers else names

    def how_read(self) -> dict[str, object]:
        """Return how it was read, for the report."""
        return {
            "writer": " ".join(filter(None, (self.writer, self.writer_version))) or None,
            "loader": self.loader,
            "weights_key": self.weights_key,
            "prefixes_stripped": list(self.prefixes),
            "refused": list(self.refused),
            "imported": list(self.imports),
        }


def count_parameters(tensors: Iterable[Tensor]) -> int:
    """Count numbers, those that tensors share once."""
    return sum(tensor.numel() for tensor in _distinct(tensors))


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


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({place_of(tensor): tensor for tensor in tensors}.values())


def digest_files(root: Path, paths: Iterable[Path]) -> tuple[DigestedFile, ...]:
    """Hash the files that were read, each once, sorted by name."""
    found = []
    for path in sorted(set(paths)):
        name = path.relative_to(root).as_posix() if root.is_dir() else path.name
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f'"{path}" cannot be read: {error.strerror}') from error
        found.append(DigestedFile(name, path.stat().st_size, digest))
    return tuple(found)


def as_dict(value: Any) -> dict[str, Any]:
    """Return a value that may be a dict; an empty one for any other."""
    return dict(value) if isinstance(value, Mapping) else {}


def as_text(value: Any) -> str | None:
    """Return a value that may be text; None for any other."""
    return value if isinstance(value, str) else None


def parse_labels(value: Any) -> dict[int, str]:
    """Read labels by class index, as `id2label` or `index_to_name.json` hold them."""
    labels = {}
    for key, label in as_dict(value).items():
        if isinstance(label, list) and label:
            label = label[-1]
        if str(key).isdecimal() and isinstance(label, str):
            labels[int(key)] = label
    return labels


def code_names(auto_map: Any) -> str:
    """Return what `auto_map` of a `config.json` names, of whatever type it is."""
    values = as_dict(auto_map).values() or [auto_map]
    return ", ".join(sorted(str(value)[:100] for value in values))


def strip_wrappers(names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Strip what wrappers put in front of every name, repeatedly, and inside names.

    Returns:
        Old name → new name, in order, without `n_averaged` of an averaged model; and what was
        stripped.
    """
    renamed = {name: name for name in names}
    stripped: list[str] = []
    if _AVERAGED in renamed and len(renamed) > 1:
        # torch's AveragedModel: its own counter, and the model below `module.`.
        rest = {name: name for name in renamed if name != _AVERAGED}
        if _common(rest, ["module."]):
            renamed = rest
    while prefix := _common(renamed.values(), WRAPPERS):
        renamed = {old: new.removeprefix(prefix) for old, new in renamed.items()}
        stripped.append(prefix)
    for inner in _INNER:
        if any(f".{inner}" in f".{name}" for name in renamed.values()):
            candidate = {
                old: f".{new}".replace(f".{inner}", ".").removeprefix(".")
                for old, new in renamed.items()
            }
            if len(set(candidate.values())) == len(candidate):
                renamed = candidate
                stripped.append(f"….{inner}")
    return renamed, tuple(stripped)


def _common(names: Collection[str], prefixes: Sequence[str]) -> str | None:
    """Return the first prefix that every name has, and something behind it."""
    common = (
        prefix
        for prefix in prefixes
        if names and all(name.startswith(prefix) and name != prefix for name in names)
    )
    return next(common, None)


def fit_names(
    tensors: Mapping[str, Tensor], original: Mapping[str, str], wanted: Iterable[str]
) -> dict[str, Tensor]:
    """Return the tensors under the names that a class expects, as far as a prefix decides it.

    Args:
        tensors: tensors under names without wrappers' prefixes.
        original: each of those names → the name in the file.
        wanted: names of the class's state dict.

    Returns:
        The tensors under the names of the file where the class has those, else without the prefix
        of an attribute that the class has not.
    """
    wanted = set(wanted)
    in_file = {original.get(name, name): tensor for name, tensor in tensors.items()}
    if not set(tensors) & wanted and set(in_file) & wanted:
        return in_file
    prefix = _common(tensors, ATTRIBUTES)
    if prefix is not None and not any(name.startswith(prefix) for name in wanted):
        return {name.removeprefix(prefix): value for name, value in tensors.items()}
    return dict(tensors)


def check_model_args(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Refuse a key of `--model-args` that `owner`, a class or a configuration, does not have.

    Raises:
        UsageError: there is one.
    """
    known = set(known)
    for key in given:
        if key not in known:
            raise UsageError(
                f'--model-args: "{key}" is not a value of {owner}; expected one of its own'
                f"{did_you_mean(key, known)}"
            )


def list_shown(names: Sequence[str]) -> str:
    """Return the names for a message: of many the first, and how many there are besides."""
    rest = len(names) - KEYS_SHOWN
    return ", ".join(names[:KEYS_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
