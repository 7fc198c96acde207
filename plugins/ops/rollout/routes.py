"""The management API of roll-outs: `/models/{model}/rollout`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from modelyard.plugins.ops.rollout.control import Rollouts
from modelyard.plugins.ops.rollout.plan import parse_plan
from modelyard.serve.api.description import ModelName, error_responses


def rollout_routes(rollouts: Rollouts) -> APIRouter:
    """Return the routes for operators."""
    router = APIRouter(tags=["roll-out"], responses=error_responses(400, 401, 404, 409))

    @router.get("/models/{model}/rollout", summary="Describe a roll-out")
    async def status(model: ModelName) -> dict[str, Any]:
        """Describe a model's roll-out: state, what was compared, the judgement, events."""
        return rollouts.status(model)

    @router.post(
        "/models/{model}/rollout",
        summary="Start a roll-out",
        responses=error_responses(500, 507),
    )
    async def start(
        model: ModelName,
        url: Annotated[str, Query(description="File name of an archive in the model store.")],
        shadow: Annotated[str | None, Query(description="Share that is copied: 5%.")] = None,
        for_: Annotated[
            str | None,
            Query(alias="for", description="How long a step lasts, then the next: 10m."),
        ] = None,
        canary: Annotated[str | None, Query(description="Shares answered: 1,10,50.")] = None,
        rule: Annotated[str | None, Query(description="What must hold.")] = None,
        expect: Annotated[str | None, Query(description="Differences that are meant.")] = None,
        keep_inputs: Annotated[bool, Query(description="Show the worst requests.")] = False,
        header: Annotated[str | None, Query(description="Whose value decides the side.")] = None,
    ) -> dict[str, Any]:
        """Load a candidate beside the default version; answers when its golden requests pass."""
        plan = parse_plan(url, shadow, for_, canary, rule, expect, keep_inputs, header)
        return await rollouts.start(model, plan)

    @router.post("/models/{model}/rollout/promote", summary="Promote")
    async def promote(
        model: ModelName,
        to: Annotated[
            str | None, Query(description="shadow, a share such as 10%, default; else one step.")
        ] = None,
        force: Annotated[bool, Query(description="Whatever was judged.")] = False,
    ) -> dict[str, Any]:
        """Take the candidate a step on; with `to` it may be repeated."""
        return await rollouts.promote(model, to, force)

    @router.post("/models/{model}/rollout/abort", summary="Abort")
    async def abort(model: ModelName) -> dict[str, Any]:
        """End the roll-out and remove the candidate."""
        return await rollouts.abort(model)

    @router.post("/models/{model}/rollout/back", summary="Take back")
    async def back(model: ModelName) -> dict[str, Any]:
        """Have the version before answer everything again."""
        return await rollouts.back(model)

    return router
