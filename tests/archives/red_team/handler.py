"""Tries to reach what is none of a handler's business, as the request says: `NAME ARGUMENT…`.

Each attempt returns what it got; what refuses it is an OSError, whose name is the answer.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)


def handle(data, context):
    if data is None:
        return None
    return [attempt(*row["body"].decode().split()) for row in data]


def attempt(name, *arguments):
    try:
        return {"got": ATTEMPTS[name](*arguments)}
    except OSError as error:
        return {"refused": type(error).__name__, "why": error.strerror}


# -- secrets and files -------------------------------------------------------------------------


def variable(name):
    if name not in os.environ:
        raise FileNotFoundError(2, "no such variable")
    return os.environ[name]


def read(file):
    return Path(file).read_bytes().decode(errors="replace")[:4096]


def append(file, text):
    with Path(file).open("a") as there:
        there.write(text)
    return text


def cut(file):
    os.truncate(file, 0)
    return "cut"


def listing(folder):
    return sorted(os.listdir(folder))


def link(file, name):
    os.link(file, name)
    return Path(name).read_text()


def move(file, name):
    os.rename(file, name)
    return name


# -- other processes ---------------------------------------------------------------------------


def memory(pid):
    """Read what is mapped first: the head of the interpreter's file."""
    first = int(Path(f"/proc/{pid}/maps").read_text().partition("-")[0], 16)
    with Path(f"/proc/{pid}/mem").open("rb") as file:
        file.seek(first)
        return file.read(4).hex()


def vm_read(pid):
    """The same with a system call, of an address that is mapped in any case or not at all."""
    buffer = ctypes.create_string_buffer(8)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    remote = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    result = LIBC.process_vm_readv(int(pid), local, 1, remote, 1, 0)
    if result < 0 and ctypes.get_errno() != 14:  # EFAULT: only the address was wrong
        fail()
    return "asked"


def trace(pid):
    if LIBC.ptrace(16, int(pid), 0, 0) < 0:  # PTRACE_ATTACH
        fail()
    os.waitpid(int(pid), 0)
    LIBC.ptrace(17, int(pid), 0, 0)  # PTRACE_DETACH
    return "attached"


def send(pid, number):
    os.kill(int(pid), int(number))
    return "sent"


def send_by_descriptor(pid):
    descriptor = os.pidfd_open(int(pid))
    signal.pidfd_send_signal(descriptor, 0)
    return "sent"


def renice(pid):
    os.setpriority(os.PRIO_PROCESS, int(pid), os.getpriority(os.PRIO_PROCESS, int(pid)))
    return "slowed down"


def limit(pid):
    import resource

    resource.prlimit(int(pid), resource.RLIMIT_CORE, (0, 0))
    return "limited"


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


# -- the machine -------------------------------------------------------------------------------


def connect(port):
    with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as connection:
        connection.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
        return connection.recv(12).decode()


def raw_socket():
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP):
        return "open"


def packet_socket():
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM):
        return "open"


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        return "connected"


def namespace():
    if LIBC.unshare(0x10000000) < 0:  # CLONE_NEWUSER
        fail()
    return "made"


def mount(folder):
    if LIBC.mount(b"none", folder.encode(), b"tmpfs", 0, None) < 0:
        fail()
    LIBC.umount(folder.encode())
    return "mounted"


SYSTEM_CALLS = {
    "x86_64": {"keyctl": 250, "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425},
    "aarch64": {"keyctl": 219, "bpf": 280, "perf_event_open": 241, "io_uring_setup": 425},
}


def call(name):
    """Ask with arguments that mean nothing: whoever is let through is answered otherwise."""
    number = SYSTEM_CALLS[os.uname().machine][name]
    result = LIBC.syscall(number, 0, 0, 0, 0, 0)
    if result < 0 and ctypes.get_errno() == 1:
        fail()
    if result > 2:
        os.close(result)
    return "let through"


def become_root():
    os.setuid(0)
    return os.getuid()


def daemon(seconds):
    """Start what nobody's parent is, in a session of its own; return its process id."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            os.closerange(0, 3)
            os.closerange(3, 256)
            time.sleep(float(seconds))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return int(pipe.read())


def escape(file):
    """Start a program of its own: walls are around it too."""
    code = f"print(open({file!r}).read()[:4096])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if ran.returncode:
        raise PermissionError(1, ran.stderr.strip().splitlines()[-1])
    return ran.stdout


# -- what it may -------------------------------------------------------------------------------


def work():
    """What handlers do that mean no harm."""
    import multiprocessing
    import pwd
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "run")
        script.write_text("#!/bin/sh\necho ran\n")
        script.chmod(0o700)
        ran = subprocess.run([script], capture_output=True, text=True, check=True).stdout.strip()
    (Path.home() / "cache").write_text("kept")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.map(abs, [-1, -2])
    with contextlib.suppress(KeyError):
        pwd.getpwuid(os.getuid())
    child = subprocess.Popen(["sleep", "600"])
    child.kill()
    os.nice(1)
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))
    return {
        "ran": ran,
        "squares": squares,
        "child": child.wait(),
        "cpus": os.cpu_count() is not None,
        "self": Path("/proc/self/maps").read_text() != "",
        "random": len(os.urandom(4)),
        "scratch": tempfile.gettempdir() == str(Path.home()),
        "descriptors": len(os.listdir("/proc/self/fd")) > 3,
        "uid": os.getuid(),
    }


def fail():
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


ATTEMPTS = {
    name: value
    for name, value in globals().items()
    if callable(value) and name not in ("handle", "attempt", "fail")
}
