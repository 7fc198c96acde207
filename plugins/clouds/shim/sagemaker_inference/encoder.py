"""Arrays, and what is like them → bodies."""

import json
from io import BytesIO, StringIO
from typing import Any

import numpy as np

from sagemaker_inference import content_types, errors


def _as_list(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.tolist()


def _array_to_json(array_like: Any) -> str:
    return json.dumps(array_like, default=_as_list)


def _array_to_npy(array_like: Any) -> bytes:
    buffer = BytesIO()
    np.save(buffer, array_like)
    return buffer.getvalue()


def _array_to_csv(array_like: Any) -> str:
    stream = StringIO()
    np.savetxt(stream, array_like, delimiter=",", fmt="%s")
    return stream.getvalue()


_encoder_map = {
    content_types.NPY: _array_to_npy,
    content_types.CSV: _array_to_csv,
    content_types.JSON: _array_to_json,
}
SUPPORTED_CONTENT_TYPES = set(_encoder_map)


def encode(array_like: Any, content_type: str) -> Any:
    """Return a body of a media type.

    Raises:
        UnsupportedFormatError: it is not known here.
    """
    if content_type not in _encoder_map:
        raise errors.UnsupportedFormatError(content_type)
    return _encoder_map[content_type](array_like)
