"""Every metric that a server may have, those of its observers included."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.dataplane.metrics import Family, Metrics
from modelyard.serve.front.begin import ServerState
from modelyard.serve.http.application import Answers
from modelyard.serve.observers import Host, make_observers
from modelyard.serve.policy import Policy
from modelyard.serve.settings import load_settings


def text_of(metrics: Metrics, *terms: Any, **more: Any) -> str:
    """Return all slices of a scrape."""
    with ThreadPoolExecutor(1) as thread:  # there may be a loop in this one
        return thread.submit(asyncio.run, metrics.gather(*terms, **more)).result()


def value_of(metrics: Metrics, name: str, labels: Mapping[str, str]) -> float | None:
    """Return the value of a series; None where there is none."""
    families = text_string_to_metric_families(text_of(metrics, has_all=True))
    found = (each for family in families for each in family.samples)
    return next((each.value for each in found if each[:2] == (name, labels)), None)


def all_metrics() -> list[Family]:
    """Return the families."""
    metrics = Metrics()
    policy = Policy(load_settings({"fork_workers": False}, None, {}))
    lifecycle = Lifecycle(policy, Registry(), metrics)
    make_observers(Host(lifecycle, metrics, Answers(ServerState()), None))
    return list(metrics.families.values())
