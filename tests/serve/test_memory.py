"""What large bodies leave behind is given back to the system."""

from __future__ import annotations

import asyncio

import pytest

from modelyard.serve import memory
from modelyard.serve.memory import GROWN_BYTES, Memory, resident_bytes


def test_what_is_freed_between_used_blocks_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "EVERY_S", 0.01)

    async def scenario() -> tuple[int, int]:
        looking = Memory()
        blocks = [bytes(50_000) for _ in range(3000)]  # below the size that is mapped by itself
        kept = blocks[::100]
        blocks.clear()
        before = resident_bytes()
        for _ in range(200):
            await asyncio.sleep(0.01)
            if resident_bytes() < before - GROWN_BYTES:
                break
        looking.stop()
        assert len(kept) == 30
        return before, resident_bytes()

    before, after = asyncio.run(scenario())
    assert after < before - GROWN_BYTES
