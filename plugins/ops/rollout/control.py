"""Roll-outs of one server: every verb, what happens by itself and after a restart, and the routes.

Each verb may be repeated: what is so already stays so. What takes an answer away from a candidate
is one step of the loop, whatever else is going on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from modelyard.archiver import Archive, ArchiveError
from modelyard.archiver.manifest import Manifest
from modelyard.plugins.ops.rollout.comparer import Comparer
from modelyard.plugins.ops.rollout.record import (
    ACTIVE,
    WITH_CANDIDATE,
    Plan,
    Record,
    RolloutMetrics,
    State,
    Step,
    Version,
    format_share,
    parse_plan,
    parse_share,
    rollout_families,
)
from modelyard.plugins.ops.rollout.rule import Outcome, parse_rule
from modelyard.plugins.ops.rollout.shadow import Canary
from modelyard.plugins.ops.rollout.trial import Trial, describe_findings
from modelyard.serve.api.description import ModelName, error_responses
from modelyard.serve.control.model_config import ModelSpec
from modelyard.serve.control.register import Lifecycle, Report
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.errors import BadRequest, Conflict, ModelNotFound, NoSuchRoute, ServeError
from modelyard.serve.http.tokens import ACTOR

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""Time from one look at what was found to the next."""
SHADOWS_NICENESS = 10
"""Niceness of a candidate's workers that answer nobody: those that answer go first on a core."""
EVENTS = {
    State.CANDIDATE: "roll-out begun",
    State.SHADOW: "roll-out begun",
    State.CANARY: "promoted",
    State.DEFAULT: "promoted",
}
"""State → kind of the event that leads there; of the others, their own names."""
NOTE = "rollouts"
"""What the server's state file calls them."""


class NoRollout(NoSuchRoute):
    """No roll-out of the model is known."""


class ServesAlready(Conflict):
    """The archive is the one that answers."""


@dataclass
class Rollout:
    """One roll-out while the server runs."""

    record: Record
    metrics: RolloutMetrics
    candidate: ModelVersion | None = None
    """Its candidate, where there is one."""
    live: ModelVersion | None = None
    """The version that it is measured by, where that is there."""
    trial: Trial | None = None
    """What is found while it is a shadow or a canary."""
    found: dict[str, Any] = field(default_factory=dict)
    """What the last trial has found."""
    moving: asyncio.Task[None] | None = None
    """Takes it to the next state, by itself."""

    def describe(self) -> dict[str, Any]:
        """Return it as the management API has it."""
        record, plan = self.record, self.record.plan
        if self.trial is not None:
            self.found = self.trial.to_json()
        elif not self.found:
            self.found = describe_findings(parse_rule(plan.rule, plan.expect))
        return {
            "model": record.model,
            "state": record.state,
            "label": record.label,
            "since": record.since,
            "candidate": vars(record.candidate),
            "live": vars(record.live),
            "shadowShare": plan.shadow if record.state in (State.SHADOW, State.CANARY) else 0.0,
            "canaryShare": record.share,
            "steps": list(plan.steps),
            "step": record.step if record.state is State.CANARY else None,
            "next": record.next_name,
            "for": plan.for_s,
            "keepInputs": plan.keeps_inputs,
            "header": plan.header,
            **self.found,
            "events": list(record.events),
        }

    def hold(self) -> None:
        """Keep others from changing what its state decides over, and let go of the rest."""
        record = self.record
        text = (
            f"a roll-out of {record.model} decides over this version: `modelyard rollout status "
            f"{record.model}` shows it, and `modelyard rollout abort {record.model}` ends it"
        )
        if self.live is not None:
            self.live.held = text if record.is_active else ""
        if self.candidate is not None:
            is_free = record.state in (State.DEFAULT, State.ABORTED)
            self.candidate.held, self.candidate.is_saved = "" if is_free else text, is_free

    def refuse_unproven(self) -> None:
        """Refuse to give a candidate more that has not been judged good.

        Raises:
            Conflict: says what is missing.
        """
        said = "nothing was compared: it had no shadow"
        if self.trial is not None:
            judgement = self.trial.explain()
            if judgement.verdict is Outcome.PASS:
                return
            said = f"the judgement is {judgement.verdict}: {'; '.join(judgement.reasons)}"
        raise Conflict(
            f"{self.record.model} {self.record.candidate.version} is not promoted: {said}. "
            "Wait, or promote it all the same with --force"
        )


class Rollouts:
    """The roll-outs of one server, by model."""

    def __init__(self, lifecycle: Lifecycle, metrics: Metrics) -> None:
        self._lifecycle = lifecycle
        self._families = rollout_families(metrics)
        self._comparer = Comparer()
        self._ticker: asyncio.TimerHandle | None = None
        self._registry = lifecycle.registry
        self._rollouts: dict[str, Rollout] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    # -- what there is -------------------------------------------------------------------------

    def status(self, name: str) -> dict[str, Any]:
        """Return a roll-out as the management API describes it.

        Raises:
            ModelNotFound, NoRollout.
        """
        return self._get(name).describe()

    def _get(self, name: str) -> Rollout:
        rollout = self._rollouts.get(name)
        if rollout is None:
            self._registry.get(name)
            text = f"{name} has no roll-out; `modelyard rollout start {name} FILE` starts one"
            raise NoRollout(text)
        return rollout

    # -- verbs ---------------------------------------------------------------------------------

    async def start(self, name: str, plan: Plan) -> dict[str, Any]:
        """Load a candidate beside the version that answers, and begin.

        Raises:
            BadRequest: its rule is none.
            Conflict: another one is under way, or this one cannot follow the version that answers.
            ArchiveError, ServeError: the candidate cannot be served; nothing was changed.
        """
        parse_rule(plan.rule, plan.expect)
        location, plan = plan.file, replace(plan, file=ModelSpec(plan.file).shown)
        async with self._locks[name]:
            live, before = self._registry.get(name), self._rollouts.get(name)
            if before is not None and before.record.is_active:
                _refuse_other(before.record, plan)
                return before.describe()
            if before is not None and before.record.state in WITH_CANDIDATE and before.candidate:
                self._move(before, State.ABORTED, "another roll-out is started")
                await self._remove(before)  # of the same version, most likely
            workers = max(1, math.ceil(plan.shadow * live.pool.least))
            spec = ModelSpec(location, name, workers, is_saved=False, niceness=SHADOWS_NICENESS)
            try:
                candidate = await self._lifecycle.add(
                    spec, None, waits=True, check=lambda archive: check_fits(archive, live)
                )
            except ServesAlready:  # by the roll-out before, which may be asked for again
                if before is None or before.record.state is not State.DEFAULT:
                    raise
                return before.describe()
            versions = Version.of(candidate), Version.of(live)
            record = Record(name, plan, secrets.token_hex(8), *versions).moved(
                State.CANDIDATE, 0, f"{candidate.file} is loaded; its golden requests pass", ""
            )
            rollout = Rollout(record, RolloutMetrics(self._families, record), candidate, live)
            try:
                if self._registry.get(name) is not live:
                    raise Conflict(f"another version of {name} was made the default meanwhile")
                self._rollouts[name] = rollout
                rollout.hold()
                self._tell(rollout, record.events[-1]["why"])
                self._lifecycle.save()
            except BaseException:
                if before is None:
                    self._rollouts.pop(name, None)
                else:
                    self._rollouts[name] = before
                live.held = candidate.held = ""
                await self._lifecycle.unregister(candidate, saves=False)
                raise
            if before is not None:
                before.metrics.remove()
            rollout.metrics.entered(record)
            if plan.shadow:
                self._move(rollout, State.SHADOW, "started")
            await self._forget_previous(before, live)
            return rollout.describe()

    async def promote(
        self, name: str, to: str | None = None, is_forced: bool = False
    ) -> dict[str, Any]:
        """Take a candidate one step on, or to a named one: shadow, a share such as 10%, default.

        Raises:
            Conflict: it is not judged good, or there is nothing to promote.
        """
        async with self._locks[name]:
            rollout = self._get(name)
            aim = _aim(rollout.record, to)
            if aim is not None:
                if aim[0] is not State.SHADOW and not is_forced:
                    rollout.refuse_unproven()
                await self._go(rollout, aim, "promoted by an operator")
            return rollout.describe()

    async def abort(self, name: str) -> dict[str, Any]:
        """End a roll-out, and remove its candidate; the version that answers goes on.

        Raises:
            Conflict: the candidate is the default already.
        """
        async with self._locks[name]:
            rollout = self._get(name)
            record = rollout.record
            if record.state is State.DEFAULT:
                raise Conflict(
                    f"{name} {record.candidate.version} is the default; "
                    f"`modelyard rollout back {name}` makes {record.live.version} that again"
                )
            if record.state is not State.ABORTED:
                self._move(rollout, State.ABORTED, "aborted by an operator")
                await self._remove(rollout)
            return rollout.describe()

    async def back(self, name: str) -> dict[str, Any]:
        """Have the version before answer everything again; the candidate stays to be looked at.

        Raises:
            Conflict: there is nothing to take back.
        """
        rollout = self._get(name)
        record = rollout.record
        if record.state in (State.CANDIDATE, State.SHADOW, State.FAILED, State.ABORTED):
            raise Conflict(
                f"{name} {record.candidate.version} answers nobody; "
                f"{record.live.version} is still the default. `modelyard rollout abort {name}` "
                "removes the candidate"
            )
        if record.state is not State.RETURNED:
            self._turn_back(rollout, "taken back by an operator")
        return rollout.describe()

    # -- by itself -----------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._ticker is None and any(each.trial for each in self._rollouts.values()):
            loop = asyncio.get_running_loop()
            self._ticker = loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        ACTOR.set("the server")  # whoever has started what is looked at
        for rollout in list(self._rollouts.values()):
            self._look(rollout)
        self._arm()

    def _look(self, rollout: Rollout) -> None:
        try:
            self._decide(rollout)
        except Exception:  # the others are looked after
            logger.exception("the roll-out of %s", rollout.record.model)

    def _decide(self, rollout: Rollout) -> None:
        """Take a candidate back that must not answer, end one that is refused, go on otherwise."""
        trial, record = rollout.trial, rollout.record
        if trial is None:
            return
        why, verdict = trial.watch.look(), Outcome.FAIL
        is_sure = why is not None
        if why is None:
            judgement = trial.judge()
            why, verdict = "; ".join(judgement.reasons), judgement.verdict
        if verdict is Outcome.FAIL:
            if record.state is State.CANARY:
                self._turn_back(rollout, why)
            elif is_sure or record.plan.for_s is not None:
                self._move(rollout, State.FAILED, why)
        elif verdict is Outcome.PASS and trial.is_over and rollout.moving is None:
            rollout.moving = asyncio.get_running_loop().create_task(self._advance(rollout, why))

    async def _advance(self, rollout: Rollout, why: str) -> None:
        """Take a candidate that is judged good one step on."""
        record = rollout.record
        try:
            async with self._locks[record.model]:
                if rollout.record is record and record.next is not None:
                    await self._go(rollout, record.next, why)
        except (ServeError, ArchiveError) as error:
            logger.error("the roll-out of %s does not go on: %s", record.model, error)
            if rollout.record is record and record.state is State.SHADOW:
                self._move(rollout, State.FAILED, str(error))
        finally:
            rollout.moving = None

    # -- steps ---------------------------------------------------------------------------------

    async def _go(self, rollout: Rollout, aim: Step, why: str) -> None:
        """Move on; what answers gets workers of the usual priority first, as many as the live one.

        Raises:
            LoadFailed: they could not load; nothing was changed.
            Conflict: it was ended meanwhile.
        """
        record, candidate, live = rollout.record, rollout.candidate, rollout.live
        assert candidate is not None and live is not None
        if aim[0] in (State.CANARY, State.DEFAULT) and candidate.pool.plan.niceness:
            await self._lifecycle.renew(candidate, max(1, live.pool.least), niceness=0)
            if rollout.record is not record:
                raise Conflict(f"the roll-out of {record.model} is {rollout.record.label} by now")
        self._move(rollout, aim[0], why, aim[1])

    def _turn_back(self, rollout: Rollout, why: str) -> None:
        """Have the version before answer everything again, at once.

        Raises:
            Conflict: it is not there any more.
        """
        trial = rollout.trial
        self._move(rollout, State.RETURNED, why)
        rollout.metrics.count("returned")
        if trial is not None:
            trial.hand_over()

    def _move(self, rollout: Rollout, state: State, why: str, step: int = 0) -> None:
        """Change the state, in the registry, in the file and here, or not at all."""
        record, registry, live = rollout.record, self._registry, rollout.live
        name = record.model
        if state is State.RETURNED and (live is None or not self._is_registered(live)):
            raise Conflict(f"{name} {record.live.version} is not registered any more")
        if state is not State.CANARY:  # before anything that may fail
            registry.splits.pop(name, None)
        defaults = {State.DEFAULT: record.candidate.version, State.RETURNED: record.live.version}
        rollout.record = record.moved(state, step, why)
        try:
            with registry.change(name):
                rollout.hold()
                if state in defaults:
                    registry.set_default(name, defaults[state])
                self._save(rollout, why)
        except BaseException:
            rollout.record = record
            rollout.hold()
            raise
        self._enter(rollout)
        logger.info("roll-out of %s %s: %s, it was %s: %s", name, record.candidate.version,
                    rollout.record.label, record.label, why)  # fmt: skip

    def _tell(self, rollout: Rollout, why: str) -> None:
        """Report a new state with its evidence, to the audit trail and all who listen."""
        record = rollout.record
        found = rollout.trial.to_json() if rollout.trial is not None else rollout.found
        versions = {"candidate": vars(record.candidate), "live": vars(record.live)}
        kind, text = EVENTS.get(record.state, record.state), f"{record.label}: {why}"
        evidence = {name: each for name, each in found.items() if name not in ("worst", "dropped")}
        version = record.candidate.version
        more = {"page": "/rollout", **versions, "evidence": evidence}
        self._registry.tell(kind, record.model, version, text, **more)

    def _save(self, rollout: Rollout, why: str) -> None:
        """Remember the change; what protects clients is done even where it cannot be remembered."""
        state = rollout.record.state
        for step in (partial(self._tell, rollout, why), self._lifecycle.save):
            try:
                step()
            except Exception as error:
                if state not in (State.RETURNED, State.FAILED):
                    raise
                logger.error("%s", error, exc_info=not isinstance(error, ServeError))

    def _enter(self, rollout: Rollout) -> None:
        """Begin or end a trial, and send a share to a canary, as the state has it."""
        record, live, candidate = rollout.record, rollout.live, rollout.candidate
        is_canary = record.state is State.CANARY
        rollout.metrics.entered(record)
        if is_canary or record.state is State.SHADOW:
            assert live is not None and candidate is not None
            if rollout.trial is None:
                look = partial(self._look, rollout)
                given = rollout.metrics, self._comparer, look
                rollout.trial = Trial(record.plan, live, candidate, *given)
            rollout.trial.enter(is_canary, record.share)
            self._arm()
            if is_canary:
                header = record.plan.header.encode()
                split = Canary(live, candidate, record.salt, record.share, header)
                self._registry.splits[record.model] = split
        elif rollout.trial is not None:
            rollout.found = rollout.trial.to_json()
            rollout.trial.stop()
            rollout.trial = None

    # -- what was before -----------------------------------------------------------------------

    def _is_registered(self, model: ModelVersion) -> bool:
        try:
            return self._registry.get(model.name, model.version) is model
        except ModelNotFound:
            return False

    async def _remove(self, rollout: Rollout) -> None:
        """Unregister a candidate, if it is still there."""
        candidate, rollout.candidate = rollout.candidate, None
        if candidate is not None and self._is_registered(candidate):
            await self._lifecycle.unregister(candidate)

    async def _forget_previous(self, before: Rollout | None, live: ModelVersion) -> None:
        """Unregister what the roll-out before kept to go back to."""
        if before is None or before.record.state is not State.DEFAULT or before.live is None:
            return
        if before.live is not live and self._is_registered(before.live) and not before.live.held:
            try:
                await self._lifecycle.unregister(before.live)
            except ServeError as error:  # the roll-out has begun all the same
                logger.error("%s %s is not removed: %s", live.name, before.live.version, error)

    # -- the server's life ---------------------------------------------------------------------

    def _note(self) -> dict[str, Any]:
        """Return what the state file holds."""
        return {
            name: each.record.to_json() | (
                {"workers": each.candidate.pool.least} if each.candidate is not None else {}
            )
            for name, each in self._rollouts.items()
        }  # fmt: skip

    async def restore(self, report: Report) -> None:
        """Go on where the server ended, in whatever state; what cannot be loaded has failed."""
        noted = self._registry.notes.get(NOTE, dict)()
        self._registry.notes[NOTE] = self._note
        if not isinstance(noted, dict):
            logger.error("roll-outs cannot be restored: they are not an object")
            return
        for name, content in noted.items():
            try:
                record = Record.from_json(content)
                parse_rule(record.plan.rule, record.plan.expect)
                live = self._registry.get(name)
                if record.state is State.DEFAULT and live.version != record.candidate.version:
                    raise ValueError(
                        f"{record.candidate.version} was the default, and {live.version} is served"
                    )
            except (ValueError, ModelNotFound, BadRequest) as error:
                logger.error("the roll-out of %s cannot be restored: %s", name, error)
            else:
                await self._restore(record, live, report)
        if self._rollouts:
            self._lifecycle.save()

    async def _restore(self, record: Record, default: ModelVersion, report: Report) -> None:
        name = record.model
        rollout = Rollout(record, RolloutMetrics(self._families, record))
        versions = {model.version: model for model in self._registry.versions(name)}
        rollout.live = versions.get(record.live.version)
        self._rollouts[name] = rollout
        rollout.metrics.entered(record)
        if record.state is State.DEFAULT:
            rollout.candidate = versions.get(record.candidate.version)
        if record.state not in WITH_CANDIDATE:
            return
        answers = record.state in (State.CANARY, State.RETURNED)
        spec = ModelSpec(
            record.candidate.file,
            name,
            record.workers,
            digest=record.candidate.digest,
            is_saved=False,
            niceness=0 if answers else SHADOWS_NICENESS,
        )
        report(name, f"candidate {record.candidate.version}, loading")
        try:
            if record.is_active and rollout.live is not default:
                raise Conflict(f"{name} {record.live.version} is not the default any more")
            rollout.candidate = await self._lifecycle.add(spec, None, waits=True)
        except (ServeError, ArchiveError) as error:
            logger.error("%s: the candidate %s: %s", name, record.candidate.version, error)
            if record.is_active:
                self._move(rollout, State.FAILED, f"it could not be restored: {error}")
            return
        rollout.hold()
        if record.is_active:
            self._move(rollout, record.state, "the server started again", record.step)

    async def stop(self) -> None:
        """Judge nothing any more; the state stays as it is."""
        if self._ticker is not None:
            self._ticker.cancel()
        for rollout in self._rollouts.values():
            if rollout.moving is not None:
                rollout.moving.cancel()
            if rollout.trial is not None:
                rollout.trial.stop()
        await self._comparer.stop()


def _aim(record: Record, to: str | None) -> Step | None:
    """Return state and step that a promotion leads to; None where it is there.

    Raises:
        Conflict, BadRequest: there is no way from here to there.
    """
    at, steps, model = record.state, record.plan.steps, record.model
    if at is State.DEFAULT:
        return None
    if at not in ACTIVE:
        raise Conflict(f"the roll-out of {model} is {at}; start it again to promote anything")
    if to is None:
        return record.next
    if to == State.DEFAULT:
        return State.DEFAULT, 0
    if to == State.SHADOW:
        if at is State.CANARY or not record.plan.shadow:
            raise Conflict(f"{model}: it is {record.label} and cannot become a shadow")
        return None if at is State.SHADOW else (State.SHADOW, 0)
    share, step = parse_share("to", to), record.step if at is State.CANARY else -1
    if share not in steps:
        known = ", ".join(map(format_share, steps)) or "none"
        raise Conflict(f"{model}: canary has no step of {to}; its steps are {known}")
    if steps.index(share) < step:
        raise Conflict(f"{model}: it is {record.label} already; back ends that")
    return None if steps.index(share) == step else (State.CANARY, steps.index(share))


def check_fits(archive: Archive, live: ModelVersion) -> None:
    """Refuse an archive that cannot follow the version that answers.

    Raises:
        Conflict: it is the same one, or of another model, or takes other inputs.
    """
    manifest, file = archive.manifest, archive.path.name
    if archive.digest == live.digest:
        raise ServesAlready(f"{file} is what {live.name} {live.version} serves already")
    check_follows(manifest, file, live)


def check_follows(manifest: Manifest, file: str, live: ModelVersion) -> None:
    """Refuse an archive whose manifest says that it cannot follow the version that answers.

    Raises:
        Conflict: it is of another model or of the same version, or takes other inputs.
    """
    said = (live.manifest or {}).get("model", {})
    if manifest.model_name not in (live.name, said.get("modelName"), None):
        raise Conflict(
            f"{file} is an archive of {manifest.model_name}; expected one of {live.name}: "
            f"`modelyard archive {live.name} …`"
        )
    if manifest.model_version == live.version:
        raise Conflict(
            f"{file} is version {live.version}, which answers already; archive it with another "
            "--model-version"
        )
    seal = manifest.modelyard
    before = ((live.manifest or {}).get("modelyard") or {}).get("signature") or {}
    if seal is None or seal.signature is None or "inputs" not in before:
        return
    ours, theirs = seal.signature.to_json()["inputs"], before["inputs"]
    if ours != theirs and said.get("handler") == manifest.handler:
        raise Conflict(
            f"{file} takes {_inputs(ours)}, and {live.name} {live.version} takes {_inputs(theirs)}:"
            " no request can be answered by both; register it as a version of its own and change "
            "the clients"
        )


def _inputs(inputs: Any) -> str:
    return ", ".join(
        f"{each.get('name')}:{each.get('dtype')}[{','.join(map(str, each.get('shape', ())))}]"
        for each in inputs
    )


def _refuse_other(record: Record, plan: Plan) -> None:
    if record.plan == plan:
        return
    name, file = record.model, record.plan.file
    what = f"of {file}" if file != plan.file else f"of {file} with other options"
    raise Conflict(
        f"a roll-out {what} is {record.label}; `modelyard rollout abort {name}` ends it, and then "
        "this one can start"
    )


# -- the management API, `/models/{model}/rollout` -------------------------------------------------


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
