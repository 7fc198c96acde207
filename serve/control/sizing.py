"""Cores, devices and what was said of each model → its workers and threads, and why.

`choose` is a pure function. A worker has one thread unless somebody says otherwise: two workers of
one thread answered more than one of two on every model that was measured, and a team of threads
collapses when anything else runs on its cores (1256 answers a second became 71, decision 0029).
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from modelyard.serve.errors import Conflict

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
WORKER_BYTES = 300 << 20
"""What a worker with a small model takes; most of it is torch."""


@dataclass(frozen=True)
class Machine:
    """What this process may use of the machine."""

    cores: int
    """Cores that may be kept busy at once, at least 1."""
    gpus: int
    """CUDA devices that a worker would see."""
    limit: str = ""
    """What decides over `cores`, in words."""
    has_quota: bool = False
    """Whether a control group holds this process up once it has used its share of the time."""


@dataclass(frozen=True)
class ResourceRequest:
    """What is said of one model version; where nothing is said the chooser decides."""

    device: str
    """auto, cpu, cuda or cuda:N."""
    workers: int | None = None
    workers_from: str = ""
    threads: int = 0
    """Threads of each worker; 0 leaves the choice open."""
    threads_from: str = ""


@dataclass(frozen=True)
class Allocation:
    """What one model version gets; `why_…` are for people."""

    workers: int
    threads: int
    """Threads of each worker."""
    why_workers: str = ""
    why_threads: str = ""
    is_stated: bool = False
    """Whether somebody said how many workers, or how many threads each."""
    most: int | None = None
    """Workers that scaling leaves alone; None: `workers`."""

    @property
    def total_threads(self) -> int:
        """Threads of all workers together."""
        return self.workers * self.threads


def choose(
    machine: Machine, requests: Sequence[ResourceRequest], taken: int = 0
) -> list[Allocation]:
    """Return every model version its workers and threads.

    What was said stands. A model on CUDA gets one worker per device. The other models share in
    equal parts the cores that are left, and each has at least one worker; so all together have no
    more threads than there are cores, or than models where those are more, unless more was said.

    Args:
        taken: threads of models that run already.
    """
    allocations = {
        at: allocation for at, each in enumerate(requests) if (allocation := _fixed(machine, each))
    }
    open_ = [at for at in range(len(requests)) if at not in allocations]
    while open_:
        used = taken + sum(allocation.total_threads for allocation in allocations.values())
        share = max(1, (machine.cores - used) // len(open_))
        # A team larger than its share leaves less to the others: they share once more.
        settled = [at for at in open_ if requests[at].threads > share] or open_
        for at in settled:
            allocations[at] = _shared(machine, requests[at], share, len(open_), used)
        open_ = [at for at in open_ if at not in allocations]
    return [allocations[at] for at in range(len(requests))]


def is_on_gpu(machine: Machine, device: str) -> bool:
    """Return whether workers with this `device` run on CUDA."""
    return device != "cpu" and machine.gpus > 0


def describe_excess(
    machine: Machine, allocations: Sequence[Allocation], taken: int = 0
) -> str | None:
    """Return a warning where what was said makes more threads than cores, else None."""
    total = taken + sum(allocation.total_threads for allocation in allocations)
    said = [allocation for allocation in allocations if allocation.is_stated]
    if total <= machine.cores or not said or total <= len(allocations):
        return None
    return (
        f"{total} threads of workers on {machine.cores} "
        f"core{'s' * (machine.cores != 1)}: they take turns, which costs latency, and teams of "
        "threads may collapse; ask for fewer workers or threads, or see `modelyard tune`"
    )


def _fixed(machine: Machine, request: ResourceRequest) -> Allocation | None:
    """Return the allocation of a model that takes no part in sharing."""
    if request.workers is not None:
        return _allocate(request, request.workers, request.workers_from)
    if not is_on_gpu(machine, request.device):
        return None
    if request.device in ("auto", "cuda"):
        why = f"one for each of {machine.gpus} CUDA devices" if machine.gpus > 1 else "one device"
        return _allocate(request, machine.gpus, why)
    return _allocate(request, 1, f"one for {request.device}")


def _shared(
    machine: Machine, request: ResourceRequest, share: int, others: int, used: int
) -> Allocation:
    threads = request.threads or 1
    left = machine.cores - used
    if left < others:
        why = f"each model has at least one; {_cores(max(0, left))} left for {_models(others)}"
    else:
        rest = "" if left == machine.cores else " left"
        why = f"{_cores(left)}{rest} for {_models(others)}"
        if threads > 1:
            why += f", {threads} threads each"
    return _allocate(request, max(1, share // threads), why)


def _allocate(request: ResourceRequest, workers: int, why: str) -> Allocation:
    why_threads = "workers of one thread answer more than a team"
    if request.threads:
        why_threads = request.threads_from
    is_stated = request.workers is not None or bool(request.threads)
    return Allocation(workers, request.threads or 1, why, why_threads, is_stated)


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"


def _models(count: int) -> str:
    return f"{count} model{'s' * (count != 1)}"


class StartupAllocator:
    """Shares names and cores out among the models of one start.

    Cores are, once the request of each model is there.
    """

    def __init__(self, machine: Machine, count: int) -> None:
        self._machine = machine
        self._count = count
        self._requests: list[ResourceRequest] = []
        self._complete = asyncio.Event()
        self._chosen: list[Allocation] = []
        self._locations: dict[tuple[str, str], str] = {}

    def claim(self, name: str, version: str, location: str) -> None:
        """Take a model version's name, before any worker of it starts.

        Raises:
            Conflict: another archive of this start has it.
        """
        if first := self._locations.get((name, version)):
            raise Conflict(
                f"{first} and {location} are both version {version} of model {name}: leave one "
                "out, or name it otherwise (NAME=FILE)"
            )
        self._locations[name, version] = location

    async def allocate(self, request: ResourceRequest) -> Allocation:
        """Return what one model gets; unless it states its workers, after all requests."""
        at = len(self._requests)
        self._requests.append(request)
        if len(self._requests) == self._count:
            self._complete.set()
        if request.workers is not None:  # whatever the others say
            return choose(self._machine, [request])[0]
        await self._complete.wait()
        self._chosen = self._chosen or choose(self._machine, self._requests)
        return self._chosen[at]

    @property
    def warning(self) -> str | None:
        """Why it is too much, or None."""
        return describe_excess(self._machine, choose(self._machine, self._requests))


# -- the machine -------------------------------------------------------------------------------


def share_of(count: int, servers: int) -> int:
    """Return what each of several servers gets, the same for all: connections come evenly."""
    return -(-count // servers)


def machine_of(servers: int) -> Machine:
    """Return what each of so many servers may use of this machine."""
    machine = this_machine()
    if servers == 1:
        return machine
    limit = f"one of {servers} servers' part of {machine.limit}"
    return replace(machine, cores=max(1, machine.cores // servers), limit=limit)


def this_machine() -> Machine:
    """Look at the cores and devices that this process may use."""
    mask = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    if quota is not None and quota < mask:
        limit = f"the control group's quota of {quota:g} of {_cores(mask)}"
        return Machine(max(1, int(quota)), count_gpus(), limit, has_quota=True)
    there = os.cpu_count() or mask
    limit = "all cores" if mask == there else f"the affinity mask, of {_cores(there)}"
    return Machine(mask, count_gpus(), limit)


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float | None:
    """Return the cores that the control groups of this process allow it; None sets no limit.

    The least of the group and all above it, of version 2 (`cpu.max`) and version 1
    (`cpu.cfs_quota_us`).

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
    """
    groups = control_groups("cpu", cgroups, own)
    return min((quota for group in groups for quota in _quota_of(group)), default=None)


def control_groups(
    controller: str, cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS
) -> Iterator[Path]:
    """Yield the folders that may hold limits of this process, of both versions of control groups.

    A container mostly sees its own group as the root, so a path that is not there counts from the
    root; not every folder exists.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = Path(path.lstrip("/"))
        # Version 2 names no controllers.
        for root in (controllers, controller) if controllers else ("", "unified"):
            for folder in (group, *group.parents):
                yield cgroups / root / folder


def _quota_of(folder: Path) -> list[float]:
    """Return the quota of one control group, in cores, in a list of at most one."""
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
        return [int(quota) / int(period)] if quota not in ("max", "-1") else []
    except (OSError, ValueError, ZeroDivisionError):
        return []


def count_gpus() -> int:
    """Return how many NVIDIA devices a worker would see, without asking CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([index for index in visible.split(",") if index.strip() not in ("", "-1")])
    return sum(1 for file in Path("/dev").glob("nvidia*") if file.name[6:].isdigit())


def available_memory() -> int:
    """Return how many bytes workers may still take."""
    return min([int(psutil.virtual_memory().available), *memory_limits()])


def memory_limits() -> Iterator[int]:
    """Yield what this process's control groups may hold, in bytes."""
    for group in control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # `max` is none
                yield int((group / name).read_text(encoding="utf-8"))
