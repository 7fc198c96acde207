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
    from modelyard.handlers.audio_handler import AudioClassifier, AudioHandler, SpeechRecognizer
    from modelyard.handlers.base import BaseHandler
    from modelyard.handlers.fill_mask import FillMask
    from modelyard.handlers.forecaster import Forecaster
    from modelyard.handlers.generate import Generate
    from modelyard.handlers.image_encoder import ImageEncoder
    from modelyard.handlers.image_segmenter import ImageSegmenter
    from modelyard.handlers.image_text import ImageText
    from modelyard.handlers.object_detector import ObjectDetector
    from modelyard.handlers.span_handler import QuestionAnswering, TokenClassifier
    from modelyard.handlers.tabular_handler import TabularHandler
    from modelyard.handlers.text_encoder import TextEncoder
    from modelyard.handlers.text_handler import TextHandler
    from modelyard.handlers.vision_handler import ImageClassifier, VisionHandler

BUILT_IN = {
    "audio_classifier": "modelyard.handlers.audio_handler:AudioClassifier",
    "base_handler": "modelyard.handlers.base:BaseHandler",
    "fill_mask": "modelyard.handlers.fill_mask:FillMask",
    "forecaster": "modelyard.handlers.forecaster:Forecaster",
    "generate": "modelyard.handlers.generate:Generate",
    "image_classifier": "modelyard.handlers.vision_handler:ImageClassifier",
    "image_encoder": "modelyard.handlers.image_encoder:ImageEncoder",
    "image_segmenter": "modelyard.handlers.image_segmenter:ImageSegmenter",
    "image_text": "modelyard.handlers.image_text:ImageText",
    "object_detector": "modelyard.handlers.object_detector:ObjectDetector",
    "question_answering": "modelyard.handlers.span_handler:QuestionAnswering",
    "speech_recognizer": "modelyard.handlers.audio_handler:SpeechRecognizer",
    "tabular": "modelyard.handlers.tabular_handler:TabularHandler",
    "text": "modelyard.handlers.text_handler:TextHandler",
    "text_encoder": "modelyard.handlers.text_encoder:TextEncoder",
    "token_classifier": "modelyard.handlers.span_handler:TokenClassifier",
}
"""The handlers that archives may name without bringing them: module and class of each."""

_PLACES = {
    **{place.partition(":")[2]: place for place in BUILT_IN.values()},
    "AudioHandler": "modelyard.handlers.audio_handler:AudioHandler",
    "VisionHandler": "modelyard.handlers.vision_handler:VisionHandler",
}

__all__ = [
    "BUILT_IN",
    "AudioClassifier",
    "AudioHandler",
    "BadInput",
    "BaseHandler",
    "Context",
    "FillMask",
    "Forecaster",
    "Generate",
    "HandlerError",
    "ImageClassifier",
    "ImageEncoder",
    "ImageSegmenter",
    "ImageText",
    "InputMismatch",
    "LoadError",
    "NoGradients",
    "ObjectDetector",
    "PredictionException",
    "QuestionAnswering",
    "SpeechRecognizer",
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
