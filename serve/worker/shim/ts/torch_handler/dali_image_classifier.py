"""`from ts.torch_handler.dali_image_classifier import DALIImageClassifier`."""

from __future__ import annotations

from ts.torch_handler.dali_handler import DALIHandler
from ts.torch_handler.image_classifier import ImageClassifier


class DALIImageClassifier(DALIHandler, ImageClassifier):
    """`ImageClassifier` whose pictures NVIDIA DALI decodes."""
