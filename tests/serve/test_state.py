import json
import stat
from pathlib import Path

import pytest

from modelyard.serve.control import state as state_module
from modelyard.serve.control.state import (
    StateDir,
    describe_running,
    read_json,
    write_file,
    write_json,
)
from modelyard.serve.errors import StartError

RUNNING = {
    "pid": 7,
    "inference": "http://127.0.0.1:1",
    "management": "http://127.0.0.1:2",
    "metrics": "http://127.0.0.1:3",
    "started": "2026-11-22T00:00:00Z",
    "log": "/logs/server.log",
    "drain_timeout_s": 30,
}


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "deep" / "state")
    state.create()
    return state


def test_the_folders_are_for_their_owner_only(state: StateDir) -> None:
    for folder in (state.root, state.unpacked, state.log_file.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_each_file_has_its_place(state: StateDir) -> None:
    """Operators, and `modelyard serve` of another version, look for them there."""
    places = {
        "server.json": state.server_file,
        "keys.json": state.key_file,
        "models.json": state.models_file,
        "models.previous.json": state.previous_models_file,
        "logs/server.log": state.log_file,
        "logs/access.log": state.access_file,
        "unpacked": state.unpacked,
        "lock": state.lock_file,
    }
    assert {name: state.root / name for name in places} == places


def test_a_folder_that_is_there_is_used(state: StateDir) -> None:
    state.create()


def test_a_folder_that_cannot_be_used_is_named_with_what_to_do(state: StateDir) -> None:
    state.lock_file.mkdir()
    with pytest.raises(StartError) as caught:
        state.running()
    assert str(caught.value) == (
        f"cannot use the state folder {state.root}: Is a directory: {state.lock_file}; "
        "--state-dir, or the variable MODELYARD_STATE_DIR, names another"
    )
    assert "folder /x: no file of its own;" in StateDir(Path("/x")).why_unusable(
        OSError("no file of its own")
    )


@pytest.mark.parametrize(
    ("content", "has_died"),
    [
        (None, False),
        ("", False),
        ("{}", False),
        ("[]", False),
        ("nonsense", False),
        (json.dumps(RUNNING), True),
    ],
)
def test_a_server_that_left_its_file_has_died(
    state: StateDir, content: str | None, has_died: bool
) -> None:
    if content is not None:
        state.server_file.write_text(content)
    text = f"the server of this state folder, pid 7, died; {state.log_file} may say why"
    assert state.how_it_died() == (text if has_died else None)


def test_a_folder_that_nobody_holds_has_no_server(state: StateDir) -> None:
    assert state.running() is None
    write_json(state.server_file, RUNNING)  # of a server that was killed
    assert state.running() is None


def test_a_second_server_is_told_that_one_runs_and_where(state: StateDir) -> None:
    with state.lock():
        write_json(state.server_file, RUNNING)
        assert state.running() == RUNNING
        with (
            pytest.raises(StartError, match=r"already running: pid 7, inference http://127\.0"),
            state.lock(),
        ):
            pass
    assert state.running() is None


@pytest.mark.parametrize(
    "content", [None, "", "[]", "nonsense", "[" * 100_000, '{"pid": 7}', '{"pid": NaN}']
)
def test_a_server_that_is_just_starting_has_no_address_yet(
    state: StateDir, content: str | None
) -> None:
    if content is not None:
        state.server_file.write_text(content)
    with state.lock():
        assert state.running() == {}
        with pytest.raises(StartError, match="a server is starting"), state.lock():
            pass


def test_the_message_about_a_running_server_says_what_to_do() -> None:
    text = describe_running(RUNNING)
    assert "modelyard serve stop" in text
    assert "--state-dir" in text


def test_a_file_is_replaced_whole_and_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    write_json(file, {"models": [1]})
    write_json(file, {"models": [1, 2]})
    assert json.loads(file.read_text()) == {"models": [1, 2]}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    write_json(file, {"models": [1]})
    with pytest.raises(TypeError):
        write_json(file, {"models": [1], "wrong": object()})
    assert json.loads(file.read_text()) == {"models": [1]}
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "folder", b"content")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_file_that_is_too_long_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "MAX_FILE_BYTES", 8)
    (tmp_path / "most").write_text("[1]     ")
    (tmp_path / "more").write_text("[1]      ")
    assert read_json(tmp_path / "most") == [1]
    with pytest.raises(ValueError, match="8"):
        read_json(tmp_path / "more")
