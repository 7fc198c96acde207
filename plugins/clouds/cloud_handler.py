"""A model folder's own code, as a handler of batches. `contract.py` packs this file into archives.

The archive holds no more than this and where the folder is: the code and the weights stay in the
folder that the cloud mounts, and are read there by the worker, behind its walls.
"""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - whoever forks workers sees by this that it is needed

from modelyard.handlers import Context
from modelyard.handlers.body import parse_strictly
from modelyard.handlers.errors import BadInput
from modelyard.plugins.clouds import SHIM

Answer = Callable[[bytes | bytearray, "OneRequest"], Any]
JSON = "application/json"


class OneRequest:
    """The context, as if one request were the batch's only one: the toolkit reads the first."""

    def __init__(self, context: Context, index: int) -> None:
        self._context = context
        self._index = index
        self.request_processor = [context.request_processor[index]]
        self.parameters: Any = None
        """What Vertex AI's clients send beside the instances."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def get_request_header(self, idx: int, key: str) -> Any:
        """Return a header of the request."""
        return self._context.get_request_header(self._index, key)

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the media type of its answer."""
        self._context.set_response_content_type(self._index, value)

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of its answer."""
        self._context.set_response_status(code, phrase, self._index)


class CloudHandler:
    """Loads a model folder as its cloud would, and answers each request by itself."""

    def initialize(self, context: Context) -> None:
        """Load the model by the author's code."""
        stated = context.model_yaml_config["handler"]
        folder = Path(stated["folder"])
        os.chdir(folder)
        context.system_properties["model_dir"] = str(folder)
        self._answer = OPEN[stated["contract"]](folder, context)

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[Any]:
        """Answer requests in their order."""
        requests = enumerate(data)
        return [
            self._answer(row.get("body") or b"", OneRequest(context, at)) for at, row in requests
        ]


def open_sagemaker(folder: Path, context: Context) -> Answer:
    """Return what answers by `code/inference.py`, or by the toolkit's defaults."""
    sys.path[:0] = [str(folder / "code"), str(folder), str(SHIM)]
    toolkit = importlib.import_module("sagemaker_pytorch_serving_container.handler_service")
    service = toolkit.HandlerService()
    service.initialize(context)

    def answer(body: bytes | bytearray, request: OneRequest) -> Any:
        service._service._context = request
        return service.handle([{"body": body}], request)[0]

    return answer


def open_vertex(folder: Path, context: Context) -> Answer:
    """Return what answers instances by the same code: they are the body, as JSON."""
    answer_all = open_sagemaker(folder, context)

    def answer(body: bytes | bytearray, request: OneRequest) -> Any:
        given = _read_object(body)
        if not isinstance(given.get("instances"), list):
            raise BadInput('the body has no list "instances"; expected {"instances": […]}')
        request.parameters = given.get("parameters")
        headers = request.request_processor[0].get_request_properties()
        headers |= {"Content-Type": JSON, "Accept": JSON}
        said = answer_all(json.dumps(given["instances"]).encode(), request)
        request.set_response_content_type(0, JSON)
        if request.request_processor[0].get_response_status_code() >= 400:
            return {"error": said}
        return {"predictions": json.loads(said) if isinstance(said, str | bytes) else said}

    return answer


def open_azureml(folder: Path, context: Context) -> Answer:
    """Return what answers by `init` and `run` of the entry script."""
    script = Path(os.environ.get("AZUREML_ENTRY_SCRIPT", "score.py"))
    sys.path[:0] = [str((folder / script).parent), str(folder)]
    os.environ.setdefault("AZUREML_MODEL_DIR", str(folder))
    own = importlib.import_module(script.stem)
    own.init()
    names = {**inspect.signature(own.run).parameters}
    wants_headers = names.pop("request_headers", None) is not None
    decorators = sys.modules.get("inference_schema.schema_util")
    is_typed = decorators is not None and decorators.is_schema_decorated(own.run)

    def answer(body: bytes | bytearray, request: OneRequest) -> Any:
        headers = request.request_processor[0].get_request_properties()
        given: Mapping[str, Any] = {next(iter(names)): body.decode()}
        if is_typed:
            said = _read_object(body)
            given = {name: said[name] for name in names if name in said}
        if wants_headers:
            given = {**given, "request_headers": dict(headers)}
        try:
            found = own.run(**given)
        except Exception as error:
            request.set_response_status(500)
            found = {"message": str(error)}
        request.set_response_content_type(0, JSON)
        return json.dumps(found)

    return answer


def _read_object(body: bytes | bytearray) -> dict[str, Any]:
    try:
        found = parse_strictly(body)
    except ValueError as error:
        raise BadInput(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadInput(f"the body is {type(found).__name__}; expected a JSON object")
    return found


OPEN = {"sagemaker": open_sagemaker, "vertex": open_vertex, "azureml": open_azureml}
