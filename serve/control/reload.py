"""Files of an author's folder → the models that are served, each edit as soon as it is saved.

A file of the folder stands for the file of its name in an archive. Where it differs, the archive
is written anew with it, its workers load and answer the golden requests, and the new ones take the
place of the old. Where one of these fails, the old ones go on.
"""

import asyncio
import filecmp
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from modelyard.archiver import ArchiveError
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.errors import ServeError

logger = logging.getLogger(__name__)

POLL_S = 0.2
MOST_WATCHED = 0.1
"""Share of a core that looking may take, of a folder with very many files."""
_PASSED_OVER = frozenset(("__pycache__", "node_modules", "model_store"))

Stamps = Mapping[Path, tuple[int, int, int]]
"""Path → what changes when the file is written: time, size, inode."""


class Reloader:
    """Watches folders, and replaces the versions that their files belong to.

    Args:
        lifecycle: lifecycle of the server.
        folders: to watch.
    """

    def __init__(self, lifecycle: Lifecycle, folders: Sequence[Path]) -> None:
        self._lifecycle = lifecycle
        self._folders = folders
        self._tried: dict[tuple[str, str], Stamps] = {}
        """Model and version → the files that were last tried for it."""
        self._seen: Stamps = {}
        self._looked_s = 0.0

    async def run(self) -> None:
        """Look for edits until this is cancelled."""
        if self._folders:
            logger.info("edits of %s are served", ", ".join(map(str, self._folders)))
        while self._folders:
            try:
                await self.look()
            except Exception:  # the next edit may go better
                logger.exception("looking for edits failed")
            await asyncio.sleep(max(POLL_S, self._looked_s / MOST_WATCHED))

    async def look(self) -> None:
        """Replace what has changed since the last look, once its files rest."""
        stamps = await asyncio.to_thread(self._stamps)
        rests, self._seen = stamps == self._seen, stamps
        if rests:  # else an editor may be in the middle of them
            for model in list(self._lifecycle.registry):
                await self._renew(model, stamps)

    async def _renew(self, model: ModelVersion, stamps: Stamps) -> None:
        key = model.name, model.version
        own = self._of_model(model, stamps)
        before = self._tried.get(key, {})
        tried = {path: stamps[path] for path in own.values()}
        if tried == before:
            return
        self._tried[key] = tried
        changed = {
            name: path
            for name, path in own.items()
            if not await asyncio.to_thread(filecmp.cmp, path, model.folder / name, shallow=False)
        }
        if not changed:
            return
        names, label = ", ".join(sorted(changed)), f"{model.name} {model.version}"
        began = time.monotonic()
        place = self._lifecycle.policy.state.unpacked / f"edited-{secrets.token_hex(4)}"
        try:
            from modelyard.archiver.write import overlay

            await asyncio.to_thread(overlay, model.folder, changed, place)
            await self._lifecycle.replace(model, place)
        except (ArchiveError, ServeError, OSError) as error:
            why = str(error).removeprefix(f"{label}: ")
            logger.error("%s keeps serving what it was, without %s: %s", label, names, why)
        else:
            logger.info("%s serves %s, %.1f s", label, names, time.monotonic() - began)
        finally:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    def _of_model(self, model: ModelVersion, stamps: Stamps) -> dict[str, Path]:
        """Return the file that stands for each of an archive's, by its name.

        That is the one in the watched folder itself, else the only one below it.
        """
        by_name: dict[str, list[Path]] = {}
        for path in stamps:
            by_name.setdefault(path.name, []).append(path)
        from modelyard.archiver.write import own_files  # which only few servers need

        found = {}
        for name in own_files(model.folder):
            paths = by_name.get(name.rpartition("/")[2], [])
            first = [path for path in paths if path.parent in self._folders] or paths
            if len(first) == 1:
                found[name] = first[0]
        return found

    def _stamps(self) -> Stamps:
        began, found = time.thread_time(), {}
        for path in self._files():
            try:
                status = path.stat()
            except OSError:  # gone meanwhile
                continue
            found[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
        self._looked_s = time.thread_time() - began
        return found

    def _files(self) -> Iterator[Path]:
        for folder in self._folders:
            for place, inner, files in os.walk(folder):
                inner[:] = [n for n in inner if n not in _PASSED_OVER and not n.startswith(".")]
                yield from (Path(place, name) for name in files)
