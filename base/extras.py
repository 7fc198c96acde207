"""What an installation may leave out, and which extra of `modelyard` brings it."""

from collections.abc import Mapping
from importlib.util import find_spec

EXTRAS: Mapping[str, str] = {
    "adlfs": "az",
    "captum": "explain",
    "gcsfs": "gs",
    "grpc": "grpc",
    "huggingface_hub": "huggingface",
    "matplotlib": "explain",
    "onnx_ir": "export",
    "onnxscript": "export",
    "opentelemetry.sdk": "otel",
    "s3fs": "s3",
    "safetensors": "export",
    "soundfile": "audio",
    "soxr": "audio",
    "tokenizers": "text",
    "transformers": "huggingface",
}
"""Module → the extra. Captum brings matplotlib in any case."""


def how_to_install(error: ImportError) -> str | None:
    """Return what to do about a module that an extra brings; None for any other."""
    name = f"{error.name}."
    return next((_advise(known) for known in EXTRAS if name.startswith(f"{known}.")), None)


def what_is_missing(*modules: str) -> str | None:
    """Return the same of the first of these modules of `EXTRAS` that is not installed."""
    return next((_advise(name) for name in modules if not is_installed(name)), None)


def _advise(name: str) -> str:
    return f"{name} is not installed; pip install 'modelyard[{EXTRAS[name]}]'"


def is_installed(name: str) -> bool:
    """Return whether a module is there, without importing it."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # of what is above it; None in sys.modules: not to be found
        return False
