"""Live predictions are explained unasked, and what their reasons are is seen to move."""

from __future__ import annotations

import json
import warnings

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor, nn

from modelyard.archiver import write_archive
from modelyard.archiver.reference import WINDOW
from tests.serve.live import SOURCES, LiveServer, poll

ROWS = [{"age": 1, "debts": 1, "letters": 0}, {"age": -2, "debts": -2, "letters": 0}]
LEAKING = {"age": 1, "debts": 1, "letters": 1}
REPEATED = 100
"""Times that the reference holds each of them: of fewer nothing could be shown to have changed."""
ALL = "explainShare: 1\nminWorkers: 1\n"


class Loans(nn.Module):
    """Logits of two classes, exactly opposed."""

    def forward(self, row: Tensor) -> Tensor:
        """(N, 3) to (N, 2)."""
        total = row[:, 0] + 2 * row[:, 1] + 3 * row[:, 2]
        return torch.stack([total, -total], 1)


@pytest.fixture(scope="module")
def server(shared_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    """Serve a table whose rows all come from the same reasons, and a handler that obeys."""
    folder = tmp_path_factory.mktemp("drift")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        torch.jit.save(torch.jit.script(Loans()), folder / "loans.pt")
    (folder / "weights.bin").write_bytes(b"none")
    (folder / "rows.json").write_text(json.dumps(ROWS * REPEATED))
    (folder / "features.json").write_text(
        json.dumps({"features": [{"name": name} for name in ROWS[0]]})
    )
    config = folder / "model-config.yaml"
    config.write_text(ALL)
    write_archive(
        "loans",
        version="1.0",
        artifact=folder / "loans.pt",
        handler="tabular",
        extra_files=[folder / "features.json"],
        config_file=config,
        reference=folder / "rows.json",
        output_dir=shared_server.store,
        dry_run=True,
    )
    write_archive(
        "unasked",
        version="1.0",
        artifact=folder / "weights.bin",
        handler=str(SOURCES / "unasked" / "handler.py"),
        config_file=config,
        reference=folder / "rows.json",
        output_dir=shared_server.store,
        dry_run=True,
    )
    shared_server.register_all("loans", "unasked")
    assert shared_server.register("unasked", model_name="mortal").status_code == 200
    return shared_server


def count(server: LiveServer, model: str, outcome: str) -> float:
    name = "modelyard_explained_predictions_total"
    return server.metric(name, model=model, outcome=outcome)


def post(server: LiveServer, model: str, row: object, outcome: str = "explained") -> None:
    """Predict, until a prediction is not dropped, and wait for what becomes of it."""
    before = count(server, model, outcome)

    def is_counted() -> bool:
        busy = count(server, model, "busy")
        assert server.client.post(f"/predictions/{model}", json=row).status_code == 200
        poll(
            lambda: count(server, model, outcome) > before or count(server, model, "busy") > busy,
            "the prediction was explained, or was not",
        )
        return count(server, model, outcome) > before

    poll(is_counted, f"a prediction is {outcome}")


@pytest.mark.nightly
def test_a_feature_that_begins_to_leak_the_label_is_seen(server: LiveServer) -> None:
    for part, mean in {"age": 1 / 3, "debts": 2 / 3, "letters": 0.0}.items():
        found = server.metric("modelyard_attribution_reference", model="loans", part=part)
        assert found == pytest.approx(mean, abs=1e-6)
    for row in ROWS:
        post(server, "loans", row)
    drift = "modelyard_attribution_drift"
    assert server.metric(drift, model="loans") == pytest.approx(0, abs=1e-5)
    for _ in range(8):
        post(server, "loans", LEAKING)  # a sixth, a third, a half
    expected = (1 - (1 - 1 / WINDOW) ** 8) * (1 / 6 + 1 / 3 + 1 / 2) / 2
    assert server.metric(drift, model="loans") == pytest.approx(expected, abs=1e-4)
    share = "modelyard_attribution_share"
    assert server.metric(f"{share}_count", model="loans", part="letters") == 10
    assert server.metric(f"{share}_sum", model="loans", part="letters") == pytest.approx(4)
    assert server.metric(f"{share}_bucket", model="loans", part="letters", le="0.4") == 2
    assert server.metric("modelyard_requests_total", model="loans", kind="explain") == 0
    families = text_string_to_metric_families(server.metrics.get("/metrics").text)
    kinds = {each.name: each.type for each in families}
    assert kinds[share] == "histogram"
    assert kinds[drift] == "gauge"


def test_what_has_changed_raises_an_alarm(server: LiveServer) -> None:
    """The shares of all three parts are others than they were, a hundred times for the class."""

    def alarms() -> float:
        name = "modelyard_attribution_alarms_total"
        return sum(server.metric(name, model="loans", part=part) for part in LEAKING)

    assert server.metric("modelyard_attribution_drift_floor", model="loans") == 0
    for _ in range(30):
        post(server, "loans", LEAKING)
        if alarms():
            break
    assert alarms() == 1
    assert server.metric("modelyard_attribution_evidence", model="loans") < 1
    with httpx.Client(base_url=server.about["management"], follow_redirects=True) as browser:
        browser.post("/console/sign-in", data={"token": server.token})
        page = browser.get("/console/models/loans/1.0").text
    said = "&#34; is not as in the reference, where &#34;0&#34; is predicted"
    assert page.count(said) == 1, page


def test_a_row_as_the_baseline_has_no_reasons(server: LiveServer) -> None:
    name = "modelyard_attribution_share_count"
    before = server.metric(name, model="loans", part="age")
    post(server, "loans", dict.fromkeys(ROWS[0], 0))
    assert server.metric(name, model="loans", part="age") == before


def test_what_nobody_asked_for_gives_way(server: LiveServer) -> None:
    post(server, "unasked", {})

    def gives_way() -> bool:
        """Begin one that does not end by itself, drop a second one, and ask."""
        before = count(server, "unasked", "interrupted")
        assert server.client.post("/predictions/unasked", json={"do": "wait"}).is_success
        post(server, "unasked", {}, "busy")
        answered = server.client.post("/explanations/unasked", json={})
        poll(lambda: count(server, "unasked", "interrupted") == before + 1, "it is counted")
        return answered.text == "explained after ClientsLeft"  # else it had not begun

    poll(gives_way, "an explanation ends the one that nobody asked for")
    post(server, "unasked", {})


def test_shares_of_something_else_are_not_taken(server: LiveServer) -> None:
    before = server.metric("modelyard_attribution_share_count", model="unasked", part="left")
    post(server, "unasked", {"do": "lie"}, "failed")
    after = server.metric("modelyard_attribution_share_count", model="unasked", part="left")
    assert after == before
    server.logs("unasked 1.0: a prediction could not be explained unasked: expected")


def test_a_worker_that_dies_of_it_is_not_asked_again(server: LiveServer) -> None:
    post(server, "mortal", {})
    post(server, "mortal", {"do": "die"}, "failed")
    counted = count(server, "mortal", "explained"), count(server, "mortal", "busy")
    assert server.client.post("/predictions/mortal", json={}).is_success
    assert server.client.post("/explanations/mortal", json={}).status_code == 200
    assert (count(server, "mortal", "explained"), count(server, "mortal", "busy")) == counted
    server.logs("a worker died while it explained a prediction unasked")


def test_a_removed_model_leaves_no_series(server: LiveServer) -> None:
    assert server.metric("modelyard_attribution_drift", model="mortal", version="1.0") == 0
    assert 'model="mortal"' in server.metrics.get("/metrics").text
    server.management.delete("/models/mortal")
    assert 'model="mortal"' not in server.metrics.get("/metrics").text
