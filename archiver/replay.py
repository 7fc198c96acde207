"""Run an unpacked archive in a process of its own, loaded the way a worker loads it.

The process is `modelyard.serve.rehearse`, named and never imported here: the archiver itself runs
no code of an archive and needs no torch. It raises the walls that a server's workers have.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelyard.archiver.errors import ArchiveError, DoesNotRun
from modelyard.archiver.explanations import Asked, Explanations, from_json
from modelyard.archiver.manifest import Golden, Manifest
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.base.exits import describe_exit

TIMEOUT_S = 600.0
"""Time for loading the model and answering everything."""
UNPACKED = "archive-own"
"""Name of the folder in which an archive is run; what it may write lies beside it, in `own`."""
GRACE_S = 5.0
"""Time for ending what it has started."""


@dataclass(frozen=True)
class Pair:
    """An artifact and the twin that was proven to agree with the same checkpoint."""

    artifact: str
    twin: str
    report: str
    """The artifact's, which with the other says by which rule the two are compared."""
    twin_report: str


@dataclass(frozen=True)
class GoldenResult:
    """One golden request, replayed."""

    golden: Golden
    answer: Any
    """What the handler gave, as JSON holds it."""
    difference: str | None
    """How the answer differs from the expected one; None when it agrees."""
    seen: Mapping[str, Any] = field(default_factory=dict)
    """What the model read and gave, where it was recorded; it is kept beside what is expected."""


@dataclass(frozen=True)
class ParityResult:
    """Artifact and twin, compared on this machine."""

    pair: Pair
    cases: int
    summary: str
    """How far they are apart at most, by which rule."""
    differences: tuple[str, ...]
    """Each output that differs, or why they could not be compared; a sentence each."""


@dataclass(frozen=True)
class Replay:
    """What came of running an archive."""

    device: str
    golden: tuple[GoldenResult, ...]
    parity: ParityResult | None
    coverage: Mapping[str, str] = field(default_factory=dict)
    """Change of the pipeline → what an example must have to notice it; empty where one does."""
    reference: bytes | None = None
    """The file of `archiver.reference`, where requests for it were given."""
    explained: Explanations | str | None = None
    """What was measured of explanations, or why nothing was; None where nobody asked."""
    lacking: tuple[str, ...] = ()
    """Walls that did not stand around it."""
    batches: Sequence[Mapping[str, Any]] = ()
    """Batches that were given: `answers`, a `status` and a `body` in Base64 for each request, and
    what the model `read`."""


def replay(
    folder: Path,
    manifest: Manifest,
    *,
    unanswered: Sequence[Golden] | None = None,
    record: bool = True,
    pair: Pair | None = None,
    reference: Path | None = None,
    explained: Sequence[Asked] = (),
    budget_s: float | None = None,
    device: str = "auto",
    doubts: bool = False,
    inputs: bool = False,
    batches: Sequence[Sequence[Mapping[str, Any]]] = (),
    load: Mapping[str, Any] | None = None,
    threads: int | None = None,
) -> Replay:
    """Load the archive that is unpacked in `folder`, and answer its golden requests.

    The archive's own code runs in the child process, behind the walls of a worker.

    Args:
        folder: folder with `MAR-INF/MANIFEST.json`, as a worker finds it.
        manifest: manifest in that file.
        unanswered: golden requests without an expected answer yet, whose results hold it; where
            this is given, what the model reads and gives is recorded of all, unless `record` is
            False.
        pair: two artifacts to compare on seeded inputs.
        reference: requests whose reasons are averaged.
        explained: requests whose explanations are measured.
        budget_s: time that this may take; as long as it takes without.
        doubts: whether to end where nothing says what the model's numbers are.
        inputs: whether `seen` of results, and `read` of batches, hold what the model read, whole;
            nothing is recorded then.
        device: auto, cpu, cuda or cuda:N.
        batches: what workers had before, to be answered again: of each request in the order of its
            batch `head` and `body` in Base64, `flags` and `rows`, as a frame has them.
        load: what their LOAD message held besides, as `batch_size`.
        threads: threads of the worker; by default those of this process.

    Raises:
        DoesNotRun: the archive does not load; the message is the worker's own.
    """
    golden = manifest.modelyard.golden if manifest.modelyard else ()
    signature = manifest.modelyard.signature if manifest.modelyard else None
    task = {
        "load": {**(load or {}), **_load_message(folder, manifest, device)},
        "threads": threads,
        "batches": batches,
        "proven_batch": signature.proven_batch if signature else None,
        "golden": [
            asdict(each) | ({"expected": None} if each in (unanswered or ()) else {})
            for each in golden
        ],
        "record": record and unanswered is not None,
        "inputs": inputs,
        "parity": asdict(pair) if pair else None,
        "reference": str(reference.absolute()) if reference else None,
        "explained": {"requests": [each._asdict() for each in explained], "budget_s": budget_s}
        if explained
        else None,
        "doubts": doubts,
    }
    result = _run_child(task)
    if "error" in result:
        raise DoesNotRun(result["error"])
    return Replay(
        device=result["device"],
        golden=tuple(
            GoldenResult(each, found["answer"], found["difference"], found.get("seen", {}))
            for each, found in zip(golden, result["golden"], strict=True)
        ),
        parity=ParityResult(pair, **result["parity"]) if pair else None,
        coverage=result.get("coverage", {}),
        reference=result["reference"].encode() if reference else None,
        explained=_explained(result["explained"]) if explained else None,
        lacking=tuple(result["lacking"]),
        batches=result["batches"],
    )


def _explained(found: Any) -> Explanations | str:
    return found if isinstance(found, str) else from_json(found)


def _load_message(folder: Path, manifest: Manifest, device: str) -> dict[str, Any]:
    """Return what the server says to a worker."""
    if not manifest.handler:
        raise DoesNotRun("the manifest names no handler")
    return {
        "name": manifest.model_name,
        "folder": str(folder.absolute()),
        "manifest": json.loads((folder / MANIFEST_NAME).read_bytes()),
        "handler": manifest.handler,
        "config_file": manifest.config_file,
        "device": device,
    }


def _run_child(task: dict[str, Any]) -> dict[str, Any]:
    """Start a worker's process on the task and read what it leaves."""
    with tempfile.TemporaryDirectory(prefix="modelyard-") as name:
        exchange = Path(name)
        (exchange / "task.json").write_text(json.dumps(task), encoding="utf-8")
        # -P keeps files of the working folder from being imported.
        command = [sys.executable, "-P", "-m", "modelyard.serve.rehearse", name]
        with (exchange / "log").open("wb") as log:
            code = _run(command, log.fileno())
        try:
            result: dict[str, Any] = json.loads((exchange / "result.json").read_bytes())
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise DoesNotRun(
                f"the process that runs the archive {code} and left no result: "
                f"{_last_line(exchange / 'log')}"
            ) from error
        return result


def _run(command: Sequence[str], log: int) -> str:
    """Run a command in a session of its own; say how it ended. Nothing of it stays behind."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"did not end within {TIMEOUT_S:g} s"
    except OSError as error:
        raise ArchiveError(f"cannot run the archive: {error}") from error
    finally:
        process.terminate()  # it ends what the archive's code has started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        process.kill()
        process.wait()
    return f"ended with {describe_exit(code)}"


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
