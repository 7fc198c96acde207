"""Written for TorchServe: only its import names."""

from ts.context import Context
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.image_classifier import ImageClassifier
from ts.torch_handler.vision_handler import VisionHandler
from ts.utils.util import PredictionException


class Upper(BaseHandler):
    def initialize(self, context):
        assert isinstance(context, Context)
        assert issubclass(ImageClassifier, VisionHandler) and issubclass(VisionHandler, BaseHandler)
        self.manifest = context.manifest
        self.model_dir = context.system_properties.get("model_dir")
        self.initialized = True

    def preprocess(self, data):
        rows = [row.get("data") or row.get("body") for row in data]
        if any(row == b"teapot" for row in rows):
            raise PredictionException("short and stout", 418)
        return [bytes(row).decode() for row in rows]

    def inference(self, inputs):
        return [text.upper() for text in inputs]

    def postprocess(self, outputs):
        return outputs
