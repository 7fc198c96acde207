"""What runs around a model, with or without a server."""

from modelyard.handlers.base import BaseHandler
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
from modelyard.handlers.tabular_handler import TabularHandler
from modelyard.handlers.text_encoder import TextEncoder
from modelyard.handlers.text_handler import TextHandler
from modelyard.handlers.vision_handler import ImageClassifier, VisionHandler

BUILT_IN: dict[str, type[BaseHandler]] = {
    "base_handler": BaseHandler,
    "image_classifier": ImageClassifier,
    "tabular": TabularHandler,
    "text": TextHandler,
    "text_encoder": TextEncoder,
}
"""The handlers that archives may name without bringing them."""

__all__ = [
    "BUILT_IN",
    "BadInput",
    "BaseHandler",
    "Context",
    "HandlerError",
    "ImageClassifier",
    "InputMismatch",
    "LoadError",
    "NoGradients",
    "PredictionException",
    "TabularHandler",
    "TextEncoder",
    "TextHandler",
    "TwinDiffers",
    "VisionHandler",
]
