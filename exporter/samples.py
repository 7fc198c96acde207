"""Files of real inputs (`--sample`) → tensors as the model takes them.

Nothing of a file runs: .npz and .npy without pickle, .pt with weights_only, JSON, and pictures
where the input's shape leaves one reading only. Values are compared with and then forgotten: the
report names the file and its number of rows.
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from modelyard.archiver.signature import Dim, Signature, TensorSpec
from modelyard.archiver.untrusted.zip import ZipReader
from modelyard.exporter.errors import UsageError, cause
from modelyard.exporter.ingest.source import Source
from modelyard.handlers.backends import torch_dtype

_FORMS = "expected .npz, .npy, .pt, .json, .png or .jpg"


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


def read_sample(path: Path, signature: Signature) -> Sample:
    """Read one file; a row without its batch dimension gets one.

    Raises:
        UsageError: it cannot be read, or its tensors are not the signature's inputs.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise UsageError(f'--sample "{path}": "{path.suffix}" is not a known suffix; {_FORMS}')
    sizes: dict[str, int] = {}
    try:
        given = _by_input(path, read(path, signature), signature)
        inputs = tuple(
            _fit(path, spec, value, signature, sizes)
            for spec, value in zip(signature.inputs, given, strict=True)
        )
    except UsageError:
        raise
    # Every parser fails in ways of its own on a file that is something else.
    except Exception as error:
        raise UsageError(f'--sample "{path}" cannot be read: {cause(error)}; {_FORMS}') from error
    return Sample(path.name, inputs, sizes)


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
    path: Path, spec: TensorSpec, value: Any, signature: Signature, sizes: dict[str, int]
) -> Tensor:
    """Return the value as a tensor of the input's dtype and shape; note its dynamic sizes."""
    tensor = _as_dtype(path, spec, value)
    batch = signature.batch
    if tensor.ndim == len(spec.shape) - 1 and isinstance(batch, Dim) and spec.shape[0] == batch:
        tensor = tensor.unsqueeze(0)
    fits = tensor.ndim == len(spec.shape)
    for wanted, size in zip(spec.shape, tensor.shape, strict=False):
        if isinstance(wanted, int):
            fits &= size == wanted
        else:
            fits &= size in wanted and sizes.setdefault(wanted.name, size) == size
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
