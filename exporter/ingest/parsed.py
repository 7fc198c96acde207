"""What one reader has found, before the weights are chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from modelyard.exporter.ingest.kinds import Weights
from modelyard.exporter.ingest.value import ClassHint


@dataclass(frozen=True)
class ParsedCheckpoint:
    """The sets of weights of a checkpoint and all that was beside them; fields as `Checkpoint`."""

    kind: str
    loader: str
    weights: Mapping[str, Weights]
    """By path; an empty path is all of the checkpoint."""
    default: str | None
    """The path that is chosen unless told otherwise; None when nothing tells which."""
    paths: tuple[Path, ...]
    """Files that were read."""
    ema: str | None = None
    writer: str | None = None
    writer_version: str | None = None
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    hyper_parameters_name: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    class_hint: ClassHint | None = None
    labels: Mapping[int, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    module: nn.Module | None = None
    """The whole model, when the file was trusted or needs no code of its own."""
