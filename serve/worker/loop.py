"""Receive batch → handler → send replies, until the server closes the socket.

The loop takes every frame that has arrived before it starts the next batch ("late merge"), so a
batch is as large as what waits, up to the batch size, and the worker never idles while there is
work.
"""

import contextlib
import gc
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any

from modelyard.handlers.body import join_chunks
from modelyard.handlers.context import Context
from modelyard.handlers.entry_point import Entry
from modelyard.handlers.errors import BadInput
from modelyard.handlers.ranges import span
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.heap import keep_freed
from modelyard.serve.dataplane.lengths import CALL_BYTES, take_batch
from modelyard.serve.worker import codec
from modelyard.serve.worker.load import Service, is_built_in

logger = logging.getLogger(__name__)

MOST_BUFFERS = 512
"""Most buffers in one system call; IOV_MAX is 1024."""
MAX_BODY = 0xFFFFFFFF
KEPT_BYTES = 16 << 20
"""Freed memory that is kept for the next bodies and answers."""

_PACKED = {
    name: wire.pack_meta([b"content-type", name.encode()])
    for name in (codec.JSON, codec.TEXT, codec.BYTES)
}

STREAMED = {"ts_stream_next": "true"}
"""Headers of the first chunk of a streamed answer, by which clients know it."""


class ClientsLeft(BaseException):
    """Nobody waits for any answer of the batch any more; no `except Exception` holds it up."""


class Reader:
    """Whole frames from the server's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._decoder = wire.Decoder(MAX_BODY)
        self._frames: deque[list[wire.Item]] = deque()
        self.poll_s = 0.0
        """How long `read_arrived` looks for a frame before it sleeps, after a wait as short."""
        self._was_short = False
        self.cancelled: set[int] = set()
        """Jobs that nobody waits for any more."""

    def read(self) -> list[wire.Item]:
        """Wait for the next frame.

        Raises:
            EOFError: the server closed its end.
        """
        while not self._frames:
            self._receive(0)
        return self._frames.popleft()

    def forget_cancelled(self, held: Iterable[int] = ()) -> None:
        """Forget jobs that were answered before the word came: all but those that are held."""
        if not self._frames:
            self.cancelled.intersection_update(held)

    def read_arrived(self, must_wait: bool = False) -> list[wire.Item]:
        """Return the items of all frames that have arrived; wait for a first one if `must_wait`.

        Raises:
            EOFError: the server closed its end.
        """
        if must_wait:
            while not self._frames:
                self._wait()  # takes all that has arrived, up to the size of a receive
        else:
            self.poll()
        items = [item for frame in self._frames for item in frame]
        self._frames.clear()
        return items

    def poll(self) -> None:
        """Take what has arrived, without waiting, and keep it for the next read."""
        try:
            while self._receive(socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return

    def _wait(self) -> None:
        """Receive once, without sleeping where the last wait was over soon.

        To wake a process on an idle core takes longer than a small model. Under load a worker is
        not idle, and others that want its core get it.
        """
        if self._decoder.room is not None:  # the rest of a body: a wait of another kind
            self._receive(0)
            return
        began = perf_counter()
        if self._was_short:
            while perf_counter() - began < self.poll_s:
                try:
                    self._receive(socket.MSG_DONTWAIT)
                    return
                except BlockingIOError:
                    os.sched_yield()
        self._receive(0)
        self._was_short = perf_counter() - began < self.poll_s

    def _receive(self, flags: int) -> bool:
        """Receive once, a long body into its own place; return whether more may have arrived."""
        buffer = self._decoder.buffer()
        if self._decoder.is_direct and not flags:
            flags = socket.MSG_WAITALL
        count = self.connection.recv_into(buffer, 0, flags)
        frames = self._decoder.received(count)
        if not count:
            raise EOFError
        for frame in frames:
            if frame[0].id == 0 and frame[0].code == wire.CANCEL:
                self.cancelled.update(wire.decode_control(frame[0])["ids"])
            else:
                self._frames.append(frame)
        return count == len(buffer)

    def send(self, frame: wire.Frame) -> None:
        """Send a frame; a long one without joining its buffers first, and maybe as several."""
        for buffers in frame.split():
            if sum(map(len, buffers)) <= wire.LONG_BYTES:
                self.connection.sendall(b"".join(buffers))
                continue
            for start in range(0, len(buffers), MOST_BUFFERS):
                self._send_some(buffers[start : start + MOST_BUFFERS])

    def _send_some(self, buffers: list[wire.Buffer]) -> None:
        sent = self.connection.sendmsg(buffers)
        for buffer in buffers:
            if sent < len(buffer):
                self.connection.sendall(memoryview(buffer)[sent:])
            sent = max(0, sent - len(buffer))


class Calls:
    """The calls of a handler, and the way of their answers: chunks at once, the rest by batches.

    Args:
        service: what answers.
        reader: whom the answers go to; None where they are only returned, and what is streamed is
            not read.
    """

    def __init__(self, service: Service, reader: Reader | None = None) -> None:
        self._service = service
        self._reader = reader
        self._requests: Sequence[codec.Request] = ()
        """Whom the next chunks are for."""
        self._handler_us: dict[int, int] = {}
        """Job of this batch → how long the handler's last call took that had it."""
        self._has_sent = False
        """Whether the running call has sent a chunk."""
        self._kept: dict[int, list[Any]] = {}
        """Chunks of instances by their place, whose answers are one with others."""

    def answer_batch(self, batch: Sequence[wire.Item]) -> list[codec.Answer]:
        """Return one answer per item, whatever happens.

        A request whose body cannot be decoded is answered by itself. When the handler fails on
        several requests together, each is run again alone: the bad one gets its own error, the
        others their answers.

        Args:
            batch: batch of one kind.
        """
        service, flags = self._service, batch[0].flags
        if flags & wire.GOLDEN:
            return [service.replay() for _ in batch]
        answers: dict[int, codec.Answer] = {}
        requests = []
        for item in batch:
            request = codec.Request(item)
            if self._has_left(request):
                answers[item.id] = codec.UNREAD
                continue
            try:
                request.decode(item.body, service.rules.read_json)
            except Exception as error:
                answers[item.id] = service.rules.refuse(error, request.request_id, was_read=False)
            else:
                requests.append(request)
        if requests:
            answered = self._answer(requests, _choose_entry(service, flags))
            if flags & wire.EXPLAIN and service.rules.compresses and not self._has_sent:
                answered = list(map(codec.compressed, answered, requests))
            for request, answer in zip(requests, answered, strict=True):
                answers[request.id] = answer
        return [answers[item.id] for item in batch]

    def send(
        self,
        batch: Sequence[wire.Item],
        began_us: int,
        answers: Sequence[codec.Answer],
        batch_us: int,
    ) -> None:
        """Send the answers of a batch, one per item, and what its handler measured.

        Args:
            batch: what was answered.
            began_us: when it was taken from what waits.
            answers: answers in the order of the batch.
            batch_us: time that the worker was busy with it.
        """
        assert self._reader is not None
        frame = wire.Frame()
        for item, (status, headers, body, flags) in zip(batch, answers, strict=True):
            queue_us = (began_us - item.queue_us) & 0xFFFFFFFF
            handler_us = self._handler_us.get(item.id, 0)
            meta = pack_headers(headers)
            frame.add(item.id, status, flags, meta, [body], queue_us, handler_us, batch_us)
        self._handler_us.clear()
        send_replies(self._reader, frame, self._service.context)

    # -- what a handler streams ------------------------------------------------------------------

    def check_cancelled(self) -> None:
        """Raise ClientsLeft when all clients of the running call have hung up."""
        assert self._reader is not None
        self._reader.poll()
        if all(map(self._has_left, self._requests)):
            raise ClientsLeft

    def _has_left(self, request: codec.Request) -> bool:
        """Return whether nobody waits for the answer to this request any more."""
        return self._reader is not None and request.id in self._reader.cancelled

    def send_chunk(self, values: Sequence[Any]) -> None:
        """Send one chunk to each client.

        Raises:
            ClientsLeft: all of them have hung up.
            WrongAnswer: a value cannot be sent.
        """
        self.check_cancelled()
        assert self._reader is not None
        frame, service = wire.Frame(), self._service
        for at, request in enumerate(self._requests):
            if self._has_left(request):
                continue
            if request.has_instances:
                self._kept.setdefault(at, []).append(values[at])
                continue
            answer = codec.answer_output(service.context, at, values[at], service.rules)
            headers = {} if self._has_sent else {**answer.headers, **STREAMED}
            frame.add(request.id, answer.status, wire.MORE, pack_headers(headers), [answer.body])
        if len(frame):
            self._reader.send(frame)
            self._has_sent = True

    # -- calls -----------------------------------------------------------------------------------

    def _answer(self, requests: list[codec.Request], entry: Entry) -> list[codec.Answer]:
        """Run the handler on these requests, and on each alone when that fails.

        Some may have several rows; a call has a batch of them at most.
        """
        rows = [row for request in requests for row in request.rows]
        size = len(rows)
        if has_several := any(request.has_instances for request in requests):
            size = self._service.batch_size
            if len(requests) > 1 and len(rows) > size:  # the server has seen fewer
                return [self._answer([one], entry)[0] for one in requests]
        owners = [request for request in requests for _ in request.rows]
        outputs: list[Any] = []
        statuses: list[int] = []
        try:
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                outputs += self._run(rows[part], owners[part], entry)
                if has_several:
                    statuses += _statuses(self._service.context, len(outputs) - start)
        except BaseException as error:
            return self._answer_failure(error, requests, entry)
        answers, at = [], 0
        for request in requests:
            own = slice(at, at + len(request.rows))
            answers.append(self._write(request, at, outputs[own], statuses[own]))
            at = own.stop
        return answers

    def _run(
        self, rows: list[dict[str, Any]], owners: Sequence[codec.Request], entry: Entry
    ) -> list[Any]:
        """Return what the handler answers to rows, each of which is of a request.

        Those of instances are in one with the chunks before them, which were not sent.

        Raises:
            BaseException: of an author's code.
        """
        context, rules = self._service.context, self._service.rules
        context.reset(
            request_ids=[request.request_id for request in owners],
            headers=lambda: [request.headers for request in owners],
            queries=[request.query for request in owners],
        )
        self._requests, self._has_sent = owners, False
        self._kept.clear()
        began = perf_counter()
        try:
            outputs = entry(rows, context)
        finally:
            took_us = int((perf_counter() - began) * 1e6)
            self._handler_us |= dict.fromkeys([request.id for request in owners], took_us)
        outputs = codec.check_outputs(outputs, len(rows))
        if (metric := rules.time_metric) and context.metrics is not None:
            context.metrics.add_time(metric, round((perf_counter() - began) * 1000, 2))
        for at, chunks in self._kept.items():
            outputs[at] = join_chunks([*chunks, outputs[at]])
        return outputs

    def _answer_failure(
        self, error: BaseException, requests: list[codec.Request], entry: Entry
    ) -> list[codec.Answer]:
        """Answer requests on which the handler failed together, by running each alone.

        Raises:
            RuntimeError: the device cannot be used any more. That ends this process: the server
                starts another one, which gets the requests one by one, and only the bad one will be
                lost.
        """
        finish_device(self._service)
        rules = self._service.rules
        if self._has_sent:
            return [self._break(error, request) for request in requests]
        if isinstance(error, ClientsLeft):
            return [codec.UNREAD] * len(requests)
        if rules.ends_worker(error):
            raise error
        if len(requests) > 1 and not rules.fails_together(error):
            # As they came: the handler may have changed its input.
            fresh = [request.decoded_again(rules.read_json) for request in requests]
            return [self._answer([one], entry)[0] for one in fresh]
        log_failure(rules, error, requests[0].request_id)
        return [rules.refuse(error, request.request_id) for request in requests]

    def _write(
        self, request: codec.Request, at: int, outputs: list[Any], statuses: list[int]
    ) -> codec.Answer:
        """Return the answer to a request, or the error that there is in its place."""
        service, rules = self._service, self._service.rules
        try:
            if request.has_instances:
                return codec.answer_instances(outputs, statuses, request.is_explained, rules)
            return codec.answer_output(service.context, at, outputs[0], rules)
        except Exception as failure:  # an answer is an author's object: its methods may fail
            error: Exception = failure
            if isinstance(failure, codec.NotFinite) and is_built_in(service.handler):
                error = BadInput(
                    "the model gives infinity or NaN for this input, which JSON does not have; "
                    "send smaller numbers"
                )
            if self._has_sent and not request.has_instances:
                return self._break(error, request)
            log_failure(rules, error, request.request_id)
            return rules.refuse(error, request.request_id)

    def _break(self, error: BaseException, request: codec.Request) -> codec.Answer:
        """Return the end of an answer of which the client has the first chunks already."""
        if not isinstance(error, ClientsLeft):
            _log_error("request %s failed after its first chunk", request.request_id, error)
        return self._service.rules.refuse(error, request.request_id)._replace(flags=wire.BROKEN)


def answer_batch(service: Service, batch: Sequence[wire.Item]) -> list[codec.Answer]:
    """Return one answer per item, as `Calls` does; what the handler streams is not read."""
    return Calls(service).answer_batch(batch)


def _choose_entry(service: Service, flags: int) -> Entry:
    if flags & wire.SHARES:
        return service.shares
    if flags & wire.EXPLAIN:
        return service.explain
    if flags & wire.TEXTS:
        return service.texts
    if flags & wire.TENSORS:
        return service.infer_stream if flags & wire.STREAM else service.infer
    return service.predict


def run(reader: Reader, service: Service) -> None:
    """Answer batch after batch of what arrives, until the server closes its end (EOFError)."""
    gc.collect()
    gc.freeze()
    keep_freed(KEPT_BYTES)
    calls = Calls(service, reader)
    service.context.stream = calls.send_chunk
    service.context.cancellation = calls.check_cancelled
    waiting: deque[wire.Item] = deque()
    call_bytes = CALL_BYTES[service.device.partition(":")[0]] if service.by_length else None
    ended_us = 0  # when the last batch had its answers
    while True:
        if not (was_busy := bool(waiting)):
            reader.forget_cancelled()
        waiting.extend(reader.read_arrived(must_wait=not waiting))
        if not waiting:
            continue
        batch = take_batch(waiting, service.batch_size, call_bytes)
        began_us = wire.now_us()
        waited_us = (began_us - batch[0].queue_us) & 0xFFFFFFFF
        with span(f"batch of {len(batch)} that waited {waited_us} µs"):
            answers = calls.answer_batch(batch)
        busy_since_us = ended_us if was_busy else began_us
        ended_us = wire.now_us()
        calls.send(batch, began_us, answers, (ended_us - busy_since_us) & 0xFFFFFFFF)


def send_replies(reader: Reader, frame: wire.Frame, context: Context) -> None:
    """Send replies, and what the handler measured since the last ones."""
    metrics = context.metrics
    if metrics is None or not metrics.records:
        reader.send(frame)
        return
    for report in _encode_records(metrics.drain()):
        frame.add(0, wire.METRICS, 0, b"", [report])
        reader.send(frame)
        frame = wire.Frame()
    if len(frame):
        reader.send(frame)


def _encode_records(records: Sequence[object]) -> Iterator[bytes]:
    """Yield records in parts that the server takes."""
    for start in range(0, len(records), wire.MAX_RECORDS):
        part = records[start : start + wire.MAX_RECORDS]
        # Authors report numbers of any library; the server reads what str() makes of them.
        text = _encode_metrics({"records": part}).encode()
        if len(text) <= wire.MAX_CONTROL:
            yield text
        elif len(part) == 1:
            logger.warning("a metric's record of %d bytes is left out", len(text))
        else:
            middle = len(part) // 2
            yield from _encode_records(part[:middle])
            yield from _encode_records(part[middle:])


_encode_metrics = json.JSONEncoder(default=codec.text_of).encode


def pack_headers(headers: dict[str, str]) -> bytes:
    """Return the `meta` of a reply."""
    if len(headers) == 1 and (packed := _PACKED.get(headers.get("content-type", ""))):
        return packed
    return wire.pack_meta(
        text.encode("latin-1", "replace") for pair in headers.items() for text in pair
    )


def _statuses(context: Context, count: int) -> list[int]:
    if context.is_answer_plain:
        return [200] * count
    return [context.get_response_status(index)[0] for index in range(count)]


def finish_device(service: Service) -> None:
    """Wait for what a device still does; a broken one raises here, and that ends the process."""
    if service.device != "cpu":
        import torch

        torch.cuda.synchronize()


def log_failure(rules: codec.Rules, error: BaseException, request_id: str) -> None:
    """Log what is not the client's fault, with the traceback that no client sees."""
    if rules.explain_error(error).code >= 500:
        _log_error("request %s failed", request_id, error)


def _log_error(text: str, request_id: str, error: BaseException) -> None:
    with contextlib.suppress(Exception):  # the handler may have closed the log
        logger.error(text, request_id, exc_info=error)
