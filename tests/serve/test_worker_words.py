"""What the server makes of a worker's words: its process sleeps, and the test speaks for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT, Call, Stream
from modelyard.serve.dataplane.metrics import Metrics, VersionMetrics
from modelyard.serve.dataplane.pool import Pool
from modelyard.serve.dataplane.process import spawn
from modelyard.serve.dataplane.worker import Worker, WorkerPlan, WorkerPolicy, decoder_of_answers
from modelyard.serve.errors import (
    HandlerFailed,
    LoadFailed,
    LoadKilled,
    OutOfMemory,
    StreamBroken,
    WorkerDied,
    WorkerKilled,
)
from tests.serve.test_batcher import RUN
from tests.serve.test_queue import Sink, job

READY = wire.encode_control(wire.READY, {"protocol": wire.PROTOCOL})
ANSWER_BYTES = 1 << 21


class Spoken(Worker):
    """A worker for whose process, which runs another command, a test speaks."""

    command: Sequence[str] = ("sleep", "60")
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._output = self._pool.policy.open_output(self.plan.log_dir / "w.log", self.name)
        process = self._process = spawn(
            self.command, {"PATH": os.environ["PATH"]},
            stdout=self._output.stdout, stderr=self._output.stderr,
        )  # fmt: skip
        self._output.close()
        self._process.ended.add_done_callback(self._exited)
        self.pid = process.pid
        self.reader, self.writer = await asyncio.open_connection(sock=theirs)
        return ours

    async def said(self, count: int) -> list[wire.Item]:
        """Return the next items that the server sends."""
        items: list[wire.Item] = []
        decoder = decoder_of_answers(ANSWER_BYTES)
        async with asyncio.timeout(20):
            while len(items) < count:
                data = await self.reader.read(1 << 16)
                assert data, "it was closed"
                items += [item for frame in decoder.feed(data) for item in frame]
        return items

    async def say(self, *items: tuple[Any, ...], control: bytes = b"") -> None:
        """Send replies as one frame, or a control message."""
        frame = wire.Frame()
        for item in items:
            frame.add(*item)
        self.writer.write(control or b"".join(frame.buffers()))
        for _ in range(10):
            await asyncio.sleep(0.002)


def make_pool(folder: Path) -> Pool:
    plan = WorkerPlan(
        "m 1", {"what": "m"}, folder, replace(RUN, startup_timeout_s=20), ANSWER_BYTES
    )
    return Pool(plan, VersionMetrics(Metrics(), "m", "1"), WorkerPolicy())


async def start(worker: Spoken, *words: bytes) -> None:
    """Start it; it says these words once it is told what to load."""
    starting = asyncio.create_task(worker.start())
    while not hasattr(worker, "reader"):
        await asyncio.sleep(0.002)
    (load,) = await worker.said(1)
    assert (load.id, load.code) == (0, wire.LOAD)
    assert json.loads(load.body) == {"what": "m", "worker": 1}
    for word in words:
        worker.writer.write(word)
    await starting


@asynccontextmanager
async def spoken(folder: Path, pool: Pool | None = None) -> AsyncIterator[Spoken]:
    """Start a worker that is ready."""
    worker = Spoken(pool or make_pool(folder), 1, 1)
    await start(worker, READY)
    try:
        yield worker
    finally:
        worker.condemn()
        worker.writer.close()
        await worker.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(main())


def ask(kind: int = PREDICT, rows: int = 1, body: bytes = b"x", **terms: Any) -> tuple[Call, Sink]:
    call = job(rows=rows)
    call.kind, call.parts, call.head = kind, [body], b"head"
    for name, value in terms.items():
        setattr(call, name, value)
    assert isinstance(call.sink, Sink)
    return call, call.sink


async def hand(worker: Spoken, *calls: Call) -> list[wire.Item]:
    worker.run(list(calls))
    return await worker.said(len(calls))


# -- its start ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message", "kind", "reason"),
    [
        (wire.FAILED, {"message": "no weights"}, HandlerFailed, "m 1: no weights"),
        (wire.FAILED, {}, HandlerFailed, "no reason given"),
        (wire.FAILED, {"message": "much", "out_of_memory": True}, OutOfMemory, "m 1: much"),
        (wire.READY, {"protocol": wire.PROTOCOL - 1}, LoadFailed, "before it was ready"),
        (wire.CANCEL, {"protocol": wire.PROTOCOL}, LoadFailed, "before it was ready"),
        (wire.METRICS, {"records": []}, LoadFailed, "before it was ready"),
    ],
)
def test_a_worker_that_is_not_ready_is_none(
    tmp_path: Path, code: int, message: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    async def scenario() -> None:
        worker = Spoken(make_pool(tmp_path), 1, 1)
        with pytest.raises(kind, match=reason) as raised:
            await start(worker, wire.encode_control(code, message))
        assert not isinstance(raised.value, LoadKilled) and not worker.takes_work
        worker.condemn()
        worker.writer.close()
        await worker.stop()

    run(scenario)


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        ("echo loading; echo no file >&2; exit 3", LoadFailed, "exit code 3 .*ends: no file"),
        ("exit 137", LoadKilled, "the log ends: .empty."),
        ("kill -9 $$", LoadKilled, "SIGKILL"),
    ],
)
def test_a_worker_that_ends_before_it_is_ready_says_how(
    tmp_path: Path, command: str, kind: type[Exception], words: str
) -> None:
    async def scenario() -> None:
        worker = Spoken(make_pool(tmp_path), 1, 1)
        worker.command = ("sh", "-c", f"sleep 0.2; {command}")
        starting = asyncio.create_task(start(worker))
        while not worker._has_exited:
            await asyncio.sleep(0.002)
        worker.writer.close()
        with pytest.raises(kind, match=words):
            await starting
        await worker.ended

    run(scenario)


def test_a_worker_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    async def scenario() -> None:
        with pytest.raises(LoadFailed, match="m 1: no worker process can be started: "):
            await Worker(make_pool(tmp_path / "file"), 1, 1).start()

    run(scenario)


# -- jobs and replies --------------------------------------------------------------------------


def test_jobs_go_out_in_one_frame_and_replies_are_theirs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with spoken(tmp_path) as worker:
            pool = worker._pool
            assert worker.takes_work and worker.is_idle
            assert (worker.capacity(PREDICT), worker.capacity(EXPLAIN)) == (16, 8)
            traces: list[Any] = []
            trace = SimpleNamespace(ran=lambda *words: traces.append(words))
            asked = [
                ask(rows=3, body=b"one", trace=trace), ask(body=b"two", retried=True, trace=trace),
            ]  # fmt: skip
            explained, why = ask(EXPLAIN)
            items = await hand(worker, *(call for call, _ in asked), explained)
            assert [item.id for item in items] == [1, 2, 3]
            assert [item.code for item in items] == [3, 1, 1]
            assert [item.flags for item in items] == [0, wire.ALONE, wire.EXPLAIN]
            assert [item.body for item in items] == [b"one", b"two", b"x"]
            assert worker.held == [4, 1] and worker.running == 5 and not worker.is_idle
            assert (worker.capacity(PREDICT), worker.capacity(EXPLAIN)) == (12, 7)
            worker.is_reserved = True
            began_at, busy_since = worker.began_at, worker.busy_since
            records = wire.encode_control(wire.METRICS, {"records": []})
            await worker.say(control=records)
            assert (worker.began_at, worker.busy_since) == (began_at, busy_since)
            metrics = json.dumps({"records": []}).encode()
            await worker.say(
                (2, 599, 0, b"a\0b", [b"second"], 5, 6, 8000),
                (1, 200, 0, b"", [b"first"], 5, 6, 8000), (0, wire.METRICS, 0, b"", [metrics]),
            )  # fmt: skip
            replies = [sink.reply for _, sink in asked]
            assert [(each.status, each.headers, each.body) for each in replies if each] == [
                (200, b"", b"first"), (599, b"a\0b", b"second"),
            ]  # fmt: skip
            assert [(each.queue_us, each.handler_us) for each in replies if each] == [(5, 6)] * 2
            assert why.reply is None and worker.held == [0, 1] and not worker.is_idle
            assert worker.answered == 4 and 0 < pool.worked_s < 60
            assert pool.own_job_s == pytest.approx(0.008 / 4)
            assert [(words[0].size, *words[2:]) for words in traces] == [(2, 5, 6)] * 2
            assert traces[0][0] is traces[1][0] and traces[0][0].worker_pid == worker.pid
            began_at = worker.began_at
            await worker.say((3, 200, wire.MORE, b"", [b"part"]))
            assert worker.began_at == began_at and isinstance(why.reply.body, Stream)
            assert not worker.takes_work, "before it is idle"
            await worker.say((3, 200, 0, b"", [b"rest"]))
            assert (
                worker.takes_work
                and worker.answered == 5
                and worker.is_idle
                and worker.held == [0, 0]
            )
            (item,) = await hand(worker, ask()[0])
            assert item.id == 4

    run(scenario)


def test_replies_of_one_batch_in_several_frames_are_counted_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with spoken(tmp_path) as worker:
            await hand(worker, *(ask(rows=rows)[0] for rows in (1, 1, 9, 1)))
            await worker.say(
                (1, 200, wire.PARTIAL, b"", [b"a"], 0, 0, 4000), (2, 200, 0, b"", [b"b"])
            )
            assert worker.answered == 0
            # What is refused may have claimed any number of rows.
            await worker.say((3, 400, 0, b"", [b"c"], 0, 0, 4000))
            assert worker.answered == 3
            await worker.say((4, 0x1FF, wire.UNREAD, b"", [b""]))
            assert worker.answered == 3 and worker.is_idle  # it was not run

    run(scenario)


def test_a_long_answer_gives_its_room_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with spoken(tmp_path) as worker:
            budget = worker._pool.budget
            for size in (ANSWER_BYTES, 10):
                call, sink = ask()
                (item,) = await hand(worker, call)
                await worker.say((item.id, 200, 0, b"", [b"x" * size]))
                while sink.reply is None:
                    await asyncio.sleep(0.002)
                assert len(sink.reply.body) == size  # type: ignore[arg-type]
                assert budget.held == 0 and not worker.is_held_up

    run(scenario)


@pytest.mark.parametrize(
    "words",
    [
        (1, 199, 0, b"", [b""]), (1, 600, 0, b"", [b""]), (1, 200, 0, b"a\0b\0c", [b""]),
        (1, 200, 0, b"a", [b""]), (2, 200, 0, b"", [b""]), (0, wire.READY, 0, b"", [b"{}"]),
        (0, wire.METRICS, 0, b"", [b"nonsense"]), (0, wire.METRICS, 0, b"", [b"[]"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_worker_that_talks_nonsense_is_ended(tmp_path: Path, words: tuple[Any, ...]) -> None:
    async def scenario() -> None:
        async with spoken(tmp_path) as worker:
            call, sink = ask()
            await hand(worker, call)
            await worker.say(words)
            await worker.ended
            assert worker.is_condemned and sink.reply is None
            assert isinstance(worker.death, WorkerDied)
            assert not isinstance(worker.death, WorkerKilled)

    run(scenario)


# -- what nobody waits for ---------------------------------------------------------------------


@pytest.mark.parametrize("end", ["answered", "streamed", "gives way", "left", "dies"])
def test_what_runs_aside_gives_way(tmp_path: Path, end: str) -> None:
    async def scenario() -> None:
        async with spoken(tmp_path) as worker:
            sink = Sink()
            worker.run_aside([(b"head", [b"x"], wire.GOLDEN, sink, 2)])
            (item,) = await worker.said(1)
            assert (item.id, item.code, item.flags) == (1, 2, wire.GOLDEN)
            assert not worker.is_idle and worker.takes_work and worker.capacity(PREDICT) == 16
            now, limit_s = worker._aside_since, RUN.response_timeout_s
            assert not worker.hangs_aside(now + limit_s) and worker.hangs_aside(now + limit_s + 1)
            if end == "gives way":
                other, answer = ask()
                cancel, asked = await hand(worker, other) or []
                assert (cancel.code, json.loads(cancel.body)) == (wire.CANCEL, {"ids": [1]})
                assert asked.id == 2 and not worker.hangs_aside(now + 2 * limit_s)
                await worker.say((1, 200, wire.UNREAD, b"", [b""]), (2, 200, 0, b"", [b"y"]))
                assert sink.is_cancelled and answer.reply is not None
            elif end == "streamed":
                await worker.say((1, 200, wire.MORE, b"", [b"a"]))
                assert not sink.done()
                await worker.say((1, 200, 0, b"", [b"b"]))
                assert isinstance(sink.error, StreamBroken)
            elif end == "left":
                sink.cancel()
                await worker.say((1, 200, 0, b"", [b"b"]))
                assert sink.reply is None
            elif end == "dies":
                worker.condemn()
                worker.writer.close()
                await worker.ended
                assert isinstance(sink.error, WorkerDied)
                return
            else:
                await worker.say((1, 200, 0, b"a\0b", [b"fine"], 7, 8))
                assert sink.reply is not None
                assert tuple(sink.reply)[:5] == (200, b"a\0b", b"fine", 7, 8)
            assert worker.is_idle and not worker.hangs_aside(now + 2 * limit_s)
            assert worker.answered == (end == "gives way")

    run(scenario)


# -- its end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "kind"),
    [("exit 137", WorkerKilled), ("kill -9 $$", WorkerKilled), ("exit 1", WorkerDied)],
)
def test_replies_that_were_sent_before_its_end_are_taken(
    tmp_path: Path, end: str, kind: type[Exception]
) -> None:
    async def scenario() -> None:
        worker = Spoken(make_pool(tmp_path), 1, 1)
        worker.command = ("sh", "-c", f"trap '{end}' TERM; echo set; sleep 60 & wait")
        await start(worker, READY)
        while worker._log_tail != "set":
            await asyncio.sleep(0.002)
        call, sink = ask()
        (item,) = await hand(worker, call)
        os.kill(worker.pid, signal.SIGTERM)
        while not worker._has_exited:
            await asyncio.sleep(0.002)
        assert not worker.takes_work and not worker.ended.done()
        await worker.say((item.id, 200, 0, b"", [b"in time"]))
        assert sink.reply is not None and sink.reply.body == b"in time"
        worker.writer.close()
        await worker.ended
        assert type(worker.death) is kind

    run(scenario)


def test_what_a_process_that_it_forked_holds_open_is_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = Spoken(make_pool(tmp_path), 1, 1)
        await start(worker, READY)
        os.kill(worker.pid, signal.SIGKILL)
        await worker.ended  # though our end of its socket is open
        assert type(worker.death) is WorkerKilled
        worker.writer.close()

    run(scenario)


def test_an_idle_worker_whose_socket_ends_is_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with spoken(tmp_path) as worker:
            await hand(worker, ask()[0])
            worker.writer.close()
            await worker.ended
            assert worker.is_condemned and worker.pid > 0

    run(scenario)
