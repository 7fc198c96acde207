"""Checkpoint → artifact, with its signature and a proof that the two agree."""

from modelyard.exporter.errors import (
    CheckpointError,
    ConversionError,
    ExportError,
    ModelError,
    ParityError,
    UsageError,
)
from modelyard.exporter.export import export
from modelyard.exporter.report import ExportReport

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
