"""Write the dashboard for Grafana.

python deploy/grafana/dashboard.py > deploy/grafana/modelyard.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF = 'model=~"$model",version=~"$version"'
RATE = "[$__rate_interval]"
OURS = " and on (instance, job) modelyard_build_info"
"""Filter of metrics that every program has."""
WIDTH, HEIGHT = 24, 8
"""Grafana's columns, and the height of a panel in its rows."""


class Panel(NamedTuple):
    """One picture, and what it shows: expression → legend."""

    title: str
    expressions: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""


def rate(metric: str, by: str = "model", more: str = "") -> str:
    """Return the sum of a counter's rates."""
    return f"sum by ({by}) (rate({metric}{{{OF}{more}}}{RATE}))"


def quantiles(metric: str, more: str = "") -> dict[str, str]:
    """Return what half, and all but one in a hundred, stay under."""
    buckets = rate(f"{metric}_bucket", "model, le", more)
    return {
        f"histogram_quantile({q}, {buckets})": f"{{{{model}}}} p{round(q * 100)}"
        for q in (0.5, 0.99)
    }


def mean(metric: str, more: str = "") -> str:
    """Return the mean of a histogram's values."""
    return f"{rate(f'{metric}_sum', more=more)} / {rate(f'{metric}_count', more=more)}"


PREDICT, EXPLAIN = ',kind="predict"', ',kind="explain"'
LATENCY = "modelyard_request_latency_seconds"

ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    ("Traffic", (
        Panel("Requests", {rate("modelyard_requests_total", "model, kind"): "{{model}} {{kind}}"},
              "reqps"),
        Panel("Answers by status", {rate("modelyard_requests_total", "code"): "{{code}}"}, "reqps"),
        Panel("In flight", {f"sum by (model, kind) (modelyard_requests_in_flight{{{OF}}})":
              "{{model}} {{kind}}"}, text="Requests that wait or are being answered."),
    )),
    ("Latency", (
        Panel("Predictions", quantiles(LATENCY, PREDICT), "s"),
        Panel("Explanations", quantiles(LATENCY, EXPLAIN), "s"),
        Panel("All predictions", {rate(f"{LATENCY}_bucket", "le", PREDICT): "{{le}}"}, "s",
              "heatmap"),
        Panel("Where a prediction's time goes", {
            mean("modelyard_queue_time_seconds", PREDICT): "{{model}} queue",
            mean("modelyard_worker_queue_seconds", PREDICT): "{{model}} waiting at the worker",
            mean("modelyard_handler_seconds", PREDICT): "{{model}} handler",
        }, "s", text="Means. The handler's call is that of the whole batch."),
    )),
    ("Queue and batches", (
        Panel("Queue", {f"sum by (model, kind) (modelyard_queue_length{{{OF}}})":
              "{{model}} {{kind}}"}),
        Panel("Oldest request in the queue", {
            f"max by (model, kind) (modelyard_queue_oldest_seconds{{{OF}}})": "{{model}} {{kind}}"},
            "s"),
        Panel("Requests in a batch", {mean("modelyard_batch_size"): "{{model}}"}),
    )),
    ("Workers", (
        Panel("Utilisation", {
            f"{rate('modelyard_worker_busy_seconds_total', 'model, version')} / "
            f"sum by (model, version) (modelyard_ready_workers{{{OF}}})": "{{model}} {{version}}"},
            "percentunit", text="The share of the workers' time that is used. Scale up above 0.7."),
        Panel("Ready workers", {f"sum by (model, version) (modelyard_ready_workers{{{OF}}})":
              "{{model}} {{version}}"}),
        Panel("Workers that died", {
            f"sum by (model, version) (increase(modelyard_worker_restarts_total{{{OF}}}{RATE}))":
            "{{model}} {{version}}"}),
        Panel("Predictions, and what tune measured", {
            rate("modelyard_requests_total", "model", PREDICT): "{{model}}",
            f"sum by (model) (modelyard_capacity_requests_per_second{{{OF}}})":
            "{{model}} as tuned"}, "reqps"),
    )),
    ("Errors and refusals", (
        Panel("Errors of the server", {rate("modelyard_errors_total", "model, code",
              ',code=~"5.."'): "{{model}} {{code}}"}, "reqps"),
        Panel("Errors of clients", {rate("modelyard_errors_total", "model, code",
              ',code=~"4.."'): "{{model}} {{code}}"}, "reqps"),
        Panel("Refused", {rate("modelyard_refused_requests_total", "model, reason"):
              "{{model}} {{reason}}"}, "reqps"),
        Panel("For no model", {f"sum by (code) (rate(modelyard_unrouted_requests_total{RATE}))":
              "{{code}}"}, "reqps"),
    )),
    ("Explanations over time", (
        Panel("Drift of reasons", {f"max by (model, version) (modelyard_attribution_drift{{{OF}}})":
              "{{model}} {{version}}"}, "percentunit",
              text="Distance of the latest mean shares to the archive's reference."),
        Panel("Explained in the background", {rate("modelyard_explained_predictions_total",
              "model, outcome"): "{{model}} {{outcome}}"}, "reqps"),
        Panel("Mean share of each part", {
            f"{rate('modelyard_attribution_share_sum', 'model, part')} / "
            f"{rate('modelyard_attribution_share_count', 'model, part')}": "{{model}} {{part}}"},
            "percentunit"),
    )),
    ("Roll-outs", (
        Panel("State", {'modelyard_rollout_state{model=~"$model"} > 0': "{{model}} {{candidate}} "
              "{{state}}"}, kind="table"),
        Panel("Compared", {'sum by (model, candidate, verdict) '
              f'(rate(modelyard_rollout_compared_total{{model=~"$model"}}{RATE}))':
              "{{model}} {{candidate}} {{verdict}}"}, "reqps"),
        Panel("Share that the candidate answers",
              {'modelyard_rollout_canary_share{model=~"$model"}': "{{model}} {{candidate}}"},
              "percentunit"),
    )),
    ("What is served", (
        Panel("Models", {f"modelyard_model_info{{{OF}}}": ""}, kind="table"),
        Panel("Servers", {"modelyard_build_info": ""}, kind="table"),
        Panel("Memory of the server process",
              {f"process_resident_memory_bytes{OURS}": "{{instance}}"}, "bytes"),
        Panel("Processor of the server process",
              {f"rate(process_cpu_seconds_total{RATE}){OURS}": "{{instance}}"}),
    )),
)  # fmt: skip


def variable(name: str, label: str) -> dict[str, Any]:
    """Return a choice among a label's values."""
    within = '{model=~"$model"}' if name == "version" else ""
    query = f"label_values(modelyard_model_info{within}, {name})"
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "definition": query,
        "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1, "multi": True,
        "includeAll": True, "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def draw(id: int, panel: Panel, x: int, y: int, width: int) -> dict[str, Any]:
    """Return a panel at its place."""
    form = {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series")
    targets = [
        {
            "refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expression,
            "legendFormat": legend, "format": form, "instant": panel.kind == "table",
            "range": panel.kind != "table", "exemplar": "histogram_quantile" in expression,
        }
        for at, (expression, legend) in enumerate(panel.expressions.items())
    ]  # fmt: skip
    options: dict[str, Any] = {}
    if panel.kind == "heatmap":
        options = {"calculate": False, "cellGap": 1, "yAxis": {"unit": panel.unit},
                   "color": {"mode": "scheme", "scheme": "Oranges"}}  # fmt: skip
    return {
        "id": id, "type": panel.kind, "title": panel.title, "description": panel.text,
        "datasource": SOURCE, "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": options, "targets": targets,
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False,
                       "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}, "panels": []})  # fmt: skip
        width = WIDTH // len(row)
        for at, panel in enumerate(row):
            panels.append(draw(len(panels) + 1, panel, at * width, y + 1, width))
        y += HEIGHT + 1
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource",
              "query": "prometheus", "current": {}}  # fmt: skip
    choices = [source, variable("model", "Model"), variable("version", "Version")]
    return {
        "id": None, "uid": "modelyard", "title": "Modelyard", "tags": ["modelyard"],
        "schemaVersion": 39, "version": 1, "editable": True, "graphTooltip": 1,
        "refresh": "30s", "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": choices},
        "annotations": {"list": []}, "panels": panels,
        "__requires": [{"type": "grafana", "id": "grafana", "name": "Grafana", "version": "10.0.0"},
                       {"type": "datasource", "id": "prometheus", "name": "Prometheus",
                        "version": "1.0.0"}],
    }  # fmt: skip


if __name__ == "__main__":
    json.dump(dashboard(), sys.stdout, indent=1)
    sys.stdout.write("\n")
