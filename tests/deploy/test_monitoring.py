"""Rules and dashboard: every expression asks for what the server measures, by its labels."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serve.collectors import all_metrics
from tests.serve.live import LiveServer, build_archive, poll

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "modelyard.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "modelyard.json"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")

METRIC = re.compile(r"\b((?:modelyard|process)[\w:]*)(\{[^}]*\})?")
GROUPED = re.compile(r"\b(?:by|on|without|ignoring) \(([^)]*)\)")
OF_PROMETHEUS = {"instance", "job", "le"}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield where each expression stands, and the expression with Grafana's variables filled in."""
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "1m")
            yield panel["title"], re.sub(r"\$(model|version)", ".*", text)
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]


EXPRESSIONS = list(expressions())


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    """Serve a model that has been asked for what it can and what it cannot do."""
    build_archive(shared_server.store, "picky", name="watched", config="tunedRate: 812.5\n")
    shared_server.register_all("watched", initial_workers=1)
    ask(shared_server)
    return shared_server


def ask(server: LiveServer) -> None:
    for body in ("hello", "bad", "broken"):
        server.predict("watched", body)
    server.client.post("/explanations/watched", content=b"x")
    server.predict("made-up", "x")


@functools.cache
def known_labels() -> dict[str, set[str]]:
    """Return the labels of each series that the server may have, those of rules included."""
    found: dict[str, set[str]] = {}
    for family in all_metrics():
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        for end in ends.get(family.kind, ("",)):
            found[family.name + end] = {*family.labels, *OF_PROMETHEUS}
    for rule in rules():
        if "record" in rule:
            by = GROUPED.search(rule["expr"])
            assert by is not None
            found[rule["record"]] = {each.strip() for each in by[1].split(",")}
    return found


@pytest.mark.parametrize(("place", "expression"), EXPRESSIONS)
def test_every_expression_asks_for_metrics_and_labels_of_a_running_server(
    server: LiveServer, place: str, expression: str
) -> None:
    text = server.metrics.get("/metrics").text
    exposed = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    labels, seen = known_labels(), set()
    for name, selector in METRIC.findall(GROUPED.sub("", expression)):
        seen.add(name)
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert family in exposed or name in exposed or (name in labels and ":" in name), name
        used = set(re.findall(r"(\w+)\s*=?[=~!]", selector))
        assert used <= labels.get(name, OF_PROMETHEUS), (name, used)
    assert seen, expression
    everything = set().union(*(labels.get(name, OF_PROMETHEUS) for name in seen))
    for group in GROUPED.findall(expression):
        assert {each.strip() for each in group.split(",")} <= everything, group


def test_a_metric_or_label_that_is_not_there_is_found(server: LiveServer) -> None:
    for wrong in ("rate(modelyard_request_total[1m])", 'modelyard_ready_workers{kind="predict"}',
                  "sum by (kind) (modelyard_ready_workers)"):  # fmt: skip
        with pytest.raises(AssertionError):
            test_every_expression_asks_for_metrics_and_labels_of_a_running_server(server, "", wrong)


def test_what_tune_measured_is_shown(server: LiveServer) -> None:
    name = "modelyard_capacity_requests_per_second"
    assert server.metric(name, model="watched", version="1.0") == 812.5
    assert server.metric("modelyard_model_info", model="watched", format="bin") == 1
    assert server.metric("modelyard_worker_busy_seconds_total", model="watched") > 0


def test_the_dashboard_is_what_its_script_writes() -> None:
    script = DEPLOY / "grafana" / "dashboard.py"
    ran = subprocess.run([sys.executable, "-P", script], capture_output=True, text=True, check=True)
    assert ran.stdout == DASHBOARD.read_text(encoding="utf-8")


def test_the_dashboard_can_be_imported() -> None:
    found = dashboard()
    assert (found["id"], found["uid"], found["schemaVersion"]) == (None, "modelyard", 39)
    names = [each["name"] for each in found["templating"]["list"]]
    assert names == ["datasource", "model", "version"]
    assert [each["id"] for each in found["panels"]] == list(range(1, len(found["panels"]) + 1))
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"] and len({each["refId"] for each in panel["targets"]}) == len(
            panel["targets"]
        )
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
    taken = [each["gridPos"] for each in panels()]
    for one, other in itertools.combinations(taken, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] != other["y"], "two panels in one place"


# -- with Prometheus itself ----------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_takes_rules_metrics_and_the_dashboards_expressions(
    server: LiveServer, tmp_path: Path
) -> None:
    as_rules = tmp_path / "dashboard.yml"
    found = [{"record": f"shown:{at}", "expr": text} for at, (_, text) in enumerate(EXPRESSIONS)]
    as_rules.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": found}]}))

    def promtool(*arguments: object, text: str = "") -> str:
        command = [str(PROMTOOL), *map(str, arguments)]
        ran = subprocess.run(
            command, input=text, capture_output=True, text=True, cwd=RULES.parent, timeout=60
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    assert f"{len(found)} rules found" in promtool("check", "rules", as_rules)
    promtool("check", "rules", RULES.name)
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "modelyard.rules.test.yml")
    promtool("check", "metrics", text=server.metrics.get("/metrics", params={"name[]": OURS}).text)


OURS = [family.name for family in all_metrics()]
EMPTY = {
    *("Drift of reasons", "Explained in the background", "Mean share of each part"),
    *(rule["alert"] for rule in rules() if "alert" in rule),
} - {"ModelyardErrorsFast", "ModelyardErrorsSlow", "ModelyardRefuses"}
"""Of a model without a reference; alerts that do not fire, while one of four fails and
some are refused."""


@pytest.mark.nightly
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")
def test_prometheus_scrapes_a_server_and_answers_every_expression(
    server: LiveServer, tmp_path: Path
) -> None:
    # One waits for company, and another has no place.
    gathers = "batchSize: 4\nmaxBatchDelay: 200\njobQueueSize: 1\n"
    build_archive(server.store, "picky", name="gathers", config=gathers)
    server.register_all("gathers", initial_workers=1)
    candidate = build_archive(server.store, "picky", name="watched", version="2.0").name
    rollout = "/models/watched/rollout"
    asked = {"url": candidate, "shadow": "100%", "canary": "50", "for": "1h"}
    assert server.management.post(rollout, params=asked).status_code == 200
    metrics = httpx.URL(server.about["metrics"])
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"{metrics.host}:{metrics.port}"]
    file, log = tmp_path / "prometheus.yml", tmp_path / "log"
    file.write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    command = [str(PROMETHEUS), f"--config.file={file}", f"--storage.tsdb.path={tmp_path}/data",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", verify=False) as client:

            def query(expression: str) -> list[Any]:
                answer = client.get("/query", params={"query": expression})
                assert answer.status_code == 200, answer.text
                result: list[Any] = answer.json()["data"]["result"]
                return result

            def is_there() -> bool:
                ask(server)
                with ThreadPoolExecutor(3) as threads:
                    list(threads.map(lambda body: server.predict("gathers", body), "abc"))
                try:
                    if client.get(f"http://127.0.0.1:{port}/-/ready").status_code != 200:
                        return False
                    return len(query("modelyard_build_info offset 5s")) == 1
                except httpx.ConnectError:
                    return False

            poll(is_there, log.read_text(), 30)
            time.sleep(2)  # for rules of rules
            wrong = [(place, expression) for place, expression in EXPRESSIONS
                     if bool(query(expression)) is (place in EMPTY)]  # fmt: skip
            assert wrong == []
            (target,) = client.get("/targets").json()["data"]["activeTargets"]
            assert (target["health"], target["lastError"]) == ("up", "")
    finally:
        server.management.post(f"{rollout}/abort")
        process.terminate()
        assert process.wait(20) == 0, log.read_text()
