"""An `.onnx` from elsewhere → a module that runs it, and the file as a worker serves it.

The file is its own reference: as it stands, without onnxruntime's optimisations. What is written
has its weights inside, and names for inputs, outputs and dims that a signature can hold.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from modelyard.archiver.signature import Signature, TensorSpec
from modelyard.exporter.arguments import NotTensor, read_inputs
from modelyard.exporter.errors import CheckpointError, ConversionError, cause
from modelyard.exporter.formats.texts import as_numbers
from modelyard.exporter.ingest.onnx_file import (
    Value,
    classes_of,
    inputs_of,
    is_quantized,
    names_in,
    outputs_of,
    read_onnx,
)
from modelyard.exporter.ingest.source import Source
from modelyard.handlers.models.backends import Opening, open_session
from modelyard.handlers.proof.plan import end_sizes
from modelyard.handlers.proof.probes import Probe, make_inputs

_FILE = "file"
# What is tried for dims of any size, but the batch: the first that runs at its ends.
_SPANS = ("1..8", "8..16", "32..96/32", "224..256/32")
_TOOLS = ("skl2onnx", "OnnxMLTools", "onnxmltools")
"""Writers of files that take the columns of a table."""


class OnnxFile(nn.Module):
    """A file that runs: one tensor per input, by place → a tensor per output, by its name."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__()
        self.is_quantized = is_quantized(model)
        self._original, (self._model, self._ends) = model, as_numbers(model, name)
        self.own_names = [value.name for value in inputs_of(self._model)]
        self.inputs = _named(inputs_of(self._model), names_in(self._model), name)
        self._name = name
        self._outputs = outputs_of(self._model)
        self._session: Any = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Run it in onnxruntime while this is open.

        Raises:
            CheckpointError: onnxruntime cannot, or it gives no tensor.
        """
        tensors = {value.name for value in self._outputs if value.dtype}
        if not tensors:
            raise CheckpointError(
                f'"{self._name}" gives no tensor of numbers, only '
                f"{', '.join(f'{value.name} ({value.kind})' for value in self._outputs)}"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            kept = [value for value in self._original.graph.output if value.name in tensors]
            path.write_bytes(_with(self._original, kept).SerializeToString())
            try:
                self._session = open_session(path, Opening(torch.device("cpu")), is_optimized=False)
            # onnxruntime has an error class of its own for every way in which it cannot.
            except Exception as error:
                raise CheckpointError(
                    f'onnxruntime cannot load "{self._name}": {cause(error)}'
                ) from error
            yield

    def forward(self, *tensors: Tensor) -> dict[str, Any]:
        """Return the outputs; one that is not a tensor is only described."""
        # torch.fx may look inside with what stands for tensors.
        given = (torch.Tensor.numpy(tensor.detach().cpu()) for tensor in tensors)
        names = [value.name for value in self._outputs if value.dtype]
        feed = self._ends.feed(dict(zip(self.own_names, given, strict=True)))
        found = dict(zip(names, self._session.run(names, feed), strict=True))
        return {
            value.name: torch.from_numpy(self._ends.read(value.name, found[value.name])).to(
                tensors[0].device
            )
            if value.dtype
            else NotTensor(value.kind, is_needed=value.kind != "string")
            for value in self._outputs
        }

    def propose(self) -> tuple[str, ...]:
        """Return the inputs with ranges in which it runs, as `--input` is written."""
        texts = [
            tuple(_text(value, span, len(self._ends.texts.get(own, ())) - (not takes_others))
                  for own, value in zip(self.own_names, self.inputs, strict=True))
            for takes_others in ((True, False) if self._ends.columns else (True,))
            for span in _SPANS
        ]  # fmt: skip
        return next(filter(self._runs, texts), texts[0])

    def table(self, signature: Signature, kept: Sequence[str]) -> dict[str, Any]:
        """Return the columns that a table of its rows has, and the classes that its outputs name.

        That is the content of `features.json`; nothing of a file that takes something else.

        Args:
            signature: signature of the artifact.
            kept: the outputs that are the signature's, by their names in the file.
        """
        producer, domains = self._model.producer_name, {d.domain for d in self._model.opset_import}
        specs, outputs = signature.inputs, signature.outputs
        is_table = all(len(spec.shape) == 2 and isinstance(spec.shape[1], int) for spec in specs)
        has_rows = all(0 < len(spec.shape) <= 2 for spec in outputs)
        if not (is_table and has_rows and (producer in _TOOLS or "ai.onnx.ml" in domains)):
            return {}
        columns: list[dict[str, Any]] = []
        for spec, own in zip(specs, self._placed(signature), strict=True):
            width = spec.shape[1]
            assert isinstance(width, int)
            prefix = "x" if len(specs) == 1 else f"{spec.name}_"
            names = [f"{prefix}{at}" for at in range(width)]
            columns += [{"name": name} for name in (names if width > 1 else [spec.name])]
            if texts := self._ends.texts.get(own):
                columns[-1]["values"] = {text: at for at, text in enumerate(texts[:-1])}
                if spec.values and spec.values.high.number == len(texts) - 1:
                    columns[-1]["other"] = len(texts) - 1
        classes = {
            spec.name: list(map(str, named))
            for spec, own in zip(outputs, kept, strict=True)
            if (named := self._classes(spec, own))
        }
        return {"features": columns} | ({"classes": classes} if classes else {})

    def _classes(self, spec: TensorSpec, own: str) -> Sequence[Any]:
        if not spec.is_float:  # whole numbers are classes themselves, unless they stand for texts
            return self._ends.classes.get(own, ())
        classes = self._ends.classes.get(own) or classes_of(self._model)
        return classes if len(spec.shape) == 2 and spec.shape[1] == len(classes) > 1 else ()

    def _placed(self, signature: Signature) -> list[str]:
        """Return the file's names of a signature's inputs, in whatever order these are."""
        own = dict(zip((value.name for value in self.inputs), self.own_names, strict=True))
        # An input of another name goes by its place.
        named = {spec.name for spec in signature.inputs}
        rest = (place for name, place in own.items() if name not in named)
        return [own[spec.name] if spec.name in own else next(rest) for spec in signature.inputs]

    def write(self, path: Path, signature: Signature, kept: Sequence[str]) -> dict[str, object]:
        """Write the file with the signature's names.

        Args:
            path: where.
            signature: signature of the inputs in whatever order, by their names.
            kept: which of its outputs are the signature's, by their names in the file.

        Raises:
            ConversionError: an output cannot have its new name, which another value has.
        """
        import onnx

        places = self._placed(signature)
        by_output = {value.name: value for value in self._model.graph.output}
        model = _with(self._model, [by_output[name] for name in kept])
        graph = model.graph
        given = {value.name: value for value in graph.input}
        free = [value for value in graph.input if value.name not in places]
        inputs = [given[name] for name in places]
        renamed_inputs = _rename(inputs, signature.inputs)
        renamed_outputs = _rename(list(graph.output), signature.outputs)
        if taken := {new for _, new in renamed_outputs} & names_in(self._model):
            raise ConversionError(
                f'"{self._name}" has another value that is called "{min(taken)}"; expected '
                "another name: give --output, once for each output"
            )
        nodes = [
            *(onnx.helper.make_node("Identity", [new], [old]) for old, new in renamed_inputs),
            *graph.node,
            *(onnx.helper.make_node("Identity", [old], [new]) for old, new in renamed_outputs),
        ]
        for field, values in ((graph.node, nodes), (graph.input, [*inputs, *free])):
            _replace(field, values)
        del graph.value_info[:]  # it may state the sizes by the names that they had
        onnx.save(model, path)
        opset = next((each.version for each in model.opset_import if not each.domain), None)
        return {"opset": opset}

    def _runs(self, texts: tuple[str, ...]) -> bool:
        signature = read_inputs(texts)
        for sizes in end_sizes(signature):
            try:
                for kind in ("zeros", "large"):  # the first category, and the last
                    self(*make_inputs(signature, Probe(kind, sizes)))
            # onnxruntime's errors, as above: another span may do.
            except Exception:
                return False
        return True


@contextmanager
def open_onnx_file(path: Path) -> Iterator[nn.Module]:
    """Yield a module that takes the file's inputs, by name or place, and gives its outputs.

    Raises:
        CheckpointError: the file is refused, or takes something else than tensors.
    """
    model, _ = read_onnx(Source.of_file(path))
    file = OnnxFile(model, path.name)
    graph = Graph()
    given = tuple(graph.placeholder(value.name, Tensor) for value in file.inputs)
    graph.output(graph.call_module(_FILE, given))
    with file.opened():
        yield GraphModule({_FILE: file}, graph)


def file_of(module: nn.Module) -> OnnxFile | None:
    """Return the file that a module runs, where it is one of `open_onnx_file`."""
    return next((part for part in module.modules() if isinstance(part, OnnxFile)), None)


def _named(values: Sequence[Value], taken: set[str], file: str) -> list[Value]:
    """Return inputs under names that a signature can hold, of which none is in the file yet."""
    named = []
    names: dict[object, str] = {}
    for place, value in enumerate(values):
        if value.dtype is None:
            raise CheckpointError(
                f'input "{value.name}" of "{file}" is a {value.kind}; expected tensors of numbers'
            )
        name = _identifier(value.name, f"input_{place}")
        while name != value.name and name in taken:
            name += "_"
        taken.add(name)
        dims: list[int | str | None] = []
        for axis, size in enumerate(value.shape or ()):
            # Nobody gives two batches; of other dims without a name, nothing is known.
            key = size if size is not None else ("batch" if axis == 0 else (name, axis))
            if not isinstance(size, int):
                is_first = axis == 0 and (place == 0 or size is None)
                own = _identifier(size or f"{name}_{axis}", f"{name}_{axis}")
                size = names.setdefault(key, "batch" if is_first else own)
            dims.append(size)
        shape = None if value.shape is None else tuple(dims)
        named.append(Value(name, value.dtype, value.kind, shape))
    return named


def _with(file: Any, outputs: Sequence[Any]) -> Any:
    """Return a copy of a file with some of its outputs."""
    model = type(file)()
    model.CopyFrom(file)
    _replace(model.graph.output, outputs)
    return model


def _replace(field: Any, values: Sequence[Any]) -> None:
    """Put copies of values in the place of those of a field, which may be among them."""
    copied = [type(value).FromString(value.SerializeToString()) for value in values]
    del field[:]
    field.extend(copied)


def _identifier(name: str, otherwise: str) -> str:
    cleaned = re.sub(r"\W", "_", name, flags=re.ASCII)
    return cleaned if cleaned.isidentifier() else otherwise


def _text(value: Value, span: str, count: int = 0) -> str:
    sizes = [
        str(size) if isinstance(size, int) else f"{size}={'1..8' if size == 'batch' else span}"
        for size in value.shape or ()
    ]
    return f"{value.name}:{value.dtype}[{','.join(sizes)}]{f'<{count}' if count > 0 else ''}"


def _rename(values: Sequence[Any], specs: Sequence[TensorSpec]) -> list[tuple[str, str]]:
    """Rename the file's values as in a signature, with its sizes; return the old and new names."""
    renamed = []
    for value, spec in zip(values, specs, strict=True):
        if value.name != spec.name:
            renamed.append((value.name, spec.name))
            value.name = spec.name
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        for size in spec.shape:
            dim = shape.dim.add()
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = size.name
    return renamed
