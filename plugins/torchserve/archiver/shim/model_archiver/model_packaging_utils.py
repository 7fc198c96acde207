"""TorchServe's static helpers that notebooks call."""

import logging
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path

from modelyard.archiver.collect import Plan
from modelyard.archiver.manifest import format_manifest, parse_manifest
from modelyard.archiver.untrusted.container import SUFFIXES
from modelyard.archiver.write import write_plan
from modelyard.plugins.torchserve.archiver.archive import (
    FORMATS,
    check_model_name,
    folder_parts,
    plan_for_torchserve,
)

from .model_archiver_config import ModelArchiverConfig
from .model_archiver_error import ModelArchiverError

logger = logging.getLogger(__name__)


class ModelExportUtils:
    """A namespace."""

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
        """Return the folder; refuse an archive that exists there, unless `overwrite`."""
        path = ModelExportUtils.get_archive_export_path(
            export_file_path, model_name, archive_format
        )
        if Path(path).exists() and not overwrite:
            raise ModelArchiverError(f"{path} already exists.")
        return export_file_path

    @staticmethod
    def copy_artifacts(model_name: str, runtime: str, **files: str | None) -> str:
        """Copy what is to be packed into a new folder, which is the caller's; return its path.

        Args:
            files: files by the names of `ModelArchiverConfig`.
        """
        given = {name.replace("-", "_"): file for name, file in files.items() if file is not None}
        named = {"handler": "base_handler", **given, "model_name": model_name, "version": ""}
        config = ModelArchiverConfig.from_args(Namespace(**named, runtime=runtime))
        folder = Path(tempfile.mkdtemp(prefix="model-archiver-"))
        for part in plan_for_torchserve(config, warn=logger.warning).parts:
            target = folder / part.name
            target.parent.mkdir(parents=True, exist_ok=True)
            assert isinstance(part.source, Path)  # TorchServe's arguments name files
            shutil.copy2(part.source, target)
        return str(folder)

    @staticmethod
    def archive(
        export_file: str,
        model_name: str,
        model_path: str,
        manifest: str,
        archive_format: str = "default",
    ) -> None:
        """Write the archive of a folder's files into the folder `export_file`, over what is there.

        Raises:
            ModelArchiverError: the manifest names another model, or it cannot be written.
        """
        parsed = parse_manifest(manifest.encode())
        if parsed.model_name != model_name:
            raise ModelArchiverError(f"the manifest names {parsed.model_name}, not {model_name}")
        plan = Plan(parsed, tuple(folder_parts(Path(model_path))))
        write_plan(plan, Path(export_file), archive_format=FORMATS[archive_format], force=True)

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
