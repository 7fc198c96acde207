"""The three keys of TorchServe: written, checked, replaced, expired."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest

from modelyard.plugins.torchserve.tokens import Tokens
from modelyard.serve.errors import Unauthorized

FAILED = "failed. Token either incorrect, expired, or not provided correctly"


def keys(folder: Path) -> dict[str, str]:
    content = json.loads((folder / "key_file.json").read_text(encoding="utf-8"))
    return {name: entry["key"] for name, entry in content.items()}


def bearer(key: str, scheme: str = "Bearer ") -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"{scheme}{key}".encode())]


def test_the_file_has_torchserves_form_and_is_its_owners_only(tmp_path: Path) -> None:
    Tokens(tmp_path, 60)
    file = tmp_path / "key_file.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    assert {name: sorted(entry) for name, entry in content.items()} == {
        "management": ["expiration time", "key"],
        "inference": ["expiration time", "key"],
        "API": ["key"],
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert all(len(key) >= 43 for key in keys(tmp_path).values())  # 256 bits
    first = keys(tmp_path)
    Tokens(tmp_path, 60)
    assert not set(first.values()) & set(keys(tmp_path).values())


@pytest.mark.parametrize("name", ["management", "inference"])
def test_only_its_own_key_opens_an_api(tmp_path: Path, name: str) -> None:
    check = Tokens(tmp_path, 60).check(name, ["/ping"])
    held = keys(tmp_path)
    check("/x", bearer(held[name]))
    check("/x", bearer(held[name], "Bearer   "))
    check("/x", bearer(f"{held[name]} "))  # no part of the value, RFC 9110
    check("/ping", [])
    check("/ping/", [])
    wrong = [bearer(key) for other, key in held.items() if other != name]
    key = held[name]
    wrong += [[], bearer(""), bearer(key[:-1]), bearer(key + "x"), bearer("\xe9")]
    wrong += [bearer(key, scheme) for scheme in ("bearer ", "BEARER ", "", "Basic ", "Bearer")]
    wrong += [bearer(key + " x"), bearer("x" * 1_000_000)]
    for headers in wrong:
        with pytest.raises(Unauthorized, match=f"Token Authorization {FAILED}"):
            check("/x", headers)


def test_a_key_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(tmp_path, 0.5)
    check = tokens.check("inference")
    headers = bearer(keys(tmp_path)["inference"])
    check("/x", headers)
    assert [grant.rights for grant in tokens.grants()] == [{"manage"}]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 31)
    with pytest.raises(Unauthorized):
        check("/x", headers)
    assert not tokens.grants()


def test_a_new_key_ends_the_old_one_at_once(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path, 60)
    check, before = tokens.check("inference"), keys(tmp_path)
    tokens.replace("INFERENCE", bearer(before["API"]))
    after = keys(tmp_path)
    assert (after["management"], after["API"]) == (before["management"], before["API"])
    check("/x", bearer(after["inference"]))
    with pytest.raises(Unauthorized):
        check("/x", bearer(before["inference"]))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("", "API"), ("API", "API"), ("x", "API"), ("inference", "management"), ("inference", "")],
)
def test_a_new_key_needs_a_kind_and_the_key_for_that(tmp_path: Path, kind: str, name: str) -> None:
    tokens = Tokens(tmp_path, 60)
    before = keys(tmp_path)
    with pytest.raises(Unauthorized, match=f"Token Authentication {FAILED}"):
        tokens.replace(kind, bearer(before.get(name, "")))
    assert keys(tmp_path) == before
