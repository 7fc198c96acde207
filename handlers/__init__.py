"""What runs around a model, with or without a server.

The classes below `Context` are imported when they are asked for: they need torch, which takes a
worker two seconds and 150 MB, and a handler of an author's may do without.
"""

from typing import TYPE_CHECKING, Any

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
    from modelyard.handlers.fill_mask import FillMask
    from modelyard.handlers.generate import Generate
    from modelyard.handlers.span_handler import QuestionAnswering, TokenClassifier
    from modelyard.handlers.tabular_handler import TabularHandler
    from modelyard.handlers.text_encoder import TextEncoder
    from modelyard.handlers.text_handler import TextHandler
    from modelyard.handlers.vision_handler import ImageClassifier, VisionHandler

BUILT_IN = {
    "base_handler": "modelyard.handlers.base:BaseHandler",
    "fill_mask": "modelyard.handlers.fill_mask:FillMask",
    "generate": "modelyard.handlers.generate:Generate",
    "image_classifier": "modelyard.handlers.vision_handler:ImageClassifier",
    "question_answering": "modelyard.handlers.span_handler:QuestionAnswering",
    "tabular": "modelyard.handlers.tabular_handler:TabularHandler",
    "text": "modelyard.handlers.text_handler:TextHandler",
    "text_encoder": "modelyard.handlers.text_encoder:TextEncoder",
    "token_classifier": "modelyard.handlers.span_handler:TokenClassifier",
}
"""The handlers that archives may name without bringing them: module and class of each."""

_PLACES = {
    **{place.partition(":")[2]: place for place in BUILT_IN.values()},
    "VisionHandler": "modelyard.handlers.vision_handler:VisionHandler",
}

__all__ = [
    "BUILT_IN",
    "BadInput",
    "BaseHandler",
    "Context",
    "FillMask",
    "Generate",
    "HandlerError",
    "ImageClassifier",
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
