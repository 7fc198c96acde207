"""Files of real inputs (`--sample`) → tensors as the model takes them.

Nothing of a file runs: .npz and .npy without pickle, .pt with weights_only, JSON, and pictures
where the input's shape leaves one reading only. Values are compared with and then forgotten: the
report names the file and its number of rows.
"""

import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from torch import Tensor

from modelyard.archiver.handler_files import TOKENIZER_FILE
from modelyard.archiver.signature import DEFAULT_RANGE, Dim, Signature, Size, TensorSpec
from modelyard.archiver.untrusted.zip import ZipReader
from modelyard.exporter.arguments import read_inputs
from modelyard.exporter.errors import UsageError, cause
from modelyard.exporter.ingest.source import Source
from modelyard.handlers.limits import refused_values
from modelyard.handlers.models.backends import dtype_name, torch_dtype
from modelyard.handlers.proof.probes import batch_sizes

# Python and numpy count in double precision, and few models do.
_SINGLE = {"float64": "float32", "complex128": "complex64"}
_TEXT = ".txt"
_FORMS = "expected .npz, .npy, .pt, .json, .png, .jpg or .txt"


_AS_TENSORS = "give the tensors that the model gets, as .npz"


class Unfit(ValueError):
    """What is given is not of the model's inputs."""


@dataclass(frozen=True)
class Sample:
    """One file's inputs, in the signature's order, and the sizes of its dynamic dimensions."""

    file: str
    inputs: tuple[Tensor, ...]
    sizes: Mapping[str, int]

    @property
    def rows(self) -> int:
        """How many rows the first input holds."""
        return self.inputs[0].shape[0] if self.inputs[0].ndim else 1


def read_sample(
    path: Path, signature: Signature, *, is_split: bool = False, folder: Path | None = None
) -> Sample:
    """Read one file; a row without its batch dimension gets one.

    Args:
        path: the file.
        signature: what it holds.
        is_split: its rows will be put into batches: it may hold more than one has.
        folder: folder of the checkpoint, whose tokenizer reads a text.

    Raises:
        UsageError: it cannot be read, or its tensors are not the signature's inputs.
    """
    sizes: dict[str, int] = {}
    with _readable(path):
        inputs = _fit_all(_read(path, signature, folder), signature, sizes, is_split)
        for spec, tensor in zip(signature.inputs, inputs, strict=True):
            if problem := refused_values(spec, tensor, sizes):
                raise Unfit(f'"{spec.name}" {problem}')
    return Sample(path.name, inputs, sizes)


def sample_of(name: str, content: Any, signature: Signature) -> Sample:
    """Return the first row of a request that came with a checkpoint; all of it, without rows.

    Args:
        name: what messages call it.
        content: numbers, or numbers by the name of an input.
        signature: what it holds.

    Raises:
        Unfit: its tensors are not the signature's inputs.
    """
    sizes = dict[str, int]()
    inputs = _fit_all(content, signature, sizes, is_split=True)
    if isinstance(batch := signature.batch, Dim) and len(inputs[0]) >= batch.min:
        sizes[batch.name] = batch.min
        inputs = tuple(
            value[: batch.min] if spec.shape[0] == batch else value
            for spec, value in zip(signature.inputs, inputs, strict=True)
        )
    return Sample(name, inputs, sizes)


def as_request(sample: Sample, signature: Signature) -> Any:
    """Return a sample as base_handler takes it: a row, rows by name, or inputs without rows."""
    values = {
        spec.name: (value[0] if isinstance(signature.batch, Dim) else value).tolist()
        for spec, value in zip(signature.inputs, sample.inputs, strict=True)
    }
    is_row = len(values) == 1 and isinstance(signature.batch, Dim)
    return next(iter(values.values())) if is_row else values


def _read(path: Path, signature: Signature, folder: Path | None = None) -> Any:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise Unfit(f'"{path.suffix}" is not a known suffix; {_FORMS}')
    return reader(path, signature, folder)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the file in every problem: each parser fails in its own ways on other files."""
    try:
        if not path.is_file():
            raise Unfit("there is no such file")
        yield
    except Unfit as error:
        raise UsageError(f'--sample "{path}": {error}') from error
    except Exception as error:
        raise UsageError(f'--sample "{path}" cannot be read: {cause(error)}; {_FORMS}') from error


def _by_input(found: Any, signature: Signature) -> list[Any]:
    """Return one value per input: by name, else by order, else the only one."""
    specs = signature.inputs
    if isinstance(found, Mapping):
        keys = [spec.path if spec.path in found else spec.name for spec in specs]
        if set(keys) != set(found):
            raise Unfit(
                f"it holds {', '.join(map(str, found))}; expected exactly the inputs "
                f"{', '.join(spec.name for spec in specs)}"
            )
        return [found[key] for key in keys]
    if len(specs) == 1:
        return [found[0] if isinstance(found, tuple) and len(found) == 1 else found]
    if isinstance(found, list | tuple) and len(found) == len(specs):
        return list(found)
    raise Unfit(
        f"it holds one value for {len(specs)} inputs; expected them by name: "
        f"{', '.join(spec.name for spec in specs)}"
    )


def _fit_all(
    found: Any, signature: Signature, sizes: dict[str, int], is_split: bool
) -> tuple[Tensor, ...]:
    """Return the values as tensors of the inputs' dtypes and shapes; note their dynamic sizes."""
    given = zip(signature.inputs, _by_input(found, signature), strict=True)
    return tuple(_fit(spec, value, signature.batch, sizes, is_split) for spec, value in given)


def _fit(
    spec: TensorSpec, value: Any, batch: Size | None, sizes: dict[str, int], is_split: bool
) -> Tensor:
    if spec.view and isinstance(value, Tensor) and value.is_complex():
        value = torch.view_as_real(value)
    tensor = _as_dtype(spec, value)
    if tensor.ndim == len(spec.shape) - 1 and isinstance(batch, Dim) and spec.shape[0] == batch:
        tensor = tensor.unsqueeze(0)
    fits = tensor.ndim == len(spec.shape)
    for wanted, size in zip(spec.shape, tensor.shape, strict=False):
        if isinstance(wanted, int):
            fits &= size == wanted
        else:
            in_range = size in wanted or (is_split and wanted == batch and size > 0)
            fits &= in_range and sizes.setdefault(wanted.name, size) == size
    if not fits:
        raise Unfit(
            f'"{spec.name}" has the shape {list(tensor.shape)}; expected {spec}, a size for a name'
        )
    return tensor.contiguous()


def _as_dtype(spec: TensorSpec, value: Any) -> Tensor:
    """Convert between widths, never between kinds: a float is not an index and an index no flag."""
    wanted = torch_dtype(spec.dtype)
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    same_kind = (
        tensor.dtype is wanted
        or (tensor.is_floating_point() and wanted.is_floating_point)
        or (_is_integer(tensor.dtype) and _is_integer(wanted))
    )
    # JSON writes 1.0 as 1.
    from_json = not isinstance(value, Tensor) and _is_integer(tensor.dtype)
    converted = tensor.detach().to("cpu", wanted)
    lossless = not _is_integer(wanted) or torch.equal(converted.to(tensor.dtype), tensor.cpu())
    if not lossless or not (same_kind or (from_json and wanted.is_floating_point)):
        seen = str(tensor.dtype).removeprefix("torch.")
        raise Unfit(f'"{spec.name}" is {seen}; expected {spec.dtype}')
    return converted


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


# -- samples without --input ----------------------------------------------------------------------


def signature_of_samples(
    paths: Sequence[Path],
    arguments: Sequence[str] = (),
    ranks: Mapping[str, int | None] = MappingProxyType({}),
) -> Signature:
    """Return what a model takes, by files of what it is given.

    Names, dtypes and shapes are the files'; a tensor without a name has that of an argument. The
    first dimension is the batch, and those of other inputs that are as large in every file; a size
    that differs between files has a range. Numbers of double precision, as Python and numpy have
    them, are taken for single ones.

    Args:
        paths: the files.
        arguments: names of forward()'s arguments, in order.
        ranks: how many dims an argument's batches have, where that is known: a file may hold one
            row without the batch's dimension.

    Raises:
        UsageError: a file cannot be read, names nothing, or the files do not hold the same inputs.
    """
    found = [
        {
            name: tensor[None] if ranks.get(name) == tensor.ndim + 1 else tensor
            for name, tensor in _tensors(path, arguments).items()
        }
        for path in paths
    ]
    for path, tensors in zip(paths, found, strict=True):
        if _described(tensors) != _described(found[0]):
            raise UsageError(
                f'--sample "{path}" holds {_described(tensors)}, and "{paths[0]}" '
                f"{_described(found[0])}; expected the same inputs in every file, or --input"
            )
    names: dict[tuple[int, ...], str] = {}
    texts = []
    for name in found[0]:
        each = [tensors[name] for tensors in found]
        dims = [
            _dim(sizes, f"{name.replace('.', '_')}_{axis}", is_first=axis == 0, names=names)
            for axis, sizes in enumerate(zip(*(tensor.shape for tensor in each), strict=True))
        ]
        dtype = dtype_name(each[0].dtype)
        texts.append(f"{name}:{_SINGLE.get(dtype, dtype)}[{','.join(dims)}]")
    return read_inputs(texts)


def is_picture(path: Path) -> bool:
    """Return whether a sample is a picture, which says nothing of its input's name."""
    return path.suffix.lower() in _PICTURES


def names_inputs(path: Path) -> bool:
    """Return whether a sample holds tensors; pictures and texts become such by a model's inputs."""
    return path.suffix.lower() not in (*_PICTURES, _TEXT)


def picture_size(path: Path) -> tuple[int, int]:
    """Return the width and height of a picture.

    Raises:
        UsageError: it cannot be read.
    """
    from PIL import Image

    with _readable(path), Image.open(path) as picture:
        return picture.size


def _tensors(path: Path, arguments: Sequence[str] = ()) -> dict[str, Tensor]:
    """Read a file's tensors by name; one without is called as the argument in its place."""
    with _readable(path):
        found = _read(path, Signature(()))
        is_list = isinstance(found, list) and all(isinstance(value, Tensor) for value in found)
        if isinstance(found, tuple) or is_list:
            numbered = [f"input_{place}" for place in range(len(found))]
            names = arguments if len(arguments) == len(found) else numbered
            found = dict(zip(names, found, strict=True))
        if not isinstance(found, Mapping):
            found = {arguments[0] if len(arguments) == 1 else "input": found}
        tensors = {
            str(name): value if isinstance(value, Tensor) else torch.tensor(value)
            for name, value in found.items()
        }
        if not tensors or not all(tensor.ndim and tensor.numel() for tensor in tensors.values()):
            raise Unfit(
                f"it holds {_described(tensors) or 'nothing'}; expected tensors with a first "
                "dimension of one or more rows"
            )
    return tensors


def _described(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(
        f"{name} {dtype_name(tensor.dtype)} of {tensor.ndim} dims"
        for name, tensor in tensors.items()
    )


def _dim(
    sizes: tuple[int, ...], name: str, *, is_first: bool, names: dict[tuple[int, ...], str]
) -> str:
    """Write a dim by its sizes in each file; `names` holds those that have a name already."""
    if not names:  # the first dim of the first input
        names[sizes] = "batch"
        last = max(*sizes, DEFAULT_RANGE[1])
        return "batch" if last == DEFAULT_RANGE[1] else f"batch=1..{last}"
    differ = len(set(sizes)) > 1
    if sizes in names and (is_first or differ):
        return names[sizes]
    if not differ:
        return str(sizes[0])
    names[sizes] = name
    return f"{name}={min(sizes)}..{max(sizes)}"


# -- one reader per suffix -------------------------------------------------------------------------


def _read_npz(path: Path, *_: Any) -> Any:
    reader = ZipReader(Source.of_file(path))
    if problems := reader.check():
        raise Unfit(f"it is not an .npz file: {problems[0]}; expected one from numpy.savez")
    return {
        member.name.removesuffix(".npy"): _array(io.BytesIO(b"".join(reader.chunks(member))))
        for member in reader.members
    }


def _array(file: IO[bytes]) -> Tensor:
    import numpy as np

    with file:
        return torch.from_numpy(np.load(file, allow_pickle=False))


def _read_picture(path: Path, signature: Signature, *_: Any) -> Any:
    """Read a picture for an input [batch, 1 or 3, height, width], as it is or as pixel / 255."""
    import numpy as np
    from PIL import Image

    if not signature.inputs:
        raise Unfit("a picture says nothing of an input; give --input")
    spec = signature.inputs[0]
    channels = spec.shape[1] if len(spec.shape) == 4 else None
    if len(signature.inputs) > 1 or channels not in (1, 3) or spec.dtype not in _PIXELS:
        raise Unfit(
            f"a picture says nothing of {', '.join(map(str, signature.inputs))}; it can stand for "
            f"one input [batch,1 or 3,height,width] of uint8 or floats: {_AS_TENSORS}"
        )
    with Image.open(path) as picture:
        expected = "L" if channels == 1 else "RGB"
        if picture.mode != expected:
            raise Unfit(f"it has the mode {picture.mode}, and {spec} is {expected}; {_AS_TENSORS}")
        pixels = np.asarray(picture, dtype=np.uint8).reshape(*picture.size[::-1], channels)
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1).unsqueeze(0)
    return tensor if spec.dtype == "uint8" else tensor.to(torch.float32) / 255


def _read_text(path: Path, signature: Signature, folder: Path | None) -> Any:
    """Read a text per line, as the tokenizer in the checkpoint's folder turns it into ids."""
    # Here: it is of a handler, whose other imports no other sample needs.
    from modelyard.handlers.tasks.text_handler import load_tokenizer, role_of

    file = (folder or path.parent) / TOKENIZER_FILE
    if not file.is_file():
        raise Unfit(
            f"a text becomes tokens by {TOKENIZER_FILE} in the folder of the checkpoint, which has "
            f"none; {_AS_TENSORS}"
        )
    tokenizer = load_tokenizer(file)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    roles = {spec.name: role_of(spec.name) for spec in signature.inputs}
    if not lines or None in roles.values():
        takes = ", ".join(map(str, signature.inputs))
        seen = "holds no line of text" if not lines else f"cannot stand for {takes}"
        raise Unfit(f"it {seen}; expected a text per line, of a text model")
    most = max((dim.max for dim in signature.dims.values() if dim != signature.batch), default=None)
    if most is not None:
        tokenizer.enable_truncation(most)
    tokenizer.enable_padding()
    read = tokenizer.encode_batch(lines)
    values = {
        "ids": [each.ids for each in read],
        "mask": [each.attention_mask for each in read],
        "types": [each.type_ids for each in read],
    }
    return {name: torch.tensor(values[str(role)]) for name, role in roles.items()}


_PIXELS = ("uint8", "float16", "bfloat16", "float32", "float64")
_PICTURES = (".png", ".jpg", ".jpeg")
_READERS: Mapping[str, Callable[[Path, Signature, Path | None], Any]] = {
    ".npz": _read_npz,
    ".npy": lambda path, *_: _array(path.open("rb")),
    **dict.fromkeys((".pt", ".pth"), lambda path, *_: torch.load(path, "cpu", weights_only=True)),
    ".json": lambda path, *_: json.loads(path.read_text(encoding="utf-8")),
    **dict.fromkeys(_PICTURES, _read_picture),
    _TEXT: _read_text,
}


# -- rows of samples in batches, where nothing that is made up is a valid input --------------------

MIN_CALIBRATION = 32
_HELD_OUT = 4


def regroup(samples: Sequence[Sample], signature: Signature) -> tuple[Sample, ...]:
    """Return the samples, and their rows in batches of 1, 2, a prime, and the largest size.

    Rows of equal sizes share a batch, in the order of the files, and begin anew where there are
    too few. Where inputs are not made of rows, the samples stay alone.
    """
    cases = list(samples)
    for batch, rows in _rows(samples, signature):
        sizes = {*batch_sizes(batch, is_reduced=True), min(rows.rows, batch.max)}
        made = (take_rows(rows, batch, size) for size in sorted(sizes) if size in batch)
        known = [each.inputs for each in samples]
        cases += [
            case
            for case in made
            if not any(all(map(torch.equal, case.inputs, other)) for other in known)
        ]
    return tuple(cases)


def take_rows(rows: Sample, batch: Dim, size: int, first: int = 0) -> Sample:
    """Return a batch of a size, from row `first` on, over and over where there are too few."""
    places = (torch.arange(size) + first) % rows.rows
    inputs = tuple(tensor[places] for tensor in rows.inputs)
    return replace(rows, inputs=inputs, sizes={**rows.sizes, batch.name: size})


@dataclass(frozen=True)
class Split:
    """Samples in two parts: to calibrate with, and to compare on."""

    calibration: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    rows: int
    """The number of rows of the former; a file is one where inputs are not made of rows."""
    held_out_rows: int


def hold_out(samples: Sequence[Sample], signature: Signature) -> Split:
    """Split samples for static quantisation: every fourth row is held out.

    Raises:
        UsageError: there are fewer than 32 rows.
    """
    groups = _rows(samples, signature)
    count = sum(rows.rows for _, rows in groups) if groups else len(samples)
    if count < MIN_CALIBRATION:
        unit = "rows" if groups else "files (its inputs are not made of rows)"
        raise UsageError(
            f"--quantize int8-static: --sample gives {count} {unit}; expected {MIN_CALIBRATION} or "
            "more, like those that will come: three of four give the ranges of values, and every "
            "fourth is compared; or use int8-dynamic, which needs none"
        )
    is_held = torch.arange(count) % _HELD_OUT == 0
    held_out_rows = int(is_held.sum())
    masks = torch.split(is_held, [rows.rows for _, rows in groups]) if groups else ()
    name = samples[0].file if len(samples) == 1 else f"{len(samples)} files"

    def part(is_wanted: bool) -> tuple[Sample, ...]:
        if not groups:
            numbered = zip(is_held.tolist(), samples, strict=True)
            return tuple(sample for held, sample in numbered if held == is_wanted)
        return tuple(
            replace(part, file=name)
            for (batch, rows), mask in zip(groups, masks, strict=True)
            for part in _in_batches(rows, batch, mask == is_wanted)
        )

    return Split(part(False), part(True), count - held_out_rows, held_out_rows)


def in_batches(sample: Sample, signature: Signature) -> Iterator[Sample]:
    """Yield a sample; its rows in batches, where it holds more or fewer than one may have."""
    batch = signature.batch
    if not isinstance(batch, Dim) or not has_rows(signature) or sample.rows in batch:
        yield sample
    else:
        yield from _in_batches(sample, batch, torch.ones(sample.rows, dtype=torch.bool))


def _in_batches(rows: Sample, batch: Dim, chosen: Tensor) -> Iterator[Sample]:
    """Yield some rows in the largest batches; a last one that is too small begins anew."""
    left = int(chosen.sum())
    some = replace(rows, inputs=tuple(tensor[chosen] for tensor in rows.inputs))
    for first in range(0, left, batch.max):
        size = min(batch.max, left - first)
        yield take_rows(some, batch, size if size in batch else batch.max, first)


def choose_example(samples: Sequence[Sample], signature: Signature) -> Sample:
    """Choose the sample to trace with: its sizes are not 1, and differ, as far as there is one."""
    fixed = {size for spec in signature.inputs for size in spec.shape if isinstance(size, int)}
    tried = [
        take_rows(rows, batch, size)
        for batch, rows in _rows(samples, signature)
        for size in (5, 3, 7, 2)
        if size in batch
    ]

    def awkward(sample: Sample) -> tuple[int, int]:
        sizes = list(sample.sizes.values())
        return sum(size < 2 for size in sizes), len(sizes) - len(set(sizes) - fixed)

    return min((*tried, *samples), key=awkward)


def rows_of(samples: Sequence[Sample], signature: Signature) -> Sample | None:
    """Return rows that are not all the same; None where the samples have one row only."""
    for batch, rows in _rows(samples, signature):
        one, other = take_rows(rows, batch, 2), take_rows(rows, batch, 2, first=1)
        pairs = zip(one.inputs, other.inputs, strict=True)
        differ = [(a != b).reshape(2, -1).any(dim=1) for a, b in pairs]
        if bool(torch.stack(differ).any(dim=0).all()):
            return rows
    return None


def _rows(samples: Sequence[Sample], signature: Signature) -> list[tuple[Dim, Sample]]:
    """Gather the rows of samples whose other sizes are equal; none where inputs have no rows."""
    batch = signature.batch
    if not isinstance(batch, Dim) or not has_rows(signature):
        return []
    alike: defaultdict[tuple[tuple[str, int], ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        others = {name: size for name, size in sample.sizes.items() if name != batch.name}
        alike[tuple(sorted(others.items()))].append(sample)
    groups = []
    for group in alike.values():
        inputs = tuple(map(torch.cat, zip(*(sample.inputs for sample in group), strict=True)))
        sizes = {**group[0].sizes, batch.name: inputs[0].shape[0]}
        files = ", ".join(sample.file for sample in group)
        groups.append((batch, Sample(files, inputs, sizes)))
    return groups


def has_rows(signature: Signature) -> bool:
    """Return whether inputs are made of rows, in batches of several sizes."""
    batch = signature.batch
    return isinstance(batch, Dim) and not any(why_no_rows(spec, batch) for spec in signature.inputs)


def why_no_rows(spec: TensorSpec, batch: Dim) -> str:
    """Return why an input's places of dim 0 cannot change theirs; empty where they can."""
    if spec.shape[0] != batch:
        return f'input "{spec.name}" has no dim "{batch.name}" in front, so rows cannot be stacked'
    if spec.values and batch.name in (spec.values.low.dim, spec.values.high.dim):
        return f'input "{spec.name}" counts the rows of its batch, so rows cannot be stacked'
    if spec.values and spec.values.order and len(spec.shape) == 1:
        return f'input "{spec.name}" is {spec.values.order}, so rows cannot be stacked as they come'
    return ""
