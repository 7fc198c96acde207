"""What is found of a candidate, and what is judged of it: by copies, and by what it answers."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import replace
from time import monotonic
from typing import Any

from modelyard.plugins.ops.rollout.bounds import Bound, excess
from modelyard.plugins.ops.rollout.compare import (
    Comparison,
    NotCompared,
    answer_of,
    both,
    read_tolerance,
)
from modelyard.plugins.ops.rollout.comparer import Comparer
from modelyard.plugins.ops.rollout.plan import Plan
from modelyard.plugins.ops.rollout.rule import Judge, Judgement, Outcome, Tally, parse_rule
from modelyard.plugins.ops.rollout.shadow import Copy, Shadow
from modelyard.plugins.ops.rollout.watch import Watch
from modelyard.plugins.ops.rollout.worst import Worst
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.call import PREDICT, Call, Reply
from modelyard.serve.dataplane.metrics import RolloutMetrics
from modelyard.serve.errors import WorkerDied

LEAST_FAILURES = 3
"""Of the candidate's answers, before their share is looked at beside the rule's own looks."""
QUICK_ALPHA = 0.001
"""Chance that such a look is wrong."""


class Trial:
    """What is found while a candidate is a shadow or a canary; the `Findings` of its copies.

    Args:
        plan: of the roll-out.
        live: what the candidate is measured by.
        metrics: of the roll-out.
        comparer: of the server.

    Raises:
        BadRequest: the plan's rule is none.
    """

    def __init__(
        self,
        plan: Plan,
        live: ModelVersion,
        candidate: ModelVersion,
        metrics: RolloutMetrics,
        comparer: Comparer,
    ) -> None:
        self._plan = plan
        self._compare = comparer.compare
        self._live = live
        self._candidate = candidate
        self._metrics = metrics
        self._rule = parse_rule(plan.rule, plan.expect)
        one, other = (read_tolerance(model.folder, model.manifest) for model in (live, candidate))
        self._tolerance = both(one, other)
        self._tally = Tally()
        self._worst = Worst(plan.keeps_inputs)
        self._dropped: Counter[str] = Counter()
        self._judge = Judge(self._rule)
        self._judged: Judgement | None = None
        self._counted: tuple[object, ...] = ()
        self._shadow: Shadow | None = None
        self._watch: Watch | None = None
        self._is_canary = False
        self._began = monotonic()

    # -- phases --------------------------------------------------------------------------------

    def enter(self, is_canary: bool) -> None:
        """Begin to judge anew: as a shadow, or by what it answers beside what copies have shown.

        The workers of a shadow make way for those of the live version, so its latency says little:
        it is measured, and judged once it answers.
        """
        before, self._tally = self._tally, Tally()
        if is_canary:
            for name in ("verdicts", "labels_agree", "noise", "noise_differs"):
                setattr(self._tally, name, getattr(before, name))
        self._judge = Judge(self._rule if is_canary else replace(self._rule, p99=math.inf))
        self._judged, self._counted, self._began = None, (), monotonic()
        if self._plan.shadow and self._shadow is None:
            self._shadow = Shadow(self._live, self._candidate, self._plan.shadow, self)
        self._live.metrics.kinds[PREDICT].watcher = self._live_answered if is_canary else None
        watcher = self._candidate_answered if is_canary else None
        self._candidate.metrics.kinds[PREDICT].watcher = watcher
        self._is_canary = is_canary
        self._watch = Watch(self._live, self._candidate, self._live_p99_s)
        self._candidate.pool.heir = self._inherit if is_canary else None

    def stop(self) -> None:
        """Copy and count nothing more; what was found stays."""
        if self._shadow is not None:
            self._shadow.stop()
            self._shadow = None
        for model in (self._live, self._candidate):
            model.metrics.kinds[PREDICT].watcher = None
        self._watch = None
        self._candidate.pool.heir = None

    def hand_over(self) -> None:
        """Have the live version answer what the candidate has not, and may be asked twice."""
        pool, queue = self._candidate.pool, self._candidate.batchers[PREDICT]
        for job in queue.withdraw():
            if not job.hand_to(self._live):
                queue.put(job)
        for worker in pool.workers if pool.plan.retry else ():
            for id, job in worker.flight.items():
                if job.kind == PREDICT and job.hand_to(self._live):
                    worker.cancel(id)

    def _inherit(self, job: Call) -> bool:
        """Count a request that a worker of the candidate died with, and have it answered."""
        if job.kind != PREDICT or not job.hand_to(self._live):
            return False
        self._tally.add_answers(candidate=1, candidate_failed=1)
        return True

    @property
    def is_over(self) -> bool:
        """Whether the time that the plan gives a state has passed."""
        return self._plan.for_s is not None and monotonic() - self._began >= self._plan.for_s

    # -- judging -------------------------------------------------------------------------------

    def judge(self) -> Judgement:
        """Return what there is to say now."""
        tally, is_over = self._tally, self.is_over
        if self._is_canary and (few := self._too_few()) is not None:
            self._judged = few
            return few
        counted = (tally.verdicts.total(), tally.noise, tally.candidate_total, is_over)
        if self._judged is None or counted != self._counted:
            self._judged, self._counted = self._judge.look(tally, is_over), counted
        return self._judged

    def _too_few(self) -> Judgement | None:
        """Return that a canary has not answered enough yet; None where it has."""
        tally = self._tally
        answered, least = sum(tally.candidate.counts), self._rule.least
        other = sum(tally.live.counts)
        if min(answered, other) >= least:
            return None
        reason = (
            f"the candidate has answered {answered} requests and the live version {other}; "
            f"expected {least} each"
        )
        bounds = self._judged.bounds if self._judged is not None else {}
        return Judgement(Outcome.NOT_ENOUGH, (reason,), self._rule.confidence, bounds)

    def danger(self) -> str | None:
        """Return why the candidate must not go on; None where there is nothing."""
        if self._watch is None:
            return None
        if (reason := self._watch.look()) is not None or not self._is_canary:
            return reason
        tally = self._tally
        if tally.candidate_failed < LEAST_FAILURES:
            return None
        more = excess(
            tally.candidate_failed,
            tally.candidate_total,
            tally.live_failed,
            tally.live_total,
            QUICK_ALPHA,
        )
        if more.low <= self._rule.failures:
            return None
        return (
            f"it failed at {tally.candidate_failed} of {tally.candidate_total} requests, the live "
            f"version at {tally.live_failed} of {tally.live_total}"
        )

    def _live_answered(self, code: int, seconds: float) -> None:
        self._tally.add_answers(live=1, live_failed=int(code >= 500))
        self._tally.live.observe(seconds)

    def _candidate_answered(self, code: int, seconds: float) -> None:
        self._tally.add_answers(candidate=1, candidate_failed=int(code >= 500))
        self._tally.candidate.observe(seconds)

    def _live_p99_s(self) -> float:
        times = self._tally.live
        return times.quantile(0.99) if sum(times.counts) else 0.0

    # -- findings ------------------------------------------------------------------------------

    def compared(self, copy: Copy, reply: Reply) -> None:
        """Take the candidate's answer to a copy."""
        try:
            live, answer = answer_of(copy.live), answer_of(reply)
        except NotCompared as reason:
            self.dropped(str(reason))
            return
        handler_us = copy.live.handler_us, reply.handler_us

        def found(comparison: Comparison | NotCompared) -> None:
            if isinstance(comparison, NotCompared):
                self.dropped(str(comparison))
                return
            self._tally.add(comparison)
            self._metrics.compared(comparison.verdict)
            self._worst.add(copy.request_id, comparison, live, answer, copy.parts)
            if not self._is_canary:  # else what clients wait for is measured
                self._tally.live.observe(handler_us[0] / 1e6)
                self._tally.candidate.observe(handler_us[1] / 1e6)

        self._compare(live, answer, self._tolerance, found)

    def failed(self, copy: Copy, error: Exception) -> None:
        """Take what there was instead of the candidate's answer."""
        text = str(error) or type(error).__name__
        kind = b"content-type\0text/plain"
        status = 500 if isinstance(error, WorkerDied) else 504
        self.compared(copy, Reply(status, kind, text.encode()))

    def repeated(self, copy: Copy, reply: Reply) -> None:
        """Take the live version's second answer to a copy."""
        with contextlib.suppress(NotCompared):
            live, answer = answer_of(copy.live), answer_of(reply)
            self._compare(live, answer, self._tolerance, self._repeated)

    def _repeated(self, found: Comparison | NotCompared) -> None:
        if isinstance(found, Comparison):
            self._tally.add_noise(found)
            self._metrics.repeated(found.verdict)

    def dropped(self, reason: str) -> None:
        """Count a copy that was not compared."""
        self._dropped[reason] += 1
        self._metrics.dropped(reason)

    # -- for people ----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return what was found, as the management API has it."""
        tally = self._tally
        judgement = self._judged or self.judge()
        bounds = judgement.bounds
        ratio = bounds.get("p99Ratio")
        sides = {"live": tally.live, "candidate": tally.candidate}
        return {
            "rule": str(self._rule),
            "expect": self._rule.expect or "",
            "tolerance": self._tolerance.scaled,
            "compared": tally.compared,
            "verdicts": {str(name): count for name, count in sorted(tally.verdicts.items())},
            "noise": {"compared": tally.noise, "differs": tally.noise_differs},
            "dropped": dict(self._dropped),
            "bounds": {
                **{name: _bound(bounds.get(name)) for name in BOUNDS},
                "p99Ratio": None if ratio is None else _finite(ratio.estimate),
                "p99RatioBounds": _bound(ratio),
            },
            "judgement": judgement.to_json(),
            "latency": {
                side: {
                    f"p{percent}": _finite(times.quantile(percent / 100))
                    if sum(times.counts)
                    else None
                    for percent in (50, 99)
                }
                for side, times in sides.items()
            },
            "answered": {
                "live": {"requests": tally.live_total, "failed": tally.live_failed},
                "candidate": {
                    "requests": tally.candidate_total, "failed": tally.candidate_failed,
                },
            },
            "worst": self._worst.to_json(),
        }  # fmt: skip


BOUNDS = ("disagreement", "noise", "excess", "failures", "labels")


def _bound(bound: Bound | None) -> dict[str, float | None]:
    if bound is None:
        return {"estimate": None, "low": None, "high": None}
    return {name: _finite(value) for name, value in bound._asdict().items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
