"""Bodies → arrays. Nothing unpickles: an array of objects is refused."""

import json
from io import BytesIO, StringIO
from typing import Any

import numpy as np

from sagemaker_inference import content_types, errors


def _json_to_numpy(string_like: str, dtype: Any = None) -> Any:
    return np.array(json.loads(string_like), dtype=dtype)


def _csv_to_numpy(string_like: str, dtype: Any = None) -> Any:
    return np.genfromtxt(StringIO(string_like), dtype=dtype, delimiter=",")


def _npy_to_numpy(npy_array: Any) -> Any:
    return np.load(BytesIO(npy_array), allow_pickle=False)


def _npz_to_sparse(npz_bytes: Any) -> Any:
    import scipy.sparse

    return scipy.sparse.load_npz(BytesIO(npz_bytes))


_decoder_map: dict[str, Any] = {
    content_types.NPY: _npy_to_numpy,
    content_types.CSV: _csv_to_numpy,
    content_types.JSON: _json_to_numpy,
    content_types.NPZ: _npz_to_sparse,
}


def decode(obj: Any, content_type: str) -> Any:
    """Return the array that a body holds.

    Raises:
        UnsupportedFormatError: of a media type that is not known here.
    """
    if content_type not in _decoder_map:
        raise errors.UnsupportedFormatError(content_type)
    return _decoder_map[content_type](obj)
