"""A handler as TorchServe's users have them: nothing in it knows Modelyard."""

import numpy as np
import torch
from ts.torch_handler.image_classifier import ImageClassifier


class DigitsClassifier(ImageClassifier):
    """Grey 8 x 8 scans in, the three most likely digits out."""

    topk = 3

    @staticmethod
    def image_processing(image):
        """Turn a picture into a tensor (1, 8, 8) of values from 0 to 1."""
        pixels = np.asarray(image.convert("L").resize((8, 8)), dtype=np.float32)
        return torch.from_numpy(pixels / 255)[None]
