"""Cases of h2spec's list, by their sections, that the other tests of HTTP/2 leave out."""

from __future__ import annotations

import asyncio
import struct

import pytest

from modelyard.plugins.grpc import http2
from modelyard.plugins.grpc.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Code,
    frame,
)
from plugins.grpc.tests.test_http2 import ECHO, HANG, grpc
from plugins.grpc.tests.test_http2_pace import Peer

BLOCK = b"\x83\x86\x04" + bytes([len(HANG)]) + HANG.encode() + b"\x0f\x10\x10application/grpc"
OPEN = frame(HEADERS, END_HEADERS, 1, BLOCK)
OPEN_ENDED = frame(HEADERS, END_HEADERS | END_STREAM, 1, BLOCK)
RESET = frame(RST_STREAM, 0, 1, struct.pack(">I", Code.CANCEL))
EIGHT = b"12345678"
MOST = struct.pack(">I", (1 << 31) - 1)


def block(more: bytes, id: int = 1) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, id, BLOCK + more)


ENDS: dict[str, tuple[list[bytes], Code]] = {
    "4.3 another stream's headers within a block": (
        [frame(HEADERS, 0, 1, BLOCK), frame(HEADERS, END_HEADERS, 3, BLOCK)], Code.PROTOCOL_ERROR),
    "4.3 PRIORITY within a block": (
        [frame(HEADERS, 0, 1, BLOCK), frame(PRIORITY, 0, 1, b"\0\0\0\0\1")], Code.PROTOCOL_ERROR),
    "5.1 DATA on a half-closed stream": ([OPEN_ENDED, frame(DATA, 0, 1, b"x")], Code.STREAM_CLOSED),
    "5.1 HEADERS on a half-closed stream": ([OPEN_ENDED, OPEN_ENDED], Code.STREAM_CLOSED),
    "5.1 CONTINUATION on a half-closed stream": (
        [OPEN_ENDED, frame(CONTINUATION, END_HEADERS, 1, BLOCK)], Code.PROTOCOL_ERROR),
    "5.1 HEADERS on a closed stream": ([OPEN, RESET, OPEN], Code.STREAM_CLOSED),
    "5.1 CONTINUATION on a closed stream": (
        [OPEN, RESET, frame(CONTINUATION, END_HEADERS, 1)], Code.PROTOCOL_ERROR),
    "5.1.1 a lower id than before": (
        [frame(HEADERS, END_HEADERS, 5, BLOCK), frame(HEADERS, END_HEADERS, 3, BLOCK)],
        Code.STREAM_CLOSED),
    "5.5 an extension within a block": (
        [frame(HEADERS, 0, 1, BLOCK), frame(0x16, 0, 0, EIGHT)], Code.PROTOCOL_ERROR),
    "6.1 more padding than payload": (
        [OPEN, frame(DATA, PADDED, 1, b"\x06Test")], Code.PROTOCOL_ERROR),
    "6.2 HEADERS on stream 0": ([frame(HEADERS, END_HEADERS, 0, BLOCK)], Code.PROTOCOL_ERROR),
    "6.2 more padding than headers": (
        [frame(HEADERS, PADDED | END_HEADERS, 1, b"\xff" + BLOCK)], Code.PROTOCOL_ERROR),
    "6.3 PRIORITY on stream 0": ([frame(PRIORITY, 0, 0, b"\0\0\0\1\1")], Code.PROTOCOL_ERROR),
    "6.4 RST_STREAM on stream 0": ([frame(RST_STREAM, 0, 0, b"\0\0\0\0")], Code.PROTOCOL_ERROR),
    "6.4 RST_STREAM of 3 bytes": (
        [OPEN, frame(RST_STREAM, 0, 1, b"\0\0\0")], Code.FRAME_SIZE_ERROR),
    "6.5.2 ENABLE_PUSH of 2": (
        [frame(SETTINGS, 0, 0, struct.pack(">HI", 2, 2))], Code.PROTOCOL_ERROR),
    "6.5.2 frames beyond 24 bits": (
        [frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1 << 24))], Code.PROTOCOL_ERROR),
    "6.8 GOAWAY on a stream": ([OPEN, frame(GOAWAY, 0, 1, bytes(8))], Code.PROTOCOL_ERROR),
    "6.9.1 a connection's window beyond 31 bits": (
        [frame(WINDOW_UPDATE, 0, 0, MOST)] * 2, Code.FLOW_CONTROL_ERROR),
    "6.10 CONTINUATION behind END_HEADERS": (
        [OPEN, frame(CONTINUATION, END_HEADERS, 1, BLOCK)], Code.PROTOCOL_ERROR),
    "6.10 CONTINUATION behind DATA": (
        [OPEN, frame(DATA, 0, 1, b"x"), frame(CONTINUATION, END_HEADERS, 1)], Code.PROTOCOL_ERROR),
    "6.10 CONTINUATION on stream 0": (
        [frame(HEADERS, 0, 1, BLOCK), frame(CONTINUATION, END_HEADERS, 0)], Code.PROTOCOL_ERROR),
    "HPACK 4.2 a table's size behind a field": ([block(b"\x20")], Code.COMPRESSION_ERROR),
    "HPACK 5.2 padding of more than 7 bits": (
        [block(b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff")], Code.COMPRESSION_ERROR),
    "HPACK 5.2 padding of zeros": (
        [block(b"\x00\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90")], Code.COMPRESSION_ERROR),
    "HPACK 6.1 index 0": ([block(b"\x80")], Code.COMPRESSION_ERROR),
    "HPACK 6.3 a table larger than allowed": (
        [frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x3f\xe1\xff\x03" + BLOCK)],
        Code.COMPRESSION_ERROR),
}  # fmt: skip

RESETS: dict[str, tuple[list[bytes], Code]] = {
    "5.3.1 a stream that depends on itself": (
        [frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, b"\0\0\0\1\xff" + BLOCK)],
        Code.PROTOCOL_ERROR),
    "5.3.1 PRIORITY on itself": (
        [OPEN, frame(PRIORITY, 0, 1, b"\0\0\0\1\xff")], Code.PROTOCOL_ERROR),
    "6.3 PRIORITY of 4 bytes": ([OPEN, frame(PRIORITY, 0, 1, b"\0\0\0\0")], Code.FRAME_SIZE_ERROR),
    "6.9 WINDOW_UPDATE by 0 on a stream": (
        [OPEN, frame(WINDOW_UPDATE, 0, 1, bytes(4))], Code.PROTOCOL_ERROR),
    "6.9.1 a stream's window beyond 31 bits": (
        [OPEN, frame(WINDOW_UPDATE, 0, 1, MOST)], Code.FLOW_CONTROL_ERROR),
    "8.1 trailers that do not end": ([OPEN, frame(HEADERS, END_HEADERS, 1, b"\x00\x01a\x01b")],
                                     Code.PROTOCOL_ERROR),
    "8.1.2.1 a pseudo-header in trailers": (
        [OPEN, frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x83")], Code.PROTOCOL_ERROR),
}  # fmt: skip


def frames(sent: bytes) -> list[tuple[int, int, int, bytes]]:
    """Return kind, flags, stream and payload of each frame."""
    found, at = [], 0
    while at < len(sent):
        length, kind, flags = int.from_bytes(sent[at : at + 3]), sent[at + 3], sent[at + 4]
        id = int.from_bytes(sent[at + 5 : at + 9])
        found.append((kind, flags, id, sent[at + 9 : at + 9 + length]))
        at += 9 + length
    return found


def answers(*given: bytes) -> list[tuple[int, int, int, bytes]]:
    """Return what a server answers, behind its greeting."""

    async def talk() -> list[tuple[int, int, int, bytes]]:
        peer = Peer(window=65_535)
        peer.connection._flush()
        before = len(peer.transport.sent)
        peer.say(*given)
        peer.connection._flush()
        return frames(bytes(peer.transport.sent[before:]))

    return asyncio.run(talk())


@pytest.mark.parametrize("what", ENDS)
def test_what_ends_a_connection(what: str) -> None:
    given, code = ENDS[what]
    kind, _, _, payload = answers(*given)[-1]
    assert (kind, int.from_bytes(payload[4:8])) == (GOAWAY, code)


@pytest.mark.parametrize("what", RESETS)
def test_what_ends_a_stream_alone(what: str) -> None:
    given, code = RESETS[what]
    # The connection goes on: a ping is answered.
    *_, reset, ping = answers(*given, frame(PING, 0, 0, EIGHT))
    assert (reset[0], reset[2], int.from_bytes(reset[3])) == (RST_STREAM, 1, code)
    assert ping == (PING, ACK, 0, EIGHT)


def test_what_is_to_be_passed_over() -> None:
    ping = frame(PING, 0, 0, EIGHT)
    for given in (
        frame(0x16, 0x16, 0, EIGHT),  # 4.1 a kind of frame that nobody knows
        frame(PING, ACK, 0, EIGHT),  # 6.7 an answer that nobody asked for
        frame(SETTINGS, 0, 0, struct.pack(">HI", 0xFF, 1))[:9] + struct.pack(">HI", 0xFF, 1),
        frame(PRIORITY, 0, 7, b"\0\0\0\0\1"),  # 5.1 of a stream that is idle
        OPEN + RESET + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),  # 5.1 of one that is closed
        OPEN + RESET + RESET,
    ):
        found = [each for each in answers(given, ping) if each[0] != SETTINGS]
        assert found == [(PING, ACK, 0, EIGHT)]
    # 4.1 flags and a bit that mean nothing
    assert answers(frame(PING, 0x16, 1 << 31, EIGHT)) == [(PING, ACK, 0, EIGHT)]


def test_a_window_that_falls_below_zero_is_filled_first() -> None:
    data = grpc(b"x" * 50)
    echo = BLOCK.replace(bytes([len(HANG)]) + HANG.encode(), bytes([len(ECHO)]) + ECHO.encode())

    def window(size: int) -> bytes:
        return frame(SETTINGS, 0, 0, struct.pack(">HI", http2.INITIAL_WINDOW, size))

    request = frame(HEADERS, END_HEADERS, 1, echo) + frame(DATA, END_STREAM, 1, data)
    sent = answers(window(30), request, window(10), frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\x16"))
    # 6.9.2: 30 bytes went, 10 - 30 are left, 22 more leave 2.
    assert [len(payload) for kind, _, _, payload in sent if kind == DATA] == [30, 2]
