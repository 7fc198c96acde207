"""Import the author's handler, build its Context, and say clearly what went wrong."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

import handlers
from handlers import BaseHandler, Context
from handlers.errors import LoadError

Entry = Callable[[list[dict[str, Any]], Context], Any]

BUILT_IN: dict[str, type[BaseHandler]] = {
    "base_handler": BaseHandler,
    "image_classifier": handlers.ImageClassifier,
}


@dataclass(frozen=True)
class Service:
    """A loaded model version."""

    predict: Entry
    explain: Entry
    context: Context
    batch_size: int
    device: str


def load_service(message: dict[str, Any]) -> Service:
    """Load what the LOAD message names.

    Raises:
        Exception: whatever the author's code raises; LoadError for what we find ourselves.
    """
    folder = Path(message["folder"])
    device = choose_device(message["device"], message["worker"])
    context = Context(
        model_name=message["name"],
        model_dir=str(folder),
        manifest=message["manifest"],
        batch_size=message["batch_size"],
        gpu=torch.device(device).index if device != "cpu" else None,
        model_yaml_config=read_config(folder, message["config_file"]),
    )
    predict, explain = _entries(message["handler"], context)
    return Service(predict, explain, context, message["batch_size"], device)


def choose_device(wanted: str, worker: int) -> str:
    """Return `cpu` or `cuda:N` for what the server was told: auto, cpu, cuda or cuda:N.

    Workers are spread over the devices by their number.
    """
    if wanted == "cpu":
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return f"cuda:{(worker - 1) % count}" if count else "cpu"
    index = int(wanted.partition(":")[2] or (worker - 1) % max(1, count))
    if index >= count:
        raise LoadError(
            f"device {wanted} was asked for but this process sees {count} CUDA devices; "
            "start with --device auto or cpu, or check the driver with nvidia-smi"
        )
    return f"cuda:{index}"


def describe(error: BaseException, folder: Path) -> str:
    """Return one line: the error, and where in the author's code it came from."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, LoadError):
        text = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        with contextlib.suppress(ValueError):
            place = Path(frame.filename).relative_to(folder)
            return f"{text} ({place}:{frame.lineno})"
    return text


def read_config(folder: Path, config_file: str | None) -> dict[str, Any]:
    """Return the archive's own configuration; empty where it has none."""
    if not config_file:
        return {}
    config = yaml.safe_load((folder / config_file).read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def _entries(handler: str, context: Context) -> tuple[Entry, Entry]:
    """Find the handler and initialise it, by TorchServe's rules.

    A module-level function of the wanted name (`handle` unless the handler says `file:name`) is
    the entry point; else the module's one class, or the class of that name.
    """
    place, _, wanted = handler.partition(":")
    name = Path(place).name.removesuffix(".py")
    if name in BUILT_IN and not Path(f"{name}.py").exists():
        return _from_class(BUILT_IN[name], context)
    module = _import_handler(name, handler)
    entry = getattr(module, wanted or "handle", None)
    if callable(entry) and not inspect.isclass(entry):
        entry(None, context)
        return entry, entry
    return _from_class(_find_class(module, wanted), context)


def _import_handler(name: str, handler: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise LoadError(
            f'the handler "{handler}" is neither a file of the archive nor one of '
            f"{', '.join(sorted(BUILT_IN))}"
        ) from error


def _find_class(module: ModuleType, wanted: str) -> type[Any]:
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    if inspect.isclass(chosen := getattr(module, wanted, None) if wanted else None):
        return chosen
    if len(own) > 1:
        own = [value for value in own if issubclass(value, BaseHandler)]
    if wanted or len(own) != 1:
        names = ", ".join(value.__name__ for value in own) or "none"
        missing = f'"{wanted}"' if wanted else "one class or a function handle(data, context)"
        raise LoadError(
            f"{module.__name__}.py: expected {missing}, found classes: {names}; "
            "name one with FILE.py:Class when archiving"
        )
    return own[0]


def _from_class(kind: type[Any], context: Context) -> tuple[Entry, Entry]:
    handler = kind()
    handler.initialize(context)
    handle = handler.handle
    # A handler without `explain` is told by the request header of that name, as in TorchServe.
    return handle, getattr(handler, "explain", handle)
