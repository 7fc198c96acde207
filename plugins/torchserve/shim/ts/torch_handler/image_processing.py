"""Pictures → tensors, as the built-in image handlers of TorchServe make them with torchvision."""

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from modelyard.handlers.tasks.pictures import ImageSettings, colour_table, normalise, to_size

ToTensor = Callable[[Image.Image], Tensor]
"""What authors put as `image_processing`."""


class ImageProcessing:
    """A value for `image_processing`: RGB, resized, cropped, normalised, as the settings say.

    Grey, palette and transparent pictures become RGB first; torchvision's steps fail on them.
    """

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        self._table = colour_table(settings)

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the values (3, H, W) of a picture."""
        pixels = np.asarray(to_size(image.convert("RGB"), self.settings))
        return torch.from_numpy(normalise(pixels, self._table))
