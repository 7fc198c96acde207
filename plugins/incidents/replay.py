"""Run the batches of incidents again, and say how the answers compare with those of then."""

from __future__ import annotations

import json
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from modelyard.archiver.errors import (
    ArchiveError,
    ArchiveNotFound,
    NothingCompared,
    RefusedArchive,
    WrongUsage,
)
from modelyard.archiver.example import TOLERANCE
from modelyard.archiver.read import Archive, open_archive
from modelyard.archiver.replay import UNPACKED, replay
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.verify import find_pair
from modelyard.base.answers import json_difference
from modelyard.plugins.incidents.file import this_machine
from modelyard.serve.control.store import list_archives

Document = dict[str, Any]
SAME, WITHIN, DIFFERS = "same", "within", "differs"


def replay_incidents(
    incidents: Sequence[Document],
    archive: Path | None,
    store: Path,
    files: Sequence[Path] = (),
    with_recorded: bool = False,
) -> list[Document]:
    """Answer the batches of incidents again, in the process and behind the walls of a worker.

    Those of one archive, that ran alike, are answered by one process.

    Args:
        incidents: what `read_incident` returns.
        archive: the archive; None looks for it in the store, by its digest.
        files: requests and answers that the incidents' files lack, told apart by their digests.
        with_recorded: whether to run what the model read on the versions of then, too.

    Returns:
        Of each the `id`, the `answers` of its batch with a `verdict` each, the `place` of its own,
        what is otherwise on this machine (`elsewhere`) and, where something is, the `parity` of its
        two artifacts here; what came of the versions of then (`recorded`); which walls were
        `lacking`; and the worst `verdict`: `same` bits;
        elsewhere also `within` the tolerance of golden requests; `differs`.

    Raises:
        ArchiveError: it is another archive, or does not run.
        NothingCompared: a request is missing, or no answer of then is known.
    """
    try:
        given = {sha256(data).hexdigest(): data for data in (file.read_bytes() for file in files)}
    except OSError as error:
        raise WrongUsage(f"--body: cannot read {error.filename}: {error.strerror}") from error
    groups: dict[str, list[Document]] = {}
    for each in incidents:
        if each["worker"]["steps"]:  # who joined while it ran is not known
            each |= {"batch": [each["batch"][each["place"]]], "place": 0}
        for request in each["batch"]:
            for key in ("body", "answer"):
                if request.get(key) is None:
                    request[key] = given.get(request.get(f"{key}_sha256"))
        _check(each)
        if each["worker"]["steps"]:
            _give_seed(each["batch"][0])
        worker = {**each["worker"], "pid": 0, "number": 0}
        groups.setdefault(repr((each["model"], worker, each["machine"])), []).append(each)
    found: dict[int, Document] = {}
    for group in groups.values():
        found |= zip(map(id, group), _run(group, archive, store, with_recorded), strict=True)
    return [found[id(each)] for each in incidents]


def _check(incident: Document) -> None:
    """Raise NothingCompared for what cannot be run again, or compared."""
    if dialect := incident["worker"]["load"].get("dialect"):
        raise NothingCompared(f"it was answered by the {dialect} drop-in, which replays nothing")
    lacking = [each for each in incident["batch"] if each["body"] is None]
    if lacking:
        raise NothingCompared(
            "the file has no requests, only their digests (incident_inputs was off); give each "
            "with --body FILE",
            [f"{each['body_sha256']} ({each['id']})" for each in lacking],
        )
    if incident["batch"][incident["place"]].get("answer_sha256") is None:
        raise NothingCompared(f"the answer {incident['id']} was streamed, and has no digest")


def _give_seed(request: Document) -> None:
    """Have a request of JSON name the seed that its answer says was drawn for it."""
    try:
        said = parse_json(request["body"])
    except ValueError:
        return
    if isinstance(said, dict) and type(request.get("seed")) is int:
        request["body"] = json.dumps({**said, "seed": request["seed"]}).encode()


def _run(
    group: Sequence[Document], archive: Path | None, store: Path, with_recorded: bool
) -> list[Document]:
    worker, here = group[0]["worker"], this_machine()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="modelyard-") as name:
        folder = Path(name) / UNPACKED
        with _open(group[0]["model"], archive, store, Path(name)) as opened:
            seal, manifest = opened.manifest.modelyard, opened.manifest
            pair = find_pair(manifest, opened.read) if here != group[0]["machine"] else None
            opened.unpack(folder)
            frames = [[_frame(request) for request in each["batch"]] for each in group]
            found = replay(
                folder, manifest, batches=frames, load=worker["load"], threads=worker["threads"],
                device=worker["device"], pair=pair, inputs=with_recorded,
            )  # fmt: skip
            golden = seal.golden if seal else ()
            tolerance = max((each.tolerance for each in golden), default=TOLERANCE)
            here["device"] = found.device
            for incident, batch in zip(group, found.batches, strict=True):
                then = {**incident["machine"], "device": worker["device"]}
                elsewhere = [
                    f"{name}: {then.get(name, 'none')} then, {here.get(name, 'none')} here"
                    for name in sorted({*here, *then}) if here.get(name) != then.get(name)
                ]  # fmt: skip
                pairs = zip(incident["batch"], batch["answers"], strict=True)
                answers = [_compare(request, now, tolerance) for request, now in pairs]
                verdicts = {each["verdict"] for each in answers}
                # On the same machine nothing but the same bits will do.
                worst = WITHIN if verdicts <= {SAME, WITHIN} and elsewhere else DIFFERS
                outcomes.append({
                    "id": incident["id"], "verdict": SAME if verdicts == {SAME} else worst,
                    "place": incident["place"], "answers": answers, "elsewhere": elsewhere,
                    "recorded": _on_versions(incident, batch, opened) if with_recorded else [],
                    "lacking": found.lacking,
                    "parity": found.parity and [found.parity.summary, *found.parity.differences],
                })  # fmt: skip
    return outcomes


def _on_versions(incident: Document, batch: Mapping[str, Any], archive: Archive) -> list[str]:
    """Say what the model gives on the versions of then, for what it read here."""
    from modelyard.plugins.recertify.certify import certify_batch
    from modelyard.plugins.recertify.page import details
    from modelyard.plugins.recertify.runtimes import RUNTIMES

    then = incident["machine"]
    versions = [
        f"{name}=={then[name].partition('+')[0]}" for name in RUNTIMES
        if then.get(name) and then[name] != this_machine().get(name)
    ]  # fmt: skip
    if not versions:
        return [f"{' and '.join(RUNTIMES)} are those of then"]
    rows = certify_batch(archive, f"of {incident['id']}", batch["read"], versions)
    beside = [
        f"{row.artifact} on {row.environment}, beside {row.here or 'nothing'}" for row in rows
    ]
    told = ["; ".join([row.verdict, *details(row)]) for row in rows]
    return list(map(": ".join, zip(beside, told, strict=True)))


def _open(model: Mapping[str, str], archive: Path | None, store: Path, staging: Path) -> Archive:
    """Open the archive that answered.

    Raises:
        RefusedArchive: it has another digest.
        ArchiveNotFound: the store has none with it.
    """
    wanted = f"{model['name']} {model['version']} with the digest {model['archive_sha256']}"
    for file in [archive] if archive else [store / name for name in list_archives(store)]:
        try:
            opened = open_archive(file, staging=staging)
        except ArchiveError:
            if archive:
                raise
            continue  # another one in the store, which is damaged
        if opened.digest == model["archive_sha256"]:
            return opened
        opened.close()
        if archive:
            raise RefusedArchive(f"{archive} is {opened.digest}, and the incident is of {wanted}")
    raise ArchiveNotFound(f"{store} has no {wanted}; name it with --archive FILE")


def _frame(request: Document) -> Document:
    encoded = {key: b64encode(request[key]).decode() for key in ("head", "body")}
    return {**encoded, "flags": request["flags"], "rows": request["rows"]}


def _compare(then: Document, now: Mapping[str, Any], tolerance: float) -> Document:
    """Return an answer's `id`, its `verdict`, and in a `text` how it differs."""
    body, verdict, text = b64decode(now["body"]), DIFFERS, "its bits differ"
    if now["status"] != then["status"]:
        text = f"status {then['status']} then, {now['status']} now"
    elif then.get("answer_sha256") is None:
        verdict, text = SAME, "streamed, and not compared"
    elif sha256(body).hexdigest() == then["answer_sha256"]:
        verdict, text = SAME, ""
    elif then["answer"] is None:
        text += "; by how much needs the answer of then: give it with --body FILE"
    else:
        try:
            difference = json_difference(parse_json(body), parse_json(then["answer"]), tolerance)
        except ValueError:  # a picture, say
            difference = "its answer is not JSON"
        verdict = DIFFERS if difference else WITHIN
        text += f": {difference}" if difference else f"; numbers agree within {tolerance:g}"
    if verdict == DIFFERS and not then["head_is_whole"]:
        text += "; headers of its request were not kept"
    return {"id": then["id"], "verdict": verdict, "text": text}
