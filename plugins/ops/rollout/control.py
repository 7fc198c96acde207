"""Roll-outs of one server: every verb, what happens by itself, and what is there after a restart.

Each verb may be repeated: what is so already stays so. What takes an answer away from a candidate
is one step of the loop, whatever else is going on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from modelyard.archiver import Archive, ArchiveError
from modelyard.plugins.ops.rollout.comparer import Comparer
from modelyard.plugins.ops.rollout.plan import Plan, format_share, parse_share
from modelyard.plugins.ops.rollout.record import ACTIVE, KEPT, Record, State, Version, now
from modelyard.plugins.ops.rollout.rule import Outcome, parse_rule
from modelyard.plugins.ops.rollout.split import Canary
from modelyard.plugins.ops.rollout.trial import Trial
from modelyard.serve.control.model_config import ModelSpec
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import CANDIDATE, LIVE, ModelVersion
from modelyard.serve.dataplane.metrics import Metrics, RolloutMetrics
from modelyard.serve.errors import Conflict, ModelNotFound, NoRollout, ServeError

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""From one look at what was found to the next."""
SHADOWS_NICENESS = 10
"""Of a candidate's workers that answer nobody: those that answer go first on the same core."""
Report = Callable[[str, str], None]


_NONE = {"estimate": None, "low": None, "high": None}
UNMEASURED: dict[str, Any] = {
    "rule": "",
    "expect": "",
    "compared": 0,
    "verdicts": {},
    "noise": {"compared": 0, "differs": 0},
    "dropped": {},
    "bounds": {
        "disagreement": _NONE,
        "noise": _NONE,
        "excess": _NONE,
        "failures": _NONE,
        "p99Ratio": None,
    },
    "judgement": {"verdict": "not enough traffic", "reasons": []},
    "latency": {"live": {"p50": None, "p99": None}, "candidate": {"p50": None, "p99": None}},
    "worst": [],
}


class _Answers(Exception):
    """The archive is what answers already, by the roll-out before."""


class Rollout:
    """One roll-out while the server runs.

    Args:
        record: what is remembered of it.
        candidate: its candidate, where there is one.
        live: the version that it is measured by.
        metrics: of the roll-out.
    """

    def __init__(
        self,
        record: Record,
        candidate: ModelVersion | None,
        live: ModelVersion | None,
        metrics: RolloutMetrics,
    ) -> None:
        self.record = record
        self.candidate = candidate
        self.live = live
        self.metrics = metrics
        self.trial: Trial | None = None
        """While it is a shadow or a canary."""
        self.found: dict[str, Any] = UNMEASURED
        """By the last trial."""
        self.moving: asyncio.Task[None] | None = None
        """By itself, to the next state."""

    def measured(self) -> dict[str, Any]:
        """Return what was found so far."""
        if self.trial is not None:
            self.found = self.trial.to_json()
        return self.found


class Rollouts:
    """The roll-outs of one server, by model.

    Args:
        lifecycle: of the server.
        metrics: of the server.
    """

    def __init__(self, lifecycle: Lifecycle, metrics: Metrics) -> None:
        self._lifecycle = lifecycle
        self._metrics = metrics
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
        return describe(self._get(name))

    def _get(self, name: str) -> Rollout:
        rollout = self._rollouts.get(name)
        if rollout is None:
            self._registry.get(name)
            raise NoRollout(name)
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
        async with self._locks[name]:
            live, before = self._registry.get(name), self._rollouts.get(name)
            if before is not None and before.record.is_active:
                _refuse_other(before.record, plan)
                return describe(before)
            if before is not None and before.candidate is not None and before.record.state in KEPT:
                self._move(before, State.ABORTED, "another roll-out is started")
                await self._remove(before)  # of the same version, most likely
            spec = ModelSpec(
                plan.file,
                name,
                max(1, math.ceil(plan.shadow * live.pool.least)),
                part=CANDIDATE,
                niceness=SHADOWS_NICENESS,
            )

            def check(archive: Archive) -> None:
                is_over = before is not None and before.record.state is State.DEFAULT
                if is_over and archive.digest == live.digest:
                    raise _Answers
                check_fits(archive, live)

            try:
                candidate = await self._lifecycle.add(spec, None, waits=True, check=check)
            except _Answers:
                assert before is not None
                return describe(before)
            record = Record(
                name, plan, secrets.token_hex(8), Version.of(candidate), Version.of(live)
            )
            record.workers = candidate.pool.least
            record.note("", f"{candidate.file} is loaded; its golden requests pass")
            try:
                if self._registry.get(name) is not live:
                    raise Conflict(f"another version of {name} was made the default meanwhile")
                with self._registry.change():
                    self._keep(record)
                    live.part = LIVE
                    self._lifecycle.save()
            except BaseException:
                live.part = candidate.part = ""
                await self._lifecycle.unregister(candidate, saves=False)
                raise
            if before is not None:
                before.metrics.remove()
            rollout = Rollout(record, candidate, live, self._new_metrics(record))
            self._rollouts[name] = rollout
            rollout.metrics.entered(record.state, record.share)
            if plan.shadow:
                self._move(rollout, State.SHADOW, "started")
            await self._forget_previous(before, live)
            return describe(rollout)

    async def promote(
        self, name: str, to: str | None = None, is_forced: bool = False
    ) -> dict[str, Any]:
        """Take a candidate one step on, or to a named one: shadow, a share such as 10%, default.

        Raises:
            Conflict: it is not judged good, or there is nothing to promote.
        """
        async with self._locks[name]:
            rollout = self._get(name)
            aim = self._aim(rollout.record, to)
            if aim is not None:
                if aim[0] is not State.SHADOW and not is_forced:
                    _refuse_unproven(rollout)
                await self._go(rollout, *aim, "promoted by an operator")
            return describe(rollout)

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
            return describe(rollout)

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
            self.turn_back(rollout, "taken back by an operator")
        return describe(rollout)

    def turn_back(self, rollout: Rollout, why: str) -> None:
        """Have the version before answer everything again, at once.

        Raises:
            Conflict: it is not there any more.
        """
        trial = rollout.trial
        self._move(rollout, State.RETURNED, why)
        rollout.metrics.returned.inc()
        if trial is not None:
            trial.hand_over()

    # -- by itself -----------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._ticker is None and any(each.trial for each in self._rollouts.values()):
            loop = asyncio.get_running_loop()
            self._ticker = loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        for rollout in list(self._rollouts.values()):
            try:
                self._look(rollout)
            except Exception:  # the others are looked after
                logger.exception("the roll-out of %s", rollout.record.model)
        self._arm()

    def _look(self, rollout: Rollout) -> None:
        """Take a candidate back that must not answer, end one that is refused, go on otherwise."""
        trial, record = rollout.trial, rollout.record
        if trial is None:
            return
        if (danger := trial.danger()) is not None:
            if record.state is State.CANARY:
                self.turn_back(rollout, danger)
            else:
                self._move(rollout, State.FAILED, danger)
            return
        judgement = trial.judge()
        why = "; ".join(judgement.reasons)
        if judgement.verdict is Outcome.FAIL:
            if record.state is State.CANARY:
                self.turn_back(rollout, why)
            elif record.plan.for_s is not None:
                self._move(rollout, State.FAILED, why)
        elif judgement.verdict is Outcome.PASS and trial.is_over and rollout.moving is None:
            rollout.moving = asyncio.get_running_loop().create_task(self._advance(rollout, why))

    async def _advance(self, rollout: Rollout, why: str) -> None:
        """Take a candidate that is judged good one step on."""
        record = rollout.record
        try:
            async with self._locks[record.model]:
                if rollout.record is not record:
                    return
                aim = self._aim(record, None)
                assert aim is not None
                await self._go(rollout, *aim, why)
        except (ServeError, ArchiveError) as error:
            logger.error("the roll-out of %s does not go on: %s", record.model, error)
            if rollout.record is record and record.state is State.SHADOW:
                self._move(rollout, State.FAILED, str(error))
        finally:
            rollout.moving = None

    # -- steps ---------------------------------------------------------------------------------

    def _aim(self, record: Record, to: str | None) -> tuple[State, int] | None:
        """Return state and step that a promotion leads to; None where it is there."""
        at, steps = record.state, record.plan.steps
        if at is State.DEFAULT:
            return None
        if at not in ACTIVE:
            raise Conflict(
                f"the roll-out of {record.model} is {at}; start it again to promote anything"
            )
        if to is None:
            return next_of(record)
        step = record.step if at is State.CANARY else -1
        if to == State.DEFAULT:
            return State.DEFAULT, 0
        if to == State.SHADOW:
            if at is State.CANARY or not record.plan.shadow:
                raise Conflict(f"{record.model}: it is {record.label} and cannot become a shadow")
            return None if at is State.SHADOW else (State.SHADOW, 0)
        share = parse_share("to", to)
        if share not in steps:
            known = ", ".join(map(format_share, steps)) or "none"
            raise Conflict(f"{record.model}: canary has no step of {to}; its steps are {known}")
        if steps.index(share) < step:
            raise Conflict(f"{record.model}: it is {record.label} already; back ends that")
        return None if steps.index(share) == step else (State.CANARY, steps.index(share))

    async def _go(self, rollout: Rollout, state: State, step: int, why: str) -> None:
        """Move on; what answers gets workers of the usual priority first, as many as the live one.

        Raises:
            LoadFailed: they could not load; nothing was changed.
            Conflict: it was ended meanwhile.
        """
        record, candidate, live = rollout.record, rollout.candidate, rollout.live
        assert candidate is not None and live is not None
        if state in (State.CANARY, State.DEFAULT) and candidate.pool.plan.niceness:
            await self._lifecycle.renew(candidate, max(1, live.pool.least), niceness=0)
            if rollout.record is not record:
                raise Conflict(f"the roll-out of {record.model} is {rollout.record.label} by now")
            record.workers = candidate.pool.least
        self._move(rollout, state, why, step)

    def _move(self, rollout: Rollout, state: State, why: str, step: int = 0) -> None:
        """Change the state, in the registry, in the file and here, or not at all."""
        record, registry = rollout.record, self._registry
        live, candidate = rollout.live, rollout.candidate
        name, before = record.model, record.label
        if state is State.RETURNED and (live is None or not self._is_registered(live)):
            raise Conflict(f"{name} {record.live.version} is not registered any more")
        next_ = replace(record, state=state, step=step, since=now(), events=[*record.events])
        next_.note(before, why)
        if state is not State.CANARY:  # before anything that may fail
            registry.splits.pop(name, None)
        parts = (live.part if live else "", candidate.part if candidate else "")
        try:
            with registry.change():
                self._keep(next_)
                if live is not None:
                    live.part = LIVE if state in ACTIVE else ""
                if candidate is not None:
                    candidate.part = "" if state in (State.DEFAULT, State.ABORTED) else CANDIDATE
                if state is State.DEFAULT:
                    registry.set_default(name, record.candidate.version)
                elif live is not None and state is State.RETURNED:
                    registry.set_default(name, live.version)
                self._save(state)
        except BaseException:
            for model, part in zip((live, candidate), parts, strict=True):
                if model is not None:
                    model.part = part
            raise
        rollout.record = next_
        self._enter(rollout)
        if state is State.CANARY and live is not None and candidate is not None:
            split = Canary(live, candidate, record.salt, record.plan.header)
            split.share = next_.share
            registry.splits[name] = split
        logger.info("roll-out of %s %s: %s, it was %s: %s", name, record.candidate.version,
                    next_.label, before or "not there", why)  # fmt: skip

    def _save(self, state: State) -> None:
        """Remember the change; what protects clients is done even where it cannot be remembered."""
        try:
            self._lifecycle.save()
        except ServeError as error:
            if state not in (State.RETURNED, State.FAILED):
                raise
            logger.error("%s", error)

    def _enter(self, rollout: Rollout) -> None:
        """Begin or end a trial, as the state has it."""
        record = rollout.record
        rollout.metrics.entered(record.state, record.share)
        if record.state in (State.SHADOW, State.CANARY):
            assert rollout.live is not None and rollout.candidate is not None
            if rollout.trial is None:
                rollout.trial = Trial(
                    record.plan, rollout.live, rollout.candidate, rollout.metrics, self._comparer
                )
            rollout.trial.enter(is_canary=record.state is State.CANARY)
            self._arm()
        elif rollout.trial is not None:
            rollout.measured()
            rollout.trial.stop()
            rollout.trial = None

    def _new_metrics(self, record: Record) -> RolloutMetrics:
        return RolloutMetrics(self._metrics, record.model, record.candidate.version)

    def _keep(self, record: Record) -> None:
        self._registry.rollouts = {**self._registry.rollouts, record.model: record.to_json()}

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
            candidate.part = ""
            await self._lifecycle.unregister(candidate)

    async def _forget_previous(self, before: Rollout | None, live: ModelVersion) -> None:
        """Unregister what the roll-out before kept to go back to."""
        if before is None or before.record.state is not State.DEFAULT or before.live is None:
            return
        if before.live is not live and self._is_registered(before.live) and not before.live.part:
            try:
                await self._lifecycle.unregister(before.live)
            except ServeError as error:  # the roll-out has begun all the same
                logger.error("%s %s is not removed: %s", live.name, before.live.version, error)

    # -- the server's life ---------------------------------------------------------------------

    async def restore(self, report: Report) -> None:
        """Go on where the server ended, in whatever state; what cannot be loaded has failed."""
        for name, content in list(self._registry.rollouts.items()):
            try:
                record = Record.from_json(content)
                live = self._registry.get(name)
                if record.state is State.DEFAULT and live.version != record.candidate.version:
                    raise ValueError(
                        f"{record.candidate.version} was the default, and {live.version} is served"
                    )
            except (ValueError, ModelNotFound) as error:
                logger.error("the roll-out of %s cannot be restored: %s", name, error)
                del self._registry.rollouts[name]
                continue
            await self._restore(record, live, report)
        if self._rollouts:
            self._lifecycle.save()

    async def _restore(self, record: Record, default: ModelVersion, report: Report) -> None:
        name = record.model
        rollout = Rollout(record, None, None, self._new_metrics(record))
        versions = {model.version: model for model in self._registry.versions(name)}
        rollout.live = versions.get(record.live.version)
        self._rollouts[name] = rollout
        if record.state is State.DEFAULT:
            rollout.candidate = versions.get(record.candidate.version)
        if record.state not in KEPT:
            rollout.metrics.entered(record.state, record.share)
            return
        answers = record.state in (State.CANARY, State.RETURNED)
        spec = ModelSpec(
            record.candidate.file,
            name,
            record.workers,
            digest=record.candidate.digest,
            part=CANDIDATE,
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
        if record.is_active:
            self._move(rollout, record.state, "the server started again", record.step)
        else:
            rollout.metrics.entered(record.state, record.share)

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


def next_of(record: Record) -> tuple[State, int] | None:
    """Return state and step that follow; None where nothing does."""
    if not record.is_active:
        return None
    if record.state is State.CANDIDATE and record.plan.shadow:
        return State.SHADOW, 0
    step = record.step + 1 if record.state is State.CANARY else 0
    return (State.CANARY, step) if step < len(record.plan.steps) else (State.DEFAULT, 0)


def check_fits(archive: Archive, live: ModelVersion) -> None:
    """Refuse an archive that cannot follow the version that answers.

    Raises:
        Conflict: it is the same one, or of another model, or takes other inputs.
    """
    manifest, file = archive.manifest, archive.path.name
    said = (live.manifest or {}).get("model", {})
    if archive.digest == live.digest:
        raise Conflict(f"{file} is what {live.name} {live.version} serves already")
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


def _refuse_unproven(rollout: Rollout) -> None:
    """Refuse to give a candidate more that has not been judged good.

    Raises:
        Conflict: says what is missing.
    """
    record, trial = rollout.record, rollout.trial
    judgement = trial.judge() if trial is not None else None
    if judgement is not None and judgement.verdict is Outcome.PASS:
        return
    verdict = (
        "nothing was compared" if judgement is None else f"the judgement is {judgement.verdict}"
    )
    reasons = "; ".join(judgement.reasons) if judgement is not None else "it had no shadow"
    raise Conflict(
        f"{record.model} {record.candidate.version} is not promoted: {verdict}: {reasons}. "
        "Wait, or promote it all the same with --force"
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


def _name(aim: tuple[State, int], plan: Plan) -> str:
    """Return what `to` of a promotion says for a state and a step."""
    return f"{plan.steps[aim[1]] * 100:.9g}%" if aim[0] is State.CANARY else str(aim[0])


def describe(rollout: Rollout) -> dict[str, Any]:
    """Return a roll-out as the management API has it."""
    record = rollout.record
    plan, after = record.plan, next_of(record)
    return {
        "model": record.model,
        "state": record.state,
        "since": record.since,
        "candidate": vars(record.candidate),
        "live": vars(record.live),
        "shadowShare": plan.shadow if record.state in (State.SHADOW, State.CANARY) else 0.0,
        "canaryShare": record.share,
        "steps": list(plan.steps),
        "step": record.step if record.state is State.CANARY else None,
        "next": None if after is None else _name(after, plan),
        "for": plan.for_s,
        "keepInputs": plan.keeps_inputs,
        "header": plan.header,
        **rollout.measured(),
        "events": record.events,
    }
