"""Which walls this kernel, and the server's user, have."""

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelyard.serve.walls import calls, kernel, landlock, mounts, places, raising

UP, LACKING, OFF = "up", "lacking", "off"
_CHOWN, _KILL, _SETGID, _SETUID = 0, 5, 6, 7
_READS_ALL = (kernel.DAC_READ_SEARCH, kernel.DAC_OVERRIDE)
"""Capabilities with which a user of its own reads what the server's may, where Landlock lets it:
archive and interpreter often lie in folders that are closed to others."""


@dataclass(frozen=True)
class Measure:
    """One wall: what a handler does not do, whatever that is made of."""

    name: str
    status: str
    """up; lacking: this machine has not what it is made of; off: not asked for, or not needed."""
    found: str
    """What it is made of, or why there is none and what to do."""


def examine(
    state: Path, uids: range, reads: Iterable[str] = (), is_wanted: bool = True
) -> list[Measure]:
    """Return every wall around workers, and whether it stands.

    Args:
        state: the server's state folder, which workers must not read.
        uids: users of which each model version gets one, where the server is root.
        reads: what workers may read by a setting.
        is_wanted: the setting `sandbox`.
    """
    leftovers = Measure("leftovers", UP, "what a worker started ends with it")
    found = list(_examine(state, uids, reads))
    if not is_wanted:
        found = [Measure(each.name, OFF, "by the setting sandbox") for each in found]
    return [leftovers, *found]


def reading_capability() -> int | None:
    """Return with which capability users of workers read; the server must have it itself."""
    held = kernel.capabilities()
    return next((number for number in _READS_ALL if held >> number & 1), None)


def why_one_user(uids: range) -> str | None:
    """Return why workers run as the server's own user, or None."""
    if os.geteuid():
        return "the server is not root"
    if not uids:
        return "by the setting worker_uids"
    if not kernel.has_users(uids):
        return (
            f"users {uids[0]}-{uids[-1]} are not all in this user namespace, as in rootless "
            "containers; set worker_uids to users that are, or to nothing"
        )
    if not (landlock.version() and calls.is_supported()):
        return "it takes Landlock and seccomp"
    held = kernel.capabilities()
    may_change = all(held >> number & 1 for number in (_CHOWN, _SETUID, _SETGID, _KILL))
    if not may_change or reading_capability() is None:
        return "it takes CAP_CHOWN, CAP_SETUID, CAP_SETGID, CAP_KILL and CAP_DAC_READ_SEARCH"
    return None


def _examine(state: Path, uids: range, reads: Iterable[str]) -> Iterator[Measure]:
    version, has_filter = landlock.version(), calls.is_supported()
    no_mounts, one_user = mounts.why_not(), why_one_user(uids)
    kernel_name = f"Linux {platform.release()}"
    yield Measure("environment", UP, "variables by a list of names")
    yield Measure("privileges", UP, "no capabilities, no way to new ones")
    yield Measure("limits", UP, f"no core files, {raising.MOST_FILES} open files")

    no_filter = f"{kernel_name} on {platform.machine()} takes no seccomp filter from this process"
    for name, text in (
        ("system calls", "seccomp"),
        ("network", "seccomp, for `network: none`"),
        ("notification", "seccomp, without inotify and fanotify"),
        ("affinity", "seccomp, of itself only"),
    ):
        yield Measure(name, *((UP, text) if has_filter else (LACKING, no_filter)))

    if not version:
        lacking = f"{kernel_name} has no Landlock: it takes 5.13, and `lsm=landlock,…` at its start"
    elif place := _who_reads(state, [*places.readable(), *reads]):
        lacking = f"the state folder {state} lies in {place}, which workers read: give another"
    elif no_mounts and version < landlock.TRUNCATE_SINCE:
        lacking = f"{kernel_name}: what may be read may be cut; it takes 6.2, or {no_mounts}"
    else:
        lacking = ""
    yield Measure("files", *((LACKING, lacking) if lacking else (UP, f"Landlock {version}")))

    lacking = f"{kernel_name}: workers of one user may end each other; it takes 6.12"
    yield _first("signals", lacking, {
        f"Landlock {version}": version >= landlock.SCOPES_SINCE,
        "users of their own": one_user is None,
    })  # fmt: skip
    yield _first("metadata", no_filter, {
        "read-only mounts": no_mounts is None,
        "users of their own": one_user is None and reading_capability() == kernel.DAC_READ_SEARCH,
        "seccomp: modes, owners and times stay as files were made": has_filter,
    })  # fmt: skip
    what_to_do = f"{no_mounts}: let the server make user namespaces, or give each model a container"
    lacking = f"versions share {places.SHARED_MEMORY}, for {what_to_do}"
    yield _first("shared memory", lacking if has_filter else no_filter, {
        f"a {places.SHARED_MEMORY} of their own": has_filter and no_mounts is None,
    })  # fmt: skip
    lacking = f"a handler learns which of the names are there that it guesses, for {what_to_do}"
    yield _first("names", lacking, {f"an empty folder over {state}": no_mounts is None})
    found = f"one per model version, of {uids[0]}-{uids[-1]}" if one_user is None else one_user
    yield Measure("users", OFF if one_user else UP, found)


def _first(name: str, lacking: str, means: Mapping[str, bool]) -> Measure:
    """Return a wall by the first of its means that there is."""
    text = next((text for text, is_there in means.items() if is_there), None)
    return Measure(name, UP, text) if text else Measure(name, LACKING, lacking)


def _who_reads(folder: Path, paths: Sequence[str]) -> str | None:
    """Return which of these paths a folder lies in, links followed."""
    there = folder.resolve()
    return next((path for path in paths if there.is_relative_to(Path(path).resolve())), None)
