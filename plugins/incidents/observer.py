"""What a server remembers of its answers, within bounds, and the route that hands it out."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Path, Query

from modelyard.plugins.incidents.file import describe, time_of
from modelyard.serve.api.description import error_responses
from modelyard.serve.control.register import Report
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Call
from modelyard.serve.dataplane.metrics import GAUGE
from modelyard.serve.dataplane.worker import Worker, WorkerPlan, flags_of
from modelyard.serve.errors import Conflict, NoSuchRoute
from modelyard.serve.http.connection import RequestResponseCycle
from modelyard.serve.observers import Host

BATCH_BYTES = 400
"""Memory of a batch beside its rows, and of a row beside its head and what it holds, about."""
ROW_BYTES = 500


class Row(NamedTuple):
    """One request of a batch, and its answer."""

    head: bytes
    flags: int
    rows: int
    sha256: bytes
    size: int
    status: int
    answer_sha256: bytes | None
    """None of a streamed answer."""
    queue_us: int
    handler_us: int
    body: bytes | None = None
    answer: bytes | None = None


class Served(NamedTuple):
    """What answered."""

    name: str
    version: str
    digest: str


class Batch(NamedTuple):
    """What a worker ran together, in its order."""

    at: float
    """Time of `time.time()` when its answers had come."""
    served: Served
    plan: WorkerPlan
    worker: dict[str, Any]
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

    def add(self, served: Served, worker: Worker, ran: Sequence[tuple[Call, wire.Item]]) -> None:
        """Remember a batch that was run just now; the oldest make room for it."""
        rows, size, keeps = [], BATCH_BYTES, self.keeps
        for job, item in ran:
            body = hashlib.sha256(job.parts[0] if job.parts else b"")
            for part in job.parts[1:]:
                body.update(part)
            length = sum(map(len, job.parts))
            answer = None if job.stream is not None else hashlib.sha256(item.body).digest()
            kept = (b"".join(job.parts), bytes(item.body)) if keeps else (None, None)
            rows.append(Row(
                job.head, flags_of(job), job.rows, body.digest(), length, item.code, answer,
                item.queue_us, item.handler_us, *kept,
            ))  # fmt: skip
            size += ROW_BYTES + len(job.head) + (length + len(item.body) if keeps else 0)
        if size > self._most_bytes:
            rows = [row._replace(body=None, answer=None) for row in rows]
            size = BATCH_BYTES + sum(ROW_BYTES + len(row.head) for row in rows)
        said = {**worker.loaded.result(), "number": worker.number, "pid": worker.pid}
        batch = Batch(time.time(), served, worker.plan, said, ran[0][1].batch_us, rows, size)
        self._batches.append(batch)
        self.answers += len(rows)
        self.size += size
        while self.answers > self._most or self.size > self._most_bytes:
            gone = self._batches.popleft()
            self.answers -= len(gone.rows)
            self.size -= gone.size

    def find(self, id: str) -> list[tuple[Batch, int]]:
        """Return the batches in which an answer of this id came about, and its place in each."""
        needle = id.encode()
        return [
            (batch, at)
            for batch in self._batches
            for at, row in enumerate(batch.rows)
            if needle in row.head and wire.unpack_meta(row.head)[2] == needle
        ]


class Incidents:
    """The `Observer` of one server; without the setting it looks at nothing and has no route."""

    routers: Sequence[APIRouter] = ()

    def __init__(self, host: Host) -> None:
        settings = host.lifecycle.policy.settings
        if not settings.incidents:
            return
        store = Store(settings.incidents, settings.incident_bytes, settings.incident_inputs)
        self._store = store
        host.lifecycle.registry.on_change.append(self._changed)
        self.routers = [incident_routes(store)]
        for name, text, read in (
            ("incident_answers", "Answers of which is remembered how they came about.",
             lambda: store.answers),
            ("incident_bytes", "Memory of that.", lambda: store.size),
        ):  # fmt: skip
            host.metrics.add(GAUGE, name, (), text).watch(read)

    def _changed(self, model: ModelVersion, is_there: bool) -> None:
        served = Served(model.name, model.version, model.digest)
        for pool in model.pools if is_there else ():
            pool.on_batch = partial(self._store.add, served)

    def owns(self, path: str) -> bool:
        """Answer nothing beside the routes."""
        return False

    def __call__(self, cycle: RequestResponseCycle, id: str) -> None:
        """Answer nothing."""

    async def restore(self, report: Report) -> None:
        """Remember nothing of a server before."""

    async def stop(self) -> None:
        """Forget everything."""


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
