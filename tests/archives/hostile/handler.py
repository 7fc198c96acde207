"""Misbehaves as the body says: `NAME ARGUMENT…` calls a function of this file, anything else is echoed.

A function that returns something decides over the answer of its request, one named `all_…` over
the answers of the whole batch.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import numpy as np
import torch

from modelyard.handlers import PredictionException


def handle(data, context):
    if data is None:
        return None
    answers = []
    for at, row in enumerate(data):
        body = bytes(row["body"]).decode()
        name, *arguments = body.split()
        if name.startswith("all_"):
            return MISDEEDS[name](data, *arguments)
        misdeed = MISDEEDS.get(name)
        answers.append(misdeed(context, at, *arguments) if misdeed else {"body": body})
    return answers


def wire():
    """The worker is told its socket on its command line."""
    return socket.socket(fileno=os.dup(int(sys.argv[1])))


# -- waits -------------------------------------------------------------------------------------


def until(context, at, file):
    while not Path(file).exists():
        time.sleep(0.005)
    return "gone on"


def nap(context, at, seconds):
    time.sleep(float(seconds))
    return "rested"


def sleep_forever(context, at):
    while True:
        time.sleep(600)


def spin_forever(context, at):
    while True:
        pass


def hold_the_gil(context, at):
    ctypes.PyDLL(None).sleep(600)


def stop_itself(context, at):
    os.kill(os.getpid(), signal.SIGSTOP)


# -- ends --------------------------------------------------------------------------------------


def leave(context, at, code):
    os._exit(int(code))


def kill_itself(context, at):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def segfault(context, at):
    ctypes.string_at(0)


def abort(context, at):
    os.abort()


def overflow(context, at):
    """Outgrow the C stack, whose limit the kernel asks for at each page that it grows by."""
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 14, resource.RLIM_INFINITY))
    value = None
    for _ in range(100_000):
        value = [value]
    sys.setrecursionlimit(1_000_000)
    repr(value)


def cut_the_wire(context, at):
    wire().shutdown(socket.SHUT_RDWR)
    time.sleep(600)


# -- raises ------------------------------------------------------------------------------------


def exit(context, at):
    sys.exit("bye")


def interrupt(context, at):
    raise KeyboardInterrupt


def generator_exit(context, at):
    raise GeneratorExit


def memory(context, at):
    raise MemoryError


def recurse(context, at):
    recurse(context, at)


class Unpicklable(Exception):
    def __init__(self):
        super().__init__(lambda: None, open(os.devnull))

    def __reduce__(self):
        raise TypeError("not for other processes")


def unpicklable(context, at):
    raise Unpicklable


class Mute(Exception):
    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


def mute(context, at):
    raise Mute


class Leaving(Exception):
    def __str__(self):
        sys.exit(5)

    __repr__ = __str__


def leaving(context, at):
    raise Leaving


def mute_message(context, at):
    raise PredictionException(Mute(), 418)


def surrogate(context, at):
    raise ValueError("\ud800 \0 \r\n\x1b[31m")


# -- answers -----------------------------------------------------------------------------------


def all_none(data):
    return None


def all_dict(data):
    return {"body": "sick"}


def all_generator(data):
    return ({"body": "sick"} for _ in data)


def all_short(data):
    return [{"body": "sick"}] * (len(data) - 1)


def all_long(data):
    return [{"body": "sick"}] * (len(data) + 1)


def all_spoil(data):
    for row in data:
        row["body"].clear()
        row.clear()
    raise ValueError("spoilt")


class Liar(list):
    """Says that it is as long as it is not."""

    def __init__(self, items, said):
        super().__init__(items)
        self.said = said

    def __len__(self):
        return self.said


def all_lie_short(data):
    return Liar([], len(data))


def all_lie_long(data):
    return Liar([{"body": "sick"}] * 1000, len(data))


class Endless(list):
    def __iter__(self):
        while True:
            yield {"body": "sick"}


def all_endless(data):
    return Endless()


def nan(context, at):
    return float("nan")


def infinity(context, at):
    return {"a": [float("-inf")]}


def cycle(context, at):
    outer = []
    outer.append(outer)
    return outer


def deep(context, at):
    value = None
    for _ in range(100_000):
        value = [value]
    return value


def array(context, at):
    return np.zeros(3)


def tensor(context, at):
    return torch.zeros(3)


def scalar(context, at):
    return {"score": np.float32(0.5)}


def lone_surrogate(context, at):
    return "\ud800"


def any_object(context, at):
    return object()


def odd_keys(context, at):
    return {(1, 2): 3}


class Unlistable(dict):
    def items(self):
        raise AttributeError("no items today")


def unlistable(context, at):
    return Unlistable(a=1)


class OddText(str):
    def encode(self, *args):
        return ["no", "bytes"]

    def __len__(self):
        return 7_000_000


def odd_text(context, at):
    return OddText("text")


class OddBytes(bytes):
    def __bytes__(self):
        return self

    def __len__(self):
        return 7_000_000


def odd_bytes(context, at):
    return OddBytes(b"bytes")


def raw_bytes(context, at):
    return b"\0\xff"


def large(context, at):
    return b"x" * 100_000_000


def odd_header(context, at):
    context.set_response_header(at, "x-note", Mute())
    return "answer"


def odd_metric(context, at):
    context.metrics.add_counter("Odd", 1)
    context.metrics.records[-1]["value"] = Mute()
    return {"body": "counted"}


# -- output ------------------------------------------------------------------------------------


def print_much(context, at):
    line = "x" * 99_999 + "\n"
    for _ in range(1000):
        sys.stdout.write(line)
    return {"body": "printed"}


def print_bytes(context, at):
    os.write(1, bytes(range(256)) * 100)
    os.write(2, "half of ü: ".encode() + b"\xc3")
    os.write(2, b"\x1b[2J\x1b]0;title\x07\r\n2026-01-01 00:00:00,000 CRITICAL serve printed\r\n")
    return {"body": "printed"}


def close_descriptors(context, at):
    os.closerange(0, 3)
    raise RuntimeError("nobody will read this")


def close_streams(context, at):
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    raise RuntimeError("nobody will read this")


# -- the wire ----------------------------------------------------------------------------------


def send_and_wait(data):
    with wire() as connection:
        connection.sendall(data)
    time.sleep(600)


def garbage(context, at):
    send_and_wait(b"\xff" * 64)


def flood(context, at):
    with wire() as connection:
        while True:
            connection.sendall(b"\xff" * 1_000_000)


def text(context, at):
    send_and_wait(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


def long_item(context, at):
    send_and_wait(struct.pack("<IIHHIIIII", 1, 1, 200, 0, 0, 0, 0, 0, 0xFFFFFFFF))


def half_a_frame(context, at):
    with wire() as connection:
        connection.sendall(struct.pack("<IIHHIIIII", 1, 1, 200, 0, 0, 0, 0, 0, 10) + b"five.")
    os._exit(0)


def replay(context, at):
    """Answer each job that it may hold twice."""
    answers = [struct.pack("<IHHIIIII", id, 200, 0, 0, 0, 0, 0, 0) for id in range(1, 33)]
    send_and_wait(b"".join(struct.pack("<I", 1) + each for each in answers * 2))


def forge(context, at, status, headers=""):
    """Answer the first job that this worker ever held with a reply that no server may send on."""
    meta = headers.replace("|", "\0").encode()
    send_and_wait(struct.pack("<IIHHIIIII", 1, 1, int(status), 0, 0, 0, 0, len(meta), 0) + meta)


def reports(context, at, count):
    """More messages of what was measured than go with an answer."""
    send_and_wait((struct.pack("<IIHHIIIII", 1, 0, 4, 0, 0, 0, 0, 0, 2) + b"{}") * int(count))


def chunks(count):
    """Return a frame of empty chunks of the answer that this worker makes now."""
    frame = sys._getframe()
    while "batch" not in frame.f_locals:
        frame = frame.f_back
    chunk = struct.pack("<IHHIIIII", frame.f_locals["batch"][0].id, 200, 1, 0, 0, 0, 0, 0)
    return struct.pack("<I", count) + chunk * count


def crowd(context, at, count):
    """More chunks in one frame than it holds jobs."""
    send_and_wait(chunks(int(count)))


def stream_until(context, at, file):
    """Send empty chunks without end; return how many bytes of them the server took."""
    data, sent = chunks(1) * 2000, 0
    with wire() as connection:
        while not Path(file).exists():
            connection.sendall(data)
            sent += len(data)
    return {"sent": sent}


def control(context, at, code):
    """A control message that nobody expects, or one with more brackets than a parser takes."""
    body = b"[" * 200_000 if code == "4" else json.dumps({"protocol": 2}).encode()
    send_and_wait(struct.pack("<IIHHIIIII", 1, 0, int(code), 0, 0, 0, 0, 0, len(body)) + body)


MISDEEDS = {
    name: value
    for name, value in globals().items()
    if callable(value) and not isinstance(value, type) and name not in ("chunks", "handle", "wire")
}
