"""What Linux says about processes and the machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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
    """Of it, copies of pages that the process has written to."""


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, all threads, user and system."""
    return parse_cpu_s((PROC / str(pid) / "stat").read_text())


def parse_cpu_s(stat: str) -> float:
    """Read user and system time from /proc/PID/stat; the name in it may hold anything."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def memory(pid: int) -> Memory:
    """Return a process's memory now."""
    return parse_memory((PROC / str(pid) / "smaps_rollup").read_text())


def parse_memory(rollup: str) -> Memory:
    """Read RSS, PSS and anonymous memory from /proc/PID/smaps_rollup."""
    kb = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in rollup.splitlines())
        if name in ("Rss", "Pss", "Anonymous")
    }
    return Memory(*(kb[name] * 1024 / 1e6 for name in ("Rss", "Pss", "Anonymous")))


def mapped(pid: int, folder: Path) -> Mapped:
    """Return what a process maps now of the files in a folder, removed ones too."""
    return parse_mapped((PROC / str(pid) / "smaps").read_text(), folder)


def parse_mapped(smaps: str, folder: Path) -> Mapped:
    """Add up the mappings of a folder's files in /proc/PID/smaps."""
    kb = dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)
    is_inside = False
    for line in smaps.splitlines():
        name, *values = line.split(maxsplit=5)
        if not name.endswith(":"):  # a mapping's address, rights, offset, device, inode and file
            is_inside = len(values) == 5 and Path(values[4]).is_relative_to(folder)
        elif is_inside and name[:-1] in kb:
            kb[name[:-1]] += int(values[0])
    return Mapped(*(value * 1024 / 1e6 for value in kb.values()))


def maps(pid: int, library: str) -> bool:
    """Return whether a process has mapped a file whose name begins so."""
    return f"/{library}" in (PROC / str(pid) / "maps").read_text()


def descendants(pid: int) -> list[int]:
    """Return the ids of the processes that a process started, and of those that they started."""
    try:
        tasks = list((PROC / str(pid) / "task").iterdir())
        found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return []
    return found + [further for child in found for further in descendants(child)]


def busy_s() -> float:
    """Return the CPU time that all processes of the machine have used."""
    return parse_busy_s((PROC / "stat").read_text())


def parse_busy_s(stat: str) -> float:
    """Read user, nice, system, irq and softirq time from /proc/stat."""
    fields = [int(value) for value in stat.splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / TICKS_PER_S


def describe_machine() -> dict[str, object]:
    """Return what a reader needs to judge the figures; no name of this machine."""
    names = [
        line.partition(":")[2].strip()
        for line in (PROC / "cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages / 1e9, 1),
        "kernel": platform.release(),
    }


def descriptors(pid: int) -> int:
    """Return how many files, sockets and pipes a process has open."""
    return sum(1 for _ in (PROC / str(pid) / "fd").iterdir())


def threads(pid: int) -> int:
    """Return how many threads a process has."""
    return sum(1 for _ in (PROC / str(pid) / "task").iterdir())
