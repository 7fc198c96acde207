"""`from ts.handler_utils.distributed.deepspeed import get_ds_engine`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from modelyard.handlers.context import Context
from modelyard.handlers.errors import LoadError


def get_ds_engine(model: torch.nn.Module, ctx: Context) -> Any:
    """Return DeepSpeed's inference engine for a model, by `deepspeed` of model-config.yaml.

    Its keys: `config`, DeepSpeed's own JSON file in the archive; `checkpoint`, the name of a file
    that is written to list the weights below `handler.model_path`.

    Raises:
        LoadError: there is no such section or file, or DeepSpeed is not installed.
    """
    section = ctx.model_yaml_config.get("deepspeed")
    if not isinstance(section, dict):
        raise LoadError("model-config.yaml has no section deepspeed; expected config: FILE.json")
    folder = Path(ctx.system_properties["model_dir"])
    weights = ctx.model_yaml_config["handler"]["model_path"]
    config = folder / section["config"] if "config" in section else None
    if config is not None and not config.is_file():
        raise LoadError(f"deepspeed.config is {config.name}, which the archive does not hold")
    checkpoint = folder / section["checkpoint"] if "checkpoint" in section else None
    if checkpoint is not None:
        files = [str(file) for file in sorted(Path(weights).rglob("*.[bp][it][n]"))]
        content = {"type": "ds_model", "checkpoints": files, "version": 1.0}
        checkpoint.write_text(json.dumps(content), encoding="utf-8")
    try:
        import deepspeed
    except ImportError as error:
        raise LoadError(f"this handler needs DeepSpeed ({error}); install deepspeed") from error
    return deepspeed.init_inference(
        model,
        config=str(config) if config else None,
        base_dir=weights,
        checkpoint=str(checkpoint) if checkpoint else None,
    )
