"""The walls around the workers of each model version: planned when it is built, gone with it."""

import contextlib
import logging
import os
import secrets
import site
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from modelyard.archiver.untrusted.names import SHARED_FOLDER
from modelyard.base.disk import remove
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings
from modelyard.serve.walls import measures, mounts, places
from modelyard.serve.walls.measures import Measure
from modelyard.serve.walls.raising import Walls

logger = logging.getLogger(__name__)

USER = "modelyard"
"""What a user without a name is called, where libraries ask."""


def examine_machine(settings: Settings) -> list[Measure]:
    """Return every wall around workers, and whether it stands here."""
    return measures.examine(
        settings.state_dir, settings.uids, map(str, settings.read_paths), settings.sandbox
    )


def check_machine(settings: Settings) -> list[Measure]:
    """Return every wall; log those that are lacking.

    Raises:
        StartError: one is, and the setting `require_sandbox` asks for all.
    """
    found = examine_machine(settings)
    lacking = [each for each in found if each.status == measures.LACKING]
    if lacking and settings.require_sandbox:
        reasons = "; ".join(f"{each.name}: {each.found}" for each in lacking)
        raise StartError(f"--require-sandbox: not every wall around workers stands: {reasons}")
    for each in found if settings.sandbox else ():
        if each.status != measures.UP:
            level = logging.WARNING if each.status == measures.LACKING else logging.INFO
            logger.log(level, "workers have no wall for %s: %s", each.name, each.found)
    if not settings.sandbox:
        logger.warning("workers have no walls: an archive may do what the server may (sandbox)")
    return found


class Sandbox:
    """Plans the walls of one server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._uids = settings.uids if measures.why_one_user(settings.uids) is None else None
        self._has_mounts = settings.sandbox and mounts.why_not() is None
        self._taken: dict[Path, int] = {}
        self._taking = threading.Lock()
        self._reads = (*places.readable(), *map(str, settings.read_paths))
        self._devices = tuple(places.devices())
        groups = {Path(device).stat().st_gid for device in places.accelerators()}
        self._groups = tuple(sorted(groups - {0}))

    def plan(self, folder: Path, network: str, files: str, may_write: bool) -> Walls | None:
        """Return the walls of a version's workers, and make the folder that they may write.

        Args:
            folder: where the archive is unpacked.
            network: `none` or `all`.
            files: `own` or `all`.
            may_write: whether its handler may write beside the model.
        """
        if not self._settings.sandbox:
            return None
        has_network = network == "all"
        if files == "all":
            return Walls(has_network, has_files=True)
        # None lies in another: a worker could put a link in its place, and the next one get what
        # this leads to.
        own = [scratch_of(folder), folder if may_write else folder / SHARED_FOLDER]
        for each in own:
            each.mkdir(mode=0o700, exist_ok=True)
        uid = self._take_user(folder)
        if uid is not None:
            for each in (path for place in own for path in (place, *place.rglob("*"))):
                os.chown(each, uid, uid, follow_symlinks=False)
        walls = Walls(
            has_network,
            reads=(str(folder), *self._reads),
            writes=(*map(str, own), *map(str, self._settings.write_paths)),
            devices=self._devices,
            has_mounts=self._has_mounts,
            hidden=str(self._settings.state_dir),
        )
        if uid is None:
            return walls
        return replace(
            walls, uid=uid, groups=self._groups, capability=measures.reading_capability()
        )

    def forget(self, folder: Path) -> None:
        """Remove a version's folders, and take back its user. Blocking."""
        for each in (scratch_of(folder), folder):
            remove(each)
        self._taken.pop(folder, None)

    def _take_user(self, folder: Path) -> int | None:
        """Return a user that nobody on this machine is; None keeps the server's own."""
        if self._uids is None:
            return None
        running = set(_running_users())
        with self._taking:
            free = sorted(set(self._uids) - set(self._taken.values()) - running)
            if not free:
                logger.warning("%s: all users of worker_uids are taken; it shares one", folder.name)
                free = list(self._uids)
            self._taken[folder] = secrets.choice(free)
            return self._taken[folder]


def own_variables(folder: Path) -> dict[str, str]:
    """Return what points a worker to the folder that it may write."""
    scratch = str(scratch_of(folder))
    return {
        **dict.fromkeys(("HOME", "TMPDIR"), scratch),
        **dict.fromkeys(("USER", "LOGNAME"), USER),
        "PYTHONUSERBASE": site.getuserbase(),
    }


def scratch_of(folder: Path) -> Path:
    """Return the folder that a version's workers may write. Short: Unix sockets lie in it."""
    return folder.with_name(folder.name.rpartition("-")[2])


def _running_users() -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):  # glob itself raises for a file of what ended
        with contextlib.suppress(OSError):
            yield int((process / "status").read_bytes().partition(b"\nUid:")[2].split(None, 1)[0])
