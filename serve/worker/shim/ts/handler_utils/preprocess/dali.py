"""`from ts.handler_utils.preprocess.dali import get_dali_pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from modelyard.handlers.context import Context
from modelyard.handlers.errors import LoadError


def get_dali_pipeline(ctx: Context) -> Any:
    """Load the pipeline that `dali.pipeline_file` of model-config.yaml names.

    Raises:
        LoadError: there is no such section or file, or DALI is not installed.
    """
    section = ctx.model_yaml_config.get("dali")
    if not isinstance(section, dict) or "pipeline_file" not in section:
        raise LoadError(
            "model-config.yaml names no dali.pipeline_file; serialise the pipeline, add it to the "
            "archive with --extra-files, and name it there"
        )
    path = Path(ctx.system_properties["model_dir"]) / cast(str, section["pipeline_file"])
    if not path.is_file():
        raise LoadError(f"dali.pipeline_file is {path.name}, which the archive does not hold")
    try:
        from nvidia.dali.pipeline import Pipeline
    except ImportError as error:
        raise LoadError(
            f"this handler needs NVIDIA DALI ({error}); install nvidia-dali-cuda120, or use a "
            "handler that decodes images on the CPU, as image_classifier"
        ) from error
    return Pipeline.deserialize(
        filename=str(path),
        prefetch_queue_depth=1,
        **{key: section[key] for key in ("batch_size", "num_threads", "device_id", "seed")},
    )
