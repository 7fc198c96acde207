"""Addresses: what is bound, what is refused, what is left behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.address import Address
from serve.errors import StartError
from serve.listener import Listener


class App:
    """Nobody asks it."""

    async def __call__(self, scope: object, receive: object, send: object) -> None:
        raise AssertionError

    def refuse(self, error: Exception) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        raise AssertionError


app = App()


@pytest.fixture
def left(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A Unix socket that somebody listens on."""
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()
        yield path, listening


def test_the_socket_of_a_killed_server_is_taken_over(left: tuple[Path, socket.socket]) -> None:
    path, listening = left
    listening.close()
    listener = Listener(app, Address(path=path))
    assert listener.url == f"unix:{path}"
    listener.abandon()
    assert not path.exists()


def test_a_socket_that_answers_is_refused(left: tuple[Path, socket.socket]) -> None:
    path, _ = left
    with pytest.raises(StartError, match="is in use; choose another path"):
        Listener(app, Address(path=path))
    assert path.is_socket()


def test_a_file_is_never_taken_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(StartError, match="notes"):
        Listener(app, Address(path=path))
    assert path.read_text() == "mine"


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="AF_UNIX path too long"):
        Listener(app, Address(path=tmp_path / ("x" * 120)))


@pytest.mark.parametrize(
    ("address", "is_loopback", "text"),
    [
        (Address("127.0.0.2", 1), True, "http://127.0.0.2:1"),
        (Address("localhost", 1, is_tls=True), True, "https://localhost:1"),
        (Address("::1", 1), True, "http://[::1]:1"),
        (Address("0.0.0.0", 1), False, "http://0.0.0.0:1"),
        (Address("some.host", 1), False, "http://some.host:1"),
        (Address(path=Path("/a")), True, "unix:/a"),
    ],
    ids=str,
)
def test_what_an_address_is(address: Address, is_loopback: bool, text: str) -> None:
    assert (address.is_loopback, str(address)) == (is_loopback, text)
