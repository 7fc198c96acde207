"""A Hugging Face folder → its model, by transformers' own class; no code of the folder runs."""

import importlib
import inspect
from typing import Any

from torch import nn

from modelyard.exporter.errors import CheckpointError, ModelError, cause
from modelyard.exporter.ingest.source import read_object
from modelyard.exporter.ingest.value import Checkpoint


def build_hugging_face(checkpoint: Checkpoint, *, is_trusted: bool = False) -> nn.Module:
    """Build the model that `config.json` names, with the checkpoint's weights.

    Args:
        checkpoint: of a folder with `config.json`.
        is_trusted: let the folder's own Python files run.

    Raises:
        CheckpointError: its class is code in the folder, or its tensors do not fit the class.
        ModelError: transformers is not installed, or does not know the class.
    """
    folder = checkpoint.path
    config = read_object(folder / "config.json")
    if isinstance(config.get("auto_map"), dict) and not is_trusted:
        code = ", ".join(sorted(str(value) for value in config["auto_map"].values()))
        raise CheckpointError(
            f'"{folder.name}" is refused: its class is code in the folder ({code}), which is not '
            "imported; give --model, or --trust to run it"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(
            f'"{folder.name}" needs transformers to build its class; install it, or give --model'
        ) from error
    if is_trusted and "auto_map" in config:
        return _remote(transformers, folder.as_posix())
    hint = checkpoint.class_hint
    found: Any = getattr(transformers, hint.name, None) if hint else None
    if not _is_model_class(found, transformers):
        seen = f'names the class "{hint.name}"' if hint else "names no class"
        raise ModelError(
            f'"{folder.name}/config.json" {seen}; expected one of transformers '
            f"{transformers.__version__} under architectures: give --model"
        )
    try:
        parsed = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        model, loaded = found.from_pretrained(
            None, config=parsed, state_dict=dict(checkpoint.tensors), output_loading_info=True
        )
    # transformers fails in whatever way the configuration or a tensor does not suit it.
    except Exception as error:
        raise ModelError(
            f'transformers cannot build {found.__name__} of "{folder.name}": {cause(error)}; '
            "give --model"
        ) from error
    _check_loaded(loaded, folder.name, found.__name__)
    assert isinstance(model, nn.Module)
    return model


def _is_model_class(found: Any, transformers: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)


def _remote(transformers: Any, folder: str) -> nn.Module:
    try:
        model = transformers.AutoModel.from_pretrained(
            folder, trust_remote_code=True, local_files_only=True
        )
    # The folder's own code runs.
    except Exception as error:
        raise ModelError(f"the folder's own class fails: {cause(error)}; give --model") from error
    assert isinstance(model, nn.Module)
    return model


def _check_loaded(loaded: Any, folder: str, name: str) -> None:
    problems = []
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if keys := sorted(str(key) for key in loaded.get(problem) or ()):
            problems.append(f"{problem.replace('_', ' ')} {', '.join(keys[:20])}")
    if problems:
        raise CheckpointError(
            f'"{folder}" does not fit {name}: {"; ".join(problems)}; give --model with the class '
            "that it was trained with"
        )
