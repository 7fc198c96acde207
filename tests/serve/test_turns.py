"""Whose turn it is: clients' work in slices, and refused clients that wait before the next."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
import uvloop

from modelyard.serve.http import turns
from modelyard.serve.http.connection import Answer, RequestResponseCycle
from modelyard.serve.http.listener import Listener
from modelyard.serve.http.turns import LEAST_RATE, MEASURE_S, MOST_RATE, Demand, Turns
from modelyard.serve.settings import Address


class FakeClock:
    """Time and demand that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.wanted = 0.0

    def monotonic(self) -> float:
        return self.now

    def read_s(self) -> float:
        return self.wanted

    def pass_s(self, seconds: float, busy: float = 0.0) -> None:
        self.now += seconds
        self.wanted += seconds * busy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(turns, "monotonic", clock.monotonic)
    monkeypatch.setattr(turns, "Demand", lambda: clock)
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


class Refused(Client):
    """One whose request is refused."""

    def __init__(self, name: str, clock: FakeClock, log: list[str], these: Turns) -> None:
        super().__init__(name, clock, log)
        self._these = these

    def take_put_off(self) -> None:
        self._log.append(self.name)
        self._these.must_hold()


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


def test_it_is_a_flood_once_somebody_waits_for_half_of_the_shortest_time(clock: FakeClock) -> None:
    async def scenario() -> None:
        these = Turns()
        these.expect(0.1)
        assert not these.is_flooded
        these.put_off(Client("first", clock, []))
        clock.pass_s(0.04)
        assert not these.is_flooded
        clock.pass_s(0.02)
        assert these.is_flooded

    asyncio.run(scenario())


def test_without_time_for_refusals_a_turn_ends_with_the_first(clock: FakeClock) -> None:
    log: list[str] = []

    async def scenario() -> None:
        loop, these = asyncio.get_running_loop(), Turns()
        while not these.must_hold():
            pass

        for name in "abc":
            these.put_off(Refused(name, clock, log, these))
        these._next()
        assert log == ["a"]
        assert not these.has_time()
        began = loop.time()
        while len(log) < 3:
            await asyncio.sleep(0)
        assert loop.time() - began >= 0.0015  # others have the processor in between

    asyncio.run(scenario())
    assert log == ["a", "b", "c"]


def test_where_a_turn_accepts_the_next_one_comes_at_once(clock: FakeClock) -> None:
    log: list[str] = []

    async def scenario() -> None:
        these = Turns()
        while not these.must_hold():
            pass

        for name in "aBcD":
            these.put_off(
                Client(name, clock, log) if name.islower() else Refused(name, clock, log, these)
            )
        these._next()
        await asyncio.sleep(0)
        assert log == ["a", "B", "c", "D"]

    asyncio.run(scenario())


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


def refuse_for(these: Turns, clock: FakeClock, seconds: float, busy: float) -> int:
    """Refuse all the time, and return how many clients need not wait."""
    count = 0
    for _ in range(round(seconds / MEASURE_S)):
        clock.pass_s(MEASURE_S, busy)
        while not these.must_hold():
            count += 1
    return count


def test_refusals_get_what_the_processor_has_left_and_always_a_little(clock: FakeClock) -> None:
    async def scenario() -> None:
        these = Turns()
        refuse_for(these, clock, 1, busy=1.0)
        assert refuse_for(these, clock, 1, busy=1.0) == pytest.approx(LEAST_RATE, rel=0.05)
        refuse_for(these, clock, 1, busy=0.3)
        assert refuse_for(these, clock, 1, busy=0.3) == pytest.approx(MOST_RATE, rel=0.05)

    asyncio.run(scenario())


def test_a_pause_saves_no_refusals_up(clock: FakeClock) -> None:
    async def scenario() -> None:
        these = Turns()
        refuse_for(these, clock, 1, busy=1.0)
        clock.pass_s(60)
        assert refuse_for(these, clock, MEASURE_S, busy=1.0) <= 3 * MOST_RATE * MEASURE_S

    asyncio.run(scenario())


def test_the_longest_held_is_released_first(clock: FakeClock) -> None:
    log: list[str] = []

    async def scenario() -> None:
        these = Turns()
        refuse_for(these, clock, 1, busy=1.0)
        names = [str(at) for at in range(30)]
        for name in names:
            assert these.must_hold()
            these.hold(Client(name, clock, log))
        while len(log) < len(names):
            clock.pass_s(MEASURE_S, busy=1.0)
            await asyncio.sleep(0.003)
        assert log == names

    asyncio.run(scenario())


def test_demand_counts_what_this_thread_ran() -> None:
    demand = Demand()
    before = demand.read_s()
    sum(range(2_000_000))
    assert demand.read_s() - before > 0.001


def test_where_the_kernel_counts_no_waiting_running_is_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr("os.open", refuse)
    demand = Demand()
    before = demand.read_s()
    sum(range(2_000_000))
    assert demand.read_s() - before > 0.001


# -- connections that are held -------------------------------------------------------------------


class Full:
    """Refuses /full, and says of everything else how long it waited."""

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


def request(path: str, body: bytes = b"it") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (
        path.encode(), len(body), body,
    )  # fmt: skip


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20)
    yield
    socket.setdefaulttimeout(before)


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


def test_how_long_a_request_waited_before_its_client_was_accepted_is_known() -> None:
    async def scenario() -> None:
        listener = Listener(Full(), Address("127.0.0.1", 0))
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


@pytest.mark.parametrize("is_flooded", [False, True])
def test_clients_are_accepted_while_others_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch, is_flooded: bool
) -> None:
    monkeypatch.setattr(Sluggish, "is_flooded", is_flooded)

    async def scenario() -> None:
        async with listening() as (listener, sluggish):
            _, writer = await connect_refused(listener)
            assert listener.turns.is_behind
            clients = [socket.socket() for _ in range(40)]
            for client in clients:
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", listener.address.port))
            listener._accept()
            count = len(listener._opening)
            assert count == 1 if is_flooded else 8 <= count < 16, "a bounded part of one turn"
            for client in clients:
                client.close()
            writer.close()
            sluggish.go_on()

    uvloop.run(scenario())
