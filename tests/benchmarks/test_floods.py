"""Floods end in time, and what they cost is bounded."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.floods import (
    FLOODS,
    MOST_CPU_PER_MB,
    SEGMENT_BYTES,
    Flood,
    Row,
    pour,
    same,
    served,
    text,
)

pytestmark = pytest.mark.nightly

BY = 2
"""Factor over what is promised for a quiet machine."""
OWN_MS = 50
KNOWN = {
    "grpc: PING",
    "grpc: resets over new connections",
    "grpc: calls that are refused",
    "grpc: references into HPACK's table",
}
"""Floods that cost grpcio more, as the page on security says."""


@contextmanager
def sink(reads: bool = True) -> Iterator[tuple[tuple[str, int], list[int]]]:
    """Take what is sent, and count it; or leave it in the kernel."""
    counts: list[int] = []

    def take(client: socket.socket) -> None:
        with suppress(OSError):
            while reads and (data := client.recv(1 << 16)):
                counts.append(len(data))

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                held.append(client)
                threading.Thread(target=take, args=(client,), daemon=True).start()

    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname(), counts
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for client in held:
        client.close()


def test_a_flood_ends_with_its_bytes_and_counts_what_was_read() -> None:
    with sink() as (address, counts):
        sent = pour(Flood("x", "http", b"begin", same(b"y" * 1000)), address, 60, 1 << 20)
        until = time.monotonic() + 20
        while sum(counts) < 950_000 and time.monotonic() < until:
            time.sleep(0.01)
    assert 950_000 <= sum(counts) <= 1_200_000 and 0 < sent <= 1_200_000


def test_a_flood_ends_in_time_and_what_nobody_reads_does_not_count() -> None:
    with sink(reads=False) as (address, _):
        sent = pour(Flood("x", "http", b"", same(b"y" * 1000)), address, 0.2, 1 << 40)
    assert sent < 1 << 19  # of the megabytes that the kernel took: headers of segments


def test_each_connection_and_segment_counts() -> None:
    with sink() as (address, _):
        sent = pour(Flood("x", "http", b"", same(b"y"), 3, 1, 1), address, 0.2, 10_000)
    assert sent >= 10_000 and sent % SEGMENT_BYTES >= 0


def test_there_are_25_kinds_and_more() -> None:
    names = [flood.name for flood in FLOODS]
    assert len(set(names)) == len(names) >= 25


@pytest.mark.slow
def test_no_flood_costs_more_than_it_may(tmp_path: Path) -> None:
    """Three times in a row: the slowest hundredth of two seconds is one answer."""
    rows: dict[str, Row] = {}
    with served(tmp_path) as target:
        target.measure(None, 1, 0)
        target.rates.clear()
        target.measure(None, 2, 0)
        for flood in FLOODS:
            for _ in range(3):
                row = rows[flood.name] = target.measure(flood, 2, 1 << 30)
                if not is_dear(row):
                    break
    dear = [row for row in rows.values() if is_dear(row)]
    assert {row.name for row in dear} <= KNOWN, text(dear)


def is_dear(row: Row) -> bool:
    """Return whether a flood cost more than it may, or the innocent client an answer."""
    is_slow = row.own_p99_ms > BY * OWN_MS
    return is_slow or row.cpu_per_mb > BY * MOST_CPU_PER_MB or row.wrong > 0
