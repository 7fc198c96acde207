"""What is sent for each call, and what is made of its answer; without any input or output."""

from __future__ import annotations

import copy
import mimetypes
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import quote

import orjson

from modelyard_client.errors import BadAnswer, RequestFailed, numpy
from modelyard_client.explanation import Explanation, read_explanations
from modelyard_client.retries import Answer, Flow, Outputs, Request, Retries

if TYPE_CHECKING:
    from modelyard_client.tensors import Arrays

JSON, OCTETS = "application/json", "application/octet-stream"
AGENT = {"User-Agent": f"modelyard-client/{version('modelyard-client')}"}
"""Headers of every request, beside httpx's own."""
Priority = Literal["high", "normal", "low"]

Body = bytes | bytearray | memoryview | str | Path | Mapping[str, Any] | list[Any]
"""Bytes go out as they are, text as text/plain, the file of a path by the media type of its name,
and anything else as JSON."""


def encode(body: Body, content_type: str | None) -> tuple[bytes, dict[str, str]]:
    """Return a body's bytes, and the header that says their type.

    Raises:
        OSError: its file cannot be read.
        TypeError: JSON has no such value.
    """
    if isinstance(body, Path):
        guessed = mimetypes.guess_type(body.name)[0] or OCTETS
        return body.read_bytes(), {"Content-Type": content_type or guessed}
    if isinstance(body, str):
        return body.encode(), {"Content-Type": content_type or "text/plain; charset=utf-8"}
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), {"Content-Type": content_type or OCTETS}
    return _to_json(body), {"Content-Type": content_type or JSON}


def _to_json(value: Any) -> bytes:
    # The subclass of TypeError that orjson raises says what it cannot write.
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def decode(answer: Answer) -> Any:
    """Return an answer's value: of JSON, text, or bytes.

    Raises:
        BadAnswer: it is not what it says.
    """
    try:
        if answer.content_type == JSON:
            return orjson.loads(answer.body)
        if answer.content_type.startswith("text/"):
            return answer.body.decode()
    except ValueError as error:
        raise BadAnswer(f"the answer is not {answer.content_type}: {error}") from error
    return answer.body


def as_text(value: object) -> str:
    """Return an option's value as a query holds it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return str(value)


class Calls:
    """The calls of one server.

    Args:
        retries: when a request is sent again.
        is_idempotent: whether predictions and explanations may run twice.
        run: takes the steps of a call later, of an explanation that is to be drawn.
    """

    def __init__(
        self, retries: Retries, is_idempotent: bool, run: Callable[[Flow[Answer]], Answer]
    ) -> None:
        self._retries = retries
        self._is_idempotent = is_idempotent
        self._run = run
        self._headers: Mapping[str, str] = AGENT

    def vary(
        self, headers: Mapping[str, str] | None, timeout_s: float | None, priority: Priority | None
    ) -> Calls:
        """Return the same calls with more headers, another time, another class.

        Raises:
            ValueError: one of them is wrong.
        """
        other = copy.copy(self)
        if priority is not None:
            if priority not in get_args(Priority):
                raise ValueError(f"priority={priority!r}; expected one of {get_args(Priority)}")
            headers = {**(headers or {}), "X-Request-Priority": priority}
        other._headers = {**self._headers, **(headers or {})}
        if timeout_s is not None:
            other._retries = replace(self._retries, timeout_s=timeout_s)
        return other

    def metadata(self, model: str) -> Flow[dict[str, Any]]:
        """Return a model's inputs and outputs."""
        found = yield from self._get(_tensor_path(model))
        if not isinstance(found, dict):
            raise BadAnswer("the answer is not a model's metadata")
        return found

    def models(self) -> Flow[list[str]]:
        """Return the names of the models that are served."""
        found = yield from self._get("/v2/models")
        if not (isinstance(found, dict) and isinstance(found.get("models"), list)):
            raise BadAnswer("the answer is not a list of models")
        return [str(name) for name in found["models"]]

    def _get(self, path: str) -> Flow[Any]:
        request = Request("GET", path, headers=self._headers, is_idempotent=True)
        return decode((yield from self._retries.send(request)))

    def is_ready(self) -> Flow[bool]:
        """Return whether predictions can be answered now; this is not tried again."""
        once = Retries(attempts=1, timeout_s=self._retries.timeout_s)
        try:
            yield from once.send(Request("GET", "/health/ready", headers=self._headers))
        except RequestFailed as error:
            if error.status == 503:
                return False
            raise
        return True

    def send(
        self,
        api: str,
        model: str,
        body: Body,
        content_type: str | None = None,
        options: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        is_stream: bool = False,
    ) -> Flow[Answer]:
        """Return the answer of a model to a body.

        Args:
            api: predictions or explanations.
            model: NAME or NAME/VERSION.
            options: options of the query; those that are None are left out.
        """
        content, kind = encode(body, content_type)
        query = {k: as_text(v) for k, v in (options or {}).items() if v is not None}
        answer = yield from self._retries.send(
            Request(
                "POST",
                f"/{api}/{_place(model)}",
                query,
                {**self._headers, **kind, **(headers or {})},
                content,
                self._is_idempotent,
                is_stream,
            )
        )
        return answer

    def predict(self, model: str, body: Body, content_type: str | None) -> Flow[Any]:
        """Return a prediction: what JSON, text or bytes hold."""
        return decode((yield from self.send("predictions", model, body, content_type)))

    def explain(
        self, model: str, body: Body, content_type: str | None, options: Mapping[str, Any]
    ) -> Flow[list[Explanation]]:
        """Return the explanations of one input: one for each output and target."""
        content, headers = encode(body, content_type)  # once: a file may be another one later
        ask = partial(self.send, "explanations", model, content, headers["Content-Type"])
        answer = yield from ask(options, {"Accept": JSON})
        found = read_explanations(decode(answer))
        return [
            replace(each, draw=self._draw(ask, options, each, len(found)), version=answer.version,
                    request_id=answer.request_id)
            for each in found
        ]  # fmt: skip

    def _draw(
        self,
        ask: Callable[[Mapping[str, Any]], Flow[Answer]],
        options: Mapping[str, Any],
        of: Explanation,
        count: int,
    ) -> Callable[[str], Answer]:
        """Return what asks for an explanation again, in a format for people."""
        its_own = {"target": of.target, "output_name": of.fields.get("output_name")}
        chosen = {**options, **(its_own if count > 1 else {})}
        return lambda format: self._run(ask({**chosen, "format": format}))

    def infer(self, model: str, inputs: Arrays, outputs: list[str] | None) -> Flow[Outputs]:
        """Return a model's outputs for its inputs, arrays by name."""
        numpy()
        from modelyard_client.tensors import read_outputs, write_request

        body, headers = write_request(inputs, outputs)
        path, sent = f"{_tensor_path(model)}/infer", {**self._headers, **headers}
        request = Request("POST", path, {}, sent, body, self._is_idempotent)
        return read_outputs((yield from self._retries.send(request)))


def _place(model: str) -> str:
    return "/".join(quote(part, "") for part in model.split("/"))


def _tensor_path(model: str) -> str:
    name, _, number = model.partition("/")
    path = f"/v2/models/{quote(name, '')}"
    return f"{path}/versions/{quote(number, '')}" if number else path
