"""Every metric that a server may have, those of its observers included."""

from __future__ import annotations

from typing import Any

from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.front.begin import ServerState
from modelyard.serve.http.application import Answers
from modelyard.serve.observers import Host, make_observers
from modelyard.serve.policy import Policy
from modelyard.serve.settings import load_settings


def all_metrics() -> list[Any]:
    """Return them as prometheus_client's collectors."""
    metrics = Metrics()
    policy = Policy(load_settings({"fork_workers": False}, None, {}))
    lifecycle = Lifecycle(policy, Registry(), metrics)
    make_observers(Host(lifecycle, metrics, Answers(ServerState()), None))
    found = metrics.registry._collector_to_names
    return [each for each in found if hasattr(each, "_labelnames")]
