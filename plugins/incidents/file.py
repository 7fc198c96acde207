"""The file of an incident: what led to one answer, as JSON that is read like a stranger's.

`sha256` is that of all else, in one form (keys sorted, nothing between them), so that a file that
was changed is noticed by whoever does not compute it anew; what the batch answers notices the rest.
"""

from __future__ import annotations

import json
import platform
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
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

KEY, FORMAT = "modelyard_incident", 1
MOST_BYTES = 1 << 30
PACKAGES = ("modelyard", "torch", "onnxruntime", "numpy", "captum", "transformers", "pillow")
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


def describe(batch: Batch, place: int, keeps: bool) -> dict[str, Any]:
    """Return the content of an incident's file.

    Args:
        keeps: whether requests and answers were to be kept themselves.
    """
    load, (ready, number, pid) = batch.plan.load, batch.worker
    seal = (load["manifest"] or {}).get("modelyard", {})
    pins = map(parse_pin, seal.get("requirements", ()) if load["interpreter"] else ())
    document: dict[str, Any] = {
        KEY: FORMAT,
        "id": id_of(batch.rows[place][0]),
        "at": time_of(batch),
        "model": dict(batch.model),
        "place": place,
        "batch": [_describe(row, keeps) for row in batch.rows],
        "batch_us": batch.batch_us,
        "worker": {
            **{"pid": pid, "number": number, "device": ready["device"], "steps": ready["steps"]},
            "threads": int(batch.plan.environment["OMP_NUM_THREADS"]),
            "load": {name: load[name] for name in LOAD if load.get(name) is not None},
        },
        "machine": {**this_machine(), **dict(pin.release for pin in pins)},
    }
    return {**document, "sha256": digest_of(document)}


def time_of(batch: Batch) -> str:
    """Return when the answers of a batch had come, to the microsecond."""
    return datetime.fromtimestamp(batch.at, UTC).isoformat(timespec="microseconds")


def id_of(head: bytes) -> str:
    """Return the id of a request, of its packed head."""
    return wire.unpack_meta(head)[2].decode("latin-1")


def _describe(row: Row, keeps: bool) -> dict[str, Any]:
    head, flags, rows, body_sha256, size, status, answer_sha256, *spent, body, answer = row
    rest, query, id, *spelled = wire.unpack_meta(head)
    is_explained = bool(flags & wire.EXPLAIN)
    # Without what may be a client's own: other headers, and the query of a prediction.
    pairs = zip(spelled[::2], spelled[1::2], strict=True)
    kept = [word for pair in pairs if pair[0].lower() in TRIMMED for word in pair]
    trimmed = wire.pack_meta((rest, query if is_explained else b"", id, *kept))
    return {
        "id": id_of(head),
        "kind": "explain" if is_explained else "predict",
        "flags": flags,
        "rows": rows,
        "head": _text(head if keeps else trimmed),
        "head_is_whole": keeps or head == trimmed,
        "seed": _seed(query if is_explained else b"", body, answer),
        "body_sha256": body_sha256.hex(),
        "body_bytes": size,
        "body": _text(body),
        "status": status,
        "answer_sha256": answer_sha256 and answer_sha256.hex(),
        "answer": _text(answer),
        "queue_us": spent[0],
        "handler_us": spent[1],
    }


def _seed(query: bytes, *texts: bytes | None) -> int | None:
    """Return the seed that a request names, or that its answer says was drawn; None for none."""
    named = dict(parse_qsl(query.decode("latin-1"))).get("seed", "")
    found = [int(named)] if named.isdecimal() else []
    for text in filter(None, texts):
        try:
            found.append(parse_json(text)["seed"])
        except (ValueError, TypeError, LookupError):
            continue
    return next((seed for seed in found if type(seed) is int), None)


def this_machine() -> dict[str, str]:
    """Return what decides here over the bits of an answer."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    pairs = (line.partition(":") for line in reversed(lines))
    said = {name.strip(): value.strip() for name, _, value in pairs}
    sets = said.get("flags", said.get("Features", "")).split()
    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        "cpu": said.get("model name", platform.machine()),
        "instructions": " ".join(sorted(each for each in sets if each.startswith(SETS))) or "none",
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version},
    }


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a file's content, whatever the order of its keys."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()


def read_incident(file: Path) -> dict[str, Any]:
    """Return what a file says, which somebody may have made up; heads and bodies as bytes.

    Raises:
        BadIncident: it is not one, has a format of another version, or was changed; says where.
    """
    try:
        with file.open("rb") as opened:
            document = parse_json(opened.read(MOST_BYTES + 1), MOST_BYTES)
        if not isinstance(document, dict) or KEY not in document:
            raise ValueError(f"it is not an incident: it has no {KEY}")
        if document[KEY] != FORMAT:
            raise ValueError(
                f"it has the format {document[KEY]!r:.40}; this version reads {FORMAT}"
            )
        said, found = document.pop("sha256", None), digest_of(document)
        if said != found:
            raise ValueError(f"it was changed: sha256 says {said!r:.70}, and it has {found}")
        _check(Fields(document))
    except OSError as error:
        raise BadIncident(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise BadIncident(f"{file}: {error}") from error
    return document


def _check(fields: Fields) -> None:
    """Raise ValueError unless everything that is used is what it should be."""
    model, worker, machine = map(fields.object, ("model", "worker", "machine"))
    load, batch, place = worker.object("load"), fields.objects("batch"), fields.integer("place")
    model.sha256("archive_sha256")
    worker.boolean("steps")
    for source, names in ((model, ("name", "version")), (machine, machine.values)):
        list(map(source.text, names))
    if not re.fullmatch(r"cpu|cuda:\d{1,4}", device := worker.text("device")):
        worker.wrong("device", "cpu or cuda:N", device)
    if not 1 <= (threads := worker.integer("threads")) <= 1 << 16:
        worker.wrong("threads", "1 or more", threads)
    for name, value in load.values.items():
        if type(value) is not LOAD.get(name):
            load.wrong(name, "a key and a value of a worker's LOAD message", value)
    for each in batch:
        _check_request(each)
    if not 0 <= place < len(batch) or batch[place].values["id"] != fields.text("id"):
        fields.wrong("place", "that of the request of this id", place)
    fields.check()


def _check_request(fields: Fields) -> None:
    """Check a request of the batch, and decode what it holds."""
    values: Any = fields.values
    id, flags, rows = fields.text("id"), fields.integer("flags"), fields.integer("rows")
    fields.integer("status")
    fields.boolean("head_is_whole")
    for key in ("head", "body", "answer"):
        digest = f"{key}_sha256"
        if (text := values.get(key)) is not None:
            try:
                values[key] = b64decode(text, validate=True)
            except (ValueError, TypeError):
                fields.wrong(key, "Base64", text)
            else:
                if key != "head" and sha256(values[key]).hexdigest() != values.get(digest):
                    fields.problems.append(f"{fields.at(key)}: it is not the one of {digest}")
        if key == "body" or (key == "answer" and values.get(digest) is not None):
            fields.sha256(digest)
    head = values.get("head")
    if not isinstance(head, bytes) or head.count(b"\0") < 2 or id_of(head) != id:
        fields.problems.append(f"{fields.at('head')}: it is not the head of {id}")
    if not (0 <= flags < 1 << 16 and 0 <= rows <= wire.MOST_ROWS):
        fields.wrong("flags", "flags and rows of a frame", [flags, rows])


def _text(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()
