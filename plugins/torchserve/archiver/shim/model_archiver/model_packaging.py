"""TorchServe's functions behind its command."""

import json
import logging

from modelyard.plugins.torchserve.archiver.archive import archive_for_torchserve
from modelyard.plugins.torchserve.archiver.cli import main

from .model_archiver_config import ModelArchiverConfig
from .model_archiver_error import ModelArchiverError

logger = logging.getLogger(__name__)


def generate_model_archive(config: ModelArchiverConfig | None = None) -> None:
    """Write the archive that `config`, or without one the command line, describes.

    Raises:
        SystemExit: with code 1 when it cannot be written.
    """
    if config is None:
        main()
        return
    try:
        write(config)
    except ModelArchiverError as error:
        logger.error("%s", error)
        raise SystemExit(1) from error


def package_model(config: ModelArchiverConfig, manifest: str) -> None:
    """Write an archive whose manifest names its files as `config` does.

    Raises:
        ModelArchiverError: the manifest names another model, or the archive cannot be written.
    """
    named = json.loads(manifest).get("model", {}).get("modelName")
    if named != config.model_name:
        raise ModelArchiverError(f"the manifest names {named}, the config {config.model_name}")
    write(config)


def write(config: ModelArchiverConfig) -> None:
    """Write the archive, with warnings in the log."""
    archive_for_torchserve(config, warn=logger.warning)
