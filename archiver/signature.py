"""What an artifact takes and gives: names, dtypes, shapes, and the ranges of dynamic dimensions.

An input is written `name:dtype[dims]`: `image:float32[batch,1,8,8]`. A dim is a number, or a name,
which makes it dynamic; `length=1..128` gives the range of sizes to prove, 1..8 when absent, and
`height=64..160/32` every 32nd of them. A name that appears twice is one size.

Where not every number is a value, the range follows: `edge_index:int64[2,edges]<nodes`; see
`archiver/values.py`. A complex tensor, `wave:complex64[batch,8]`, is taken as its real view: the
artifact's input is float32[batch,8,2].

A tensor inside an argument is named by the way to it: `batch.image:float32[…]` is the value under
the key "image" of the dict `batch`, `pair.0:float32[…]` the first tensor of the tuple or list
`pair`. The artifact takes them one by one, as `batch_image` and `pair_0`.

Reports and manifests hold a signature as

    {"inputs": [{"name": "image", "dtype": "float32", "shape": ["batch", 1, 8, 8]}],
     "outputs": […], "dims": {"batch": {"min": 1, "max": 8}},
     "batching": {"batchable": true, "reason": "…",
                  "invariant": {"sizes": [4, 6, 8], "apart": 6e-8}}}

where an input may also have "values", "argument" (the way to it), "view" ("complex64") and "limits"
(for which values the artifact is known to differ), and a dim its "step".
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any

from modelyard.archiver import values as values_of
from modelyard.archiver.untrusted.json import Fields
from modelyard.archiver.values import Limits, Values

DTYPES = (
    *("float32", "float16", "bfloat16", "float64"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
"""What an export takes; torch's names."""
VIEWS = {"complex64": "float32", "complex128": "float64"}
"""A complex dtype → that of its real view, whose last dim holds real and imaginary part."""
OIP_DATATYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
}
"""A dtype → its name in the Open Inference Protocol."""
PAST_MASK = "past_mask"
"""An input that only decoders have which take their cache."""
UNLIMITED = sys.maxsize
DEFAULT_RANGE = (1, 8)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
_FORM = "name:dtype[dims], such as image:float32[batch,1,8,8]"
_DIM_FORM = "a size such as 8, a name such as batch, or a name with its range such as batch=1..8"
_SIZES = re.compile(r"(\d{1,9})\.\.(\d{1,9})(?:/(\d{1,9}))?")


@dataclass(frozen=True)
class Dim:
    """A dynamic dimension, and the sizes that it may have, both ends included."""

    name: str
    min: int = 0
    max: int = UNLIMITED
    step: int = 1
    """Difference between one size and the next."""

    def __str__(self) -> str:
        step = f"/{self.step}" if self.step > 1 else ""
        return self.name if self.max == UNLIMITED else f"{self.name}={self.min}..{self.max}{step}"

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= self.max and (size - self.min) % self.step == 0

    def sizes(self, start: int = 0) -> range:
        """Return its sizes, those below `start` left out."""
        skipped = -(-max(0, start - self.min) // self.step)
        return range(self.min + skipped * self.step, self.max + 1, self.step)

    def at_least(self, size: int) -> int:
        """Return its smallest size from `size` on, its largest where all are smaller."""
        return next(iter(self.sizes(size)), self.max)


Size = int | Dim


def fits(size: int, dim: Size) -> bool:
    """Return whether a tensor's dimension may have a size."""
    return size in dim if isinstance(dim, Dim) else size == dim


@dataclass(frozen=True)
class TensorSpec:
    """One input or output; without a dtype, the file says nothing but its name."""

    name: str
    dtype: str = ""
    shape: tuple[Size, ...] = ()
    path: str = ""
    """Place of the tensor in forward()'s arguments, when that is inside one: `batch.image`."""
    values: Values | None = None
    """Those that it takes; None where nobody said so."""
    view: str = ""
    """The complex dtype whose real view the artifact takes, of `VIEWS`."""
    limits: Limits | None = None
    """Values for which the artifact is known to differ from its checkpoint, if there are any."""

    def __str__(self) -> str:
        name, dims = self.path or self.name, self.shape
        if self.view:
            return f"{name}:{self.view}[{','.join(map(str, dims[:-1]))}]"
        shape = f"[{','.join(map(str, dims))}]" if self.dtype else ""
        return f"{name}:{self.dtype or 'tensor'}{shape}{self.values or ''}"

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return "float" in self.dtype

    @property
    def open_value(self) -> int | None:
        """What lets a position through, if it is a mask: by its name, nothing else tells it."""
        if self.is_float or "mask" not in self.name:
            return None
        return 0 if "padding_mask" in self.name else 1  # torch's say what to leave out

    def sizes(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with every dynamic dimension at its size in `dims`."""
        return tuple(size if isinstance(size, int) else dims[size.name] for size in self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return the form that reports and manifests hold."""
        shape = [size if isinstance(size, int) else size.name for size in self.shape]
        document: dict[str, Any] = {"name": self.name, "dtype": self.dtype, "shape": shape}
        stated = {"argument": self.path, "view": self.view}
        document |= {key: text for key, text in stated.items() if text}
        both = {"values": self.values, "limits": self.limits}
        return document | {key: each.to_json() for key, each in both.items() if each}


@dataclass(frozen=True)
class Batching:
    """Whether requests may share a call: whether each row's output depends on that row alone."""

    batchable: bool
    reason: str
    sizes: tuple[int, ...] = ()
    """Sizes of batches at which a row gives the same bits, at every place and beside all others."""
    apart: float = 0.0
    """Largest scaled difference that others made, where it was not refused."""

    def __str__(self) -> str:
        if not self.batchable:
            return f"one request at a time: {self.reason}"
        sizes = ", ".join(map(str, self.sizes)) or "no size"
        return f"a row keeps its bits in batches of {sizes}; others move it by {self.apart:.1e}"

    def to_json(self) -> dict[str, Any]:
        """Return the form that reports and manifests hold."""
        promised = {"sizes": list(self.sizes), "apart": self.apart}
        found = {"batchable": self.batchable, "reason": self.reason}
        return found | ({"invariant": promised} if self.batchable else {})


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs in the order of the call; outputs are empty until the model has run."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...] = ()
    batching: Batching | None = None
    """None until the model has run, and in reports of versions that did not look."""

    @property
    def dims(self) -> dict[str, Dim]:
        """The inputs' dynamic dimensions, in the order of their first mention."""
        sizes = (size for spec in self.inputs for size in spec.shape)
        return {size.name: size for size in sizes if isinstance(size, Dim)}

    @property
    def batch(self) -> Size | None:
        """The first dimension of the first input; None where there is none."""
        return self.inputs[0].shape[0] if self.inputs and self.inputs[0].shape else None

    @property
    def main(self) -> TensorSpec | None:
        """The output that answers are made of: the first of real numbers, else the first.

        Classifiers of scikit-learn give the numbers of their labels before the probabilities.
        """
        real = (spec for spec in self.outputs if spec.is_float)
        return next(real, next(iter(self.outputs), None))

    @property
    def has_cache(self) -> bool:
        """Whether it is of a decoder with its cache, as `export --generate` writes."""
        return any(spec.name == PAST_MASK for spec in self.inputs)

    @property
    def proven_batch(self) -> int | None:
        """The largest batch that the export compared, None if unknown.

        1 for a fixed batch, and for a model whose rows mix: it is served one request at a time.
        """
        if self.batch is None:
            return None
        mixes = self.batching is not None and not self.batching.batchable
        return 1 if mixes or isinstance(self.batch, int) else self.batch.max

    def with_values(self, found: Mapping[str, Values]) -> "Signature":
        """Return the signature in which inputs without stated values take those of their name."""
        inputs = (replace(spec, values=spec.values or found.get(spec.name)) for spec in self.inputs)
        return replace(self, inputs=tuple(inputs))

    def in_precision(self, dtype: str) -> "Signature":
        """Return the signature whose floating-point inputs are of `dtype`, but complex ones."""
        inputs = (
            replace(spec, dtype=dtype) if spec.is_float and not spec.view else spec
            for spec in self.inputs
        )
        return replace(self, inputs=tuple(inputs))

    def to_json(self) -> dict[str, Any]:
        """Return the form that reports and manifests hold."""
        document: dict[str, Any] = {
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "dims": {
                name: {"min": dim.min, "max": dim.max}
                | ({"step": dim.step} if dim.step > 1 else {})
                for name, dim in self.dims.items()
            },
        }
        return document | ({"batching": self.batching.to_json()} if self.batching else {})


def parse_signature(document: Any) -> Signature:
    """Read a signature from the JSON of a report or manifest.

    Raises:
        ValueError: every field that is wrong.
    """
    fields = Fields(document, "signature")
    signature = read_signature(fields)
    fields.check()
    return signature


def read_signature(fields: Fields) -> Signature:
    """Read a signature as reports and manifests hold it; problems are noted in `fields`."""
    stated = fields.object("dims")
    dims = {name: _read_dim(name, stated.object(name)) for name in stated.values}
    inputs = [_read_tensor(item, dims) for item in fields.objects("inputs")]
    outputs = [_read_tensor(item, dims) for item in fields.objects("outputs")]
    batching = None
    if fields.values.get("batching") is not None:
        entry = fields.object("batching")
        batching = Batching(entry.boolean("batchable"), entry.text("reason"))
        if "invariant" in entry.values:
            promised = entry.object("invariant")
            sizes = promised.items("sizes")
            if not all(type(size) is int and size > 0 for size in sizes):
                promised.wrong("sizes", "a list of whole numbers from 1", sizes)
                sizes = []
            batching = replace(batching, sizes=tuple(sizes), apart=promised.number("apart"))
    signature = Signature(tuple(inputs), tuple(outputs), batching)
    for name in sorted(set(signature.dims) - set(dims)):
        fields.problems.append(f"{stated.at(name)}: an input names it, its range is missing")
    return signature


def _read_dim(name: str, fields: Fields) -> Dim:
    low, high, step = fields.integer("min"), fields.integer("max"), fields.integer("step", 1)
    if not 0 <= low <= high:
        fields.problems.append(f"{fields.path}: expected 0 <= min <= max, found {low} and {high}")
    if step < 1 or (high - low) % step:
        fields.wrong("step", "a whole part of the range", step)
        step = 1
    return Dim(name, low, high, step)


def _read_tensor(fields: Fields, dims: Mapping[str, Dim]) -> TensorSpec:
    shape: list[Size] = []
    for i, size in enumerate(fields.items("shape")):
        if isinstance(size, str) and size:
            shape.append(dims.get(size, Dim(size)))
        elif isinstance(size, int) and not isinstance(size, bool) and size >= 0:
            shape.append(size)
        else:
            fields.wrong(f"shape[{i}]", "a size of at least 0 or a dimension's name", size)
    path = fields.text_or_none("argument") or ""
    dtype, view = fields.text("dtype"), fields.text_or_none("view") or ""
    if view and (VIEWS.get(view) != dtype or shape[-1:] != [2]):
        fields.wrong("view", "a complex dtype whose real view this is", view)
        view = ""
    values = None
    if "values" in fields.values:
        stated = fields.object("values")
        values = values_of.read_values(stated)
        if problem := values.problem(dtype, ends_of(dims)):
            fields.problems.append(f"{stated.path}: {problem}")
    limits = values_of.read_limits(fields.object("limits")) if "limits" in fields.values else None
    return TensorSpec(fields.text("name"), dtype, tuple(shape), path, values, view, limits)


def ends_of(dims: Mapping[str, Dim]) -> dict[str, tuple[int, int]]:
    """Return the smallest and the largest size of each dim."""
    return {name: (dim.min, dim.max) for name, dim in dims.items()}


def parse_inputs(texts: Sequence[str]) -> Signature:
    """Read every `--input` of one model.

    Raises:
        ValueError: names the input, the part of it that is wrong, and what was expected there.
    """
    if not texts:
        raise ValueError(f"no --input given; expected one {_FORM} per argument of forward()")
    ranges: dict[str, tuple[int, ...] | None] = {}
    specs = [_parse_input(text, ranges) for text in texts]
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f'--input "{twice[0]}" is given twice; every input needs a name of its own'
        )
    # The range of a name may follow its first mention.
    dims = {name: Dim(name, *(ends or DEFAULT_RANGE)) for name, ends in ranges.items()}
    for text, spec in zip(texts, specs, strict=True):
        if spec.values and (problem := spec.values.problem(spec.view or spec.dtype, ends_of(dims))):
            raise ValueError(f'--input "{text}": the values {spec.values}: {problem}')
    return Signature(tuple(with_dims(specs, dims)))


def with_dims(specs: Iterable[TensorSpec], dims: Mapping[str, Dim]) -> Iterable[TensorSpec]:
    """Yield the specs with these ranges in place of those of equal name."""
    for spec in specs:
        shape = (
            dims.get(size.name, size) if isinstance(size, Dim) else size for size in spec.shape
        )
        yield replace(spec, shape=tuple(shape))


def _parse_input(text: str, ranges: dict[str, tuple[int, ...] | None]) -> TensorSpec:
    path, colon, rest = text.partition(":")
    name = path.replace(".", "_")
    if not _PATH.fullmatch(path) or iskeyword(name):
        raise _wrong(text, f'"{path}" is not a name of letters, digits and _', _FORM)
    if not colon:
        raise _wrong(text, f'nothing follows the name "{name}"', _FORM)
    dtype, bracket, behind = rest.partition("[")
    if rest.partition("(")[0] in (*DTYPES, *VIEWS) and rest.endswith(")"):
        square = f"{path}:{rest.replace('(', '[').replace(')', ']')}"
        raise _wrong(text, "the dims stand in round brackets", f"square ones: {square}")
    if dtype not in (*DTYPES, *VIEWS):
        raise _wrong(text, f'"{dtype}" is not a dtype', f"one of {', '.join((*DTYPES, *VIEWS))}")
    dims, closed, stated = behind.partition("]")
    if not bracket or not closed or stated[:1] not in ("", "<", "="):
        wrong = f'"{bracket}{behind}" after the dtype is not a list of dims in [ ]'
        raise _wrong(text, wrong, _FORM)
    shape = tuple(
        _parse_dim(text, position, part.strip(), ranges)
        for position, part in enumerate(dims.split(","), start=1)
    )
    values = _parse_values(text, dtype, stated) if stated else None
    path = path if path != name else ""
    if dtype in VIEWS:
        return TensorSpec(name, VIEWS[dtype], (*shape, 2), path, values, view=dtype)
    return TensorSpec(name, dtype, shape, path, values)


def _parse_values(text: str, dtype: str, stated: str) -> Values:
    try:
        values = values_of.parse_values(stated.replace(" ", ""))
    except ValueError as error:
        raise _wrong(text, str(error), values_of.FORM) from error
    if stated.startswith("<") and "int" not in dtype:
        raise _wrong(text, f'"{stated}" is for integers', "a range such as =0..1")
    return values


def _parse_dim(
    text: str, position: int, part: str, ranges: dict[str, tuple[int, ...] | None]
) -> Size:
    """Read one dim, and note a named one in `ranges` (None until a range is given)."""
    if part.isdecimal() and int(part) > 0:
        return int(part)
    name, equals, range_text = part.partition("=")
    if not _NAME.fullmatch(name):
        raise _wrong(text, f'dim {position} is "{part}"', _DIM_FORM)
    ends = _parse_range(text, position, part, range_text) if equals else None
    noted = ranges.setdefault(name, ends)
    if ends and noted not in (None, ends):
        here, elsewhere = Dim(name, *ends), Dim(name, *noted)
        raise _wrong(text, f"dim {here} here and {elsewhere} elsewhere", "one range per name")
    ranges[name] = ends or noted
    return Dim(name)


def _parse_range(text: str, position: int, part: str, range_text: str) -> tuple[int, ...]:
    ends = _SIZES.fullmatch(range_text)
    if ends is None:
        raise _wrong(text, f'dim {position} is "{part}"', _DIM_FORM)
    low, high, step = int(ends[1]), int(ends[2]), int(ends[3] or 1)
    if low < 1 or low >= high:
        wrong = f"dim {position} has the range {low}..{high}"
        raise _wrong(
            text, wrong, "1 or more first, then more; a single size is written as a number"
        )
    if step < 1 or (high - low) % step:
        wrong = f"dim {position} has the range {low}..{high} in steps of {step}"
        raise _wrong(text, wrong, "whole steps from one end to the other, as in 64..160/32")
    return low, high, step


def _wrong(text: str, seen: str, expected: str) -> ValueError:
    return ValueError(f'--input "{text}": {seen}; expected {expected}')
