"""What an adversary does to a trail, and what notices it: the chain, a head, or nobody."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from modelyard.archiver.errors import NotTrusted
from modelyard.archiver.keys import generate_keys
from modelyard.archiver.signing import read_signing_key, read_trusted_keys
from modelyard.plugins.audit.chain import (
    FIRST,
    MOST_LINE_BYTES,
    Trail,
    check_head,
    format_entry,
    read_chain,
)
from modelyard.plugins.audit.export import (
    BrokenTrail,
    check_signature,
    make_export,
    make_page,
    read_export,
)
from modelyard.plugins.audit.observer import Audit
from modelyard.serve.control.registry import Registry
from modelyard.serve.errors import ServeError

ENTRIES = 6
Lines = list[bytes]


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    """Return the lines of a trail that a server has written."""
    trail = Trail(tmp_path / "audit.jsonl")
    for number in range(ENTRIES):
        trail.append("ops", "promoted", model="digits", version=f"{number}.0", text="20 % → 50 %")
    trail.close()
    return trail.file.read_bytes().splitlines()


def whole(lines: Lines) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def forge(lines: Lines, since: int, **change: object) -> Lines:
    """Change an entry, and write all after it anew, as whoever may write the file can."""
    before = hashlib.sha256(lines[since - 1]).hexdigest() if since else FIRST
    found = lines[:since]
    for at, line in enumerate(lines[since:]):
        entry = json.loads(line) | (change if at == 0 else {})
        entry["n"] = len(found) + 1
        found.append(format_entry(entry | {"before": before}))
        before = hashlib.sha256(found[-1]).hexdigest()
    return found


def edit(line: bytes, **change: object) -> bytes:
    return format_entry(json.loads(line) | change)


ATTACKS: dict[str, tuple[Callable[[Lines], Lines], str, bool]] = {
    "an entry edited": (lambda x: [*x[:2], edit(x[2], who="me"), *x[3:]], "line 4:", True),
    "the first edited": (lambda x: [edit(x[0], who="me"), *x[1:]], "line 2:", True),
    "a space added": (lambda x: [x[0].replace(b",", b", ", 1), *x[1:]], "line 1:", True),
    "an entry removed": (lambda x: [*x[:2], *x[3:]], "line 3:", True),
    "the first removed": (lambda x: x[1:], "line 1:", True),
    "two entries swapped": (lambda x: [x[0], x[2], x[1], *x[3:]], "line 2:", True),
    "an entry inserted": (lambda x: [*x[:2], edit(x[2], who="me"), *x[2:]], "line 4:", True),
    "an entry repeated": (lambda x: [*x[:3], *x[2:]], "line 4:", True),
    "an empty line": (lambda x: [*x[:3], b"", *x[3:]], "line 4:", True),
    "a forged hash": (lambda x: [*x[:2], edit(x[2], before="0" * 64), *x[3:]], "line 3:", True),
    "a forged number": (lambda x: [*forge(x, 5, who="me")[:5], edit(forge(x, 5)[5], n=9)][:6],
                        "line 6:", True),
    "something else": (lambda x: [*x[:3], b"PK\x03\x04", *x[3:]], "line 4:", True),
    "the last edited": (lambda x: [*x[:-1], edit(x[-1], who="me")], "", True),
    "the end removed": (lambda x: x[:-2], "", True),
    "everything removed": (lambda x: [], "", True),
    "all written anew": (lambda x: forge(x, 0, who="me"), "", True),
    "the rest written anew": (lambda x: forge(x, 3, who="me"), "", True),
    "entries added": (lambda x: [*x, *forge([*x, x[-1]], len(x))[len(x) :]], "", False),
}  # fmt: skip
"""What is done → where the chain breaks, empty where it does not; whether a kept head tells."""


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_an_adversary_does_is_noticed_as_far_as_the_page_says(
    lines: Lines, attack: str
) -> None:
    do, where, a_head_tells = ATTACKS[attack]
    head = read_chain(whole(lines)).head
    chain = read_chain(whole(do(lines)))
    assert chain.broken.startswith(where) and bool(chain.broken) == bool(where)
    assert bool(chain.broken or check_head(chain, head.to_json(), "an export")) == a_head_tells


def test_a_trail_that_nobody_touched_holds_and_goes_on(lines: Lines, tmp_path: Path) -> None:
    chain = read_chain(whole(lines))
    assert (chain.broken, chain.head.entries, chain.torn) == ("", ENTRIES, b"")
    trail = Trail(tmp_path / "audit.jsonl")
    trail.append("ops", "scaled", model="digits", text="x" * 10_000, evidence={"at": 0.1})
    trail.close()
    longer = read_chain(trail.file.read_bytes())
    assert longer.broken == "" and longer.head == trail.head
    assert check_head(longer, chain.head.to_json(), "an export") == ""
    assert len(longer.entries[-1]["text"]) == 2000
    assert (trail.file.stat().st_mode & 0o777) == 0o600


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_half_a_line_at_the_end_is_named_and_taken_out(
    lines: Lines, tmp_path: Path, cut: int
) -> None:
    file = tmp_path / "audit.jsonl"
    file.write_bytes(whole(lines)[:-cut])
    chain = read_chain(file.read_bytes())
    assert chain.broken == "" and chain.head.entries == ENTRIES - 1
    assert whole(lines).endswith(chain.torn + whole(lines)[-cut:]) and chain.torn
    trail = Trail(file)
    assert trail.found.torn == chain.torn
    trail.append("the server", "repaired")
    trail.close()
    assert read_chain(file.read_bytes()).head.entries == ENTRIES


def test_a_broken_trail_goes_on_and_stays_broken(lines: Lines, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    file.write_bytes(whole([*lines[:2], edit(lines[2], who="me"), *lines[3:]]))
    trail = Trail(file)
    trail.append("the server", "broken", text=trail.found.broken)
    trail.close()
    assert read_chain(file.read_bytes()).broken.startswith("line 4:")
    assert len(file.read_bytes().splitlines()) == ENTRIES + 1


def test_what_is_too_long_for_a_line_is_left_out(tmp_path: Path) -> None:
    trail = Trail(tmp_path / "audit.jsonl")
    trail.append("ops", "promoted", evidence={"all": "x" * 2 * MOST_LINE_BYTES})
    trail.close()
    (entry,) = read_chain(trail.file.read_bytes()).entries
    assert "bytes are too many" in entry["evidence"]


def test_an_entry_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    trail = Trail(tmp_path / "audit.jsonl")
    trail.append("ops", "started")
    head, size = trail.head, trail.file.stat().st_size
    with pytest.raises(ValueError, match="not JSON compliant"):
        trail.append("ops", "promoted", evidence=float("nan"))
    assert (trail.head, trail.file.stat().st_size) == (head, size)


# -- exports --------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    private, public = generate_keys()
    (tmp_path / "k.key").write_bytes(private)
    (tmp_path / "k.pub").write_bytes(public)
    return tmp_path / "k.key", tmp_path / "k.pub"


def test_an_export_is_signed_as_archives_are(
    lines: Lines, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    file = tmp_path / "export.json"
    file.write_bytes(make_export(read_chain(whole(lines)), read_signing_key(keys[0])))
    chain, signature = read_export(file)
    assert chain.head == read_chain(whole(lines)).head
    assert check_signature(file, chain, signature, read_trusted_keys(keys[1]))
    _, other = generate_keys()
    keys[1].write_bytes(other)
    with pytest.raises(NotTrusted, match="not trusted"):
        check_signature(file, chain, signature, read_trusted_keys(keys[1]))


def _forged(content: dict[str, Any]) -> None:
    lines = [format_entry(entry) for entry in content["entries"]]
    content["entries"] = [json.loads(line) for line in forge(lines, 2, who="me")]
    content["head"] = read_chain(whole(forge(lines, 2, who="me"))).head.to_json()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_forged, "signed other entries"),
        (lambda content: content.pop("signature"), "is not signed"),
        (lambda content: content["head"].update(entries=3), "its head is not that"),
        (lambda content: content["entries"].pop(), "its head is not that"),
        (lambda content: content.pop("entries"), "is not an export"),
    ],
)
def test_an_export_that_was_changed_is_refused(
    lines: Lines, keys: tuple[Path, Path], tmp_path: Path, change: Callable[[Any], Any], why: str
) -> None:
    file = tmp_path / "export.json"
    content = json.loads(make_export(read_chain(whole(lines)), read_signing_key(keys[0])))
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(BrokenTrail, match=why):
        check_signature(file, *read_export(file), read_trusted_keys(keys[1]))


def test_the_page_escapes_what_it_shows_and_runs_nothing(tmp_path: Path) -> None:
    trail = Trail(tmp_path / "audit.jsonl")
    trail.append("<script>x</script>", "promoted", text="<b>", evidence={"<i>": "</pre>"})
    trail.close()
    page = make_page(read_chain(trail.file.read_bytes()), "<u>").decode()
    assert "&lt;script&gt;" in page and "@page" in page
    assert not [tag for tag in ("<script", "<b>", "<i>", "<u>", "http") if tag in page]


@pytest.mark.parametrize(("what", "goes_on"), [("promoted", False), ("returned", True)])
def test_what_cannot_be_recorded_is_refused_unless_it_takes_something_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, goes_on: bool
) -> None:
    """The disk is full: a file may have as many bytes as it has, and no more."""
    state = SimpleNamespace(root=tmp_path, models_file=tmp_path / "models.json")
    lifecycle = SimpleNamespace(policy=SimpleNamespace(state=state), registry=Registry())
    audit = Audit(cast("Any", SimpleNamespace(lifecycle=lifecycle)))
    asyncio.run(audit.restore(lambda model, text: None))
    size = (tmp_path / "audit.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        if goes_on:
            lifecycle.registry.tell(what, "m", "2.0", "why")
        else:
            with pytest.raises(ServeError, match="cannot write the audit trail"):
                lifecycle.registry.tell(what, "m", "2.0", "why")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert ("cannot write the audit trail" in caplog.text) == goes_on
    chain = read_chain((tmp_path / "audit.jsonl").read_bytes())
    assert (chain.broken, chain.torn, chain.head.entries) == ("", b"", 1)
    lifecycle.registry.tell(what, "m", "2.0", "why")
    assert read_chain((tmp_path / "audit.jsonl").read_bytes()).entries[1]["what"] == what
