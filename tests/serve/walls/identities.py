"""Who a server may be: root; another user; both in a container, where nobody makes namespaces; root
of a user namespace with one user."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from modelyard.serve.settings import Settings
from modelyard.serve.walls import kernel
from tests.shared import ROOT

UID = 1500
CONTAINER = """
import ctypes, os, platform, struct, sys
from modelyard.serve.walls import calls, kernel
column = calls._ARCHITECTURES[platform.machine()][0]
program = [calls._load(0)]
for name in ("unshare", "mount", "setns"):
    program += calls._if(0x15, calls._DENIED[name][column], [calls._refuse()])
code = b"".join([*program, calls._allow()])
buffer = ctypes.create_string_buffer(code, len(code))
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
kernel.syscall(calls._SECCOMP[column], 1, 0, header)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""What container engines forbid as they come; also what a set-uid program is for."""
ROOTLESS = ("unshare", "--user", "--map-root-user")
IS_ROOT = os.geteuid() == 0 and kernel.has_users(Settings().uids)
OURS = "root" if IS_ROOT else "user" if os.geteuid() else "rootless"


DOCKERS = (
    *("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("net_bind_service", "net_raw", "sys_chroot", "mknod", "audit_write", "setfcap"),
)
"""Capabilities of root in a container, as Docker has them."""


def command_as(identity: str, words: list[str]) -> list[str]:
    """Return the command that runs another as one of `matrix.IDENTITIES`.

    Who is not root stays who it is, and is never root.
    """
    container = (sys.executable, "-B", "-P", "-c", CONTAINER)
    if not IS_ROOT and identity == OURS:
        return words
    inner = [*{"rootless": ROOTLESS, "container": container}.get(identity, ()), *words]
    if not IS_ROOT or identity == "root":
        return inner
    if identity == "root in a container":
        capabilities = ",".join(["-all", *(f"+{each}" for each in DOCKERS)])
        limit = (f"--bounding-set={capabilities}", "--inh-caps=-all")
        return ["setpriv", *limit, *container, *words]
    plain = ("--clear-groups", "--inh-caps=-all", "--bounding-set=-all")
    become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", *plain, *inner]
    return ["unshare", "--mount", "sh", "-ec", "\n".join([*_open_folders(), shlex.join(become)])]


def is_possible(identity: str) -> bool:
    """Return whether this user can be that one."""
    if identity == "root" and not IS_ROOT:
        return False
    try:
        ran = subprocess.run(command_as(identity, ["true"]), capture_output=True, check=False)
    except OSError:
        return False
    return ran.returncode == 0


def _open_folders() -> Iterator[str]:
    """Yield what opens to others, here only, the folders in which Python and we lie."""
    needed = [Path(sys.executable).resolve(), Path(sys.prefix).resolve(), ROOT]
    needed += [Path(each).resolve() for each in sys.path if each]
    done: set[Path] = set()
    for path in needed:
        closed = [each for each in path.parents if each.exists() and not each.stat().st_mode & 1]
        for folder in closed[-1:]:
            first = folder / path.relative_to(folder).parts[0]
            if first in done:
                continue
            yield "there=$(mktemp -d)" if first.is_dir() else "there=$(mktemp)"
            yield f"mount --bind {first} $there"
            if folder not in {each.parent for each in done}:
                yield f"mount -t tmpfs -o mode=755 none {folder}"
            yield f"mkdir {first}" if first.is_dir() else f"touch {first}"
            yield f"mount --bind $there {first}"
            done.add(first)
