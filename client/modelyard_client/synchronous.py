"""The client for programs without asyncio; made of asynchronous.py by scripts/unasync."""

from __future__ import annotations

import copy
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import httpx

from modelyard_client.calls import Body, Calls, Priority
from modelyard_client.connection import Connection, answer_of, is_left_open, run_apart
from modelyard_client.deadline import bound, within
from modelyard_client.errors import BadAnswer, NoAnswer
from modelyard_client.explanation import Explanation
from modelyard_client.options import ExplainOptions
from modelyard_client.retries import Answer, Attempt, Flow, Outputs, Pause, Retries

if TYPE_CHECKING:
    from modelyard_client.tensors import Arrays

T = TypeVar("T")


class Client:
    """Calls a server; one may be used by many threads.

    Args:
        url: URL of the inference API, as `http://127.0.0.1:8080`.
        token: token for it; a path is a file that is read for each request.
        ca: file of certificates to trust in place of the system's.
        timeout_s: time of a call, from its begin to its answer, with all that is tried again.
        attempts: how often a request is sent at most.
        idempotent: whether requests may run twice: one that was sent and not answered is then sent
            again. Right for models whose handlers change nothing.
        max_answer_bytes: longest answer; a streamed one may be of any length.
        trust_env: whether proxies are taken from the environment.

    Raises:
        ValueError: an argument is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | Path | None = None,
        ca: Path | str | ssl.SSLContext | None = None,
        timeout_s: float = 60.0,
        attempts: int = 4,
        idempotent: bool = False,
        max_answer_bytes: int = 1 << 28,
        trust_env: bool = True,
    ) -> None:
        self._connection = Connection(url, token, ca, max_answer_bytes, trust_env)
        self.calls = Calls(
            Retries(attempts, timeout_s), idempotent, partial(run_apart, self._connection)
        )
        self._http = bound(httpx.Client(**self._connection.options()))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def with_options(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> Client:
        """Return a client over the same connections whose calls differ in what is given here.

        Args:
            headers: more headers, as `traceparent`.
            timeout_s: as of the client.
            priority: class of the requests, where the server tells them apart.

        Raises:
            ValueError: an argument is wrong.
        """
        other = copy.copy(self)
        other.calls = self.calls.vary(headers, timeout_s, priority)
        return other

    def ask(self, model: str, body: Body, *, content_type: str | None = None) -> Answer:
        """Return a prediction as it came: its `body`, `headers`, `version` and `request_id`.

        Args:
            model: as of `predict`, as are `body`, `content_type` and the errors.
        """
        return self.run(self.calls.send("predictions", model, body, content_type))

    def predict(self, model: str, body: Body, *, content_type: str | None = None) -> Any:
        """Return a model's prediction: what its JSON or text says, or bytes.

        Args:
            model: NAME or NAME/VERSION.
            body: bytes as they are, text, a `Path` to a file, or what becomes JSON.
            content_type: Content-Type of the body, where that does not say it.

        Raises:
            RequestFailed: the server answered with an error.
            NoAnswer: nobody answered, or not in time.
            BadAnswer: the answer is too long, or not what it says to be.
        """
        return self.run(self.calls.predict(model, body, content_type))

    def explain(
        self,
        model: str,
        body: Body,
        *,
        content_type: str | None = None,
        **options: Unpack[ExplainOptions],
    ) -> list[Explanation]:
        """Return the explanations of one input: one, or one for each target and output.

        Args:
            model: as of `predict`, as are `body`, `content_type` and the errors.
            options: options such as `method`, `target`, `baseline`: see `ExplainOptions` and
                docs/explain.md.
        """
        return self.run(self.calls.explain(model, body, content_type, options))

    def infer(
        self,
        model: str,
        inputs: Arrays,
        *,
        outputs: list[str] | None = None,
    ) -> Outputs:
        """Return a model's own outputs for its own inputs, numpy arrays by name, sent as bytes.

        They are a dict that has the `version` and the `request_id`, too.

        Args:
            model: NAME or NAME/VERSION.
            inputs: inputs by name; the first dimension is that of the rows.
            outputs: which; None for all.

        Raises:
            TypeError: the protocol has no such dtype.
            RequestFailed, NoAnswer, BadAnswer: as of `predict`.
        """
        return self.run(self.calls.infer(model, inputs, outputs))

    @contextmanager
    def stream(
        self, model: str, body: Body, *, content_type: str | None = None, accept: str = "*/*"
    ) -> Iterator[Iterator[bytes]]:
        """Yield the pieces of an answer as they come; leaving the block stops the model's work.

        Args:
            model: as of `predict`, as are `body`, `content_type` and the errors.
            accept: media type, as `text/event-stream`.
        """
        headers = {"Accept": accept}
        flow = self.calls.send(
            "predictions", model, body, content_type, headers=headers, is_stream=True
        )
        answer = self.run(flow)
        response = answer.stream
        assert response is not None
        try:
            yield self._pieces(response)
        finally:
            response.close()

    def _pieces(self, response: httpx.Response) -> Iterator[bytes]:
        try:
            for piece in response.iter_bytes():
                yield piece
        except httpx.HTTPError as error:
            raise NoAnswer(f"the stream broke ({error or type(error).__name__})") from error

    def metadata(self, model: str) -> dict[str, Any]:
        """Return a model's inputs and outputs, as the Open Inference Protocol states them."""
        return self.run(self.calls.metadata(model))

    def models(self) -> list[str]:
        """Return the names of the models that are served."""
        return self.run(self.calls.models())

    def is_ready(self) -> bool:
        """Return whether the server can answer predictions now."""
        return self.run(self.calls.is_ready())

    def run(self, flow: Flow[T]) -> T:
        """Take the steps of a call."""
        try:
            step = next(flow)
            while True:
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                    step = flow.send(None)
                else:
                    step = flow.send(self._send(step))
        except StopIteration as end:
            found: T = end.value
            return found

    def _send(self, attempt: Attempt) -> Answer | Exception:
        try:
            request = self._connection.build(self._http, attempt)
            with within(attempt.timeout_s):
                response = self._http.send(request, stream=True)
                if is_left_open(attempt, response):
                    return answer_of(response, None)
                body = bytearray()
                try:
                    for chunk in response.iter_bytes():
                        self._connection.collect(body, chunk)
                finally:
                    response.close()
            return answer_of(response, bytes(body))
        except TimeoutError:
            return httpx.ReadTimeout("", request=request)
        except (httpx.HTTPError, BadAnswer, OSError, ValueError) as error:
            return error
