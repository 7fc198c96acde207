"""Whose turn it is: clients' work in slices."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
import uvloop

from modelyard.serve.http import turns
from modelyard.serve.http.connection import Answer, RequestResponseCycle
from modelyard.serve.http.listener import Listener
from modelyard.serve.http.turns import Turns
from modelyard.serve.settings import Address


class FakeClock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(turns, "monotonic", clock.monotonic)
    return clock


class Client:
    """A connection, as Turns sees it, whose requests take time."""

    def __init__(self, name: str, clock: FakeClock, log: list[str]) -> None:
        self.name, self._clock, self._log = name, clock, log

    def take_put_off(self) -> None:
        self._log.append(self.name)
        self._clock.pass_s(0.0006)

    def release(self) -> None:
        self._log.append(self.name)


# -- slices ------------------------------------------------------------------------------------


def test_between_two_slices_of_clients_work_others_have_a_turn(clock: FakeClock) -> None:
    log: list[str] = []

    async def scenario() -> None:
        loop, these = asyncio.get_running_loop(), Turns()
        assert these.has_time()
        clock.pass_s(0.002)
        for name in "abcde":
            assert not these.has_time()
            these.put_off(Client(name, clock, log))
        for _ in range(4):
            loop.call_soon(log.append, "worker")
            await asyncio.sleep(0)
        assert these.has_time()

    asyncio.run(scenario())
    assert [name for name in log if name != "worker"] == list("abcde")
    longest = max(map(len, "".join(name[0] for name in log).strip("w").split("w")))
    assert longest == 2  # of 0.6 ms each, in slices of 1 ms


@pytest.mark.parametrize("fault", ["it stands still", "one of them fails"])
def test_all_have_their_turn_whatever_happens_in_one(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """This process may stand still where it looks at the clock, as on a machine that is loaded."""
    log: list[str] = []

    class Failing(Client):
        def take_put_off(self) -> None:
            super().take_put_off()
            raise RuntimeError(self.name)

    async def scenario() -> None:
        loop, these = asyncio.get_running_loop(), Turns()
        failed: list[object] = []
        loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
        assert these.has_time()
        for name in "abcde":
            kind = Failing if name == "b" and fault == "one of them fails" else Client
            these.put_off(kind(name, clock, log))
        if fault == "it stands still":
            ticks = itertools.count(clock.now, 0.01)
            monkeypatch.setattr(turns, "monotonic", lambda: next(ticks))
        for _ in range(8):
            await asyncio.sleep(0)
        assert [str(each) for each in failed] == ["b"] * (fault == "one of them fails")

    asyncio.run(scenario())
    assert log == list("abcde")


@pytest.mark.parametrize(
    ("times", "order"),
    [
        pytest.param((), "abcdefgh", id="nobody says when"),
        pytest.param((60.0, 0.09), "abcdefgh", id="there is time for all"),
        pytest.param((60.0, 0.02, 60.0), "hgfaedcb", id="a flood"),
        pytest.param((0.02, *8000 * [60.0]), "abcdefgh", id="one was in haste, long ago"),
    ],
)
def test_under_a_flood_most_turns_are_of_who_came_last_and_some_of_who_waits_longest(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, times: Sequence[float], order: str
) -> None:
    log: list[str] = []
    monkeypatch.setattr(turns, "OLDEST_EVERY", 4)

    async def scenario() -> None:
        these = Turns()
        for time_s in times:
            these.expect(time_s)
        assert these.has_time()
        for name in "abcdefgh":
            these.put_off(Client(name, clock, log))
            clock.pass_s(0.005)
        while len(log) < 8:
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert "".join(log) == order


def test_addresses_take_turns_however_many_connections_one_has(clock: FakeClock) -> None:
    log: list[str] = []

    async def scenario() -> None:
        these = Turns()
        assert these.has_time()
        for number in range(6):
            these.put_off(Client(f"f{number}", clock, log), "flood")
        these.put_off(Client("a", clock, log), "first")
        these.put_off(Client("b", clock, log), "second")
        while len(log) < 8:
            await asyncio.sleep(0)
        assert these.has_time()

    asyncio.run(scenario())
    assert log == ["f0", "a", "b", "f1", "f2", "f3", "f4", "f5"]


def test_what_comes_while_others_wait_does_not_overtake_them(clock: FakeClock) -> None:
    async def scenario() -> None:
        these = Turns()
        assert these.has_time()
        clock.pass_s(0.002)
        these.put_off(Client("first", clock, []))
        clock.pass_s(-0.002)
        assert not these.has_time()

    asyncio.run(scenario())


# -- refusals ----------------------------------------------------------------------------------


def test_refused_clients_are_held_back_while_others_wait_and_many_are_refused(
    clock: FakeClock,
) -> None:
    log: list[str] = []

    async def scenario() -> None:
        these = Turns()
        assert not any(these.must_hold() for _ in range(2 * turns.REFUSALS)), "nobody waits"
        await asyncio.sleep(2 * turns.WINDOW_S)
        these.put_off(Client("waits", clock, []))
        found = [these.must_hold() for _ in range(2 * turns.REFUSALS)]
        assert found == [False] * turns.REFUSALS + [True] * turns.REFUSALS
        names = [str(at) for at in range(3 * turns.REFUSALS)]
        for name in names:
            these.hold(Client(name, clock, log))
        these._end_window()
        assert log == names[: turns.REFUSALS], "the longest held are the first"
        these._next()
        these._end_window()
        assert log == names, "more of them while nobody waits"

    asyncio.run(scenario())


# -- what waited in the kernel --------------------------------------------------------------------


class Waited:
    """Says how long each request waited."""

    def accept(self, cycle: RequestResponseCycle) -> None:
        body = b"%.1f" % cycle.connection.waited_s
        headers = [(b"content-length", b"%d" % len(body))]

        def answer(parts: object) -> None:
            assert cycle.send_whole(200, headers, body)

        cycle.read_body(answer)

    def refuse(self, error: Exception, cycle: RequestResponseCycle | None) -> Answer:
        return 400, [], b""


def request(path: str, body: bytes = b"it") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (
        path.encode(), len(body), body,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20)
    yield
    socket.setdefaulttimeout(before)


def test_how_long_a_request_waited_before_its_client_was_accepted_is_known() -> None:
    async def scenario() -> None:
        listener = Listener(Waited(), Address("127.0.0.1", 0))
        with socket.create_connection(("127.0.0.1", listener.address.port)) as client:
            client.sendall(request("/free"))
            await asyncio.sleep(0.3)
            await listener.start()
            client.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(client, 1000)
            assert 0.2 <= float(answer.rpartition(b"\r\n\r\n")[2]) <= 5
        await listener.stop_accepting()
        listener.close_idle(0)

    uvloop.run(scenario())


def test_clients_are_accepted_while_others_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> int:
        listener = Listener(Waited(), Address("127.0.0.1", 0))
        await listener.start()
        monkeypatch.setattr(Turns, "is_behind", True)
        clients = [socket.socket() for _ in range(40)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", listener.address.port))
        listener._accept()
        count = len(listener._opening)
        for client in clients:
            client.close()
        await listener.stop_accepting()
        listener.close_idle(0)
        return count

    assert uvloop.run(scenario()) == 8, "a bounded part of one turn"


def test_who_comes_knows_how_long_it_would_wait(clock: FakeClock) -> None:
    async def scenario() -> None:
        these = Turns()
        assert these.behind_s == 0
        for _ in range(100):
            these.put_off(Client("a", clock, []))
        while these.is_behind:
            these._next()
        for _ in range(50):
            these.put_off(Client("a", clock, []))
        assert 0.02 < these.behind_s < 0.035  # each takes 0.6 ms

    asyncio.run(scenario())


# -- connections that are held -------------------------------------------------------------------


class Full(Waited):
    """Refuses /full."""

    def accept(self, cycle: RequestResponseCycle) -> None:
        cycle.is_refused = cycle.path == "/full"
        status = 503 if cycle.is_refused else 200
        body = b"%.1f" % cycle.connection.waited_s
        headers = [(b"content-length", b"%d" % len(body))]

        def answer(parts: object) -> None:
            assert cycle.send_whole(status, headers, body)

        cycle.read_body(answer)

    def refuse(self, error: Exception, cycle: RequestResponseCycle | None) -> Answer:
        return 400, [], b""


class Sluggish(Turns):
    """Holds every client that is refused, until it is told to go on."""

    def must_hold(self) -> bool:
        return True

    def hold(self, connection: turns.Reading) -> None:
        self._held.append(connection)

    def go_on(self) -> None:
        while self._held:
            self._held.popleft().release()


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Listener, Sluggish]]:
    listener = Listener(Full(), Address("127.0.0.1", 0))
    await listener.start()
    listener.turns = sluggish = Sluggish()
    try:
        yield listener, sluggish
    finally:
        await listener.stop_accepting()
        listener.close_idle(0)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


async def connect_refused(
    listener: Listener, more: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, send a request that is refused, and what is to follow it; read the refusal."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.address.port)
    writer.write(request("/full") + more)
    assert await read_answer(reader) == (503, b"0.0")
    return reader, writer


def test_a_client_that_is_held_is_answered_later_in_order_and_knows_how_long_it_waited() -> None:
    async def scenario() -> None:
        async with listening() as (listener, sluggish):
            reader, writer = await connect_refused(listener)
            writer.write(request("/free") + request("/full") + request("/free"))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.3)
            sluggish.go_on()
            status, waited = await read_answer(reader)
            assert (status, float(waited) >= 0.3) == (200, True)
            assert (await read_answer(reader))[0] == 503
            sluggish.go_on()
            assert (await read_answer(reader))[0] == 200
            await asyncio.sleep(0.02)
            writer.write(request("/free"))
            assert await read_answer(reader) == (200, b"0.0")
            writer.close()

    uvloop.run(scenario())


def test_what_comes_long_after_the_release_has_not_waited() -> None:
    async def scenario() -> None:
        async with listening() as (listener, sluggish):
            reader, writer = await connect_refused(listener)
            await asyncio.sleep(0.2)
            sluggish.go_on()
            await asyncio.sleep(0.05)
            writer.write(request("/free"))
            assert await read_answer(reader) == (200, b"0.0")
            writer.close()

    uvloop.run(scenario())


def test_a_client_that_leaves_while_it_is_held_is_forgotten() -> None:
    async def scenario() -> None:
        async with listening() as (listener, sluggish):
            for ends in (b"", b"not HTTP\r\n\r\n"):
                _, writer = await connect_refused(listener, ends)
                writer.close()
                await asyncio.sleep(0.05)
                sluggish.go_on()
                await asyncio.sleep(0.05)
            assert listener.busy_count == 0
            assert listener.close_idle(0) == 0

    uvloop.run(scenario())
