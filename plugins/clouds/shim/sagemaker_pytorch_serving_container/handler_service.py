"""The handler that SageMaker's containers name to their model server."""

import sys
from typing import Any

from sagemaker_inference import default_handler_service, environment, transformer

from sagemaker_pytorch_serving_container import default_pytorch_inference_handler

ENABLE_MULTI_MODEL = environment.is_multi_model


class HandlerService(default_handler_service.DefaultHandlerService):
    """A handler of batches, with what PyTorch's models need."""

    def __init__(self) -> None:
        default = default_pytorch_inference_handler.DefaultPytorchInferenceHandler()
        super().__init__(transformer.Transformer(default_inference_handler=default))

    def initialize(self, context: Any) -> None:
        """Load the model, whose code comes with it where there are several."""
        if ENABLE_MULTI_MODEL:
            sys.path.append(f"{context.system_properties.get('model_dir')}/code")
        super().initialize(context)
