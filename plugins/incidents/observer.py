"""What a server remembers of its answers, within bounds, and the route that hands it out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Path, Query

from modelyard.plugins.incidents.file import describe, id_of, time_of
from modelyard.serve.api.description import error_responses
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Call
from modelyard.serve.dataplane.metrics import GAUGE
from modelyard.serve.dataplane.worker import Worker, WorkerPlan
from modelyard.serve.errors import Conflict, NoSuchRoute
from modelyard.serve.observers import Host, Observer

BATCH_BYTES, ROW_BYTES = 400, 500
"""Memory of a batch beside its rows, and of a row beside its head and what is kept of it, about."""
Row = tuple[bytes, int, int, bytes, int, int, bytes | None, int, int, bytes | None, bytes | None]
"""Head, flags, rows, SHA-256 and size of the body; status and SHA-256 of the answer (None of a
streamed one), microseconds in the queue and in the handler; body and answer where they are kept."""


class Batch(NamedTuple):
    """What a worker ran together, in its order."""

    at: float
    """Time of `time.time()` when its answers had come."""
    model: Mapping[str, str]
    """Name, version and digest."""
    plan: WorkerPlan
    worker: tuple[Mapping[str, Any], int, int]
    """What the worker said when it was ready, its number and its process."""
    batch_us: int
    rows: Sequence[Row]
    size: int


class Store:
    """The latest batches of a server; lives on the event loop.

    Args:
        most: answers that are remembered, at most.
        most_bytes: memory for them, at most.
        keeps: whether requests and answers are kept themselves.
    """

    def __init__(self, most: int, most_bytes: int, keeps: bool) -> None:
        self._most, self._most_bytes, self.keeps = most, most_bytes, keeps
        self._batches: deque[Batch] = deque()
        self.answers = self.size = 0

    def add(
        self, model: Mapping[str, str], worker: Worker, ran: Sequence[tuple[Call, wire.Item]]
    ) -> None:
        """Remember a batch that was run just now; the oldest make room for it."""
        rows: list[Row] = []
        keeps, size, held = self.keeps, BATCH_BYTES, 0
        for job, item in ran:  # once for every answer
            # As the worker was sent them.
            flags = job.flags | job.kind * wire.EXPLAIN | job.retried * wire.ALONE
            parts, answer = job.parts, item.body
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            digest = sha256(answer).digest() if job.stream is None else None
            kept = (bytes(body), bytes(answer) if digest else None) if keeps else (None, None)
            rows.append((
                job.head, flags, job.rows, sha256(body).digest(), len(body), item.code,
                digest, item.queue_us, item.handler_us, *kept,
            ))  # fmt: skip
            size += ROW_BYTES + len(job.head)
            held += len(body) + len(answer)
        if keeps and size + held <= self._most_bytes:
            size += held
        elif keeps:
            rows = [(*row[:-2], None, None) for row in rows]
        said = worker.loaded.result(), worker.number, worker.pid
        batch = Batch(time.time(), model, worker.plan, said, ran[0][1].batch_us, rows, size)
        self._batches.append(batch)
        self.answers += len(rows)
        self.size += size
        while self.answers > self._most or self.size > self._most_bytes:
            gone = self._batches.popleft()
            self.answers -= len(gone.rows)
            self.size -= gone.size

    def find(self, id: str) -> list[tuple[Batch, int]]:
        """Return the batches in which an answer of this id came about, and its place in each."""
        return [
            (batch, at)
            for batch in self._batches
            for at, (head, *_) in enumerate(batch.rows)
            if id.encode() in head and id_of(head) == id
        ]


class Incidents(Observer):
    """What one server remembers; without the setting it looks at nothing and has no route."""

    routers: Sequence[APIRouter] = ()

    def __init__(self, host: Host) -> None:
        settings = host.lifecycle.policy.settings
        if not settings.incidents:
            return
        store = Store(settings.incidents, settings.incident_bytes, settings.incident_inputs)
        self._store, add = store, host.metrics.add
        text = "Answers of which is remembered how they came about."
        add(GAUGE, "incident_answers", (), text).watch(lambda: store.answers)
        add(GAUGE, "incident_bytes", (), "Memory of that.").watch(lambda: store.size)
        host.lifecycle.registry.on_change.append(self._changed)
        self.routers = [incident_routes(store)]

    def _changed(self, model: ModelVersion, is_there: bool) -> None:
        about = {"name": model.name, "version": model.version, "archive_sha256": model.digest}
        for pool in model.pools if is_there else ():
            pool.on_batch = partial(self._store.add, about)

    def owns(self, path: str) -> bool:
        """Answer nothing beside the routes."""
        return False


def incident_routes(store: Store) -> APIRouter:
    """Return the route for operators."""
    router = APIRouter(tags=["incidents"], responses=error_responses(401, 404, 409))

    @router.get("/incidents/{id}", summary="Describe how an answer came about")
    async def incident(
        id: Annotated[str, Path(description="The answer's X-Request-Id.")],
        at: Annotated[str | None, Query(description="Time of it, where several have it.")] = None,
    ) -> dict[str, Any]:
        """Return what led to an answer, as `modelyard replay` reads it."""
        found = [each for each in store.find(id) if at in (None, time_of(each[0]))]
        if not found:
            raise NoSuchRoute(
                f"nothing is remembered of an answer {id}: it was kept by a cache, is older than "
                "the bounds incidents and incident_bytes, or its request reached no worker"
            )
        if len(found) > 1:
            times = ", ".join(time_of(batch) for batch, _ in found[-20:])
            raise Conflict(f"{len(found)} answers have the id {id}; say which with at: {times}")
        batch, place = found[0]
        return await asyncio.to_thread(describe, batch, place, store.keeps)

    return router
