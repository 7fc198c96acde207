"""The file of an incident: what led to one answer, as JSON that is read like a stranger's.

`sha256` is that of all else, in one form (keys sorted, nothing between them), so that a file that
was changed is noticed by whoever does not compute it anew; what a batch gives notices the rest.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.proven import installed_version
from modelyard.archiver.requirements import parse_pin
from modelyard.archiver.untrusted.json import Fields, parse_json
from modelyard.serve.dataplane import wire

if TYPE_CHECKING:
    from modelyard.plugins.incidents.observer import Batch, Row

FORMAT = 1
KEY = "modelyard_incident"
MOST_BYTES = 1 << 30
MOST_ROWS = 1 << 16
PACKAGES = ("modelyard", "torch", "onnxruntime", "numpy", "captum", "transformers", "tokenizers",
            "pillow")  # fmt: skip
"""What may change the bits of an answer."""
SETS = ("sse4", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16", "i8mm")
"""Beginnings of the names of instruction sets that kernels are chosen by."""
LOAD = {"batch_size": int, "by_length": bool, "artifact": str, "only_predicts": bool,
        "max_image_pixels": int, "decode_input": bool, "dialect": str}  # fmt: skip
"""Keys of a worker's LOAD message that decide over its answers, and their types unless null."""
TRIMMED = (b"content-type", b"accept", b"accept-encoding")
"""Headers that a file has where requests themselves are not kept."""


class BadIncident(ArchiveError):
    """A file is not one of an incident, or was changed."""


@dataclass(frozen=True)
class Request:
    """One request of the batch, and the answer that it got."""

    id: str
    head: bytes
    is_whole: bool
    """Whether the head has all that the worker got."""
    flags: int
    rows: int
    sha256: str
    body: bytes | None
    status: int
    answer_sha256: str | None
    answer: bytes | None


@dataclass(frozen=True)
class Incident:
    """What a file holds."""

    id: str
    archive: str
    """SHA-256 that names the archive."""
    model: str
    version: str
    place: int
    """Place of the answer's request in the batch."""
    batch: Sequence[Request]
    load: Mapping[str, Any]
    threads: int
    device: str
    has_steps: bool
    """Whether requests joined and left between its steps, so that nobody knows who shared them."""
    machine: Mapping[str, str]
    """What decides over bits → what it was: `cpu`, `instructions`, versions of packages."""


def describe(batch: Batch, place: int, keeps: bool) -> dict[str, Any]:
    """Return the content of an incident's file.

    Args:
        keeps: whether requests and answers were to be kept themselves.
    """
    load, ready = batch.plan.load, batch.worker
    manifest = load["manifest"] or {}
    pins = manifest.get("modelyard", {}).get("requirements", ()) if load["interpreter"] else ()
    document: dict[str, Any] = {
        KEY: FORMAT,
        "id": id_of(batch.rows[place].head),
        "at": time_of(batch),
        "model": {"name": batch.served.name, "version": batch.served.version,
                  "archive_sha256": batch.served.digest},
        "place": place,
        "batch": [_describe_row(row, keeps) for row in batch.rows],
        "batch_us": batch.batch_us,
        "worker": {
            "pid": ready["pid"], "number": ready["number"], "device": ready["device"],
            "threads": int(batch.plan.environment["OMP_NUM_THREADS"]), "steps": ready["steps"],
            "load": {name: load.get(name) for name in LOAD},
        },
        "machine": {**this_machine(), **dict(parse_pin(pin).release for pin in pins)},
    }  # fmt: skip
    return {**document, "sha256": digest_of(document)}


def time_of(batch: Batch) -> str:
    """Return when the answers of a batch had come, to the microsecond."""
    return datetime.fromtimestamp(batch.at, UTC).isoformat(timespec="microseconds")


def id_of(head: bytes) -> str:
    """Return the id of a request, of its packed head."""
    return wire.unpack_meta(head)[2].decode("latin-1")


def _describe_row(row: Row, keeps: bool) -> dict[str, Any]:
    head = row.head if keeps else _trimmed(row)
    return {
        "id": id_of(row.head),
        "kind": "explain" if row.flags & wire.EXPLAIN else "predict",
        "flags": row.flags,
        "rows": row.rows,
        "head": _text(head),
        "head_is_whole": head == row.head,
        "body_sha256": row.sha256.hex(),
        "body_bytes": row.size,
        "body": _text(row.body),
        "status": row.status,
        "answer_sha256": row.answer_sha256.hex() if row.answer_sha256 else None,
        "answer": _text(row.answer),
        "seed": _seed(row),
        "queue_us": row.queue_us,
        "handler_us": row.handler_us,
    }


def _trimmed(row: Row) -> bytes:
    """Return a head without what may be a client's own: other headers, a prediction's query."""
    rest, query, id, *spelled = wire.unpack_meta(row.head)
    pairs = zip(spelled[::2], spelled[1::2], strict=True)
    kept = [word for pair in pairs if pair[0].lower() in TRIMMED for word in pair]
    return wire.pack_meta((rest, query if row.flags & wire.EXPLAIN else b"", id, *kept))


def _seed(row: Row) -> int | None:
    """Return the seed that a request names, or that its answer says was drawn; None for none."""
    query = dict(parse_qsl(wire.unpack_meta(row.head)[1].decode("latin-1")))
    if row.flags & wire.EXPLAIN and query.get("seed", "").isdecimal():
        return int(query["seed"])
    for text in (row.body, row.answer):
        try:
            seed = parse_json(text).get("seed") if text else None
        except (ValueError, AttributeError):
            continue
        if type(seed) is int:
            return seed
    return None


def this_machine() -> dict[str, str]:
    """Return what decides here over the bits of an answer."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    pairs = [line.partition(":") for line in reversed(lines)]
    said = {name.strip(): value.strip() for name, _, value in pairs}
    flags = (said.get("flags") or said.get("Features") or "").split()
    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        "cpu": said.get("model name", platform.machine()),
        "instructions": " ".join(sorted(flag for flag in flags if flag.startswith(SETS))),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version},
    }


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a file's content, whatever the order of its keys."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_incident(file: Path) -> Incident:
    """Read a file, which somebody may have made up.

    Raises:
        BadIncident: it is not one, has a format of another version, or was changed; says where.
    """
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        document = parse_json(file.read_bytes(), MOST_BYTES)
        if not isinstance(document, dict) or KEY not in document:
            raise ValueError(f"it is not an incident: it has no {KEY}")
        if document[KEY] != FORMAT:
            raise ValueError(
                f"it has the format {document[KEY]!r:.40}, and this version reads {FORMAT}; take "
                "a modelyard of its time"
            )
        said = document.pop("sha256", None)
        if said != (found := digest_of(document)):
            raise ValueError(f"it was changed: sha256 says {said!r:.70}, and it has {found}")
        return _incident(Fields(document))
    except OSError as error:
        raise BadIncident(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise BadIncident(f"{file}: {error}") from error


def _incident(fields: Fields) -> Incident:
    model, worker = fields.object("model"), fields.object("worker")
    load, machine = worker.object("load"), fields.object("machine")
    batch = [_request(each) for each in fields.objects("batch")]
    place, threads = fields.integer("place"), worker.integer("threads")
    for name, value in load.values.items():
        if value is not None and type(value) is not LOAD.get(name):
            load.wrong(name, "a key and a value of a worker's LOAD message", value)
    if not re.fullmatch(r"cpu|cuda:\d{1,4}", device := worker.text("device")):
        worker.wrong("device", "cpu or cuda:N", device)
    for name in machine.values:
        machine.text(name)
    if not 0 <= place < len(batch) <= MOST_ROWS:
        fields.wrong("place", f"one of a batch of 1 to {MOST_ROWS}", place)
    if not 1 <= threads <= MOST_ROWS:
        worker.wrong("threads", "1 or more", threads)
    found = Incident(
        fields.text("id"), model.sha256("archive_sha256"), model.text("name"),
        model.text("version"), place, batch, load.values, threads, device,
        worker.boolean("steps"), machine.values,
    )  # fmt: skip
    if 0 <= place < len(batch) and batch[place].id != found.id:
        fields.wrong("id", f"that of the request at place {place}", found.id)
    fields.check()
    return found


def _request(fields: Fields) -> Request:
    answer_sha256 = fields.sha256("answer_sha256") if fields.values.get("answer_sha256") else None
    body, answer = _bytes(fields, "body"), _bytes(fields, "answer")
    found = Request(
        fields.text("id"), _bytes(fields, "head") or b"", fields.boolean("head_is_whole"),
        fields.integer("flags"), fields.integer("rows"), fields.sha256("body_sha256"), body,
        fields.integer("status"), answer_sha256, answer,
    )  # fmt: skip
    for key, data, expected in (("body", body, found.sha256), ("answer", answer, answer_sha256)):
        if data is not None and hashlib.sha256(data).hexdigest() != expected:
            fields.problems.append(f"{fields.at(key)}: it is not the one of {key}_sha256")
    if found.head.count(b"\0") < 2 or id_of(found.head) != found.id:
        fields.problems.append(f"{fields.at('head')}: it is not the head of this id")
    if not (0 <= found.flags < 1 << 16 and 0 <= found.rows <= wire.MOST_ROWS):
        fields.wrong("flags", "flags and rows of a frame", [found.flags, found.rows])
    return found


def _bytes(fields: Fields, key: str) -> bytes | None:
    if fields.values.get(key) is None:
        return None
    try:
        return b64decode(str(fields.values[key]), validate=True)
    except ValueError:
        fields.wrong(key, "Base64", fields.values[key])
        return None


def _text(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()
