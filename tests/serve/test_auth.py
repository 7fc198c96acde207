import io
import json
import logging
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from modelyard.cli import main
from modelyard.serve.api.inference import right_of
from modelyard.serve.app import known_tokens
from modelyard.serve.control.state import make_keys, read_key
from modelyard.serve.errors import Forbidden, StartError, Unauthorized
from modelyard.serve.http import watched
from modelyard.serve.http.application import TokenCheck
from modelyard.serve.http.tokens import (
    LEAST_CHARACTERS,
    MOST_BYTES,
    MOST_SHOWN,
    MOST_TOKENS,
    RIGHTS,
    make_grant,
    parse_grants,
    read_token_file,
)
from modelyard.serve.settings import load_settings

KEY = "a-token-of-this-test-that-is-long-enough"
GRANTS = [make_grant("test", "manage", KEY)]
CHECK = TokenCheck(lambda: GRANTS, lambda path: "manage", ("/ping",))


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


def test_a_request_shows_so_many_tokens_and_no_more() -> None:
    """Each is compared with all that are known: a thousand of them would take 9 ms."""
    shown = [(b"authorization", b"Bearer wrong")] * (MOST_SHOWN - 1)
    CHECK("/predictions/a", [*shown, (b"authorization", b"Bearer " + KEY.encode())])
    with pytest.raises(Unauthorized):
        CHECK("/predictions/a", [*shown, *shown[:1], (b"authorization", b"Bearer " + KEY.encode())])


def test_no_token_is_refused_and_the_message_says_where_to_get_one() -> None:
    with pytest.raises(Unauthorized, match="modelyard serve token"):
        CHECK("/models", [])


@pytest.mark.parametrize("path", ["/ping/", "//ping", "/PING", "/ping/x", "/", ""])
def test_only_the_very_open_paths_are_open(path: str) -> None:
    CHECK("/ping", [])
    with pytest.raises(Unauthorized):
        CHECK(path, [])


def test_without_a_key_everybody_passes() -> None:
    TokenCheck(None, right_of)("/models", [])


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


# -- tokens that stay --------------------------------------------------------------------------

PATHS = {
    "/predictions/echo": "predict",
    "/predictions/echo/1.0": "predict",
    "/v2/models/echo/infer": "predict",
    "/v2/models/echo/versions/1/infer": "predict",
    "/explanations/echo": "explain",
    "/explanations/echo/1.0": "explain",
    "/docs": None,
    "/v2/models/echo": None,
    "": None,
    "*": None,
    "no-path": None,
}


@pytest.mark.parametrize(("path", "right"), PATHS.items())
def test_a_path_takes_the_tokens_that_have_its_right(path: str, right: str | None) -> None:
    for given in RIGHTS:
        check = TokenCheck([make_grant("one", given, KEY)].copy, right_of)
        if right in (None, given):
            check(path, bearer(f"Bearer {KEY}".encode()))
        else:
            with pytest.raises(Forbidden, match=f"'one' may {given}; this needs one .* {right}"):
                check(path, bearer(f"Bearer {KEY}".encode()))
        with pytest.raises(Unauthorized):
            check(path, bearer(b"Bearer another-token-that-nobody-knows-of"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("app predict", "2 words; expected name, rights and hash"),
        ("app predict sha256:12", "third word is not sha256: and 64"),
        ("app predict my-secret-token", "third word is not sha256: and 64"),
        ("app,x predict sha256:" + "0" * 64, "'app,x' is not a name"),
        ("app read sha256:" + "0" * 64, "'read' is not a right; expected some of predict,"),
        ("app predict, sha256:" + "0" * 64, "'' is not a right"),
    ],
)
def test_a_wrong_line_is_named_and_what_may_be_a_token_is_not_shown(
    line: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"line 2: .*{message}") as caught:
        parse_grants(["# comment", line])
    assert "secret" not in str(caught.value)


def test_there_are_not_too_many_tokens() -> None:
    line = "app predict sha256:" + "0" * 64
    assert len(parse_grants([line] * MOST_TOKENS)) == MOST_TOKENS
    with pytest.raises(ValueError, match="101 tokens; expected 100 at most"):
        parse_grants([line] * (MOST_TOKENS + 1))


@pytest.mark.parametrize(
    ("token", "is_one"),
    [
        ("x" * LEAST_CHARACTERS, True),
        ("x" * (LEAST_CHARACTERS - 1), False),
        ("x" * LEAST_CHARACTERS + " ", False),
        ("ü" * LEAST_CHARACTERS, False),
    ],
)
def test_a_token_that_somebody_chose_is_long_and_visible(token: str, is_one: bool) -> None:
    if is_one:
        assert make_grant("app", "predict", token).name == "app"
    else:
        with pytest.raises(ValueError, match="a token has 32 characters or more, visible ones"):
            make_grant("app", "predict", token)


def test_a_token_file_has_a_megabyte_at_most(tmp_path: Path) -> None:
    file = tmp_path / "tokens.txt"
    line = f"{make_grant('app', 'predict', KEY)}\n".encode()
    file.write_bytes(line.rjust(MOST_BYTES, b"\n"))
    assert [grant.name for grant in read_token_file(file)] == ["app"]
    file.write_bytes(line.rjust(MOST_BYTES + 1, b"\n"))
    with pytest.raises(StartError, match=rf"the token file {file}: more than 1048576 bytes"):
        read_token_file(file)


@pytest.mark.parametrize("given", ["two lines", "two in one", "a list"])
def test_tokens_come_from_a_variable_or_the_settings(tmp_path: Path, given: str) -> None:
    lines = [str(make_grant(name, "metrics", KEY + name)) for name in ("a", "b")]
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps({"tokens": lines}))
    separator = "\n" if given == "two lines" else "; "
    variable = {} if given == "a list" else {"MODELYARD_TOKENS": separator.join(lines)}
    settings = load_settings({}, file if given == "a list" else None, variable)
    names = [grant.name for grant in known_tokens(settings, {"management": KEY})()]
    assert names == ["serve-management", "a", "b"]
    assert settings.asks_for_tokens  # on loopback too


def test_tokens_that_nobody_asks_for_are_refused(tmp_path: Path) -> None:
    for wrong in ({"tokens": ("x",)}, {"token_file": tmp_path}):
        with pytest.raises(StartError, match="auth is never, so no token would be asked for"):
            load_settings({"auth": "never", **wrong}, None, {})
    settings = load_settings({"tokens": "app predict plain-text"}, None, {})
    with pytest.raises(StartError, match="the setting tokens: line 1: the third word is not"):
        known_tokens(settings, {})


def refused(check: Callable[[], None]) -> bool:
    try:
        check()
    except Unauthorized:
        return True
    return False


def test_a_token_file_that_changes_is_read_again_and_one_that_breaks_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watched, "LOOK_S", 0)
    caplog.set_level(logging.INFO)
    # As Kubernetes mounts a secret: a link to a folder that is another one after a change.
    keys = {number: f"{KEY}-{number}" for number in (1, 2)}
    for number in (1, 2):
        (tmp_path / f"v{number}").mkdir()
        line = make_grant("app", "predict", keys[number])
        (tmp_path / f"v{number}" / "tokens").write_text(f"# of {number}\n\n{line}\n")
    (tmp_path / "data").symlink_to("v1")
    file = tmp_path / "data" / "tokens"
    settings = load_settings({"token_file": file}, None, {})
    check = TokenCheck(known_tokens(settings, {}), right_of)

    def passes(number: int) -> bool:
        headers = bearer(f"Bearer {keys[number]}".encode())
        return not refused(lambda: check("/predictions/echo", headers))

    assert (passes(1), passes(2)) == (True, False)
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").replace(tmp_path / "data")
    assert (passes(1), passes(2)) == (False, True)
    file.write_text("app predict plain-secret\n")
    assert (passes(1), passes(2)) == (False, True)
    file.unlink()
    assert (passes(1), passes(2)) == (False, True)
    file.write_text(f"{make_grant('app', 'predict', keys[1])}\n")
    assert (passes(1), passes(2)) == (True, False)
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" changed and ")[2][:20] for text in said] == [
        "was read again", "cannot be used; what", "cannot be used; what", "was read again",
    ]  # fmt: skip
    assert "secret" not in "".join(said)


def command(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["token", *map(str, arguments)])
    return int(end.value.code or 0)


def test_the_command_prints_a_token_once_and_keeps_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokens.txt"
    assert command("new", "app", "--rights", "predict,explain", "--file", file) == 0
    first = capsys.readouterr().out.strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)
    file.write_text("# ours\n" + file.read_text())
    assert command("new", "app", "--rights", "predict", "--file", file) == 0
    second = capsys.readouterr().out.strip()
    monkeypatch.setattr("sys.stdin", io.StringIO(KEY + "\n"))
    assert command("new", "graph", "--rights", "metrics", "--stdin", "--file", file) == 0
    assert capsys.readouterr().out == ""
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    made = [make_grant("app", "predict,explain", first), make_grant("app", "predict", second)]
    assert read_token_file(file) == (*made, make_grant("graph", "metrics", KEY))
    assert not any(token in file.read_text() for token in (first, second, KEY))
    assert command("list", file, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in shown] == ["app", "app", "graph"]
    assert command("remove", "app", file, "--keep-last") == 0
    assert read_token_file(file)[0] == made[1]
    assert file.read_text().startswith("# ours\n")
    assert command("remove", "nobody", file) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("new", "a b", "--rights", "predict"), 2, "'a b' is not a name"),
        (("new", "app", "--rights", "read"), 2, "'read' is not a right"),
        (("new", "app", "--rights", "metrics", "--stdin"), 2, "a token has 32 characters or more"),
        (("new", "app", "--rights", "metrics", "--file", "/nowhere/x"), 1, "cannot write /nowhe"),
        (("list", "/nowhere/x"), 1, "cannot read the token file /nowhere/x"),
    ],
)
def test_wrong_use_of_the_command_is_one_line(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert command(*arguments) == code
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1 and not said.out


def test_a_file_that_nobody_may_write_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "tokens.txt"
    file.write_text("app predict plain\n")
    assert command("new", "other", "--rights", "predict", "--file", file) == 1
    assert file.read_text() == "app predict plain\n"
    assert list(tmp_path.iterdir()) == [file]
