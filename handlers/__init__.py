"""What runs around a model, with or without a server."""

from handlers.base import BaseHandler
from handlers.context import Context
from handlers.errors import (
    BadInput,
    HandlerError,
    InputMismatch,
    LoadError,
    NoGradients,
    PredictionException,
)
from handlers.image_classifier import ImageClassifier
from handlers.vision_handler import VisionHandler

__all__ = [
    "BadInput",
    "BaseHandler",
    "Context",
    "HandlerError",
    "ImageClassifier",
    "InputMismatch",
    "LoadError",
    "NoGradients",
    "PredictionException",
    "VisionHandler",
]
