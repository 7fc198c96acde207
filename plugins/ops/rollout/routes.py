"""The management API of roll-outs: `/models/{model}/rollout`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from modelyard.plugins.ops.rollout.control import Rollouts
from modelyard.plugins.ops.rollout.record import Plan, parse_plan
from modelyard.serve.api.description import ModelName, error_responses


def rollout_routes(rollouts: Rollouts) -> APIRouter:
    """Return the routes for operators."""
    router = APIRouter(tags=["roll-out"], responses=error_responses(400, 401, 404, 409))
    place = "/models/{model}/rollout"

    @router.get(place, summary="Describe a roll-out")
    async def status(model: ModelName) -> dict[str, Any]:
        """Describe a model's roll-out: state, what was compared, the judgement, events."""
        return rollouts.status(model)

    @router.post(place, summary="Start a roll-out", responses=error_responses(500, 507))
    async def start(model: ModelName, plan: Annotated[Plan, Depends(parse_plan)]) -> dict[str, Any]:
        """Load a candidate beside the default version; answers when its golden requests pass."""
        return await rollouts.start(model, plan)

    @router.post(f"{place}/promote", summary="Promote")
    async def promote(
        model: ModelName,
        to: Annotated[
            str | None, Query(description="shadow, a share such as 10%, default; else one step.")
        ] = None,
        force: Annotated[bool, Query(description="Whatever was judged.")] = False,
    ) -> dict[str, Any]:
        """Take the candidate a step on; with `to` it may be repeated."""
        return await rollouts.promote(model, to, force)

    @router.post(f"{place}/abort", summary="Abort")
    async def abort(model: ModelName) -> dict[str, Any]:
        """End the roll-out and remove the candidate."""
        return await rollouts.abort(model)

    @router.post(f"{place}/back", summary="Take back")
    async def back(model: ModelName) -> dict[str, Any]:
        """Have the version before answer everything again."""
        return await rollouts.back(model)

    return router
