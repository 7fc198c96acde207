"""TorchScript → the state dict of its module, without loading the program.

Names of parameters and buffers stand in the program's text, which is read and not compiled.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import (
    NOT_REBUILT,
    BadPickle,
    Global,
    UnresolvedCall,
    read_pickle,
)
from modelyard.exporter.ingest.source import Source, Window
from modelyard.exporter.ingest.torch_file import TorchZip, read_zip

_MAX_CODE = 64 << 20
_MAX_DEPTH = 200
_CLASS = re.compile(r"^class (\w+)\((\w+)\):\n((?:[ ].*\n|\n)*)", re.MULTILINE)
_NAMES = re.compile(r"^  __(parameters|buffers)__ = \[(.*)\]$", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """A TorchScript archive, read as data."""

    tensors: Mapping[str, Tensor]
    class_name: str
    code: Mapping[str, str]
    """Name of each file of its program → text."""
    traced_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the example rows that it was traced with."""
    has_rows: bool
    """Whether the content of those rows travels inside the file."""
    is_mobile: bool
    extra: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Name the kind of file."""
        return "TorchScript (mobile)" if self.is_mobile else "TorchScript"

    @property
    def notes(self) -> list[str]:
        """Return what travels inside beside the weights."""
        if not self.traced_shapes:
            return []
        shapes = ", ".join(str(list(shape)) for shape in self.traced_shapes)
        rows = ", and the rows themselves are inside" if self.has_rows else ""
        return [f"it was traced with tensors of shape {shapes}{rows}"]


def read_script(source: Source) -> Script:
    """Read the tensors, and the program as text.

    Raises:
        CheckpointError: it is damaged.
    """
    container = TorchZip(source, may_deflate=_is_code)
    entries = container.entries
    code = {
        name.partition("/code/")[2]: container.read(name, limit=_MAX_CODE).decode(
            "utf-8", "replace"
        )
        for name in entries
        if "/code/" in name and name.endswith(".py")
    }
    try:
        root = read_zip(container).value
        traced = _traced(container)
    except BadPickle as error:
        raise CheckpointError(
            f'"{source.name}" is refused: its pickle holds {error}; expected a file as '
            "torch.jit.save writes it"
        ) from error
    if not isinstance(root, UnresolvedCall):
        raise CheckpointError(f'"{source.name}" holds no TorchScript module; save it again')
    return Script(
        tensors=dict(_tensors(root, _declared(code), "", 0)),
        class_name=root.dotted.removeprefix("__torch__."),
        code=code,
        traced_shapes=traced,
        has_rows=any(
            "/traced_inputs/" in name and entry.size_bytes for name, entry in entries.items()
        ),
        is_mobile=any(name.endswith("/bytecode.pkl") for name in entries),
        extra=tuple(name for name in entries if "/extra/" in name),
    )


def _is_code(name: str) -> bool:
    return "/code/" in name or name.endswith(".debug_pkl")


def _traced(container: TorchZip) -> tuple[tuple[int, ...], ...]:
    """Read the shapes of the example rows; some versions of torch leave their content out."""
    name = next((name for name in container.entries if name.endswith("/traced_inputs.pkl")), None)
    if name is None:
        return ()
    shapes: list[tuple[int, ...]] = []

    def record(function: Global, args: tuple[Any, ...]) -> Any:
        if function.name == "_rebuild_tensor_v2" and len(args) > 2 and isinstance(args[2], tuple):
            shapes.append(tuple(size for size in args[2] if isinstance(size, int)))
        return NOT_REBUILT

    content = memoryview(container.read(name, limit=_MAX_CODE))
    read_pickle(Window(content), lambda _: None, record)
    return tuple(shapes)


def _declared(code: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Find for each module class the names of its parameters, then of its buffers."""
    found: dict[str, tuple[str, ...]] = {}
    for file, text in code.items():
        module = file.removesuffix(".py").replace("/", ".")
        for name, base, body in _CLASS.findall(text):
            if base == "Module":
                lists = {
                    kind: re.findall(r'"([^"]+)"', names) for kind, names in _NAMES.findall(body)
                }
                found[f"{module}.{name}"] = (
                    *lists.get("parameters", ()),
                    *lists.get("buffers", ()),
                )
    return found


def _tensors(
    module: UnresolvedCall, declared: Mapping[str, tuple[str, ...]], prefix: str, depth: int
) -> Iterator[tuple[str, Tensor]]:
    attributes = module.attributes
    names = declared.get(module.dotted)
    if names is None:  # a program without text: what is a tensor is taken
        names = tuple(name for name, value in attributes.items() if isinstance(value, Tensor))
    for name in names:
        if isinstance(attributes.get(name), Tensor):
            yield prefix + name, attributes[name]
    for name, child in attributes.items():
        is_module = isinstance(child, UnresolvedCall) and isinstance(child.function, Global)
        if is_module and child.dotted in declared and depth < _MAX_DEPTH:
            yield from _tensors(child, declared, f"{prefix}{name}.", depth + 1)
