"""A handler of batches around a transformer."""

import os
from typing import Any

from sagemaker_inference.transformer import Transformer


class DefaultHandlerService:
    """What a model server calls."""

    def __init__(self, transformer: Any = None) -> None:
        self._service = transformer or Transformer()

    def handle(self, data: Any, context: Any) -> Any:
        """Answer requests."""
        return self._service.transform(data, context)

    def initialize(self, context: Any) -> None:
        """Load the model of the context's folder; processes that are started find its code, too."""
        model_dir = context.system_properties.get("model_dir")
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{model_dir}/code:{before}"
        self._service.validate_and_initialize(model_dir=model_dir, context=context)
