"""`from ts.torch_handler.vision_handler import VisionHandler`."""

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from modelyard.handlers.context import Context
from modelyard.handlers.tasks.pictures import ImageSettings
from ts.handler_utils.timer import timed
from ts.torch_handler.base_handler import BaseHandler, import_captum
from ts.torch_handler.image_processing import ImageProcessing, ToTensor


class VisionHandler(BaseHandler):
    """Pictures in; subclasses set `image_processing`, picture → tensor, and `postprocess`."""

    image_processing: ToTensor = ImageProcessing(ImageSettings())

    @functools.cached_property
    def ig(self) -> Any:
        """Captum's integrated gradients of the model."""
        return import_captum().IntegratedGradients(self.model)

    def initialize(self, context: Context) -> None:
        """Load the archive; the server's `limit_max_image_pixels=false` lifts Pillow's limit."""
        super().initialize(context)
        if not context.system_properties.get("limit_max_image_pixels"):
            Image.MAX_IMAGE_PIXELS = None

    @timed
    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Tensor:
        """Turn image files, base64 of them, or nested lists of numbers into one tensor."""
        images = []
        for row in data:
            value = row.get("data") or row.get("body")
            if isinstance(value, str):
                value = base64.b64decode(value)
            if isinstance(value, bytes | bytearray):
                images.append(self.image_processing(Image.open(io.BytesIO(value))))
            else:
                images.append(torch.tensor(value, dtype=torch.float32))
        return torch.stack(images).to(self.device)

    def get_insights(self, tensor_data: Tensor, _: Any, target: Any = 0) -> list[Any]:
        """Attribute the target's output to the input values: 15 steps from all zeros."""
        attributions = self.ig.attribute(tensor_data, target=target, n_steps=15)
        return cast("list[Any]", attributions.tolist())
