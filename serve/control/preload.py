"""What the fork server imports before it forks the workers of an archive: guessed from its files.

A guess changes how long a start takes, and never what is answered.
"""

import contextlib
import re
from collections.abc import Callable, Iterable
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


def choose_preload(
    manifest: Manifest,
    files: Iterable[DigestedFile] | Iterable[Member],
    read: Callable[[str], bytes],
    handler: str | None,
) -> Preload | None:
    """Return what to import before a worker of an archive is forked; None starts it by itself.

    A worker whose handler needs no torch starts as fast by itself. One that changes the environment
    may do so for what torch reads when it is imported. Workers of our handlers that leave
    explaining to others do not load the twin; an author's may.

    Args:
        manifest: manifest of the archive.
        files: its files.
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
    programs, seal = {name for name in sizes if name.endswith(".pt2")}, manifest.modelyard
    modules = ("torch", "onnx") if any(name.endswith(".onnx") for name in sizes) else ("torch",)
    explain = seal.explain if seal is not None and handler in OUR_HANDLERS else None
    if explain and programs == {explain.artifact} != {manifest.serialized_file}:
        return Preload(modules, tuple(own), ("program",))
    return Preload((*modules, "program") if programs else modules, tuple(own))


def start_fork_server(policy: "Policy") -> None:
    """Give the policy a fork server, unless the settings turn it off.

    If a model of the start needs torch, the fork server is started here and imports torch, which
    takes as long as the rest of the start, beside it. The archives are not verified yet. A tar is
    left out: it would have to be read to its end.
    """
    settings, wanted = policy.settings, list[str]()
    if not settings.fork_workers:
        return
    folder = policy.state.unpacked / "temporary"
    policy.fork_server = ForkServer(policy.environment(threads=1), folder)
    for spec in policy.models_at_start(is_trial=True):
        with contextlib.suppress(ServeError, ArchiveError, Damaged, OSError):
            file = find_archive(settings.model_store, spec.location)
            if file.suffix == ".mar":
                with peek(file) as (manifest, files, read):
                    preload = choose_preload(manifest, files, read, manifest.handler)
                    wanted += preload.modules if preload else ()
    if wanted and not is_on_gpu(this_machine(), settings.device):
        policy.fork_server.prepare(tuple(sorted(set(wanted), reverse=True)))  # torch is first
