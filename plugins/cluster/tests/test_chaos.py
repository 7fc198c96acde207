"""The chaos script accounts for every request."""

import asyncio
import contextlib
import json
import subprocess
import sys
import zlib
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.chaos import Outcome, missed
from benchmarks.chaos_load import WRONG, Account, Load

ROOT = Path(__file__).parents[3]
FIRST = {1: "close", 2: "refuse", 3: "another"}
"""What the server below does at the first attempt of a request, by its number."""


class Server:
    """Answers as the archive of the script does, but for some first attempts."""

    def __init__(self) -> None:
        self.attempts: Counter[int] = Counter()
        self.load: Load | None = None
        self.clients: list[asyncio.Task[None]] = []

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients.append(asyncio.create_task(self.serve(reader, writer)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has closed
            await self.answer(reader, writer)
        writer.close()
        await writer.wait_closed()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            body = await reader.readexactly(int(head.rpartition(b":")[2]))
            number = int(body.split(b" ")[0])
            self.attempts[number] += 1
            event = FIRST.get(number) if self.attempts[number] == 1 else None
            if number == 5 and self.load is not None:
                self.load.stop()
            if event == "close":
                break
            status = b"503 Service Unavailable" if event == "refuse" else b"200 OK"
            said = {"version": "1", "bytes": len(body), "crc": zlib.crc32(body)}
            text = json.dumps({**said, **({"crc": 0} if event == "another" else {})}).encode()
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(text), text))


@pytest.mark.parametrize("rate", [0, 4], ids=["closed loop", "open loop"])
def test_each_request_is_in_one_count_and_says_what_it_met(rate: float) -> None:
    server = Server()

    async def run() -> dict[int, Account]:
        listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
        load = Load("127.0.0.1", listening.sockets[0].getsockname()[1], "/", (10, 70_000), 1, rate)
        server.load = load
        await load.run()
        listening.close()
        await asyncio.gather(*server.clients)
        return load.accounts

    small, large = (accounts := asyncio.run(run()))[10], accounts[70_000]
    assert server.attempts == Counter({0: 1, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1})
    assert (small.sent, small.at_once, small.repeated, small.lost) == (3, 2, 1, 0)
    assert (large.sent, large.at_once, large.repeated, large.lost) == (3, 1, 2, 0)
    assert list(large.met) == ["closed unanswered", "an answer to another body"]
    assert [said[:12] for said in small.met] == ["HTTP/1.1 503"]
    assert large.versions == {"1": 3}


@pytest.mark.parametrize(
    ("fault", "size", "account", "count"),
    [
        ("cell", 100, Account(sent=2, at_once=2), 0),
        ("cell", 1_000_000, Account(sent=2, at_once=1, repeated=1), 1),
        ("cell", 2_000_000, Account(sent=2, at_once=1, repeated=1), 0),
        ("proxy", 100, Account(sent=2, at_once=1, repeated=1), 0),
        ("proxy", 2_000_000, Account(sent=1, lost=1), 1),
        ("hung-worker", 100, Account(sent=2, at_once=1, repeated=1), 0),
        ("hung-worker", 100, Account(sent=1, lost=1), 1),
        ("cell", 2_000_000, Account(sent=1, repeated=1, met=Counter({WRONG: 1})), 1),
        ("silent", 100, Account(sent=1, at_once=1, slowest_s=5.1), 1),
        ("silent", 100, Account(sent=1, at_once=1, slowest_s=4.9), 0),
        ("cell", 100, Account(sent=1, at_once=1, slowest_s=5.1), 0),
    ],
)
def test_what_may_not_be_is_missed(fault: str, size: int, account: Account, count: int) -> None:
    assert missed(Outcome(fault, {size: account}, 1.0, "")) == count


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_cells_that_die_hang_or_follow_the_load_lose_no_request() -> None:
    faults = ("server", "hung-server", "hung-cell", "bad-update", "load")
    only = [word for fault in faults for word in ("--only", fault)]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *only],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
