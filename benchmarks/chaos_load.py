"""Clients that send one request after the other, and account for every one of them.

A request ends answered at once, answered after the client has sent it again, or lost. What an
attempt met instead of an answer is counted by its own name.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

PATIENCE_S = 150.0
"""For which a client sends a request again."""
PAUSE_S = 0.05
MAX_HEAD_BYTES = 1 << 16
WRONG = "an answer to another body"


@dataclass
class Account:
    """What became of the requests of one body size."""

    sent: int = 0
    at_once: int = 0
    repeated: int = 0
    """Answered, but only to the client's second attempt or a later one."""
    lost: int = 0
    slowest_s: float = 0.0
    met: Counter[str] = field(default_factory=Counter)
    """What attempts met instead of a right answer."""
    versions: Counter[str] = field(default_factory=Counter)
    """Versions of the model, in the answers."""


class WrongAnswer(Exception):
    """A status other than 200, or an answer to another request."""


class Load:
    """Clients that ask until they are told to stop.

    Args:
        host, port, path: where to.
        sizes: sizes of the bodies, in turns.
        clients: how many; each has a connection of its own, which it keeps.
        rate: requests a second, each on a connection of its own, however long others take; 0 has
            `clients` ask.
    """

    def __init__(
        self,
        host: str,
        port: int,
        path: str,
        sizes: Sequence[int],
        clients: int,
        rate: float = 0,
    ) -> None:
        self._rate = rate
        self.accounts = {size: Account() for size in sizes}
        self._at = host, port
        self._path = path
        self.clients = clients
        """How many go on; the others wait until there are to be more again."""
        self._started = clients
        self._numbers = count()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Ask until `stop`; return when every request that was sent is accounted for."""
        if self._rate:
            await self._open()
            return
        await asyncio.gather(*(self._client(number) for number in range(self._started)))

    def stop(self) -> None:
        """Have no further requests sent."""
        self._stop.set()

    async def _open(self) -> None:
        """Send requests at a rate."""
        started, sizes = time.monotonic(), list(self.accounts)
        async with asyncio.TaskGroup() as group:
            while not self._stop.is_set():
                number = next(self._numbers)
                connection = Connection(*self._at)
                size = sizes[number % len(sizes)]
                asking = group.create_task(self._account(connection, size, number))
                asking.add_done_callback(partial(_close, connection))
                await asyncio.sleep(started + (number + 1) / self._rate - time.monotonic())

    async def _client(self, number: int) -> None:
        connection = Connection(*self._at)
        sizes = list(self.accounts)
        at = number
        while not self._stop.is_set():
            if number >= self.clients:
                await asyncio.sleep(PAUSE_S)
                continue
            size = sizes[at % len(sizes)]
            at += 1
            await self._account(connection, size, next(self._numbers))
        connection.close()

    async def _account(self, connection: Connection, size: int, number: int) -> None:
        """Send one request until it is answered, and write down what became of it."""
        account = self.accounts[size]
        account.sent += 1
        body = (b"%d " % number).ljust(size, b"%d" % (number % 10))
        started, attempts = time.monotonic(), 0
        while True:
            attempts += 1
            try:
                async with asyncio.timeout(PATIENCE_S):
                    version = await connection.ask(self._path, body)
            except (OSError, EOFError, WrongAnswer) as error:
                connection.close()
                account.met[_name(error)] += 1
            else:
                account.versions[version] += 1
                account.at_once += attempts == 1
                account.repeated += attempts > 1
                break
            if time.monotonic() - started > PATIENCE_S:
                account.lost += 1
                break
            await asyncio.sleep(PAUSE_S)
        account.slowest_s = max(account.slowest_s, time.monotonic() - started)


class Connection:
    """HTTP/1.1 to one address, opened when it is needed."""

    def __init__(self, host: str, port: int) -> None:
        self._at = host, port
        self._pair: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: bytes) -> str:
        """Return the version that has answered.

        Raises:
            OSError, EOFError: no answer came.
            WrongAnswer: of another status, or to another request.
        """
        if self._pair is None:
            self._pair = await asyncio.open_connection(*self._at, limit=MAX_HEAD_BYTES)
        reader, writer = self._pair
        head = f"POST {path} HTTP/1.1\r\nhost: chaos\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        fields = {
            name.lower(): value.strip() for name, _, value in (x.partition(b":") for x in lines)
        }
        answer = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        if fields.get(b"connection", b"").lower() == b"close":
            self.close()
        if not first.startswith(b"HTTP/1.1 200"):
            raise WrongAnswer(f"{first.decode()} {answer[:60].decode('latin-1')}".strip())
        said = json.loads(answer)
        if (said["bytes"], said["crc"]) != (len(body), zlib.crc32(body)):
            raise WrongAnswer(WRONG)
        return str(said["version"])

    def close(self) -> None:
        """Close it; the next request opens another."""
        if self._pair is not None:
            self._pair[1].close()
        self._pair = None


def _close(connection: Connection, _: asyncio.Task[None]) -> None:
    connection.close()


def _name(error: BaseException) -> str:
    if isinstance(error, WrongAnswer):
        return str(error)
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    return "no answer in time" if isinstance(error, TimeoutError) else "closed unanswered"
