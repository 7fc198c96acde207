"""Takes what the body says: give BYTES, announce COUNT BYTES, record COUNT, print BYTES …"""

import json
import os
import socket
import struct
import sys
import time


def wire() -> socket.socket:
    """Return the socket to the server, which the worker is told on its command line."""
    return socket.socket(fileno=os.dup(int(sys.argv[1])))


def handle(data, context):
    if data is None:
        return None
    return [answer(bytes(row["body"]).decode(), context) for row in data]


def answer(body, context):
    verb, *numbers = body.split()
    first, *rest = map(int, numbers or ["0"])
    if verb == "give":
        return b"x" * first
    if verb == "stream":
        for _ in range(first >> 20):
            context.stream([b"x" * (1 << 20)])
        return b""
    if verb == "announce":
        heads = b"".join(
            struct.pack("<IHHIIIII", at + 1, 200, 0, 0, 0, 0, 0, rest[0]) for at in range(first)
        )
        with wire() as server:
            server.sendall(struct.pack("<I", first) + heads)
            while True:
                server.sendall(bytes(1 << 20))
    if verb == "record":
        text = json.dumps({"records": [0] * first}).encode()
        with wire() as server:
            server.sendall(struct.pack("<IIHHIIIII", 1, 0, 4, 0, 0, 0, 0, 0, len(text)) + text)
        time.sleep(0.2)
    if verb == "measure":
        for _ in range(first):
            context.metrics.add_counter("Counted", 1)
    if verb == "print":
        line = "x" * 99
        for _ in range(first // 100):
            print(line)
        sys.stdout.flush()
    return {"done": body}
