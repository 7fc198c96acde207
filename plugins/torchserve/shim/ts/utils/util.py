"""Labels, classes of a module, and what else handlers take from `ts.utils.util`."""

import enum
import functools
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from modelyard.handlers.errors import PredictionException as PredictionException

_log = logging.getLogger(__name__)

CLEANUP_REGEX = re.compile(r"<.*?>|&(?:[a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")
"""HTML tags and character references."""


PT2Backend = enum.StrEnum(
    "PT2Backend",
    "EAGER AOT_EAGER INDUCTOR NVFUSER AOT_NVFUSER AOT_CUDAGRAPHS OFI FX2TRT ONNXRT IPEX "
    "TORCHXLA_TRACE_ONCE OPENVINO TENSORRT HPU_BACKEND",
)
"""The backends of `torch.compile` that `pt2` in model-config.yaml may name."""


def check_valid_pt2_backend(backend: str) -> bool:
    """Return whether a backend is one of `PT2Backend`; one that is not is logged."""
    known = [member.value for member in PT2Backend]
    if backend not in known:
        _log.warning("pt2 names the backend %r; known are %s", backend, ", ".join(known))
    return backend in known


def list_classes_from_module(
    module: ModuleType, parent_class: type[Any] | None = None
) -> list[type[Any]]:
    """Return the classes that a module defines itself, by name; of `parent_class` if given."""
    return [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__
        and (parent_class is None or issubclass(value, parent_class))
    ]


def load_label_mapping(mapping_file_path: str) -> dict[str, Any] | None:
    """Read output index as str → label; None, with a warning, where there is no such file.

    Three forms: {"0": "cat"}, {"0": ["n02123045", "tabby"]} (the last name counts) and
    {"object_type_names": ["cat", …]}.

    Raises:
        ValueError: the file holds something else.
    """
    path = Path(mapping_file_path)
    if not path.is_file():
        _log.warning("there is no %s; answers name classes by their index", path)
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f'{path.name} holds {content!r}; expected an object like {{"0": "cat"}}')
    names = content.get("object_type_names")
    if isinstance(names, list):
        return {str(index): name for index, name in enumerate(names)}
    labels = {
        key: value[-1] if isinstance(value, list) else value for key, value in content.items()
    }
    for key, label in labels.items():
        if not isinstance(label, str):
            raise ValueError(
                f"{path.name} gives {key} the label {label!r}; expected text or a list of text"
            )
    return labels


def map_class_to_label(
    probs: Sequence[Sequence[Any]],
    mapping: dict[str, str] | None = None,
    lbl_classes: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """Return label → value for every row; of two values with one label, the later stays.

    Args:
        probs: the values of each row.
        mapping: class index as str → label; without one the index is the label.
        lbl_classes: the class index of each value; without, the values are those of classes 0, 1, …

    Raises:
        TypeError: `probs` is not a list, or `mapping` no dict.
        KeyError: a class that `mapping` does not have.
    """
    if not isinstance(probs, list):
        raise TypeError(f"probs is {type(probs).__name__}; expected a list: call tolist() first")
    if mapping is not None and not isinstance(mapping, dict):
        raise TypeError(f"mapping is {type(mapping).__name__}; expected a dict")
    classes = [range(len(row)) for row in probs] if lbl_classes is None else lbl_classes
    return [
        {
            str(index) if mapping is None else mapping[str(index)]: value
            for index, value in zip(indices, row, strict=False)
        }
        for indices, row in zip(classes, probs, strict=False)
    ]


def get_yaml_config(yaml_file_path: str) -> Any:
    """Read a YAML file."""
    with Path(yaml_file_path).open(encoding="utf-8") as file:
        return yaml.safe_load(file)


def deprecated(
    version: str, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Warn, each time the decorated function is called, that it goes in `version`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def warn(*args: Any, **kwargs: Any) -> Any:
            text = f"{function.__name__} goes in {version}; use {replacement or 'another'} instead"
            warnings.warn(text, klass, stacklevel=2)
            return function(*args, **kwargs)

        return warn

    return decorate
