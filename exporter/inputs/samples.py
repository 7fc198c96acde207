"""Files of real inputs (`--sample`) → tensors as the model takes them.

Nothing of a file runs: .npz and .npy without pickle, .pt with weights_only, JSON, and pictures
where the input's shape leaves one reading only. Values are compared with and then forgotten: the
report names the file and its number of rows.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from torch import Tensor

from modelyard.archiver.handler_files import TOKENIZER_FILE
from modelyard.archiver.signature import DEFAULT_RANGE, Dim, Signature, TensorSpec
from modelyard.archiver.untrusted.zip import ZipReader
from modelyard.exporter.arguments import read_inputs
from modelyard.exporter.errors import UsageError, cause
from modelyard.exporter.ingest.source import Source
from modelyard.handlers.limits import refused_values
from modelyard.handlers.models.backends import dtype_name, torch_dtype

# Python and numpy count in double precision, and few models do.
_SINGLE = {"float64": "float32", "complex128": "complex64"}
_FORMS = "expected .npz, .npy, .pt, .json, .png, .jpg or .txt"


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
        folder: of the checkpoint, whose tokenizer reads a text.

    Raises:
        UsageError: it cannot be read, or its tensors are not the signature's inputs.
    """
    sizes: dict[str, int] = {}
    with _readable(path):
        found = _read_text(path, signature, folder) if _is_text(path) else _read(path, signature)
        given = _by_input(path, found, signature)
        inputs = tuple(
            _fit(path, spec, value, signature, sizes, is_split)
            for spec, value in zip(signature.inputs, given, strict=True)
        )
    for spec, tensor in zip(signature.inputs, inputs, strict=True):
        if problem := refused_values(spec, tensor, sizes):
            raise UsageError(f'--sample "{path}": "{spec.name}" {problem}')
    return Sample(path.name, inputs, sizes)


def sample_of(name: str, content: Any, signature: Signature) -> Sample:
    """Return the first row of a request that came with a checkpoint; all of it, without rows.

    Args:
        name: what messages call it.
        content: numbers, or numbers by the name of an input.
        signature: what it holds.

    Raises:
        UsageError: its tensors are not the signature's inputs.
    """
    path, sizes = Path(name), dict[str, int]()
    inputs = tuple(
        _fit(path, spec, value, signature, sizes, is_split=True)
        for spec, value in zip(signature.inputs, _by_input(path, content, signature), strict=True)
    )
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


def _read(path: Path, signature: Signature) -> Any:
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise UsageError(f'--sample "{path}": "{path.suffix}" is not a known suffix; {_FORMS}')
    return read(path, signature)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what a parser raises into one sentence: each fails in its own ways on other files."""
    if not path.is_file():
        raise UsageError(f'--sample "{path}": there is no such file')
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f'--sample "{path}" cannot be read: {cause(error)}; {_FORMS}') from error


def _by_input(path: Path, found: Any, signature: Signature) -> list[Any]:
    """Return one value per input: by name, else by order, else the only one."""
    specs = signature.inputs
    if isinstance(found, Mapping):
        keys = [spec.path if spec.path in found else spec.name for spec in specs]
        if set(keys) != set(found):
            raise UsageError(
                f'--sample "{path}" holds {", ".join(map(str, found))}; expected exactly the '
                f"inputs {', '.join(spec.name for spec in specs)}"
            )
        return [found[key] for key in keys]
    if len(specs) == 1:
        return [found[0] if isinstance(found, tuple) and len(found) == 1 else found]
    if isinstance(found, list | tuple) and len(found) == len(specs):
        return list(found)
    raise UsageError(
        f'--sample "{path}" holds one value for {len(specs)} inputs; expected them by name: '
        f"{', '.join(spec.name for spec in specs)}"
    )


def _fit(
    path: Path,
    spec: TensorSpec,
    value: Any,
    signature: Signature,
    sizes: dict[str, int],
    is_split: bool,
) -> Tensor:
    """Return the value as a tensor of the input's dtype and shape; note its dynamic sizes."""
    if spec.view and isinstance(value, Tensor) and value.is_complex():
        value = torch.view_as_real(value)
    tensor = _as_dtype(path, spec, value)
    batch = signature.batch
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
        raise UsageError(
            f'--sample "{path}": "{spec.name}" has the shape {list(tensor.shape)}; expected '
            f"{spec}, one size for each name"
        )
    return tensor.contiguous()


def _as_dtype(path: Path, spec: TensorSpec, value: Any) -> Tensor:
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
        raise UsageError(f'--sample "{path}": "{spec.name}" is {seen}; expected {spec.dtype}')
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
            name: _batched(tensor, ranks.get(name))
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
    return _READERS.get(path.suffix.lower()) is _read_picture


def _is_text(path: Path) -> bool:
    return path.suffix.lower() == ".txt"


def names_inputs(path: Path) -> bool:
    """Return whether a sample holds tensors; pictures and texts become such by a model's inputs."""
    return not (is_picture(path) or _is_text(path))


def picture_size(path: Path) -> tuple[int, int]:
    """Return the width and height of a picture.

    Raises:
        UsageError: it cannot be read.
    """
    from PIL import Image

    with _readable(path), Image.open(path) as picture:
        return picture.size


def _batched(tensor: Tensor, rank: int | None) -> Tensor:
    return tensor[None] if rank == tensor.ndim + 1 else tensor


def _tensors(path: Path, arguments: Sequence[str] = ()) -> dict[str, Tensor]:
    """Read a file's tensors by name; one without is called as the argument in its place."""
    with _readable(path):
        found = _read(path, Signature(()))
        if isinstance(found, tuple) or (
            isinstance(found, list) and all(isinstance(value, Tensor) for value in found)
        ):
            own = arguments if len(arguments) == len(found) else ()
            names = own or [f"input_{place}" for place in range(len(found))]
            found = dict(zip(names, found, strict=True))
        if not isinstance(found, Mapping):
            found = {arguments[0] if len(arguments) == 1 else "input": found}
        tensors = {
            str(name): value if isinstance(value, Tensor) else torch.tensor(value)
            for name, value in found.items()
        }
    if not tensors or not all(tensor.ndim and tensor.numel() for tensor in tensors.values()):
        raise UsageError(
            f'--sample "{path}" holds {_described(tensors) or "nothing"}; expected tensors with a '
            "first dimension of one or more rows"
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


def _read_npy(path: Path, signature: Signature) -> Any:
    return _array(path.open("rb"))


def _read_npz(path: Path, signature: Signature) -> Any:
    reader = ZipReader(Source.of_file(path))
    if problems := reader.check():
        raise UsageError(
            f'--sample "{path}" is not an .npz file: {problems[0]}; expected one from numpy.savez'
        )
    return {
        member.name.removesuffix(".npy"): _array(io.BytesIO(b"".join(reader.chunks(member))))
        for member in reader.members
    }


def _array(file: IO[bytes]) -> Tensor:
    import numpy as np

    with file:
        return torch.from_numpy(np.load(file, allow_pickle=False))


def _read_torch(path: Path, signature: Signature) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_json(path: Path, signature: Signature) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _read_picture(path: Path, signature: Signature) -> Any:
    """Read a picture for an input [batch, 1 or 3, height, width], as it is or as pixel / 255."""
    import numpy as np
    from PIL import Image

    if not signature.inputs:
        raise UsageError(f'--sample "{path}": a picture says nothing of an input; give --input')
    spec = signature.inputs[0]
    channels = spec.shape[1] if len(spec.shape) == 4 else None
    if len(signature.inputs) > 1 or channels not in (1, 3) or spec.dtype not in _PIXELS:
        raise UsageError(
            f'--sample "{path}": a picture says nothing of {", ".join(map(str, signature.inputs))}'
            "; it can stand for one input [batch,1 or 3,height,width] of uint8 or floats: give "
            "the tensors that the model gets, as .npz"
        )
    with Image.open(path) as picture:
        expected = "L" if channels == 1 else "RGB"
        if picture.mode != expected:
            raise UsageError(
                f'--sample "{path}" has the mode {picture.mode}, and {spec} is {expected}; '
                "give the tensors that the model gets, as .npz"
            )
        pixels = np.asarray(picture, dtype=np.uint8).reshape(*picture.size[::-1], channels)
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1).unsqueeze(0)
    return tensor if spec.dtype == "uint8" else tensor.to(torch.float32) / 255


def _read_text(path: Path, signature: Signature, folder: Path | None) -> Any:
    """Read a text per line, as the tokenizer in the checkpoint's folder turns it into ids."""
    # Here: it is of a handler, whose other imports no other sample needs.
    from modelyard.handlers.tasks.text_handler import load_tokenizer, role_of

    file = (folder or path.parent) / TOKENIZER_FILE
    if not file.is_file():
        raise UsageError(
            f'--sample "{path}": a text becomes tokens by {TOKENIZER_FILE} in the folder of the '
            f"checkpoint, which has none; give the tensors that the model gets, as .npz"
        )
    tokenizer = load_tokenizer(file)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    roles = {spec.name: role_of(spec.name) for spec in signature.inputs}
    if not lines or None in roles.values():
        takes = ", ".join(map(str, signature.inputs))
        seen = "holds no line of text" if not lines else f"cannot stand for {takes}"
        raise UsageError(f'--sample "{path}" {seen}; expected a text per line, of a text model')
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
_READERS: Mapping[str, Callable[[Path, Signature], Any]] = {
    ".npz": _read_npz,
    ".npy": _read_npy,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".json": _read_json,
    ".png": _read_picture,
    ".jpg": _read_picture,
    ".jpeg": _read_picture,
}
