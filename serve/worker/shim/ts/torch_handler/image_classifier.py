"""`from ts.torch_handler.image_classifier import ImageClassifier`."""

from handlers import ImageClassifier as ImageClassifier
