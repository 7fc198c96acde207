"""The files that a worker needs, whatever it serves: the system's, Python's, the devices'."""

import os
import sys
from pathlib import Path

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/opt/rocm", "/opt/intel"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/localtime", "/etc/timezone", "/etc/mime.types", "/etc/os-release", "/etc/fonts"),
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/pki/tls/openssl.cnf"),
    *("/etc/pki/tls/cert.pem", "/etc/pki/ca-trust"),
    *("/etc/ca-certificates", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/hosts"),
    *("/etc/host.conf", "/etc/gai.conf", "/etc/resolv.conf", "/etc/services", "/etc/protocols"),
    *("/run/systemd/resolve", "/etc/OpenCL", "/etc/vulkan", "/etc/nvidia", "/etc/nccl.conf"),
    *("/sys/devices", "/sys/class", "/sys/bus", "/sys/module", "/sys/fs/cgroup", "/sys/kernel/mm"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/loadavg", "/proc/uptime"),
    *("/proc/version", "/proc/filesystems", "/proc/devices", "/proc/vmstat", "/proc/cgroups"),
    *("/proc/sys", "/proc/driver"),
)
"""Never all of /etc, /sys or /dev: the user of a version may read what root may, so what is named
here must be harmless in anybody's hands."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ACCELERATORS = ("nvidia*", "kfd", "dri/render*", "infiniband/*")

OWN = "/proc/self"
"""What the kernel shows of the process itself; not of others, and not of what it starts."""
SHARED_MEMORY = "/dev/shm"
"""Folder of semaphores and shared tensors; where mounts are its own, a process begins with an empty
one."""


def readable() -> list[str]:
    """Return what every worker of this interpreter may read."""
    variables = ("LD_LIBRARY_PATH", "LD_PRELOAD")
    stated = [each for name in variables for each in os.environ.get(name, "").split(os.pathsep)]
    ours = Path(__file__).resolve().parents[2]  # a link leads to it where it is not installed
    python = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *sys.path)
    found = dict.fromkeys((*_SYSTEM, *python, str(ours), *stated))
    return [each for each in found if each.startswith("/") and each != "/" and Path(each).exists()]


def devices() -> list[str]:
    """Return the device files that it may read and write."""
    return [*_DEVICES, *accelerators()]


def accelerators() -> list[str]:
    """Return the device files of GPUs, and of networks between them."""
    return [str(path) for pattern in _ACCELERATORS for path in Path("/dev").glob(pattern)]
