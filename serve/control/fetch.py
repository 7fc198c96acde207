"""URL → archive, in the model store or in a machine's cache, when the settings allow that URL.

A file gets its name when all of it has come, is an archive and has the digest that was named; until
then it lies in a hidden folder. A cache names archives by their digest, and a lock for each has one
process of a machine fetch it.
"""

import asyncio
import fcntl
import hashlib
import http.client
import logging
import os
import random
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from modelyard.archiver import ArchiveError, open_archive
from modelyard.archiver.errors import RefusedArchive
from modelyard.archiver.untrusted.names import file_name_problem
from modelyard.serve import errors
from modelyard.serve.control.store import parse_model_option
from modelyard.serve.control.transfer import FetchAborted, Interrupted, Limits, Part, open_part
from modelyard.serve.control.urls import Url, UrlRules, is_url, parse_url, split_digest
from modelyard.serve.errors import NOT_KEPT, is_disk_full, without_secrets

logger = logging.getLogger(__name__)

STAGING = ".fetching-"
"""Folders that hold what is being fetched; hidden, so never served."""
MOST_PAUSE_S = 30.0
NOTHING = Part("", 0, None, iter(()))


@dataclass(frozen=True)
class Source:
    """What a user wrote: `[NAME=]LOCATION[#sha256=DIGEST]`."""

    name: str | None
    location: str
    digest: str | None

    @property
    def shown(self) -> str:
        """Location as it is stored and shown."""
        return without_secrets(self.location)


def parse_source(text: str) -> Source:
    """Read what names an archive of a machine's store or cache.

    Raises:
        BadRequest: a digest is wrong, or lacking where the archive is fetched.
        BadName: the name breaks the rule for names.
    """
    try:
        rest, digest = split_digest(text)
        name, location = parse_model_option(rest)
        if is_url(location) and parse_url(location).scheme == "file":
            raise errors.UrlRefused(text, "name its folder as model_store instead")
        if is_url(location) and digest is None:
            raise errors.UrlRefused(
                text, "an archive that is fetched needs #sha256=DIGEST behind its URL"
            )
    except errors.UrlRefused as error:
        raise errors.BadRequest(f"{without_secrets(text)}: {error.reason}") from error
    return Source(name, location, digest)


def fetch_archive(
    location: str,
    store: Path,
    rules: UrlRules,
    limits: Limits | None = None,
    name: str | None = None,
) -> Path:
    """Fetch an archive into the store, and return its path.

    It is checked as an archive before it gets its name there; when anything fails the store is
    left as it was. Blocking.

    Args:
        location: a URL; with `#sha256=DIGEST` behind it, of an archive that must have this digest.
        name: name of its file there; None takes the URL's last part.

    Raises:
        UrlRefused, FetchFailed, FileExists, StorageFull, ArchiveError.
    """
    text, digest = split_digest(location)
    url, location = parse_url(text), without_secrets(location)
    rules.check(url)
    staged = name or secrets.token_hex(8)
    if name is None:
        name = url.path.rpartition("/")[2]
        if url.scheme == "oci":
            name = f"{re.split('[:@]', name)[0]}.mar"
    if name.startswith(".") or file_name_problem(name):
        raise errors.UrlRefused(location, "its last part is not a name for a file")
    target = store / name
    if target.exists():
        raise errors.FileExists(name)
    staging = store / f"{STAGING}{staged}"
    try:
        staging.mkdir(mode=0o700)
        file = staging / name
        _Download(url, file, digest, rules, limits or Limits()).run()
        os.link(file, target)  # unlike a renamed file it never replaces one
    except FileExistsError as error:
        raise errors.FileExists(name) from error
    except (OSError, http.client.HTTPException, FetchAborted, Interrupted) as error:
        logger.error("%s cannot be fetched: %s: %s", location, type(error).__name__, error)
        if is_disk_full(error):
            raise errors.StorageFull(f"{location} does not fit on the disk of {store}") from error
        raise errors.FetchFailed(location, str(error)) from error
    except ArchiveError as error:
        logger.error("%s was fetched and is refused: %s", location, error)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    logger.info("%s fetched, %d bytes", location, target.stat().st_size)
    return target


def place(
    source: Source, cache: Path, rules: UrlRules | None = None, limits: Limits | None = None
) -> Path:
    """Return the file of an archive that a URL names, in a cache; fetch it if need be. Blocking.

    Args:
        rules: what may be fetched; None trusts whoever wrote the URL.

    Raises:
        ArchiveError, BadRequest, StorageFull: it cannot be fetched, or it is another one.
    """
    url = parse_url(source.location)
    rules = rules or UrlRules.around(url)
    suffix = ".tar.gz" if url.path.endswith(".tar.gz") else ".mar"
    file = cache / f"{source.digest}{suffix}"
    try:
        rules.matching(url)
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (cache / f"{source.digest}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with the process
            if file.exists():
                return file
            if url.query == NOT_KEPT:
                raise errors.FetchFailed(
                    source.location,
                    f"{file} is gone, and the query that the URL had may be a secret, which is not "
                    "kept; put that file back, or name the whole URL again",
                )
            shutil.rmtree(cache / f"{STAGING}{file.name}", ignore_errors=True)  # of a killed one
            location = f"{source.location}#sha256={source.digest}"
            return fetch_archive(location, cache, rules, limits, name=file.name)
    except (errors.FetchFailed, errors.UrlRefused) as error:
        raise errors.BadRequest(f"cannot fetch {source.shown}: {error.reason}") from error
    except OSError as error:
        raise errors.BadRequest(
            f"cannot use the folder {cache} for fetched archives: {error.strerror}; name another "
            "one with cache_dir=FOLDER"
        ) from error


def clear_leftovers(store: Path) -> None:
    """Remove what a server that was killed had fetched half."""
    for folder in store.glob(f"{STAGING}*"):
        shutil.rmtree(folder, ignore_errors=True)


async def in_daemon(
    fetch: Callable[[], Path], discard: Callable[[Path], None] = lambda path: None
) -> Path:
    """Run in a thread that a server which is being stopped does not wait for.

    Args:
        discard: called with what comes when nobody waits for it any more.
    """
    fetched: Future[Path] = Future()
    fetched.set_running_or_notify_cancel()

    def run() -> None:
        try:
            fetched.set_result(fetch())
        except BaseException as error:
            fetched.set_exception(error)

    def end(late: Future[Path]) -> None:
        if late.exception() is None:
            discard(late.result())

    threading.Thread(target=run, daemon=True, name="fetch").start()
    try:
        return await asyncio.wrap_future(fetched)
    except asyncio.CancelledError:
        fetched.add_done_callback(end)
        raise


class _Another(RefusedArchive):
    """An archive without damage, but not the one that was named."""


class _Download:
    """A file that comes in parts, all of one version.

    Args:
        file: path that it is written to.
        digest: digest that the archive must have.
    """

    def __init__(
        self, url: Url, file: Path, digest: str | None, rules: UrlRules, limits: Limits
    ) -> None:
        self._url, self._file, self._digest = url, file, digest
        self._rules, self._limits = rules, limits
        self._name, self._began = without_secrets(str(url)), time.monotonic()
        self._part = NOTHING
        """What came last; its version is empty where the file is to begin anew."""

    def run(self) -> None:
        """Write the file, in as many attempts as the limits allow; each goes on where one ended.

        Raises:
            ArchiveError: what came is not an archive, or not the one of the digest.
            FetchAborted, Interrupted, OSError, HTTPException: it did not come.
        """
        limits, best, failures, refused = self._limits, 0, 0, ""
        with self._file.open("xb") as out:
            while True:
                problem: Exception
                after_s = 0.0
                try:
                    self._attempt(out)
                    self._check()
                    return
                except _Another:
                    raise
                except ArchiveError as error:
                    # What was damaged on its way does not come so again.
                    seen, self._part, problem = _sha256(self._file), NOTHING, error
                    if seen == refused or self._url.scheme == "file":
                        raise
                    refused = seen
                except (Interrupted, OSError, http.client.HTTPException) as error:
                    if is_disk_full(error):
                        raise
                    problem = error
                    if isinstance(error, Interrupted):
                        after_s = error.after_s
                        self._part = NOTHING if error.begins_anew else self._part
                failures = 0 if out.tell() > best else failures + 1
                best = max(best, out.tell())
                pause_s = min(limits.pause_s * 2 ** max(failures - 1, 0), MOST_PAUSE_S)
                pause_s = max(after_s, pause_s * random.uniform(0.5, 1))
                left_s = limits.total_s - (time.monotonic() - self._began)
                if failures >= limits.attempts or pause_s > left_s:
                    raise problem
                logger.warning("%s: %s; again in %.1f s", self._name, problem, pause_s)
                time.sleep(pause_s)

    def _attempt(self, out: IO[bytes]) -> None:
        """Write what one request brings."""
        limits, held, began = self._limits, self._part, time.monotonic()
        at = out.tell() if held.version else 0
        with open_part(self._url, at, held.version, self._rules, limits) as part:
            if part.start and part != replace(held, start=at):
                raise Interrupted("another part, or a part of another version", begins_anew=True)
            if part.size is not None and part.size > limits.size_bytes:
                raise FetchAborted(f"{part.size} bytes; {limits.size_bytes} are allowed")
            self._part = part
            out.seek(part.start)
            out.truncate()
            for chunk in part.chunks:
                out.write(chunk)
                size, seconds = out.tell(), time.monotonic() - began
                if size > limits.size_bytes:
                    raise FetchAborted(f"more than {limits.size_bytes} bytes")
                brought, silence_s = size - part.start, limits.silence_s
                is_slow = seconds > silence_s and brought < limits.bytes_per_s * seconds
                if is_slow or time.monotonic() - self._began > limits.total_s:
                    raise FetchAborted(f"too slow: {brought} bytes in {seconds:.0f} s")
            out.flush()
        if part.size not in (None, size := out.tell()):
            raise Interrupted(f"it ended after {size} of {part.size} bytes")
        os.fsync(out.fileno())

    def _check(self) -> None:
        """Raise ArchiveError where the file is not the archive that was named."""
        if self._part.sha256 not in (None, _sha256(self._file)):
            raise RefusedArchive(f"its bytes do not have the digest sha256:{self._part.sha256}")
        with open_archive(self._file, needs_manifest=False) as archive:
            if self._digest not in (None, archive.digest):
                raise _Another(f"its digest is {archive.digest}, expected {self._digest}")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
