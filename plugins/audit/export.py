"""A trail outside of its server: signed JSON, and a page for people that prints."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.signing import Statement, Trust, find_signed, sign
from modelyard.archiver.untrusted.json import parse_json
from modelyard.plugins.audit.chain import Chain, follow, format_entry

if TYPE_CHECKING:
    from modelyard.archiver.keys import PrivateKey

SCHEMA = 1
MOST_BYTES = 1 << 30
NAME = "audit.jsonl"
"""Name under which a signature states the digest of all lines."""


class BrokenTrail(ArchiveError):
    """A trail does not hold, or is not one."""


def make_export(chain: Chain, key: PrivateKey | None) -> bytes:
    """Return a trail as JSON, signed as archives are where there is a key."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "exported": datetime.now(UTC).isoformat(timespec="seconds"),
        "head": chain.head.to_json(),
        "entries": list(chain.entries),
    }
    if key is not None:
        statement = Statement("audit trail", {NAME: _digest(chain)})
        content["signature"] = json.loads(sign(statement, key))
    return json.dumps(content, indent=1).encode() + b"\n"


def read_export(file: Path) -> tuple[Chain, object]:
    """Return the chain of an export, and its signature; None where it has none.

    Raises:
        BrokenTrail: it is not an export.
    """
    try:
        with file.open("rb") as opened:
            content = parse_json(opened.read(MOST_BYTES), MOST_BYTES)
        if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
            raise ValueError('expected an object with "entries"')
        chain = follow(format_entry(entry) for entry in content["entries"])
        if not chain.broken and content.get("head") != chain.head.to_json():
            raise ValueError("its head is not that of its entries")
    except OSError as error:
        raise BrokenTrail(f"cannot read {file}: {error.strerror}") from error
    except (TypeError, ValueError) as error:
        raise BrokenTrail(f"{file} is not an export of an audit trail: {error}") from error
    return chain, content.get("signature")


def check_signature(file: Path, chain: Chain, signature: object, trust: Trust) -> str:
    """Return who signed an export.

    Raises:
        NotTrusted: nobody that is trusted did, or what was signed was changed.
        BrokenTrail: it has no signature.
    """
    if signature is None:
        raise BrokenTrail(f"{file} is not signed; `modelyard audit export --sign KEY_FILE` signs")
    signer, statement = find_signed(file.name, signature, trust)
    if dict(statement.digests) != {NAME: _digest(chain)}:
        raise BrokenTrail(f"{file}: the key {signer} signed other entries")
    return str(signer)


def _digest(chain: Chain) -> str:
    return hashlib.sha256(
        b"".join(format_entry(each) + b"\n" for each in chain.entries)
    ).hexdigest()


def make_page(chain: Chain, whose: str) -> bytes:
    """Return a page for people, which prints; nothing in it runs or is fetched."""
    from jinja2 import Template

    shown = ("n", "at", "who", "what", "model", "version", "text", "before")
    more = [{k: v for k, v in entry.items() if k not in shown} for entry in chain.entries]
    page = Template(Path(__file__).with_name("page.html").read_text("utf-8"), autoescape=True)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    evidence = [json.dumps(each, indent=1) if each else "" for each in more]
    rows = zip(chain.entries, evidence, strict=True)
    return str(page.render(chain=chain, whose=whose, made=made, rows=rows)).encode()
