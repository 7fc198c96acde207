"""What the fork server imports before it forks the workers of an archive: guessed from its files.

A guess changes how long a start takes, and never what is answered.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from modelyard.archiver.digest import DigestedFile
from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.manifest import Manifest
from modelyard.archiver.read import peek
from modelyard.archiver.untrusted.container import Damaged, Member
from modelyard.archiver.untrusted.names import builtin_handlers
from modelyard.serve.control.sizing import is_on_gpu, this_machine
from modelyard.serve.control.store import find_archive
from modelyard.serve.dataplane.process import ForkServer, Preload
from modelyard.serve.errors import ServeError

if TYPE_CHECKING:
    from modelyard.serve.policy import Policy

MAX_SOURCE_BYTES = 1 << 20
"""Size of an author's file that is searched for what it needs."""
NEEDS_TORCH = re.compile(rb"torch|transformers|modelyard.*Handler")
_SETS_VARIABLES = re.compile(rb"environ|putenv|setenv")
OUR_HANDLERS = frozenset(builtin_handlers()) - {"text_classifier"}
"""Handlers among the built-in ones that are ours; the other is a dialect's, and knows none of our
options."""


Files = Iterable[DigestedFile] | Iterable[Member]


def without_twin(
    preload: Preload, manifest: Manifest, files: Files, handler: str | None
) -> Preload:
    """Return what to import for workers that leave explaining to others.

    Our handlers do not load the twin there; an author's may.
    """
    seal, artifact = manifest.modelyard, manifest.serialized_file
    if seal is None or seal.explain is None or handler not in OUR_HANDLERS:
        return preload
    programs = {file.name for file in files if file.name.endswith(".pt2")}
    if programs - {seal.explain.artifact} or artifact in programs:
        return preload
    return replace(preload, modules=tuple(name for name in preload.modules if name != "program"))


def choose_preload(
    files: Files, read: Callable[[str], bytes], handler: str | None
) -> Preload | None:
    """Return what to import before a worker of an archive is forked; None starts it by itself.

    A worker whose handler needs no torch starts as fast by itself. One that changes the environment
    may do so for what torch reads when it is imported.

    Args:
        files: files of the archive.
        read: returns the content of one of them.
        handler: the handler.
    """
    sizes = {file.name: file.size_bytes for file in files}
    sources = [name for name in sizes if name.endswith(".py")]
    place = (handler or "").partition(":")[0].removesuffix(".py")
    if any(name.removesuffix(".py") == place for name in sources):
        if sum(sizes[name] for name in sources) > MAX_SOURCE_BYTES:
            return None
        text = b"\n".join(map(read, sources))
        if not NEEDS_TORCH.search(text) or _SETS_VARIABLES.search(text):
            return None
    own = set()
    for *folders, file in (name.split("/") for name in sizes):
        own.update(folders)
        if file.endswith((".py", ".pyc", ".so")):
            own.add(file.partition(".")[0])
    has_program = any(name.endswith(".pt2") for name in sizes)
    return Preload(("torch", "program") if has_program else ("torch",), tuple(own))


def start_fork_server(policy: Policy) -> None:
    """Give a server what forks its workers, where its settings want that.

    If those of its start need torch, it is started and imports it, which takes as long as all else
    that a start does, and goes on beside it.
    """
    if policy.settings.fork_workers:
        folder = policy.state.unpacked / "temporary"
        policy.fork_server = ForkServer(policy.environment(threads=1), folder)
        if not is_on_gpu(this_machine(), policy.settings.device) and (found := _foresee(policy)):
            policy.fork_server.prepare(tuple(sorted(set(found), reverse=True)), starts=True)


def _foresee(policy: Policy) -> list[str]:
    """Return what the workers of a start will be forked with.

    Nothing of their archives is checked by now. To look into a tar, all of it would be read.
    """
    found: list[str] = []
    for spec in policy.models_at_start(is_trial=True):
        with contextlib.suppress(ServeError, ArchiveError, Damaged, OSError):
            file = find_archive(policy.settings.model_store, spec.location)
            if file.suffix == ".mar":
                with peek(file) as (manifest, files, read):
                    if preload := choose_preload(files, read, manifest.handler):
                        found += without_twin(preload, manifest, files, manifest.handler).modules
    return found
