"""The arguments of TorchServe's archiver as a value."""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path


@dataclass
class ModelArchiverConfig:
    """What to pack; the command's flags have the same names."""

    model_name: str
    handler: str
    version: str
    serialized_file: str | None = None
    model_file: str | None = None
    extra_files: str | None = None
    runtime: str = "python"
    export_path: str = field(default_factory=lambda: str(Path.cwd()))
    archive_format: str = "default"
    force: bool = False
    requirements_file: str | None = None
    config_file: str | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ModelArchiverConfig":
        """Take the arguments that a parser found."""
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls)})
