"""How many cells there should be, and the reading of what decides it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from prometheus_client import Metric

from modelyard.plugins.cluster.ray.forward import Upstream
from modelyard.plugins.cluster.ray.scaling import CellScaling
from modelyard.plugins.cluster.ray.signals import Signals


@pytest.mark.parametrize(
    ("running", "measured", "wanted"),
    [
        (2, {"busy": {1: 0.7, 2: 0.7}, "in_flight": {1: 0, 2: 0}}, 2),
        (2, {"busy": {1: 1.0, 2: 0.75}, "in_flight": {1: 0, 2: 0}}, 2.5),
        (4, {"busy": {1: 0.35}, "in_flight": {1: 1}}, 2),
        (2, {"busy": {1: 0.1, 2: 0.1}, "in_flight": {1: 24, 2: 16}}, 5),
        (3, {}, 7),
        (3, None, 7),
        (3, {"busy": {}}, 7),
    ],
    ids=["as it should be", "busy", "idle", "full hop", "unknown", "none", "just started"],
)
def test_there_are_as_many_cells_as_bring_the_signals_to_their_targets(
    running: int, measured: object, wanted: float
) -> None:
    context = SimpleNamespace(
        current_num_replicas=running, target_num_replicas=7, aggregated_metrics=measured
    )
    cells, state = CellScaling(busy=0.7, in_flight=8)(context)
    assert cells == pytest.approx(wanted)
    assert state == {}


def test_busy_is_the_share_of_time_of_the_busiest_models_workers() -> None:
    """Over two readings; a server that does not answer in between is asked again."""
    texts = [(0.0, 5.0), None, (0.2, 5.01)]
    read: list[set[str]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"authorization: Bearer key\r\n" in head
        if (seconds := texts[min(len(read), 2)]) is not None:
            lines = "".join(
                f'modelyard_worker_busy_seconds_total{{model="{model}",version="1"}} {value}\n'
                f'modelyard_ready_workers{{model="{model}",version="1"}} 2\n'
                for model, value in zip("ab", seconds, strict=True)
            )
            length = len(lines)
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{lines}".encode())
        else:
            read.append(set())
        await writer.drain()
        writer.close()

    def publish(families: Iterable[Metric]) -> None:
        read.append({family.name for family in families})

    async def main() -> float:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            signals = Signals(Upstream("127.0.0.1", port, 0), "key", publish, every_s=0.2)
            while len(read) < 3:
                await asyncio.sleep(0.01)
            await signals.stop()
        return signals.busy

    busy = asyncio.run(main())
    assert 0 < busy <= 0.25, "0.2 s in at least 0.4, of two workers"
    assert read[0] == {"modelyard_worker_busy_seconds_total", "modelyard_ready_workers"}
