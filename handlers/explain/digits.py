"""Tensors → numbers in an answer: no more digits than mean something, or NumPy's file format."""

import io
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor


def as_lists(tensor: Tensor) -> Any:
    """Return nested lists; of float32 and less, the fewest digits that are read as the same number.

    As float64, which Python's floats are, 0.1 would be 0.10000000149011612.
    """
    if tensor.dtype == torch.float64 or tensor.dim() == 0:
        return tensor.tolist()
    return orjson.loads(orjson.dumps(_as_array(tensor), option=orjson.OPT_SERIALIZE_NUMPY))


def as_npy(tensor: Tensor) -> bytes:
    """Return a file as `numpy.save` writes it: float64 as it is, all else as float32."""
    file = io.BytesIO()
    np.save(file, _as_array(tensor), allow_pickle=False)
    return file.getvalue()


def _as_array(tensor: Tensor) -> np.ndarray:
    values = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
    return np.ascontiguousarray(values.cpu().numpy())
