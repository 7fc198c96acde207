import json
import stat
from pathlib import Path

import pytest

from modelyard.serve.control.state import make_keys, read_key
from modelyard.serve.errors import StartError, Unauthorized
from modelyard.serve.http.auth import TokenCheck

KEY = "a-token-of-this-test"
CHECK = TokenCheck(KEY, ("/ping",))


def bearer(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"here"), (b"authorization", value)]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_right_token_passes_however_its_scheme_is_spelled(scheme: str) -> None:
    CHECK("/models", bearer(f"{scheme} {KEY}".encode()))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        KEY.encode(),
        f"Basic {KEY}".encode(),
        f"Bearer {KEY[:-1]}".encode(),
        f"Bearer {KEY}x".encode(),
        f"Bearer {KEY} ".encode(),
        f"Bearer {KEY.upper()}".encode(),
        "Bearer schlüssel".encode("latin-1"),
        b"Bearer " + b"x" * 1_000_000,
    ],
    ids=lambda value: repr(value[:30]),
)
def test_any_other_token_is_refused(value: bytes) -> None:
    with pytest.raises(Unauthorized):
        CHECK("/models", bearer(value))


def test_no_token_is_refused_and_the_message_says_where_to_get_one() -> None:
    with pytest.raises(Unauthorized, match="modelyard serve token"):
        CHECK("/models", [])


@pytest.mark.parametrize("path", ["/ping/", "//ping", "/PING", "/ping/x", "/", ""])
def test_only_the_very_open_paths_are_open(path: str) -> None:
    CHECK("/ping", [])
    with pytest.raises(Unauthorized):
        CHECK(path, [])


def test_without_a_key_everybody_passes() -> None:
    TokenCheck(None)("/models", [])


def test_keys_are_long_distinct_new_each_time_and_readable_by_their_owner_only(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.json"
    first = make_keys(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text()) == first
    second = make_keys(file)
    keys = [*first.values(), *second.values()]
    assert len(set(keys)) == 4
    assert min(map(len, keys)) >= 43  # 256 bits in base64
    assert read_key(file, "management") == second["management"]


@pytest.mark.parametrize(
    "content", [None, "", "{}", '{"inference": "x"}', "nonsense", "[]", "7", "[" * 100_000]
)
def test_a_key_file_without_the_key_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartError, match=f"no management key in {file} .*a server writes it"):
        read_key(file, "management")
