"""The trail of a real server: who did what, on what evidence, through kills; and the commands."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from modelyard.archiver.keys import generate_keys
from modelyard.plugins.audit.chain import read_chain
from modelyard.plugins.audit.cli import audit_app
from modelyard.serve.http.tokens import make_grant
from tests.serve.live import LiveServer, build_archive, poll, running, start_server

ALICE = "a" * 40


def entries(state_dir: Path) -> list[dict[str, Any]]:
    """Return the entries of a trail, which holds."""
    chain = read_chain((state_dir / "audit.jsonl").read_bytes())
    assert (chain.broken, chain.torn) == ("", b"")
    return list(chain.entries)


def audit(*words: str | Path, code: int = 0) -> str:
    ran = CliRunner().invoke(audit_app, list(map(str, words)))
    assert ran.exit_code == code, ran.output
    return ran.output


def said(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in ("who", "what", "model", "version"))


def build(store: Path, version: str) -> str:
    made = build_archive(store, "rolled", version=version, handler="good.py")
    return made.rename(store / f"rolled-{version}.mar").name


def test_who_did_what_on_what_evidence_stands_in_a_chain_that_survives_kills(
    tmp_path: Path,
) -> None:
    store, state = tmp_path / "store", tmp_path / "state"
    one, two = build(store, "1.0"), build(store, "2.0")
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(f"{make_grant('alice', 'manage', ALICE)}\n")
    options = ["--workers=1", f"--token-file={tokens}"]
    server = start_server(state, store, *options)
    try:
        alice = httpx.Client(
            base_url=server.about["management"], timeout=60, verify=False,
            headers={"Authorization": f"Bearer {ALICE}"},
        )  # fmt: skip
        assert server.register(one).status_code == 200
        (store / "torn.mar").write_bytes((store / one).read_bytes()[:900])
        assert alice.post("/models", params={"url": "torn.mar"}).status_code == 400
        assert alice.post("/models", params={"url": "absent.mar"}).status_code == 404
        scaled = alice.put("/models/rolled", params={"min_worker": 2, "synchronous": True})
        assert scaled.status_code == 200
        plan = {"url": two, "shadow": "100", "canary": "50", "rule": "least 5"}
        assert alice.post("/models/rolled/rollout", params=plan).status_code == 200
        key = {"Authorization": f"Bearer {server.inference_token}"}
        for number in range(30):
            assert server.predict("rolled", str(number), headers=key).status_code == 200
        place = "/models/rolled/rollout"
        poll(lambda: alice.get(place).json()["compared"] >= 5, "some are compared", 60)
        assert alice.post(f"{place}/promote", params={"force": True}).status_code == 200
        console(server)
        alice.close()
    finally:
        server.close_clients()
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    found = entries(state)
    shown = [said(entry) for entry in found]
    expected = [
        ("the server", "started", None, None),
        ("serve-management", "registered", "rolled", "1.0"),
        ("alice", "not registered", "torn.mar", None),
        ("alice", "not registered", "absent.mar", None),
        ("alice", "scaled", "rolled", "1.0"),
        ("alice", "registered", "rolled", "2.0"),
        ("alice", "roll-out begun", "rolled", "2.0"),
        ("alice", "promoted", "rolled", "2.0"),
        ("serve-management", "returned", "rolled", "2.0"),
    ]
    assert [each for each in shown if each in expected and each[1] != "roll-out begun"] == [
        each for each in expected if each[1] != "roll-out begun"
    ]
    promoted = next(entry for entry in found if entry["what"] == "promoted")
    evidence = promoted["evidence"]
    assert evidence["compared"] >= 5 and evidence["verdicts"]["equal"] >= 5
    assert "least 5" in evidence["rule"] and evidence["tolerance"] > 0
    assert evidence["bounds"]["disagreement"]["high"] <= 1
    assert promoted["candidate"]["digest"] != promoted["live"]["digest"]
    assert ALICE not in (state / "audit.jsonl").read_text()

    # Killed while it wrote a line, and read by whoever comes after.
    with (state / "audit.jsonl").open("ab") as file:
        file.write(b'{"n":99,"at"')
    assert "12 bytes of a line" in audit("verify", "--state-dir", state)
    with running(state, store, *options) as server:
        after = entries(state)
        whats = [entry["what"] for entry in after[len(found) :]]
        assert whats[:2] == ["repaired", "started"] and "stopped" not in whats
        assert after[len(found) + 1]["served"][0]["version"] == "1.0"
    assert entries(state)[-1]["what"] == "stopped"
    check_commands(state, tmp_path)


def console(server: LiveServer) -> None:
    """Have the console return the roll-out."""
    with httpx.Client(base_url=server.about["management"], timeout=60, verify=False) as browser:
        assert browser.post("/console/sign-in", data={"token": server.token}).status_code == 303
        page = browser.get("/console/models/rolled/1.0").text
        word = re.search(r'name="csrf" value="([^"]+)"', page)
        assert word is not None
        place = "/console/models/rolled/1.0/rollout/back"
        assert browser.post(place, data={"csrf": word[1]}).status_code == 303


def check_commands(state: Path, folder: Path) -> None:
    """Run every command on a trail, then take something from it."""
    at = ("--state-dir", state)
    private, public = generate_keys()
    (folder / "k.key").write_bytes(private)
    (folder / "k.pub").write_bytes(public)
    trail = state / "audit.jsonl"
    lines = trail.read_bytes().splitlines(keepends=True)
    exported = folder / "export.json"
    audit("export", "-o", exported, "--sign", folder / "k.key", *at)
    assert "signed by" in audit("verify", exported, "--trusted-keys", folder / "k.pub")
    assert f"{len(lines)} entries" in audit("verify", "--against", exported, *at)
    assert "alice: promoted rolled 2.0" in audit("show", *at)
    audit("show", "--html", folder / "audit.html", *at)
    assert "alice" in (folder / "audit.html").read_text()

    trail.write_bytes(b"".join(lines[:-1]))  # beyond what the state file knows
    audit("verify", *at)
    assert "missing at the end" in audit("verify", "--against", exported, *at, code=1)
    trail.write_bytes(b"".join(lines[:3]))
    assert "the state file knows" in audit("verify", *at, code=1)
    trail.write_bytes(b"".join([*lines[:3], lines[3].replace(b"alice", b"nobody"), *lines[4:]]))
    assert "line 5" in audit("verify", *at, code=1)
    assert json.loads(audit("verify", "--json", *at, code=1))["broken"].startswith("line 5")
    audit("export", "-o", folder / "no.json", *at, code=1)
    assert not (folder / "no.json").exists()


@pytest.mark.nightly
def test_a_start_says_that_entries_are_missing_and_it_is_not_forgotten(tmp_path: Path) -> None:
    store, state = tmp_path / "store", tmp_path / "state"
    for version in ("2.0", "3.0"):
        build_archive(store, "echo", version=version).rename(store / f"echo-{version}.mar")
    build_archive(store, "echo")
    with running(state, store, "--workers=1") as server:
        assert server.register("echo.mar").status_code == 200
    trail = state / "audit.jsonl"
    trail.write_bytes(trail.read_bytes().splitlines(keepends=True)[0])
    assert "entries are missing at the end" in audit("verify", "--state-dir", state, code=1)
    for version in ("2.0", "3.0"):  # a change saves a new head
        with running(state, store, "--workers=1") as server:
            assert server.register(f"echo-{version}.mar").status_code == 200
        found = audit("verify", "--state-dir", state, code=1)
        assert "a start of the server found then" in found and "missing at the end" in found


def test_a_server_that_could_not_record_anything_does_not_start(tmp_path: Path) -> None:
    store, state = tmp_path / "store", tmp_path / "state"
    build_archive(store, "echo")
    (state / "audit.jsonl").mkdir(parents=True)
    with pytest.raises(AssertionError, match="cannot write the audit trail"):
        start_server(state, store, "--workers=1")
