"""Does to its own process what the body says: die, signal NUMBER, hang, garbage, forge, until FILE, sleep SECONDS."""

import os
import socket
import struct
import sys
import time


def handle(data, context):
    if data is None:
        return None
    bodies = [bytes(row["body"]).decode() for row in data]
    for body in bodies:
        if body == "die":
            os._exit(3)
        if body.startswith("signal"):
            os.kill(os.getpid(), int(body.split()[1]))
        if body == "hang":
            time.sleep(600)
        if body == "garbage":
            # The worker is told its socket on its command line.
            socket.socket(fileno=os.dup(int(sys.argv[1]))).sendall(b"\xff" * 64)
            time.sleep(600)
        if body == "forge":
            # A reply to every job that this worker may hold, with a status that HTTP has not.
            replies = b"".join(
                struct.pack("<IHHIIIII", id, 999, 0, 0, 0, 0, 0, 0) for id in range(1, 65)
            )
            socket.socket(fileno=os.dup(int(sys.argv[1]))).sendall(b"\x40\0\0\0" + replies)
            time.sleep(600)
        if body.startswith("until"):
            while not os.path.exists(body.split()[1]):
                time.sleep(0.01)
        if body.startswith("sleep"):
            time.sleep(float(body.split()[1]))
    return [{"body": body, "pid": os.getpid()} for body in bodies]
