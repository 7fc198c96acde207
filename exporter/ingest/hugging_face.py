"""A folder of transformers, timm or diffusers → its model, by the library's own class.

No code of the folder runs.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.base.extras import how_to_install
from modelyard.base.nearest import did_you_mean
from modelyard.exporter.errors import CheckpointError, ModelError, UsageError, cause
from modelyard.exporter.ingest.value import (
    Checkpoint,
    as_dict,
    check_model_args,
    code_names,
    list_shown,
)
from modelyard.exporter.tables import read_table

TASKS: Mapping[str, Sequence[str]] = read_table(__package__, "kinds")["tasks"]
"""Task, as transformers' pipelines and the hub name it → endings of `AutoModelFor…`."""

Factory = Callable[..., nn.Module]

# What config.json may say of how it is computed: transformers fetches and loads native code for a
# name with a slash, and needs a GPU for others.
_KERNEL_ENDINGS = ("attn_implementation", "experts_implementation", "implementation_internal")
# Arguments of PreTrainedConfig that are not among its fields.
_ALWAYS_KNOWN = frozenset(
    ("num_labels", "attn_implementation", "dtype", "output_attentions", "output_hidden_states")
)


def build_hugging_face(
    checkpoint: Checkpoint,
    class_name: str | None = None,
    *,
    task: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    is_trusted: bool = False,
    keeps_cache: bool = False,
    notes: list[str] | None = None,
) -> nn.Module:
    """Build the model that `config.json` names, or another head on it, with the weights.

    Args:
        checkpoint: a folder with `config.json`.
        class_name: a class of transformers, also an `Auto…` class; None for that of `config.json`.
        task: one of `TASKS`, instead of a class.
        model_args: values that replace those of `config.json`.
        is_trusted: let the folder's own Python files run.
        keeps_cache: leave the cache of one that decodes as its configuration has it, for
            `open_decoder`; else it is left out of the outputs.
        notes: gets a sentence for each thing that was done otherwise than the folder says.

    Raises:
        UsageError: there is no such task or class, or `model_args` has a key that is none of the
            configuration's.
        CheckpointError: its class is code in the folder, or its tensors do not fit the class.
        ModelError: transformers is not installed, or does not know the class.
    """
    notes = [] if notes is None else notes
    name = checkpoint.path.name
    if task is not None and task not in TASKS:
        raise UsageError(
            f'--task "{task}" is unknown; expected one of {", ".join(TASKS)}'
            f"{did_you_mean(task, TASKS)}"
        )
    content = dict(checkpoint.hyper_parameters)
    if "auto_map" in content and not is_trusted:
        raise CheckpointError(
            f'"{name}" is refused: its class is code in the folder '
            f"({code_names(content['auto_map'])}), which is not imported; give --model, or --trust "
            "to run it"
        )
    if "quantization_config" in content:
        raise CheckpointError(
            f'"{name}" holds quantised weights (quantization_config in config.json), which need '
            "the library that wrote them; save them anew after model.dequantize()"
        )
    transformers = _imported("transformers", checkpoint)
    model_args = model_args or {}
    if "auto_map" in content:
        model = _remote(transformers, checkpoint, task, model_args)
    else:
        config = _configuration(transformers, content, model_args, name, notes)
        if not keeps_cache:
            _leave_cache_out(config, model_args)
        found = _model_class(transformers, config, checkpoint, class_name, task)
        try:
            model, loaded = found.from_pretrained(
                None, config=config, state_dict=dict(checkpoint.tensors), output_loading_info=True
            )
        # transformers fails in whatever way the configuration or a tensor does not suit it.
        except Exception as error:
            raise ModelError(
                f'transformers cannot build {found.__name__} of "{name}": {cause(error)}; give '
                "--model"
            ) from error
        is_chosen = class_name is not None or task is not None
        _check_loaded(loaded, checkpoint, found.__name__, notes if is_chosen else None)
    assert isinstance(model, nn.Module)
    # A mixture's experts by torch's own operators, which every format has: transformers' default
    # is one of its own, which ONNX lacks, and which a program needs transformers to load.
    chosen: dict[str, str] = getattr(model, "get_experts_implementation", dict)()
    if "grouped_mm" in chosen.values():
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    if not keeps_cache:
        _leave_cache_out(model.config, model_args)
        uses = [getattr(part, "use_cache", None) for part, _ in _parts(model.config, {})]
        if _caches(model) and False in uses:
            notes.append(
                "it was built with use_cache=False, so its outputs hold no cache (past_key_values)"
            )
    return model


@contextmanager
def quiet_and_offline() -> Iterator[None]:
    """Keep transformers' notes and progress bars to itself, and the hub unasked.

    A configuration may name a backbone or a kernel for which it would be.
    """
    try:
        logging: Any = importlib.import_module("transformers").utils.logging
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        yield
        return
    verbosity, is_offline = logging.get_verbosity(), constants.HF_HUB_OFFLINE
    had_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = is_offline
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _configuration(
    transformers: Any,
    content: Mapping[str, Any],
    model_args: Mapping[str, Any],
    name: str,
    notes: list[str],
) -> Any:
    """Build the configuration from the values of `config.json` and those that replace them."""
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        seen = f'the model_type "{kind}"' if isinstance(kind, str) else "no model_type"
        raise ModelError(
            f'"{name}/config.json" names {seen}, which transformers {transformers.__version__} '
            "does not know: give --model"
        )
    kernels: list[str] = []
    plain = _without_kernels(content, kernels)
    notes += [
        f'config.json asks for the kernel "{kernel}", which was left out: its code would be '
        "fetched and loaded"
        for kernel in kernels
    ]
    try:
        config = transformers.AutoConfig.for_model(**plain)
        if model_args:
            _check_known(model_args, config, name)
            config = transformers.AutoConfig.for_model(**_merged(plain, model_args))
    except UsageError:
        raise
    # Each configuration class checks its values in its own way.
    except Exception as error:
        raise ModelError(
            f'transformers refuses "{name}/config.json": {cause(error)}; correct it or give --model'
        ) from error
    for part, given in _parts(config, model_args):
        if "return_dict" not in given:  # without it outputs have no names
            part.return_dict = True
    return config


_NOT_IN_JSON = ("Infinity", "-Infinity", "NaN")


def _without_kernels(value: Any, kernels: list[str]) -> Any:
    """Return the configuration without what chooses an implementation, nor a backbone's weights.

    Numbers that JSON does not have are `{"__float__": "Infinity"}` in it, as transformers says. All
    weights are the checkpoint's; `kernels` gets the names with a slash, which are the hub's.
    """
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"} and value["__float__"] in _NOT_IN_JSON:
            return float(value["__float__"])
        named = [item for key, item in value.items() if key.endswith(_KERNEL_ENDINGS)]
        for item in named:
            items = item.values() if isinstance(item, Mapping) else [item]
            kernels += [str(each)[:100] for each in items if "/" in str(each)]
        return {
            key: key != "use_pretrained_backbone" and _without_kernels(item, kernels)
            for key, item in value.items()
            if not key.endswith(_KERNEL_ENDINGS)
        }
    if isinstance(value, list):
        return [_without_kernels(item, kernels) for item in value]
    return value


def _check_known(model_args: Mapping[str, Any], config: Any, name: str) -> None:
    known = {*config.to_dict(), *config.attribute_map, *config.sub_configs, *_ALWAYS_KNOWN}
    check_model_args(model_args, known, f'"{name}/config.json" ({type(config).__name__})')
    for key, value in model_args.items():
        if key.endswith(_KERNEL_ENDINGS) and "/" in str(value):
            raise UsageError(
                f'--model-args: the kernel "{value}" would be fetched and loaded as native code; '
                "expected eager or sdpa"
            )


def _merged(content: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values, and inside a nested configuration only those that are given."""
    merged = dict(content)
    for key, value in given.items():
        inner = merged.get(key)
        is_nested = isinstance(value, Mapping) and "model_type" in as_dict(inner)
        merged[key] = _merged(as_dict(inner), value) if is_nested else value
    return merged


def _parts(config: Any, model_args: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield the configuration and those nested in it, each with its own of `model_args`."""
    yield config, model_args
    for key in config.sub_configs:
        part, given = getattr(config, key, None), model_args.get(key)
        if part is not None:
            yield from _parts(part, given if isinstance(given, Mapping) else model_args)


def _leave_cache_out(config: Any, model_args: Mapping[str, Any]) -> None:
    """Let no part give its cache, unless that was asked for."""
    for part, given in _parts(config, model_args):
        if getattr(part, "use_cache", None) and "use_cache" not in given:
            part.use_cache = False


def _caches(model: Any) -> bool:
    """Return whether the model decodes, so that a cache would be among its outputs."""
    config = model.config
    is_encoder = not (getattr(config, "is_decoder", True) or config.is_encoder_decoder)
    return not is_encoder and "use_cache" in inspect.signature(model.forward).parameters


def _autos(task: str | None) -> list[str]:
    """Name the classes of transformers that a task's model may be made by."""
    return [f"AutoModelFor{end}" if end else "AutoModel" for end in TASKS.get(task or "", ())]


def _model_class(
    transformers: Any, config: Any, checkpoint: Checkpoint, class_name: str | None, task: str | None
) -> Any:
    """Return the class that was asked for, or the one that `config.json` names."""
    version = transformers.__version__
    is_auto = class_name is not None and class_name.startswith("Auto")
    autos = [str(class_name)] if is_auto else _autos(task)
    for auto in autos:
        mapping = getattr(getattr(transformers, auto, None), "_model_mapping", {})
        if type(config) in mapping:
            found: Any = mapping[type(config)]
            # Some configurations belong to several classes of one task.
            return found[0] if isinstance(found, tuple) else found
    if autos:
        asked = f"--task {task}" if task else f"--model transformers:{class_name}"
        raise UsageError(
            f"{asked}: transformers {version} has no {' or '.join(autos)} for a "
            f"{type(config).__name__}; expected a task of this model"
        )
    hint = checkpoint.class_hint
    name = class_name or (hint.name if hint else "")
    found = getattr(transformers, name, None) if name else None
    if not (inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)):
        if class_name is not None:
            raise UsageError(
                f"--model transformers:{class_name}: transformers {version} has no model "
                f'"{class_name}"{did_you_mean(class_name, dir(transformers))}'
            )
        seen = f'names the class "{name}"' if name else "names no class"
        raise ModelError(
            f'"{checkpoint.path.name}/config.json" {seen}; expected one of transformers {version} '
            "under architectures: give --model or --task"
        )
    return found


def _remote(
    transformers: Any, checkpoint: Checkpoint, task: str | None, model_args: Mapping[str, Any]
) -> Any:
    """Let the folder's own code build its model: the class of `architectures`, or of the task."""
    classes = as_dict(checkpoint.hyper_parameters.get("auto_map"))
    own = checkpoint.class_hint.name if checkpoint.class_hint else ""
    fitting = [auto for auto, code in classes.items() if str(code).endswith(f".{own}")]
    auto = next((auto for auto in (*_autos(task), *fitting) if auto in classes), "AutoModel")
    options = {"trust_remote_code": True, "local_files_only": True, **model_args}
    try:
        return getattr(transformers, auto).from_pretrained(checkpoint.path.as_posix(), **options)
    # The folder's own code runs.
    except Exception as error:
        raise ModelError(f"the folder's own class fails: {cause(error)}; give --model") from error


def _check_loaded(
    loaded: Any, checkpoint: Checkpoint, class_name: str, notes: list[str] | None
) -> None:
    """Refuse weights that are not there, or not of the class's shapes.

    Args:
        loaded: what transformers says of them.
        checkpoint: where they come from.
        class_name: what messages call the class.
        notes: given where the class was chosen: then it may use a part of the weights, and gets a
            note of the rest.
    """
    found = {
        problem: sorted(map(str, loaded.get(problem) or ()))
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    }
    own = checkpoint.class_hint.name if checkpoint.class_hint else "another class"
    if notes is not None and (rest := found.pop("unexpected_keys")):
        notes.append(f"{class_name} has no place for {list_shown(rest)} of the checkpoint, a {own}")
    problems = [
        f"{problem.replace('_', ' ')} {list_shown(keys)}" for problem, keys in found.items() if keys
    ]
    if problems:
        advice = (
            "give --model with the class that it was trained with"
            if notes is None
            else f"they would be random, and this is a checkpoint of {own}: train that head, or "
            "leave --task and --model out"
        )
        raise CheckpointError(
            f'"{checkpoint.path.name}" does not fit {class_name}: {"; ".join(problems)}; {advice}'
        )


# -- timm and diffusers: the name of a model, or a `config.json` → what makes it, with weights
# that the checkpoint's then replace; nothing is fetched ------------------------------------------


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
            f'"{checkpoint.path.name}" needs {library} to build its class: '
            f"{how_to_install(error) or f'{error}; install it'}; or give --model"
        ) from error


def _timm_factory(
    timm: Any, name: str, checkpoint: Checkpoint, known: Mapping[str, Any]
) -> Factory:
    # Behind a dot stands which of its weights; a name with a slash would be fetched from the hub.
    if not timm.is_model(name.partition(".")[0]):
        raise ModelError(
            f'timm {timm.__version__} has no model "{name}"; expected one of timm.list_models()'
            f"{did_you_mean(name, timm.list_models())}"
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
