import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from modelyard.archiver import write_archive
from modelyard.plugins.tune.costs import parse_costs
from modelyard.plugins.tune.load import Load, make_request, run_load
from modelyard.plugins.tune.tune import (
    QUANTILES,
    Outcome,
    Setting,
    Slo,
    Turn,
    config_changes,
    merge_config,
    on_own_ports,
    parse_slo,
    search,
    shapes,
)
from modelyard.plugins.tune.tune_cli import tune_app
from modelyard.serve.errors import StartError, WrongUsage
from modelyard.serve.settings import load_settings
from tests.serve.live import LiveServer, build_archive, descendants, environment, is_alive, poll

# -- the limit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("p99=50ms", Slo("p99", 0.05)),
        ("p50=0.5s", Slo("p50", 0.5)),
        ("p99.9=900us", Slo("p99.9", 0.0009)),
    ],
)
def test_a_limit_is_read(text: str, slo: Slo) -> None:
    assert parse_slo(text).quantile == slo.quantile
    assert parse_slo(text).limit_s == pytest.approx(slo.limit_s)
    assert parse_slo(str(parse_slo(text))).limit_s == pytest.approx(slo.limit_s)


@pytest.mark.parametrize(
    "text", ["p99", "p99=50", "p99=50min", "p98=50ms", "p99=-1ms", "p99=0ms", "=5ms", "p99=ms"]
)
def test_a_limit_that_cannot_be_kept_or_read_is_refused(text: str) -> None:
    with pytest.raises(WrongUsage, match="--slo"):
        parse_slo(text)


# -- the search --------------------------------------------------------------------------------

PLAN = Setting(2, 1, 8)


def turn(rate: float, p99_ms: float, failure: str = "") -> Turn:
    return Turn(rate, dict.fromkeys(QUANTILES, p99_ms / 1e3), failure=failure)


def find(measure: Callable[[Setting], Turn], slo: str | None = None, **options: Any) -> Outcome:
    given = {"cores": 2, "gpus": 0, "largest_batch": 8, "rounds": 3, **options}
    limit = parse_slo(slo) if slo else None
    return search(PLAN, slo=limit, measure=lambda each: list(map(measure, each)), **given)


def best(outcome: Outcome) -> Setting:
    assert outcome.best is not None
    return outcome.best.setting


def model(setting: Setting) -> Turn:
    """A model that two workers and batches of 4 serve best; a batch costs latency."""
    gain = {1: 1.0, 2: 1.2, 4: 1.6, 8: 1.3}[setting.batch_size]
    return turn(100 * setting.workers * gain / setting.threads, 10.0 * setting.batch_size)


def test_the_highest_rate_that_keeps_the_limit_is_found() -> None:
    assert best(find(model)) == Setting(2, 1, 4)
    assert best(find(model, "p99=45ms")) == Setting(2, 1, 4)
    assert best(find(model, "p99=25ms")) == Setting(2, 1, 2)
    assert best(find(model, "p99=10ms")) == Setting(2, 1, 1)
    assert best(find(model, largest_batch=2)) == Setting(2, 1, 8)


def test_when_nothing_keeps_the_limit_the_lowest_latency_is_named() -> None:
    outcome = find(model, "p99=9ms")
    assert outcome.best is None
    assert outcome.nearest is not None and outcome.nearest.setting.batch_size == 1


def test_equals_go_to_the_simpler_setting() -> None:
    assert best(find(lambda setting: turn(100 + setting.workers, 1))) == Setting(1, 1, 1)


def test_an_artifact_is_chosen_where_it_is_faster_with_the_setting_that_leads() -> None:
    def measure(setting: Setting) -> Turn:
        found = model(setting)
        rate = {"": 1.0, "int8.onnx": 1.5, "other.pt2": 0.5}[setting.artifact] * found.rate
        return replace(found, rate=rate)

    without = best(find(model))
    outcome = find(measure, artifacts=["other.pt2", "int8.onnx"])
    assert best(outcome) == replace(without, artifact="int8.onnx")
    assert config_changes({}, best(outcome))["artifact"] == "int8.onnx"
    assert best(find(model, artifacts=["int8.onnx"])) == without


def test_an_artifact_has_workers_threads_and_batches_of_its_own() -> None:
    def measure(setting: Setting) -> Turn:
        if setting.artifact and setting.threads == 2:
            return turn(400 if setting.batch_size == 2 else 300, 1)
        return turn(50, 1) if setting.artifact else model(setting)

    assert best(find(measure, artifacts=["int8.onnx"])) == Setting(1, 2, 2, "int8.onnx")


def test_those_that_could_win_have_their_turns_beside_each_other() -> None:
    """A machine whose speed changes between turns changes it for all of a turn alike."""
    seen: list[int] = []

    def measure(settings: Sequence[Setting]) -> list[Turn]:
        seen.append(len(settings))
        speed = 3.0 ** len(seen)
        return [turn(speed * model(setting).rate, 1) for setting in settings]

    found = search(
        PLAN, cores=2, gpus=0, largest_batch=8, slo=None, rounds=3, measure=measure, artifacts=["a"]
    )
    assert best(found) == Setting(2, 1, 4)
    assert seen == [6, 8, 4, 4, 4]


def test_a_setting_that_fails_once_is_not_chosen() -> None:
    def measure(setting: Setting) -> Turn:
        return turn(0, 1, "no memory") if setting == Setting(2, 1, 4) else model(setting)

    outcome = find(measure)
    assert best(outcome) == Setting(2, 1, 8)
    assert [r.failure for r in outcome.others if r.setting == Setting(2, 1, 4)] == ["no memory"]


def test_nothing_is_chosen_where_nothing_can_be_measured() -> None:
    for slo in (None, "p99=1s"):
        outcome = find(lambda setting: turn(0, 1, "no"), slo)
        assert (outcome.best, outcome.nearest) == (None, None)
        assert len(outcome.others) == 3


def test_a_machine_that_slows_down_meanwhile_does_not_decide() -> None:
    turns = 0

    def measure(setting: Setting) -> Turn:
        nonlocal turns
        turns += 1
        return turn(model(setting).rate * 0.97**turns, 1)

    assert best(find(measure)) == Setting(2, 1, 4)


def test_one_disturbed_turn_does_not_decide() -> None:
    seen: list[Setting] = []

    def measure(setting: Setting) -> Turn:
        seen.append(setting)
        is_disturbed = setting == Setting(2, 1, 4) and seen.count(setting) == 2
        return turn(model(setting).rate * (0.1 if is_disturbed else 1), 1)

    assert best(find(measure)) == Setting(2, 1, 4)


def test_the_plan_is_in_the_finals_and_progress_counts_to_its_end() -> None:
    steps: list[tuple[int, int]] = []
    outcome = find(
        lambda setting: turn(100 if setting != PLAN else 10, 1),
        on_turn=lambda text, done, expected: steps.append((done, expected)),
    )
    assert PLAN in [result.setting for result in outcome.finals]
    assert {len(result.turns) for result in outcome.finals} == {3}
    assert [done for done, _ in steps] == list(range(len(steps)))
    assert steps[-1][1] == len(steps)


def test_no_shape_has_more_threads_than_cores() -> None:
    for cores in range(1, 65):
        found = shapes(Setting(cores, 1, 8), cores, 0)
        assert found[0] == Setting(cores, 1, 8)
        assert all(s.workers >= 1 and s.workers * s.threads <= cores for s in found)
        assert len(set(found)) == len(found) <= 6
    assert shapes(Setting(2, 1, 8), 16, 2) == [Setting(2, 1, 8), Setting(4, 1, 8)]


# -- the file ----------------------------------------------------------------------------------


def test_the_file_keeps_what_it_said_with_its_comments() -> None:
    old = "# ours\nbatchSize: 2  # small\nhandler:\n  batchSize: 7\n  mean: [0.5]\n"
    text = merge_config(old, {"minWorkers": 3, "batchSize": 8})
    assert text == (
        "# ours\nbatchSize: 8\nhandler:\n  batchSize: 7\n  mean: [0.5]\nminWorkers: 3\n"
    )


@pytest.mark.parametrize("old", ["", "{}", "{batchSize: 2, handler: {top_k: 3}}", "a: |\n b\n"])
def test_every_form_of_the_file_can_be_merged(old: str) -> None:
    changes = {"minWorkers": 3, "batchSize": 8}
    assert yaml.safe_load(merge_config(old, changes)) == {**(yaml.safe_load(old) or {}), **changes}


def test_torchserve_would_take_the_numbers_of_workers_too() -> None:
    assert config_changes({}, Setting(4, 1, 8)) == {
        "minWorkers": 4,
        "maxWorkers": 4,
        "workerThreads": 1,
        "batchSize": 8,
    }
    changes = config_changes({"maxWorkers": 6, "maxBatchDelay": 50}, Setting(4, 1, 8))
    assert (changes["maxWorkers"], changes["maxBatchDelay"]) == (6, 0)


# -- the load ----------------------------------------------------------------------------------


def test_the_load_sees_what_the_server_answered(shared_server: LiveServer) -> None:
    build_archive(shared_server.store, "echo", config="minWorkers: 1\n")
    shared_server.register_all("echo.mar")
    url = shared_server.about["inference"]

    def load(path: str, *bodies: bytes, connections: int = 4) -> Load:
        requests = [make_request(url, path, body, "text/plain") for body in bodies]
        return run_load(url, requests, connections, seconds=0.3, warm_s=0.1)

    def answered() -> float:
        return shared_server.metric(
            "modelyard_requests_total", model="echo", version="1.0", kind="predict", code="200"
        )

    before = answered()
    seen = load("/predictions/echo", b"one", b"x" * 100_000)
    assert seen.failed == 0
    assert 4 <= len(seen.latencies_s) < answered() - before
    assert (
        seen.quantile_s(0.5)
        <= seen.quantile_s(0.99)
        == pytest.approx(seen.latencies_s[-1 - len(seen.latencies_s) // 100])
    )
    assert seen.cpu_s > 0 and all(latency_s > 0 for latency_s in seen.latencies_s)
    wrong = load("/predictions/nope", b"")
    assert not wrong.latencies_s and wrong.failed >= 4
    assert wrong.first_failure.startswith("404: ") and "nope" in wrong.first_failure
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(OSError, match="refused"):
        load("/predictions/echo", b"")


def test_a_rate_is_from_answer_to_answer() -> None:
    """Batches of four every 0.2 s: any part of the time between two of them must not count."""
    answers: list[float] = []
    body = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"

    def answer(server: socket.socket) -> None:
        with server, suppress(OSError), ExitStack() as stack:
            peers = [stack.enter_context(server.accept()[0]) for _ in range(4)]
            while all(peer.recv(1000) for peer in peers):
                time.sleep(0.2)
                answers.append(time.monotonic())
                for peer in peers:
                    peer.sendall(body)

    server = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    peer = threading.Thread(target=answer, args=[server], daemon=True)
    peer.start()
    load = run_load(url, [make_request(url, "/", b"", None)], 4, seconds=0.9, warm_s=0)
    batches = len(load.latencies_s) // 4
    took_s = answers[batches] - answers[0]  # the first was the warm-up
    assert batches >= 3
    assert load.rate == pytest.approx(4 * batches / took_s, rel=0.05)


def test_a_connection_that_the_server_closes_is_told() -> None:
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], "
        "flush=True); c, _ = s.accept(); c.recv(9); c.close()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        url = f"http://127.0.0.1:{int(peer.stdout.readline())}"
        with pytest.raises(StartError, match="closed a connection"):
            run_load(url, [make_request(url, "/", b"", None)], 1, seconds=5, warm_s=5)


def test_quantiles_are_by_nearest_rank() -> None:
    load = Load(2.0, [float(n) for n in range(1, 101)], 0, "", 0.0)
    assert [load.quantile_s(q) for q in (0.5, 0.99, 0.999, 0.0)] == [50, 99, 100, 1]
    assert load.rate == 50
    assert Load(1.0, [], 3, "500: no", 0.0).quantile_s(0.5) == float("inf")


# -- the command -------------------------------------------------------------------------------


def on_one_core(*arguments: str | Path) -> list[str]:
    """Return `modelyard tune` on a single core, where there is a single shape to try."""
    code = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "os.execv(sys.executable, [sys.executable, '-P', '-m', 'modelyard', 'tune', *sys.argv[1:]])"
    )
    return [sys.executable, "-c", code, *map(str, arguments)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "ask").write_bytes(b"hello")
    config = "# kept\nbatchSize: 1\nhandler: {of: its own}\n"
    build_archive(tmp_path / "store", "patient", config=config)
    return tmp_path / "store"


Refused = Callable[..., tuple[int, str]]


@pytest.fixture
def refused(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Run the command in this process with what it refuses before it starts anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELYARD_MODEL_STORE", str(store))

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(tune_app, arguments)
        assert not (tmp_path / "model-config.yaml").exists()
        return result.exit_code, result.stderr

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["patient", "--slo", "p99=50"], 2, "--slo 'p99=50': expected such as p99=50ms"),
        (["patient", "--slo", "p99=0ms"], 2, "give a limit above 0"),
        (["nope"], 1, "Model not found at: nope; the model store "),
        (["patient"], 1, "patient.mar holds no golden request; give a request with --input"),
        (["patient", "--input", "nope"], 1, "--input nope: No such file or directory"),
        (["patient", "--output", "ask"], 1, "ask exists; --force replaces it"),
        (["patient", "--output", "nope/x.yaml"], 1, "there is no folder nope"),
        (["patient", "--connections", "0"], 2, "--connections"),
        (["ALL"], 2, "one model is tuned at a time"),
        (["patient", "--device", "tpu"], 2, "wrong settings: --device"),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_what_to_do(
    refused: Refused, arguments: list[str], code: int, message: str
) -> None:
    found, said = refused(*arguments)
    assert (found, message in " ".join(said.split())) == (code, True), said


@pytest.mark.nightly
def test_the_best_setting_is_written_for_the_archive(store: Path, tmp_path: Path) -> None:
    command = on_one_core("patient", f"--model-store={store}", f"--input={tmp_path / 'ask'}")
    command += ["--connections=1", "--seconds=0.2", "--rounds=1", "--json"]
    tuned = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=120
    )
    assert tuned.returncode == 0, tuned.stderr
    report = json.loads(tuned.stdout)
    assert report["file"] == "model-config.yaml"
    assert report["plan"] == {"workers": 1, "threads": 1, "batch_size": 1, "artifact": ""}
    assert report["best"]["rate"] > 0
    assert 0 < report["best"]["p50_ms"] <= report["best"]["p99_ms"]
    assert 0 < report["load_cores"] < 1
    text, _, costs = (tmp_path / "model-config.yaml").read_text().partition("tunedCosts: ")
    assert text == (
        "# kept\nbatchSize: 1\nhandler: {of: its own}\n"
        "minWorkers: 1\nworkerThreads: 1\nmaxWorkers: 1\n"
        f"tunedRate: {float(format(report['best']['rate'], '.3g'))}\n"
    )
    found = parse_costs(yaml.safe_load(costs), "here")
    assert (found.threads, found.batch_size, list(found.batch_ms)) == (1, 1, [1])
    assert found.worker_mb > 1 and found.server_mb > 10 and found.load_s > 0
    assert report["costs"]["server_ms"] == found.server_ms > 0


@pytest.mark.slow
def test_a_limit_that_nothing_keeps_writes_nothing(store: Path, tmp_path: Path) -> None:
    command = on_one_core("patient", f"--model-store={store}", f"--input={tmp_path / 'ask'}")
    command += ["--connections=1", "--seconds=0.2", "--rounds=1", "--slo=p99=0.001us"]
    tuned = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=120
    )
    assert tuned.returncode == 1
    said = "no setting keeps p99=1e-06ms; the nearest is workers 1, threads 1, batch 1 with p99="
    assert said in " ".join(tuned.stdout.split())
    assert not (tmp_path / "model-config.yaml").exists()


def test_a_killed_tune_leaves_no_server(store: Path, tmp_path: Path) -> None:
    command = on_one_core("patient", f"--model-store={store}", f"--input={tmp_path / 'ask'}")
    tuning = subprocess.Popen(
        [*command, "--seconds=60"], cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL
    )
    try:
        # The server, and its worker.
        poll(lambda: len(descendants(tuning.pid)) >= 2, "a server has a worker", 60)
        started = descendants(tuning.pid)
    finally:
        os.kill(tuning.pid, signal.SIGKILL)
        tuning.wait()
    poll(lambda: not any(map(is_alive, started)), "the server ends with it", 30)


@pytest.mark.nightly
def test_a_model_that_answers_only_errors_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "ask").write_bytes(b"bad")
    build_archive(tmp_path, "picky")
    ran = subprocess.run(
        on_one_core("picky", f"--model-store={tmp_path}", f"--input={tmp_path / 'ask'}"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        timeout=120,
    )
    assert ran.returncode == 1
    assert "error: picky answers 4" in ran.stderr and "--input" in ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores")
def test_batches_win_where_each_costs_the_same_time(tmp_path: Path) -> None:
    """A batch of any size sleeps once, so batches of all four requests are the best."""
    (tmp_path / "ask").write_bytes(b"")
    (tmp_path / "weights.bin").write_bytes(b"none")
    (tmp_path / "model-config.yaml").write_text("batchSize: 1\nminWorkers: 1\n")
    (tmp_path / "handler.py").write_text(
        "import time\n\ndef handle(data, context):\n"
        "    if data:\n        time.sleep(0.05)\n        return ['ok'] * len(data)\n"
    )
    write_archive(
        "nap",
        version="1.0",
        artifact=tmp_path / "weights.bin",
        handler=str(tmp_path / "handler.py"),
        output_dir=tmp_path,
        config_file=tmp_path / "model-config.yaml",
    )
    ran = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "modelyard", "tune", "nap", "--json", "--force"),
            *(f"--model-store={tmp_path}", f"--input={tmp_path / 'ask'}", "--connections=4"),
            *("--seconds=1", "--rounds=2", "--slo=p99=5s"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["best"]["workers"] * report["best"]["batch_size"] >= 4
    plan = next(each for each in report["finals"] if report["plan"].items() <= each.items())
    assert report["best"]["rate"] > 1.5 * plan["rate"]


def test_what_is_set_for_others_is_not_for_the_server_that_is_measured(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("tls_cert", "tls_key", "token_file")}
    settings = load_settings(
        {**files, "host": "0.0.0.0", "auth": "always", "access_log": True, "device": "cpu"},
        None,
        {},
    )
    own = on_own_ports(settings, ("patient",), tmp_path / "state")
    assert not own.asks_for_tokens
    assert {str(address) for address in own.addresses} == {"http://127.0.0.1:0"}
    assert (own.access_log, own.device) == (False, "cpu")
