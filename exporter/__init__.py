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
from modelyard.exporter.request import export

if TYPE_CHECKING:
    from modelyard.exporter.prove.parity import ExportReport
else:

    def __getattr__(name: str) -> object:
        """Import what needs torch, which takes seconds, when it is used."""
        if name == "ExportReport":
            return import_module(f"{__name__}.prove.parity").ExportReport
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
