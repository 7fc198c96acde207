"""The tour's handler: a picture in, the most likely digits out; Captum explains them."""

import numpy as np
import torch
from PIL import Image
from ts.torch_handler.image_classifier import ImageClassifier


class DigitHandler(ImageClassifier):
    """Grey 28 x 28 pictures."""

    topk = 3

    @staticmethod
    def image_processing(image: Image.Image) -> torch.Tensor:
        """Turn a picture into a tensor (1, 28, 28) of values from 0 to 1."""
        pixels = np.asarray(image.convert("L").resize((28, 28)), dtype=np.float32)
        return torch.from_numpy(pixels / 255)[None]
