"""What runs around a model, with or without a server.

The classes below `Context` are imported when they are asked for: they need torch, which takes a
worker two seconds and 150 MB, and a handler of an author's may do without.
"""

from typing import TYPE_CHECKING, Any

from modelyard.base.plugins import registered
from modelyard.handlers.context import Context
from modelyard.handlers.entry_point import import_class
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
    from modelyard.handlers.tasks.fill_mask import FillMask
    from modelyard.handlers.tasks.image_encoder import ImageEncoder
    from modelyard.handlers.tasks.image_text import ImageText
    from modelyard.handlers.tasks.span_handler import QuestionAnswering, TokenClassifier
    from modelyard.handlers.tasks.tabular_handler import TabularHandler
    from modelyard.handlers.tasks.text_encoder import TextEncoder
    from modelyard.handlers.tasks.text_handler import TextHandler
    from modelyard.handlers.tasks.vision_handler import ImageClassifier, VisionHandler

_CORE = {
    "base_handler": "modelyard.handlers.base:BaseHandler",
    "fill_mask": "modelyard.handlers.tasks.fill_mask:FillMask",
    "image_classifier": "modelyard.handlers.tasks.vision_handler:ImageClassifier",
    "image_encoder": "modelyard.handlers.tasks.image_encoder:ImageEncoder",
    "image_text": "modelyard.handlers.tasks.image_text:ImageText",
    "question_answering": "modelyard.handlers.tasks.span_handler:QuestionAnswering",
    "tabular": "modelyard.handlers.tasks.tabular_handler:TabularHandler",
    "text": "modelyard.handlers.tasks.text_handler:TextHandler",
    "text_encoder": "modelyard.handlers.tasks.text_encoder:TextEncoder",
    "token_classifier": "modelyard.handlers.tasks.span_handler:TokenClassifier",
}

BUILT_IN = _CORE | {name: entry.value for name, entry in registered("tasks").items()}
"""The handlers that archives may name without bringing them: module and class of each."""

_PLACES = {
    **{place.partition(":")[2]: place for place in BUILT_IN.values()},
    "VisionHandler": "modelyard.handlers.tasks.vision_handler:VisionHandler",
}

__all__ = [
    "BUILT_IN",
    "BadInput",
    "BaseHandler",
    "Context",
    "FillMask",
    "HandlerError",
    "ImageClassifier",
    "ImageEncoder",
    "ImageText",
    "InputMismatch",
    "LoadError",
    "NoGradients",
    "PredictionException",
    "QuestionAnswering",
    "TabularHandler",
    "TextEncoder",
    "TextHandler",
    "TokenClassifier",
    "TwinDiffers",
    "VisionHandler",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_class(_PLACES[name])
