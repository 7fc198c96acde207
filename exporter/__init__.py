"""Checkpoint → artifact, with its signature and a proof that the two agree."""

from exporter.errors import (
    CheckpointError,
    ConversionError,
    ExportError,
    ModelError,
    ParityError,
    UsageError,
)
from exporter.export import export
from exporter.report import ExportReport

__all__ = [
    "CheckpointError",
    "ConversionError",
    "ExportError",
    "ExportReport",
    "ModelError",
    "ParityError",
    "UsageError",
    "export",
]
