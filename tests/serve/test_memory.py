"""What large bodies leave behind is given back to the system."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import psutil
import pytest

from modelyard.serve.dataplane import heap
from modelyard.serve.dataplane.heap import GROWN_BYTES, give_back, resident_bytes
from tests.serve.live import LiveServer, build_archive


def test_what_is_freed_between_used_blocks_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "EVERY_S", 0.01)

    async def scenario() -> tuple[int, int]:
        looking = asyncio.create_task(give_back())
        await asyncio.sleep(0)  # it has begun
        blocks = [bytes(50_000) for _ in range(3000)]  # below the size that is mapped by itself
        kept = blocks[::100]
        blocks.clear()
        before = resident_bytes()
        for _ in range(200):
            await asyncio.sleep(0.01)
            if resident_bytes() < before - GROWN_BYTES:
                break
        looking.cancel()
        assert len(kept) == 30
        return before, resident_bytes()

    before, after = asyncio.run(scenario())
    assert after < before - GROWN_BYTES


BODIES = """
import resource, sys
from modelyard.serve.dataplane.heap import keep_freed, trim
if sys.argv[1] == "keep":
    keep_freed()
def round():
    [b"x" * 600_000 for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
round()
before = round()
print([round() for _ in range(20)][-1] - before)
if sys.argv[1] == "keep":
    trim()
    assert round() > before + 100
"""


def test_what_is_freed_is_kept_for_the_next_bodies() -> None:
    def faults(*arguments: str, **more: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", BODIES, *arguments],
            capture_output=True, text=True, check=True, env={**os.environ, **more},
        )  # fmt: skip
        return int(done.stdout)

    assert faults("leave") > 5000  # each page of each body, again and again
    assert faults("keep") < 500
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > 5000  # as the operator says


@pytest.mark.slow
def test_models_that_were_removed_leave_nothing(shared_server: LiveServer) -> None:
    """The pools and workers of one are cycles, 0.3 MB of them, which Python looks for seldom."""
    build_archive(shared_server.store, "echo", name="guest")
    server = psutil.Process(shared_server.pid)

    def grown_by(rounds: int) -> int:
        before = server.memory_info().rss
        for _ in range(rounds):
            shared_server.register_all("guest.mar", initial_workers=1, synchronous=True)
            assert shared_server.management.delete("/models/guest").status_code == 200
        time.sleep(2)
        grown: int = server.memory_info().rss - before
        return grown

    grown_by(10)
    assert grown_by(60) < 3_000_000
