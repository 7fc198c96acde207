"""Arguments → an application of Ray Serve.

`serve run modelyard.plugins.cluster.ray:app model_store=…`
"""

from __future__ import annotations

import os
from typing import Any

import click
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import RayServeException

from modelyard.archiver import ArchiveError
from modelyard.plugins.cluster.ray.arguments import Arguments, Plan, make_plan
from modelyard.plugins.cluster.ray.cell import HEALTH_S, Cell
from modelyard.plugins.cluster.ray.environment import ray_environment
from modelyard.plugins.cluster.ray.scaling import CellScaling
from modelyard.serve.errors import ServeError

NAME = "cell"
HEALTH_EVERY_S = 1
LEAVING_S = 45.0
"""Time for which a replica that is to go is kept by Ray, at least: 30 s in which proxies forget
it."""


class CannotBuild(click.ClickException, RayServeException):  # type: ignore[misc]
    """What both `serve run` and Ray's controller show as a line, not as a traceback."""


def app(said: dict[str, Any]) -> Any:
    """Return an application of cells.

    Args:
        said: `Arguments`, and settings of a server.

    Raises:
        CannotBuild: what is wrong, in a line; nothing was started.
    """
    try:
        arguments, plan = make_plan(said)
    except (ServeError, ArchiveError) as error:
        raise CannotBuild(str(error)) from error
    if not ray.is_initialized():
        os.environ.update(ray_environment(plan.settings.request_timeout_s) | os.environ)
    cell = serve.deployment(name=NAME, **_options(arguments, plan))(serve.ingress()(Cell))
    return cell.bind(plan.model_dump_json())


def _options(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    """Return Ray's options of the deployment."""
    settings = plan.settings
    options: dict[str, Any] = {
        # The server refuses what it cannot answer in time; it takes so many connections.
        "max_ongoing_requests": settings.max_connections,
        "health_check_period_s": HEALTH_EVERY_S,
        "health_check_timeout_s": HEALTH_S + 1,
        "graceful_shutdown_wait_loop_s": 1,
        "graceful_shutdown_timeout_s": LEAVING_S
        + settings.drain_delay_s
        + settings.drain_timeout_s,
        "ray_actor_options": {"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
    }
    if arguments.cells_per_node is not None:
        options["max_replicas_per_node"] = arguments.cells_per_node
    if arguments.max_cells is None:
        return {**options, "num_replicas": arguments.cells}
    policy = AutoscalingPolicy(
        policy_function=CellScaling,
        policy_kwargs={"busy": arguments.busy, "in_flight": arguments.in_flight},
    )
    scaling = AutoscalingConfig(
        min_replicas=arguments.cells,
        max_replicas=arguments.max_cells,
        upscale_delay_s=arguments.upscale_delay_s,
        downscale_delay_s=arguments.downscale_delay_s,
        policy=policy,
    )
    return {**options, "autoscaling_config": scaling}
