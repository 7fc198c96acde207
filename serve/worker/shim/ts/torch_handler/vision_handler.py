"""`from ts.torch_handler.vision_handler import VisionHandler`."""

from handlers.vision_handler import VisionHandler as VisionHandler
