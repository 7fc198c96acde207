"""timm and diffusers: the name of a model, or the `config.json` of a folder → what makes it.

Both make a model with random weights here, which the checkpoint's then replace; nothing is fetched.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.exporter.errors import ModelError
from modelyard.exporter.ingest import Checkpoint
from modelyard.exporter.ingest.value import check_model_args, such_as

Factory = Callable[..., nn.Module]


def library_factory(
    checkpoint: Checkpoint, library: str | None, name: str | None
) -> tuple[str, Factory] | None:
    """Return the name and the maker of a model that a library makes; None where none does.

    Args:
        checkpoint: the weights, whose shapes say the number of classes and channels of timm's.
        library: what `--model` has in front of the colon; None without `--model`.
        name: what it has behind.

    Raises:
        ModelError: the library is not installed, or does not know the model.
    """
    if library == "timm" and name is not None:
        timm = _imported("timm", checkpoint)
        return None if hasattr(timm, name) else (name, _timm_factory(timm, name, checkpoint, {}))
    config = checkpoint.hyper_parameters
    if checkpoint.kind == "timm folder" and library is None:
        name = str(config.get("architecture"))
        own = config.get("model_args")
        known = dict(own) if isinstance(own, Mapping) else {}
        timm = _imported("timm", checkpoint)
        return name, _timm_factory(timm, name, checkpoint, known)
    if checkpoint.kind == "diffusers folder" and library in (None, "diffusers"):
        name = name or (checkpoint.class_hint.name if checkpoint.class_hint else "")
        return name, _diffusers_factory(_imported("diffusers", checkpoint), name, config)
    return None


def _imported(library: str, checkpoint: Checkpoint) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ModelError(
            f'"{checkpoint.path.name}" needs {library} to build its class; install it, or give '
            "--model"
        ) from error


def _timm_factory(
    timm: Any, name: str, checkpoint: Checkpoint, known: Mapping[str, Any]
) -> Factory:
    # Behind a dot stands which of its weights; a name with a slash would be fetched from the hub.
    if not timm.is_model(name.partition(".")[0]):
        raise ModelError(
            f'timm {timm.__version__} has no model "{name}"; expected one of timm.list_models()'
            f"{such_as(name, timm.list_models())}"
        )

    def create(**arguments: Any) -> nn.Module:
        settled = {**_read_off(timm, name, checkpoint.tensors), **known, **arguments}
        model = timm.create_model(name, **{**settled, "pretrained": False})
        assert isinstance(model, nn.Module)
        return model

    return create


def _read_off(timm: Any, name: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Read the number of classes and of channels off the shapes of the weights."""
    found = {}
    settings = getattr(timm.get_pretrained_cfg(name), "classifier", None)
    classifier = _weight(tensors, settings)
    if settings:
        found["num_classes"] = 0 if classifier is None else classifier.shape[0]
    first = getattr(timm.get_pretrained_cfg(name), "first_conv", None)
    stem = _weight(tensors, first)
    if stem is not None and stem.ndim == 4:
        with torch.device("meta"):
            usual = timm.create_model(name, pretrained=False)
        own = _weight(usual.state_dict(), first)
        # Some split the picture first and so have a multiple of its channels.
        if own is not None and own.shape[1] != stem.shape[1]:
            found["in_chans"] = stem.shape[1] * usual.default_cfg["input_size"][0] // own.shape[1]
    return found


def _weight(tensors: Mapping[str, Tensor], layer: Any) -> Tensor | None:
    """Return the weight of a layer, whatever is in front of its name; the first of several."""
    layer = layer[0] if isinstance(layer, tuple | list) and layer else layer
    if not isinstance(layer, str) or not layer:
        return None
    ending = f"{layer}.weight"
    return next((value for key, value in tensors.items() if f".{key}".endswith(f".{ending}")), None)


def _diffusers_factory(diffusers: Any, name: str, config: Mapping[str, Any]) -> Factory:
    found = getattr(diffusers, name, None) if name else None
    if not (inspect.isclass(found) and issubclass(found, diffusers.ModelMixin)):
        raise ModelError(
            f'config.json names the class "{name}", which diffusers {diffusers.__version__} does '
            "not have as a model: give --model"
        )
    made_by: Any = found
    known = set(inspect.signature(made_by).parameters)

    def create(**arguments: Any) -> nn.Module:
        check_model_args(arguments, known, name)
        # What is not an argument of the class is not handed to it.
        own = {key: value for key, value in config.items() if key in known}
        model = made_by.from_config({**own, **arguments})
        assert isinstance(model, nn.Module)
        return model

    return create
