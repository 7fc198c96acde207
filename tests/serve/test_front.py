"""Where every request begins: what had passed of its time before it was read counts, too."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from modelyard.serve.control.registry import Registry
from modelyard.serve.dataplane.call import PREDICT, Call, Target
from modelyard.serve.dataplane.metrics import Metrics, VersionMetrics
from modelyard.serve.errors import TooLate
from modelyard.serve.front.begin import AwaitedReply, Front, Release, ServerState
from tests.serve.test_batcher import Engine, make


class Asked:
    """A request of no protocol."""

    id = "one"
    headers: list[tuple[bytes, bytes]] = []  # noqa: RUF012 - as the protocol of requests has it
    served: tuple[str, str] | None = None
    trace_id = ""
    release: Release | None = None
    client = ("127.0.0.1", 5000)

    def is_left(self) -> bool:
        return False


class Plain(AwaitedReply):
    def head(self) -> bytes:
        return b""


def begin(**terms: Any) -> tuple[Call | None, Plain]:
    """Begin a request for a model that takes 0.1 s a job and has one replica, which is busy."""
    engine, metrics = Engine(0), Metrics()
    engine.cost_s = 0.1
    model: Any = SimpleNamespace(
        name="m",
        version="1",
        batchers=(make(engine, metrics), make(engine, metrics)),
        config=SimpleNamespace(refuses_late=True, request_timeout_s=60.0),
        answers=None,
        request_timeout_s=60.0,
        metrics=VersionMetrics(metrics, "m", "1"),
    )
    registry = Registry()
    registry.add(model)
    front = Front(registry, metrics, ServerState())
    reply = Plain(front, Asked(), Target(PREDICT, ["m"]))
    return front.begin(reply, **terms), reply


@pytest.mark.parametrize(("waited_s", "is_taken"), [(0.0, True), (0.15, False)])
def test_what_had_passed_of_a_requests_time_decides_whether_it_is_taken(
    waited_s: float, is_taken: bool
) -> None:
    """Of 0.2 s a client waits for, 0.1 s are needed: enough, but not after 0.15 s."""

    async def scenario() -> None:
        call, reply = begin(timeout_s=0.2, waited_s=waited_s)
        assert (call is not None) is is_taken
        if call is None:
            with pytest.raises(TooLate):
                await reply.wait()

    asyncio.run(scenario())
