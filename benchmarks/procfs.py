"""What Linux says about processes and the machine."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Memory:
    """One process's memory, in MB (10^6 bytes)."""

    rss_mb: float
    pss_mb: float
    """As RSS, but a page that n processes share counts 1/n."""
    own_mb: float
    """In no file: what one more process like this one certainly takes."""


@dataclass(frozen=True)
class Mapped:
    """What a process maps of files, in MB (10^6 bytes)."""

    resident_mb: float
    pss_mb: float
    own_mb: float
    """Copies among it of pages that the process has written to."""


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, all threads, user and system."""
    return time.clock_gettime(~pid << 3 | 2)  # of clock_getcpuclockid(3): to the nanosecond


def memory(pid: int) -> Memory:
    """Return a process's memory now."""
    return Memory(*_add_up(pid, None))


def mapped(pid: int, folder: Path) -> Mapped:
    """Return what a process maps now of the files in a folder, removed ones too."""
    return Mapped(*_add_up(pid, folder))


def _add_up(pid: int, folder: Path | None) -> tuple[float, float, float]:
    """Return RSS, PSS and anonymous memory of all mappings, or of a folder's files, in MB."""
    found = [
        each
        for each in psutil.Process(pid).memory_maps()
        if folder is None or Path(each.path).is_relative_to(folder)
    ]
    rss, pss, own = (
        sum(getattr(each, key) for each in found) for key in ("rss", "pss", "anonymous")
    )
    return rss / 1e6, pss / 1e6, own / 1e6


def maps(pid: int, library: str) -> bool:
    """Return whether a process has mapped a file whose name begins so."""
    return f"/{library}" in Path(f"/proc/{pid}/maps").read_text()


def descendants(pid: int) -> list[int]:
    """Return the ids of the processes that a process started, and of those that they started."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def busy_s() -> float:
    """Return the CPU time that all processes of the machine have used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def describe_machine() -> dict[str, object]:
    """Return what a reader needs to judge the figures; no name of this machine."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(),
    }


def descriptors(pid: int) -> int:
    """Return how many files, sockets and pipes a process has open."""
    return int(psutil.Process(pid).num_fds())


def threads(pid: int) -> int:
    """Return how many threads a process has."""
    return int(psutil.Process(pid).num_threads())
