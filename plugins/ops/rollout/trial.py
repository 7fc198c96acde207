"""What is found of a candidate, and what is judged of it: by copies, and by what it answers."""

from __future__ import annotations

import contextlib
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from modelyard.plugins.ops.rollout.answers import (
    Answer,
    Comparison,
    NotCompared,
    Verdict,
    answer_of,
    both,
    read_tolerance,
)
from modelyard.plugins.ops.rollout.bounds import Bound
from modelyard.plugins.ops.rollout.comparer import Comparer
from modelyard.plugins.ops.rollout.metrics import RolloutMetrics
from modelyard.plugins.ops.rollout.record import Plan
from modelyard.plugins.ops.rollout.rule import Judge, Judgement, Outcome, Rule, Tally, parse_rule
from modelyard.plugins.ops.rollout.shadow import Copy, Shadow
from modelyard.plugins.ops.rollout.watch import Watch
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.call import PREDICT, Call, Reply
from modelyard.serve.dataplane.metrics import Histogram
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.errors import WorkerDied

LEAST_FAILURES = 3
"""Least failures among the candidate's answers, before their share is looked at beside the rule's
own looks."""
QUICK_ALPHA = 0.001
"""Chance that such a look is wrong."""
MOST_KEPT = 10
MOST_ANSWER_BYTES = 4 << 10
"""Most bytes of an answer that are kept, from its start."""
MOST_INPUT_BYTES = 64 << 10
"""Most bytes of a request that are kept."""


class Trial:
    """What is found while a candidate is a shadow or a canary; and of its copies.

    Args:
        plan: plan of the roll-out.
        live: what the candidate is measured by.
        metrics: metrics of the roll-out.
        comparer: comparer of the server.

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
        self._tolerance = both(one, other, f"{live.name} {live.version}")
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
        before, tally = self._tally, Tally()
        self._tally = tally
        if is_canary:
            for name in ("verdicts", "labels_agree", "noise", "noise_differs"):
                setattr(tally, name, getattr(before, name))
        self._judge = Judge(self._rule if is_canary else replace(self._rule, p99=math.inf))
        self._judged, self._counted, self._began = None, (), monotonic()
        if self._plan.shadow and self._shadow is None:
            self._shadow = Shadow(self._live, self._candidate, self._plan.shadow, self)
        for model, side in ((self._live, tally.live), (self._candidate, tally.candidate)):
            model.metrics.kinds[PREDICT].watcher = side.answered if is_canary else None
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
        for worker in pool.workers if pool.plan.run.retry else ():
            for id, job in worker.flight.items():
                if job.kind == PREDICT and job.hand_to(self._live):
                    worker.cancel(id)

    def _inherit(self, job: Call) -> bool:
        """Count a request that a worker of the candidate died with, and have it answered."""
        if job.kind != PREDICT or not job.hand_to(self._live):
            return False
        self._tally.candidate.count(1, 1)
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
        counted = (tally.verdicts.total(), tally.noise, tally.candidate.total, is_over)
        if self._judged is None or counted != self._counted:
            self._judged, self._counted = self._judge.look(tally, is_over), counted
        return self._judged

    def _too_few(self) -> Judgement | None:
        """Return that a canary has not answered enough yet; None where it has."""
        tally = self._tally
        answered, least = sum(tally.candidate.times.counts), self._rule.least
        other = sum(tally.live.times.counts)
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
        if tally.candidate.failed < LEAST_FAILURES:
            return None
        if tally.failures(QUICK_ALPHA).low <= self._rule.failures:
            return None
        return (
            f"it failed at {tally.candidate.failed} of {tally.candidate.total} requests, the live "
            f"version at {tally.live.failed} of {tally.live.total}"
        )

    def _live_p99_s(self) -> float:
        times = self._tally.live.times
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
            self._metrics.count("compared", comparison.verdict)
            self._worst.add(copy.request_id, comparison, live, answer, copy.parts)
            if not self._is_canary:  # else what clients wait for is measured
                self._tally.live.times.observe(handler_us[0] / 1e6)
                self._tally.candidate.times.observe(handler_us[1] / 1e6)

        self._compare(live, answer, self._tolerance, found)

    def failed(self, copy: Copy, error: BaseException) -> None:
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
            self._metrics.count("noise", found.verdict)

    def dropped(self, reason: str) -> None:
        """Count a copy that was not compared."""
        self._dropped[reason] += 1
        self._metrics.count("shadow_dropped", reason)

    def to_json(self) -> dict[str, Any]:
        """Return what was found, as the management API has it."""
        found = describe_findings(self._rule, self._tally, self._judged or self.judge())
        return {
            **found,
            "tolerance": self._tolerance.scaled,
            "dropped": dict(self._dropped),
            "worst": self._worst.to_json(),
        }


def describe_findings(
    rule: Rule, tally: Tally | None = None, judgement: Judgement | None = None
) -> dict[str, Any]:
    """Return what was counted and judged, as the management API has it; of nothing, by default."""
    tally, judgement = tally or Tally(), judgement or Judgement(Outcome.NOT_ENOUGH)
    bounds = judgement.bounds
    ratio = _bound(bounds.get("p99Ratio"))
    sides = {"live": tally.live, "candidate": tally.candidate}
    return {
        "rule": str(rule),
        "expect": rule.expect or "",
        "compared": tally.compared,
        "verdicts": {str(name): count for name, count in sorted(tally.verdicts.items())},
        "noise": {"compared": tally.noise, "differs": tally.noise_differs},
        "dropped": {},
        "bounds": {
            **{name: _bound(bounds.get(name)) for name in BOUNDS},
            "p99Ratio": ratio["estimate"],
            "p99RatioBounds": ratio,
        },
        "judgement": judgement.to_json(),
        "latency": {name: {f"p{percent}": _quantile(side.times, percent) for percent in (50, 99)}
                    for name, side in sides.items()},
        "answered": {name: {"requests": side.total, "failed": side.failed}
                     for name, side in sides.items()},
        "worst": [],
    }  # fmt: skip


BOUNDS = ("disagreement", "noise", "excess", "failures", "labels")


def _bound(bound: Bound | None) -> dict[str, float | None]:
    values = bound._asdict() if bound is not None else dict.fromkeys(Bound._fields)
    return {name: _finite(value) for name, value in values.items()}


def _quantile(times: Histogram, percent: int) -> float | None:
    return _finite(times.quantile(percent / 100)) if sum(times.counts) else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# -- the worst differences, for a person to see -------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A request that two versions answered differently."""

    request_id: str
    at: datetime
    comparison: Comparison
    live: dict[str, Any]
    """The answer as `shown` has it."""
    candidate: dict[str, Any]
    input: dict[str, Any] | None = None
    """The request's body; None where inputs are not kept."""

    @property
    def rank(self) -> tuple[bool, float]:
        """What is worse is larger: another label, then what no tolerance helps, then by size."""
        return self.comparison.labels_agree is False, self.comparison.scaled

    def to_json(self) -> dict[str, Any]:
        """Return it as the management API has it."""
        found = {
            "requestId": self.request_id,
            "at": self.at.isoformat(timespec="milliseconds"),
            "verdict": str(self.comparison.verdict),
            "difference": self.comparison.difference,
            "live": self.live,
            "candidate": self.candidate,
        }
        return found if self.input is None else found | {"input": self.input}


class Worst:
    """The worst differences of a roll-out, of bounded size.

    Args:
        keep_inputs: whether requests are kept with them.
        most: how many are kept.
    """

    def __init__(self, keep_inputs: bool = False, most: int = MOST_KEPT) -> None:
        self._keep_inputs = keep_inputs
        self._most = most
        self._kept: list[Difference] = []

    def add(
        self, request_id: str, found: Comparison, live: Answer, candidate: Answer,
        body: Sequence[Buffer] = (),
    ) -> None:  # fmt: skip
        """Keep two answers if they differ and are among the worst; of equals, the earlier ones.

        Args:
            request_id: id as the client or the server named the request.
            found: what comparing the answers found.
            live: the live version's answer.
            candidate: the candidate's answer.
            body: body of the request, as it arrived.
        """
        if found.verdict not in (Verdict.DIFFERS, Verdict.CANDIDATE_FAILED):
            return
        new = Difference(request_id[:200], datetime.now(UTC), found, {}, {})
        if len(self._kept) >= self._most and new.rank <= self._kept[-1].rank:
            return
        new = replace(new, live=shown(live), candidate=shown(candidate))
        if self._keep_inputs:
            new = replace(new, input=_cut(b"".join(body), MOST_INPUT_BYTES))
        self._kept.append(new)
        self._kept.sort(key=lambda each: each.rank, reverse=True)
        del self._kept[self._most :]

    def to_json(self) -> list[dict[str, Any]]:
        """Return what is kept, the worst first."""
        return [each.to_json() for each in self._kept]


def shown(answer: Answer) -> dict[str, Any]:
    """Return an answer for people: status, type, and its text or its bytes in base64."""
    kind = answer.headers.get("content-type", "")
    return {"status": answer.status, "type": kind[:200], **_cut(answer.body, MOST_ANSWER_BYTES)}


def _cut(body: Buffer, most: int) -> dict[str, Any]:
    """Return the beginning of a body as text, else in base64, and how many bytes it has."""
    head = bytes(memoryview(body)[:most])
    try:
        said = {"text": head.decode()}
    except UnicodeDecodeError as error:
        is_cut_short = len(body) > most and error.end == len(head) and error.start >= most - 3
        said = (
            {"text": head[: error.start].decode()}
            if is_cut_short
            else {"base64": b64encode(head).decode()}
        )
    return {**said, "bytes": len(body)}
