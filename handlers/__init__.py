"""What runs around a model, with or without a server.

The classes below `Context` are imported when they are asked for: they need torch, which takes a
worker two seconds and 150 MB, and a handler of an author's may do without. Those of plug-ins are
among them, as `from modelyard.handlers import ObjectDetector`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from modelyard.base.plugins import registered
from modelyard.handlers.context import Context
from modelyard.handlers.errors import (
    BadInput,
    HandlerError,
    InputMismatch,
    LoadError,
    NoGradients,
    PredictionException,
    TwinDiffers,
)

if TYPE_CHECKING:
    from modelyard.handlers.base import BaseHandler
    from modelyard.handlers.tasks.tabular_handler import TabularHandler
    from modelyard.handlers.tasks.text_handler import TextHandler
    from modelyard.handlers.tasks.vision_handler import ImageClassifier, VisionHandler

__all__ = ["BUILT_IN", "BadInput", "BaseHandler", "Context", "HandlerError", "ImageClassifier"]
__all__ += ["InputMismatch", "LoadError", "NoGradients", "PredictionException", "TabularHandler"]
__all__ += ["TextHandler", "TwinDiffers", "VisionHandler"]

BUILT_IN = {
    "base_handler": "modelyard.handlers.base:BaseHandler",
    "image_classifier": "modelyard.handlers.tasks.vision_handler:ImageClassifier",
    "tabular": "modelyard.handlers.tasks.tabular_handler:TabularHandler",
    "text": "modelyard.handlers.tasks.text_handler:TextHandler",
} | {name: entry.value for name, entry in registered("tasks").items()}
"""The handlers that archives may name without bringing them: module and class of each."""

_PLACES = [*BUILT_IN.values(), "modelyard.handlers.tasks.vision_handler:VisionHandler"]


def __getattr__(name: str) -> Any:
    """Return a handler's class, or one that a module of a plug-in's handlers has beside it."""
    modules = [place.partition(":")[0] for place in _PLACES if place.endswith(f":{name}")]
    if not modules and name[:1].isupper():
        modules = [entry.module for entry in registered("tasks").values()]
    for module in map(import_module, dict.fromkeys(modules)):
        if (found := vars(module).get(name)) and found.__module__ == module.__name__:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
