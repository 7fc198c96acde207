"""What a handler is told: its model, its settings, and the requests of the current batch.

The shape is TorchServe's, so that its handlers run unchanged; ours are `device`, `query`, `reset`,
`send_intermediate`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SERVER_NAME = "MMS"
SERVER_VERSION = "0.12.0"  # what handlers of old compare against


class Headers(dict[str, Any]):
    """One request's headers, spelled as the client sent them, found in any case.

    A proxy that speaks HTTP/2 sends every name in lower case; handlers ask for `Content-Type`.
    """

    def __missing__(self, key: str) -> Any:
        """Return the value of a name that differs in case only.

        Raises:
            KeyError: there is no such header.
        """
        wanted = key.lower()
        for name, value in self.items():
            if name.lower() == wanted:
                return value
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a header by its exact name, else by its name in any case, else the default."""
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key, self) is not self


class RequestProcessor:
    """One request's headers, and what the handler wants to answer besides the body."""

    def __init__(self, request_header: Mapping[str, Any]) -> None:
        self._request_header = Headers(request_header)
        self._response_headers: dict[str, str] = {}
        self._status_code = 200
        self._reason_phrase: str | None = None

    def get_request_property(self, key: str) -> Any:
        """Return a request header by its exact name, else by its name in any case, else None."""
        return self._request_header.get(key)

    def get_request_properties(self) -> dict[str, Any]:
        """Return all request headers, spelled as they came."""
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Set the HTTP status of this answer."""
        self._status_code = code
        self._reason_phrase = reason_phrase

    def get_response_status_code(self) -> int:
        """Return the HTTP status of this answer, 200 unless it was set."""
        return self._status_code

    def get_response_status_phrase(self) -> str | None:
        """Return the reason phrase that was set with the status."""
        return self._reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        """Set a header of this answer."""
        self._response_headers[key] = value

    def get_response_headers(self) -> dict[str, str]:
        """Return the headers set for this answer."""
        return self._response_headers

    def get_response_header(self, key: str) -> str | None:
        """Return one header set for this answer."""
        return self._response_headers.get(key)


class Context:
    """Everything a handler may know; one object per worker, given to every call.

    Args:
        model_name: the name it is registered under.
        model_dir: the folder that holds the unpacked archive.
        manifest: MANIFEST.json of the archive as written, None without one.
        batch_size: the most requests that come at once.
        gpu: CUDA device index, None on a CPU.
        mms_version: the version that handlers of old look for.
        limit_max_image_pixels: False lifts the limit on the size of images.
        max_image_pixels: limit of pixels; None leaves it to the handler.
        metrics: where handlers add their own metrics.
        model_yaml_config: the archive's model-config.yaml, parsed.

    Authors attach attributes of their own, so the class takes any.
    """

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        batch_size: int = 1,
        gpu: int | None = None,
        mms_version: str = SERVER_VERSION,
        limit_max_image_pixels: bool = True,
        metrics: Any = None,
        model_yaml_config: dict[str, Any] | None = None,
        max_image_pixels: int | None = None,
    ) -> None:
        self.model_name = model_name
        self.manifest = manifest
        self.device = "cpu" if gpu is None else f"cuda:{gpu}"
        self.system_properties: dict[str, Any] = {
            "model_dir": str(model_dir),
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": SERVER_NAME,
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        if max_image_pixels is not None:
            self.system_properties["max_image_pixels"] = max_image_pixels
        self.model_yaml_config: dict[str, Any] = model_yaml_config or {}
        self.metrics = metrics
        self.stopping_criteria: Any = None
        self.cl_socket: Any = None
        self.header_key_sequence_id = _sequence_header("id")
        self.header_key_sequence_start = _sequence_header("start")
        self.header_key_sequence_end = _sequence_header("end")
        self.request_ids: dict[int, str] = {}
        self._headers: Sequence[Mapping[str, Any]] | Callable[[], Sequence[Mapping[str, Any]]] = ()
        self._processors: list[RequestProcessor] | None = []
        self.query: list[dict[str, str]] = []
        self.stream: Callable[[list[Any]], None] | None = None
        """Sends chunks to the clients; None where nobody reads them, as in a dry run."""

        self.cancellation: Callable[[], None] | None = None
        """Raises when nobody waits any more; None where nobody could leave."""

    def check_cancelled(self) -> None:
        """Return, unless nobody waits for any answer of the batch any more.

        Long work calls it between its steps. What it raises then is a BaseException that ends the
        call of the handler; there is nobody left to answer.
        """
        if self.cancellation is not None:
            self.cancellation()

    def send_intermediate(self, values: list[Any]) -> None:
        """Send each client the next chunk of its answer, before the handler returns the last one.

        Status and headers that are set after the first chunk have no effect.

        Args:
            values: one per request of the batch, in its order; what a handler may return.

        Raises:
            ValueError: there are more or fewer values than requests.
        """
        if len(values) != len(self.request_ids):
            raise ValueError(
                f"{len(values)} chunks for {len(self.request_ids)} requests; expected one for each"
            )
        if self.stream is not None:
            self.stream(values)

    def reset(
        self,
        request_ids: Sequence[str],
        headers: Sequence[Mapping[str, Any]] | Callable[[], Sequence[Mapping[str, Any]]] = (),
        queries: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Begin a batch: forget the last one's requests and answers.

        Args:
            request_ids: one per request, in the order of the batch.
            headers: request headers of each request, or what gives them when they are asked for;
                none at all stands for empty ones.
            queries: query parameters of each request; none at all stands for empty ones.
        """
        count = len(request_ids)
        self.request_ids = dict(enumerate(request_ids))
        self._headers = headers or [{}] * count
        self._processors = None
        self.query = [dict(parameters) for parameters in queries or [{}] * count]
        there = count if callable(self._headers) else len(self._headers)
        if there != count or len(self.query) != count:
            raise ValueError(
                f"{count} request ids, {there} headers and {len(self.query)} queries; expected as "
                "many of each"
            )

    @property
    def request_processor(self) -> list[RequestProcessor]:
        """Headers and answer of each request; few handlers ask, so they are made when one does."""
        if self._processors is None:
            headers = self._headers() if callable(self._headers) else self._headers
            self._processors = [RequestProcessor(each) for each in headers]
        return self._processors

    @request_processor.setter
    def request_processor(self, processors: list[RequestProcessor]) -> None:
        self._processors = processors

    @property
    def is_answer_plain(self) -> bool:
        """Whether the handler has set neither status nor headers of any answer."""
        return self._processors is None

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of request `idx`, None where there is no such request."""
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        """Return a header of request `idx`, whatever the case of its name; None where absent."""
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        """Return all headers of request `idx`."""
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the content type of answer `idx`."""
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        """Return the content type set for answer `idx`, None where none was."""
        return self.request_processor[idx].get_response_header("content-type")

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the HTTP status of answer `idx` (the index comes last)."""
        self.request_processor[idx].report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set the HTTP status of every answer of the batch."""
        for processor in self.request_processor:
            processor.report_status(code, phrase)

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        """Return status code and reason phrase of answer `idx`."""
        processor = self.request_processor[idx]
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a header of answer `idx`; a header set twice keeps the later value."""
        self.request_processor[idx].add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """Return the headers set for answer `idx`."""
        return self.request_processor[idx].get_response_headers()

    def get_sequence_id(self, idx: int) -> str | None:
        """Return the sequence that request `idx` belongs to, None outside one."""
        value = self.get_request_header(idx, self.header_key_sequence_id)
        return None if value is None else str(value)


def _sequence_header(end: str) -> str:
    """Return the name of one of the headers that tie requests to a sequence."""
    name = f"ts_request_sequence_{end}"
    return os.environ.get(name.upper(), name)
