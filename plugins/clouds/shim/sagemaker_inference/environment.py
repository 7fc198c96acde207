"""What the variables of SageMaker's containers say."""

import os

from sagemaker_inference import content_types, parameters

base_dir = os.environ.get(parameters.BASE_PATH_ENV, "/opt/ml")
is_multi_model = os.environ.get(parameters.MULTI_MODEL_ENV) == "true"
model_dir = os.path.join(base_dir, "models" if is_multi_model else "model")  # noqa: PTH118 - of text
code_dir = os.path.join(model_dir, "code")  # noqa: PTH118


class Environment:
    """The variables as they are now.

    Attributes:
        module_name: the module that the author's functions are of.
        default_accept: the media type of answers to requests that want none, or any.
    """

    def __init__(self) -> None:
        get = os.environ.get
        self.module_name = get(parameters.USER_PROGRAM_ENV, "inference.py").removesuffix(".py")
        self.model_server_timeout = int(get(parameters.MODEL_SERVER_TIMEOUT_ENV, "60"))
        seconds = get(parameters.MODEL_SERVER_TIMEOUT_SECONDS_ENV)
        self.model_server_timeout_seconds = int(seconds) if seconds else None
        self.model_server_workers = get(parameters.MODEL_SERVER_WORKERS_ENV)
        self.default_accept = get(parameters.DEFAULT_INVOCATIONS_ACCEPT_ENV, content_types.JSON)
        self.inference_http_port = get(parameters.BIND_TO_PORT_ENV, "8080")
        self.management_http_port = self.inference_http_port
        self.safe_port_range = get(parameters.SAFE_PORT_RANGE_ENV)
        megabytes = get(parameters.MAX_REQUEST_SIZE)
        self.max_request_size = int(megabytes) << 20 if megabytes else None
