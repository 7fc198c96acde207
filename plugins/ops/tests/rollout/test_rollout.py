"""A roll-out of a real server: every verb, what is refused beside it, what comes back by itself."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modelyard.archiver import write_archive
from modelyard.plugins.ops.rollout.cli import rollout_app
from tests.serve.live import (
    LiveServer,
    build_archive,
    make_notes_folder,
    poll,
    running,
    start_server,
)

QUICK = "disagreement<=40%, failures<=40%, least 5, confidence 80%, p50<=1000, p99<=1000"
"""A rule that a few requests are enough for."""


def build(store: Path, version: str, behaviour: str = "good", model: str = "rolled") -> str:
    """Archive a version of the classifier of numbers; return its file."""
    config = "minWorkers: 1\n"
    made = build_archive(
        store, "rolled", name=model, version=version, handler=f"{behaviour}.py", config=config
    )
    return made.rename(store / f"{model}-{version}.mar").name


def verb(server: LiveServer, what: str = "", model: str = "rolled", **query: Any) -> Any:
    """Call the management API of roll-outs, and return status and JSON."""
    path = f"/models/{model}/rollout" + (f"/{what}" if what else "")
    answer = server.management.post(path, params=query)
    return answer.status_code, answer.json()


def done(answer: Any, state: str) -> Any:
    status, found = answer
    assert (status, found.get("state")) == (200, state), found
    return found


def refused(answer: Any, *words: str) -> None:
    status, found = answer
    assert status == 409, found
    assert all(word in found["message"] for word in words), found["message"]


def status(server: LiveServer, model: str = "rolled") -> Any:
    answer = server.management.get(f"/models/{model}/rollout")
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(server: LiveServer, count: int, model: str = "rolled") -> Counter[str]:
    """Send numbers; return which versions answered, and check that they answered right."""
    versions: Counter[str] = Counter()
    for number in range(count):
        answer = server.predict(model, str(number), headers={"x-request-id": f"n{number}"})
        assert answer.status_code == 200, answer.text
        assert max(answer.json(), key=answer.json().__getitem__) == str(number % 10)
        versions[answer.headers["x-model-version"]] += 1
    return versions


def ask_until(
    server: LiveServer, is_so: Callable[[Any], bool], what: str, model: str = "rolled"
) -> Any:
    """Send numbers until the roll-out is so."""

    def found() -> Any:
        ask(server, 10, model)
        about = status(server, model)
        return about if is_so(about) else None

    return poll(found, what, 60)


def by_command(server: LiveServer, code: int, name: str, *more: str) -> str:
    """Run a command of `modelyard rollout`, and return what it prints."""
    arguments = [name, "rolled", *more, f"--state-dir={server.state_dir}"]
    ran = CliRunner().invoke(rollout_app, arguments)
    assert ran.exit_code == code, ran.output
    return ran.output


def test_a_version_goes_from_shadow_to_default_and_back(shared_server: LiveServer) -> None:
    server, store = shared_server, shared_server.store
    one, two, three = (build(store, version) for version in ("1.0", "2.0", "3.0"))
    assert server.register(one).status_code == 200
    assert server.management.get("/models/rolled/rollout").status_code == 404
    refused(verb(server, url=one), "serves already")
    assert verb(server, url=two, rule="perfect")[0] == 400
    assert [model["modelVersion"] for model in all_versions(server)] == ["1.0"]

    plan = {"shadow": "100", "canary": "30,60", "rule": QUICK}
    started = done(verb(server, url=two, **plan), "shadow")
    assert done(verb(server, url=two, **plan), "shadow")["since"] == started["since"]
    refused(verb(server, url=three, **plan), two, "abort")
    refused(verb(server, url=two, shadow="10"), "other options")
    refused(verb(server, "promote"), "not enough traffic", "--force")
    refused(verb(server, "back"), "answers nobody")
    for method, path in (
        ("DELETE", "rolled/2.0"), ("PUT", "rolled/2.0/set-default"),
        ("PUT", "rolled/1.0/set-default"), ("DELETE", "rolled/1.0"),
    ):  # fmt: skip
        answer = server.management.request(method, f"/models/{path}")
        assert answer.status_code in (403, 409), answer.text
    assert server.register(two).status_code == 409
    for version in ("1.0", "2.0"):  # nobody would answer what is sent to it
        answer = server.management.put(f"/models/rolled/{version}", params={"min_worker": 0})
        refused((answer.status_code, answer.json()), "modelyard rollout abort rolled")
    assert server.predict("rolled/2.0", "7").headers["x-model-version"] == "2.0"

    found = ask_until(server, lambda about: about["judgement"]["verdict"] == "pass", "it passes")
    assert found["verdicts"] == {"equal": found["compared"]}
    assert found["noise"]["compared"] >= 1
    assert found["noise"]["differs"] == 0
    found = ask_until(server, lambda about: about["noise"]["compared"] >= 150, "enough, twice")
    ask(server, 100)
    more = poll(lambda: (about := status(server))["compared"] >= found["compared"] + 60 and about,
                "the next are compared")  # fmt: skip
    assert more["noise"]["compared"] <= found["noise"]["compared"] + 30, "one in ten is enough"
    assert done(verb(server, "promote", to="30"), "canary")["canaryShare"] == 0.3
    assert done(verb(server, "promote", to="30%"), "canary")["canaryShare"] == 0.3
    sides = ask(server, 60)
    assert sides == ask(server, 60)
    assert 3 < sides["2.0"] < 35
    by_command(server, 0, "promote", "--to", "default", "--force")
    by_command(server, 0, "promote")
    assert ask(server, 5) == {"2.0": 5}
    assert done(verb(server, url=two), "default")["candidate"]["version"] == "2.0"
    by_command(server, 1, "abort")
    refused(verb(server, "abort"), "back")
    shown = by_command(server, 0, "status")
    assert "default, since" in shown
    assert "promoted by an operator" in shown
    by_command(server, 2, "start", "rolled-2.0.mar", "--wait")
    for _ in range(2):
        done(verb(server, "back"), "returned")
    assert ask(server, 5) == {"1.0": 5}
    assert server.predict("rolled/2.0", "7").status_code == 200
    for _ in range(2):
        done(verb(server, "abort"), "aborted")
    assert [model["modelVersion"] for model in all_versions(server)] == ["1.0"]
    state = {"model": "rolled", "candidate": "2.0", "state": "aborted"}
    assert server.metric("modelyard_rollout_state", **state) == 1
    labels = {"model": "rolled", "candidate": "2.0", "verdict": "equal"}
    assert server.metric("modelyard_rollout_compared_total", **labels) >= found["compared"]

    # Without copies, how long it takes is measured beside what clients of the other one wait for.
    done(verb(server, url=two, shadow="0", canary="50"), "candidate")
    done(verb(server, "promote", force=True), "canary")
    found = ask_until(server, lambda about: about["latency"]["candidate"]["p50"], "it is timed")
    assert all(side["p50"] > 0 for side in found["latency"].values())
    assert found["compared"] == 0
    done(verb(server, "back"), "returned")
    done(verb(server, "abort"), "aborted")

    # A candidate that fails is taken back, and one that is another model is not taken at all.
    bad = build(store, "4.0", "failing")
    other = build(store, "1.0", model="another")
    refused(verb(server, url=other), "archive of another")
    done(verb(server, url=bad, shadow="0", canary="90"), "candidate")
    done(verb(server, "promote", force=True), "canary")

    def is_back() -> bool:
        for number in (7, 17, 27):
            server.predict("rolled", str(number))
        return bool(status(server)["state"] == "returned")

    poll(is_back, "the failing one does not answer any more")
    assert "failed at" in status(server)["events"][-1]["why"]
    assert ask(server, 20) == {"1.0": 20}
    assert server.metric("modelyard_rollout_returned_total", model="rolled", candidate="4.0") == 1
    done(verb(server, "abort"), "aborted")


def test_a_candidate_that_answers_its_golden_requests_wrong_is_the_archives_fault(
    shared_server: LiveServer, tmp_path: Path
) -> None:
    server, gate = shared_server, make_notes_folder() / "gate"
    (handler := tmp_path / "moody.py").write_text(
        "import os\n\n\ndef handle(data, context):\n"
        f"    off = 1.5 * os.path.exists({str(gate)!r})\n"
        "    return None if data is None else [183.25 + off for _ in data]\n"
    )
    (request := tmp_path / "seven.txt").write_text("7")
    files = []
    for version, examples in (("1.0", []), ("2.0", [f"{request}=183.25"])):
        made = write_archive(
            "moody", version=version, handler=str(handler), output_dir=tmp_path, examples=examples,
            force=True,
        )  # fmt: skip
        files.append(made.rename(server.store / f"moody-{version}.mar").name)
    assert server.register(files[0]).status_code == 200
    gate.touch()
    code, found = verb(server, url=files[1], model="moody")
    assert (code, found["type"]) == (400, "InvalidModelException")
    assert "expected 183.25, got 184.75;" in found["message"]
    assert "archive it again" in found["message"]
    assert server.management.delete("/models/moody").status_code == 200


def all_versions(server: LiveServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.management.get("/models/rolled/all").json()
    return found


# -- at night ------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_after_a_kill_every_state_is_there_again(tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "state"
    one, two = build(store, "1.0"), build(store, "2.0")
    server = start_server(folder, store)
    assert server.register(one).status_code == 200

    def kill(*arguments: str) -> LiveServer:
        server.signal(signal.SIGKILL)
        server.wait()
        server.close_clients()
        return start_server(folder, store, *arguments)

    plan = {"url": two, "shadow": "100", "canary": "50"}
    steps: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("candidate", lambda: verb(server, **plan | {"shadow": "0"})),
        ("aborted", lambda: verb(server, "abort")),
        ("shadow", lambda: verb(server, **plan)),
        ("canary", lambda: verb(server, "promote", force=True)),
        ("default", lambda: verb(server, "promote", force=True)),
        ("returned", lambda: verb(server, "back")),
    )
    shares = {"canary": range(5, 56), "default": range(60, 61)}
    for state, act in steps:
        done(act(), state)
        before = ask(server, 60)
        server = kill()
        assert status(server)["state"] == state
        assert ask(server, 60) == before, state
        assert before["2.0"] in shares.get(state, range(1)), state
        versions = {each["modelVersion"] for each in all_versions(server)}
        assert versions == ({"1.0"} if state == "aborted" else {"1.0", "2.0"}), state
        if state == "canary":  # as a service starts, which names what it serves
            server = kill(f"--models=rolled={one}")
            assert status(server)["state"] == "canary"
            assert ask(server, 60) == before
    done(verb(server, **plan), "shadow")
    store.joinpath(two).write_bytes(store.joinpath(one).read_bytes())  # not what it was
    server = kill()
    assert status(server)["state"] == "failed"
    assert "could not be restored" in status(server)["events"][-1]["why"]
    assert ask(server, 5) == {"1.0": 5}
    server.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("behaviour", ["crashing", "hanging", "slow"])
def test_a_canary_that_misbehaves_is_taken_back_and_no_client_sees_it(
    tmp_path: Path, behaviour: str
) -> None:
    store = tmp_path / "store"
    one, two = build(store, "1.0"), build(store, "2.0", behaviour)
    rule = "least 20, confidence 90%"
    with running(tmp_path / "state", store) as server:
        assert server.register(one).status_code == 200
        done(verb(server, url=two, shadow="0", canary="50", rule=rule), "candidate")
        done(verb(server, "promote", force=True), "canary")

        def is_back() -> bool:
            for number in range(20):
                answer = server.predict("rolled", str(number))
                assert answer.status_code == 200, answer.text  # the live version answers for it
            return bool(status(server)["state"] == "returned")

        poll(is_back, "it is taken back", 90)
        assert ask(server, 20) == {"1.0": 20}
        saved = json.loads((server.state_dir / "models.json").read_text())
        assert saved["rollouts"]["rolled"]["state"] == "returned"


@pytest.mark.nightly
def test_a_good_one_goes_on_by_itself_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    store = tmp_path / "store"
    one, two, three = build(store, "1.0"), build(store, "2.0"), build(store, "3.0", "wrong")
    by_itself = {"shadow": "100", "for": "2s", "canary": "50"}
    with running(tmp_path / "state", store) as server:
        assert server.register(one).status_code == 200
        done(verb(server, url=two, rule=QUICK, **by_itself), "shadow")
        found = ask_until(server, lambda about: about["state"] != "shadow", "it is judged")
        found = ask_until(server, lambda about: about["state"] == "default", "it is the default")
        assert [event["to"] for event in found["events"]] == [
            "candidate", "shadow", "canary 50 %", "default",
        ]  # fmt: skip
        rule = "disagreement<=0.1%, least 50"
        done(verb(server, url=three, keep_inputs=True, rule=rule, **by_itself), "shadow")
        versions = {each["modelVersion"] for each in all_versions(server)}
        assert versions == {"2.0", "3.0"}  # what was kept to go back to is not kept any more

        def is_judged() -> Any:
            for _ in range(20):
                assert server.predict("rolled", "37").json()["7"] == 0.9
            about = status(server)
            return about if about["state"] == "failed" else None

        found = poll(is_judged, "it is refused", 60)
        assert found["worst"][0]["input"]["text"] == "37"
        assert found["worst"][0]["candidate"]["text"].startswith('{"8"')


@pytest.mark.nightly
def test_golden_requests_are_answered_again_while_a_canary_answers(tmp_path: Path) -> None:
    store, state = tmp_path / "store", tmp_path / "state"
    one = build(store, "1.0")
    (request := tmp_path / "seven.txt").write_text("7")
    made = build_archive(
        store, "rolled", version="2.0", handler="drifting.py", examples=[f"{request}=7"]
    )
    with running(state, store) as server:
        assert server.register(one).status_code == 200
        done(verb(server, url=made.name, shadow="0", canary="50"), "candidate")
        done(verb(server, "promote", force=True), "canary")
        (folder,) = {
            path.parent
            for path in (state / "unpacked").rglob("good.py")
            if json.loads((path.parent / "MAR-INF" / "MANIFEST.json").read_text())["model"][
                "modelVersion"
            ]
            == "2.0"
        }
        (folder / "gate").touch()
        poll(lambda: status(server)["state"] == "returned", "it is taken back", 100)
        why = status(server)["events"][-1]["why"]
        assert "golden request 0" in why
        assert 'expected the label "7", got "8"' in why
        assert ask(server, 5) == {"1.0": 5}
