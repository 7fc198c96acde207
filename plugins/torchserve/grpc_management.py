"""TorchServe's management API by gRPC: the six methods, answered by those of HTTP."""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from inspect import isawaitable
from typing import Any

from grpc import StatusCode

from modelyard.plugins.grpc.messages import parse
from modelyard.plugins.grpc.protos import message
from modelyard.plugins.grpc.rpc import Failure, Method, Rpc, code_of
from modelyard.plugins.torchserve.dialect import with_class
from modelyard.plugins.torchserve.management import TorchServeManagement
from modelyard.serve.errors import BadRequest
from modelyard.serve.front.begin import pack_fields
from modelyard.serve.http.application import Answers
from modelyard.serve.http.connection import Answer

PACKAGE = "org.pytorch.serve.grpc.management"
SERVICE = f"{PACKAGE}.ManagementAPIsService"
STATUSES = {403: StatusCode.FAILED_PRECONDITION, 409: StatusCode.ALREADY_EXISTS}
"""Status of gRPC for an HTTP status, where TorchServe's gRPC says nothing but UNKNOWN."""

Respond = Callable[[Rpc, Any], Awaitable[Answer] | Answer]


class ManagementApi:
    """The service.

    Args:
        management: answers by HTTP, from where the answers are taken.
        answers: the form of its errors.
    """

    def __init__(self, management: TorchServeManagement, answers: Answers) -> None:
        self._management = management
        self._answers = answers

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        management = self._management
        own: dict[str, Respond] = {
            "DescribeModel": self._describe,
            "ListModels": lambda rpc, request: management.list_models(
                {"limit": request.limit, "next_page_token": request.next_page_token}
            ),
            "RegisterModel": self._register,
            "ScaleWorker": lambda rpc, request: management.scale(
                request.model_name, request.model_version or None, _given(request)
            ),
            "SetDefault": lambda rpc, request: management.set_default(
                request.model_name, request.model_version
            ),
            "UnregisterModel": self._unregister,
        }
        return {
            f"/{SERVICE}/{name}": Method(partial(self._answer, name, respond))
            for name, respond in own.items()
        }

    async def _answer(self, name: str, respond: Respond, rpc: Rpc, data: bytes) -> bytes:
        request = parse(f"{PACKAGE}.{name}Request", data)
        try:
            answered = respond(rpc, request)
            status, _, body = await answered if isawaitable(answered) else answered
        except Failure:
            raise
        except Exception as error:
            status, _, body = self._answers.error(error, rpc.id)
        said = json.loads(body)
        if status >= 400:
            code = STATUSES.get(status) or code_of(status)
            if getattr(request, "customized", False):
                code = StatusCode.INTERNAL
            raise Failure(code, with_class(said["message"], said["type"]))
        is_change = isinstance(said, dict) and "status" in said
        text = said["status"] if is_change else body.decode().rstrip("\n")
        answer: bytes = message(f"{PACKAGE}.ManagementResponse")(msg=text).SerializeToString()
        return answer

    async def _describe(self, rpc: Rpc, request: Any) -> Answer:
        name, version = request.model_name, request.model_version or None
        if request.customized and version != "all":
            head = pack_fields(b"", b"", rpc.id, ())
            return await self._management.describe_customized(name, version, head)
        return self._management.describe(name, version)

    async def _register(self, rpc: Rpc, request: Any) -> Answer:
        self._require_model_api()
        return await self._management.register(_given(request))

    async def _unregister(self, rpc: Rpc, request: Any) -> Answer:
        self._require_model_api()
        if not request.model_name:
            raise BadRequest("Parameter url is required.")  # as TorchServe calls it
        return await self._management.unregister(request.model_name, request.model_version or None)

    def _require_model_api(self) -> None:
        if not self._management.has_model_api:
            text = with_class("Model API disabled", "ModelException")
            raise Failure(StatusCode.PERMISSION_DENIED, text)


def _given(request: Any) -> dict[str, Any]:
    """Return what a request says: a number counts above 0 only, a text where it is not empty."""
    fields = {field.name: value for field, value in request.ListFields()}
    given = {name: value for name, value in fields.items() if isinstance(value, str) or value > 0}
    return {**given, "synchronous": request.synchronous}
