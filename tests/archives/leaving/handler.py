"""Start what is meant to outlive the worker; a request says what, and in which file that says it lives."""

import ctypes
import os
import subprocess
import sys
import time

CHAIN = """
import os, sys, time
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        break
else:
    time.sleep(600)
ends = time.monotonic() + 120  # of itself, where what is tested does not end it
file = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o666)
while time.monotonic() < ends:
    os.write(file, b".")
    os.setsid()
    time.sleep(0.0015)
    try:
        if os.fork():
            os._exit(0)
    except OSError:  # it may have no more processes, those included that nobody has reaped
        pass
"""
DAEMON = """
import os, time
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
time.sleep(600)
"""


def handle(data, context):
    return data and [act(*row["body"].decode().split()) for row in data]


def act(what, file, *count):
    if what == "untied":  # it neither dies with its parent nor minds what its socket says
        ctypes.CDLL(None).prctl(1, 0)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", file])
        time.sleep(600)
    code = {"chain": CHAIN, "daemon": DAEMON}[what]
    subprocess.Popen([sys.executable, "-c", code, file, *count], start_new_session=True, close_fds=True)
    return os.getpid()
