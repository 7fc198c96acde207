"""Checkpoint → artifact, with its signature and a proof that the two agree."""

from importlib import import_module
from typing import TYPE_CHECKING

from modelyard.exporter.errors import (
    CheckpointError,
    ConversionError,
    ExportError,
    ModelError,
    ParityError,
    PartialExportError,
    UsageError,
)

if TYPE_CHECKING:
    from modelyard.exporter.parity import ExportReport
    from modelyard.exporter.trip import export
else:
    _LAZY = {"export": "trip", "ExportReport": "parity"}

    def __getattr__(name: str) -> object:
        """Import what needs torch, which takes seconds, when it is used."""
        if name in _LAZY:
            return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CheckpointError",
    "ConversionError",
    "ExportError",
    "ExportReport",
    "ModelError",
    "ParityError",
    "PartialExportError",
    "UsageError",
    "export",
]
