"""TorchServe's static helpers that notebooks call."""

from pathlib import Path

from modelyard.archiver.manifest import format_manifest
from modelyard.archiver.torchserve.archive import (
    FORMATS,
    check_model_name,
    plan_for_torchserve,
)
from modelyard.archiver.untrusted.container import SUFFIXES

from .model_archiver_config import ModelArchiverConfig
from .model_archiver_error import ModelArchiverError


class ModelExportUtils:
    """A namespace; what copied files to a staging folder is not needed any more and left out."""

    @staticmethod
    def generate_manifest_json(config: ModelArchiverConfig) -> str:
        """Return the manifest as text."""
        plan = plan_for_torchserve(config, warn=lambda message: None)
        return format_manifest(plan.manifest).decode().rstrip("\n")

    @staticmethod
    def get_archive_export_path(export_file_path: str, model_name: str, archive_format: str) -> str:
        """Return where an archive would be written."""
        suffix = SUFFIXES[FORMATS[archive_format]]
        return str(Path(export_file_path) / f"{model_name}{suffix}")

    @staticmethod
    def check_mar_already_exists(
        model_name: str, export_file_path: str, overwrite: bool, archive_format: str = "default"
    ) -> str:
        """Return where an archive would be written; refuse one that exists, unless `overwrite`."""
        path = ModelExportUtils.get_archive_export_path(
            export_file_path, model_name, archive_format
        )
        if Path(path).exists() and not overwrite:
            raise ModelArchiverError(f"{path} already exists.")
        return path

    @staticmethod
    def check_model_name_regex_or_exit(model_name: str) -> None:
        """Refuse a name outside the rule."""
        check_model_name(model_name)

    @staticmethod
    def validate_inputs(model_name: str, export_path: str) -> None:
        """Refuse a name outside the rule, and a folder that is not there."""
        ModelExportUtils.check_model_name_regex_or_exit(model_name)
        if not Path(export_path).is_dir():
            raise ModelArchiverError(
                f"Given export-path {export_path} is not a directory. "
                "Point to a valid export-path directory."
            )
