"""What is found of a candidate, and what is judged of it: by copies, and by what it answers."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import Any

import psutil

from modelyard.plugins.ops.rollout.comparer import (
    Comparer,
    Comparison,
    NotCompared,
    Verdict,
    answer_of,
    both,
    read_tolerance,
)
from modelyard.plugins.ops.rollout.evidence import Bound
from modelyard.plugins.ops.rollout.reasons import LIMIT, Explained
from modelyard.plugins.ops.rollout.record import Plan, RolloutMetrics
from modelyard.plugins.ops.rollout.rule import (
    Beside,
    Judge,
    Judgement,
    Rule,
    Tally,
    describe,
    parse_rule,
)
from modelyard.plugins.ops.rollout.shadow import Copy, CopyBatch, Shadow
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import PREDICT, Call, Reply
from modelyard.serve.dataplane.metrics import Histogram
from modelyard.serve.dataplane.pool import Pool
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.dataplane.worker import Worker

Found = Comparison | NotCompared
WARM_UP = 100
"""Times of a canary that are not judged at first: its workers have just started."""
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
        look: looks at once at what was found; clients get answers that differ.

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
        look: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._compare = comparer.compare
        self._live = live
        self._candidate = candidate
        self._metrics = metrics
        self._rule = parse_rule(plan.rule, plan.expect)
        one, other = (read_tolerance(model.folder, model.manifest) for model in (live, candidate))
        self._tolerance = both(one, other, f"{live.name} {live.version}")
        limit = LIMIT if self._rule.reasons is None else self._rule.reasons
        self._explained = Explained(limit, live, candidate)
        self._tally = Tally(self._rule, reasons=self._explained.leaning)
        self._worst = Worst(plan.keeps_inputs)
        self._dropped: Counter[str] = Counter()
        self._shadows: list[Shadow] = []
        self._look = look
        self._soon: asyncio.Handle | None = None
        self.watch = Watch(live, candidate, self._live_p99_s)
        """Knows why the candidate must not go on, whatever is judged."""
        self._times = Beside()
        self._timers = partial(self._timed, False), partial(self._timed, True)
        self._is_canary = False
        self._cold = 0
        """Times that are still not judged."""
        self._began = monotonic()

    # -- phases --------------------------------------------------------------------------------

    def enter(self, is_canary: bool, share: float = 0.0) -> None:
        """Begin to judge anew, with what was shown before, by copies and by a smaller canary.

        The workers of a shadow make way for those of the live version, so its latency says little:
        it is measured, and judged once it answers.

        Args:
            share: share of the requests that the candidate answers. Of these answers as many are
                compared as are of the live version's.
        """
        if not is_canary:
            self._explained.begin()
        tally = Tally(self._rule, reasons=self._explained.leaning)
        if is_canary:
            tally = replace(self._tally, live=tally.live, candidate=tally.candidate)
        if not self._is_canary:
            tally.begin_times()
            self._cold = WARM_UP if is_canary else 0
        self._tally = tally
        self._judge = Judge(self._rule, is_canary)
        self._began = monotonic()
        self._copy(is_canary, share)
        for model, is_candidate in ((self._live, False), (self._candidate, True)):
            kind, timer = model.metrics.kinds[PREDICT], self._timers[is_candidate]
            kind.watcher = partial(tally.answered, is_candidate) if is_canary else None
            if is_canary and timer not in model.pool.on_answer:
                model.pool.on_answer = (*model.pool.on_answer, timer)
        self._is_canary = is_canary
        self.watch.begin()
        self._candidate.pool.heir = self._inherit if is_canary else None

    def stop(self) -> None:
        """Copy and count nothing more; what was found stays."""
        while self._shadows:
            self._shadows.pop().stop()
        for model in (self._live, self._candidate):
            model.metrics.kinds[PREDICT].watcher = None
            others = (each for each in model.pool.on_answer if each not in self._timers)
            model.pool.on_answer = tuple(others)
        self._candidate.pool.heir = None

    def _timed(self, is_candidate: bool, answered: Sequence[tuple[Call, Reply]]) -> None:
        """Take how long a handler had for clients' requests, beside what the other one had."""
        for job, reply in answered:
            if job.kind == PREDICT and reply.status < 500 and reply.handler_us:
                both = self._times.put(is_candidate, reply.handler_us / 1e6)
                if both is not None:
                    self._time(*both)

    def _time(self, live_s: float, candidate_s: float) -> None:
        if self._cold:
            self._cold -= 1
        else:
            self._tally.timed(live_s, candidate_s)

    def _copy(self, is_canary: bool, share: float) -> None:
        """Copy the plan's share, of a canary's own answers as many as make up that share of all."""
        copied, sides = self._plan.shadow, (self._live, self._candidate)
        if copied and not self._shadows:
            self._shadows.append(Shadow(*sides, copied, self))
        while len(self._shadows) > 1:  # of the share before
            self._shadows.pop().stop()
        if copied and is_canary and share:
            self._shadows.append(Shadow(*sides, min(1.0, copied / share), self, is_own=True))

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
        self._tally.answered(True, 500)
        return True

    @property
    def is_over(self) -> bool:
        """Whether the time that the plan gives a state has passed."""
        return self._plan.for_s is not None and monotonic() - self._began >= self._plan.for_s

    # -- judging -------------------------------------------------------------------------------

    def judge(self) -> Judgement:
        """Return what there is to say now, with its reasons where that is sure."""
        for shadow in self._shadows:
            shadow.noise_every = self._judge.noise_every(self._tally)
        return self._judge.look(self._tally)

    def explain(self) -> Judgement:
        """Return what there is to say now with bounds, and what is missing where it is not sure."""
        return self._judge.explain(self._tally)

    def _look_soon(self) -> None:
        """Look once all that was found together is counted."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._looked)

    def _looked(self) -> None:
        self._soon = None
        self._look()

    def _live_p99_s(self) -> float:
        times = self._tally.live.times
        return times.quantile(0.99) if sum(times.counts) else 0.0

    # -- findings ------------------------------------------------------------------------------

    def compared(self, pairs: Sequence[tuple[Copy, Reply, Reply]], is_own: bool) -> None:
        """Take what the live version and the candidate answered to copies of one batch.

        Args:
            pairs: copy, the live version's answer and the candidate's.
            is_own: a client got the candidate's answer, and not the live version's.
        """
        for copy, live, candidate in pairs:
            found = partial(self._compared, copy, live, candidate, is_own)
            self._compare(live, candidate, self._tolerance, found)

    def _compared(
        self, copy: Copy, live: Reply, candidate: Reply, is_own: bool, found: Found
    ) -> None:
        if isinstance(found, NotCompared):
            self.dropped(str(found))
            return
        self._tally.add(found, copy.request_id, is_own)
        self._metrics.count("compared", found.verdict)
        if not found.agrees:
            self._worst.add(copy.request_id, found, live, candidate, copy.parts)
        if is_own and not self._tally.agrees(found):
            self._look_soon()
        if not is_own and live.status < 300 and candidate.status < 300:
            self._explained.offer(copy, self._judge.knows_reasons)
        if not is_own and live.handler_us and candidate.handler_us:
            self._time(live.handler_us / 1e6, candidate.handler_us / 1e6)

    def repeated(self, batch: CopyBatch, first: Reply, again: Reply) -> None:
        """Take a version's second answer to a copy, given alone."""
        found, tolerance = partial(self._repeated, batch, first, again), self._tolerance
        if batch.for_candidate:  # whose answers teach nothing of the live version's
            tolerance = replace(tolerance, subject=self._candidate.pool.plan.label)
        self._compare(first, again, tolerance, found)

    def _repeated(self, batch: CopyBatch, first: Reply, again: Reply, found: Found) -> None:
        if isinstance(found, NotCompared) or first.status >= 500:
            return
        if not batch.for_candidate:
            self._tally.add_noise(found, batch.copies[0].request_id)
            self._metrics.count("noise", found.verdict)
            return
        if not found.agrees and batch.first is not None:
            (copy,), others = batch.copies, len(batch.first.copies) - 1
            than = f"beside {others} other requests than alone" if others else "the second time"
            words = f"its answer is another {than}: {found.difference}"
            found = replace(found, difference=words)
            self._worst.add(copy.request_id, found, first, again, copy.parts)
        self._tally.again.add(self._tally.agrees(found), found.difference)

    def dropped(self, reason: str, count: int = 1) -> None:
        """Count copies that were not compared."""
        if count:
            self._dropped[reason] += count
            self._metrics.count("shadow_dropped", reason, by=count)

    def to_json(self) -> dict[str, Any]:
        """Return what was found, as the management API has it."""
        found = describe_findings(self._rule, self._tally, self.explain())
        found["reasons"] |= {"explanations": dict(self._explained.counts)}
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
    tally, judgement = tally or Tally(), judgement or Judgement()
    bounds = judgement.bounds
    sides = {"live": tally.live, "candidate": tally.candidate}
    return {
        "rule": str(rule),
        "expect": rule.expect or "",
        "compared": tally.compared,
        "verdicts": {str(name): count for name, count in sorted(tally.verdicts.items())},
        "noise": {"compared": tally.noise, "differs": tally.noise_differs},
        "again": tally.again.to_json(),
        "own": tally.own.to_json(),
        "reasons": {"said": describe("reasons", rule, tally, bounds), "explanations": {}},
        "dropped": {},
        "bounds": {name: bounds[name]._asdict() if name in bounds else dict.fromkeys(Bound._fields)
                   for name in BOUNDS},
        "judgement": {"verdict": str(judgement.verdict), "reasons": list(judgement.reasons),
                      "confidence": rule.confidence},
        "latency": {name: {f"p{percent}": _quantile(side.times, percent) for percent in (50, 99)}
                    for name, side in sides.items()},
        "answered": {name: {"requests": side.total, "failed": side.failed}
                     for name, side in sides.items()},
        "worst": [],
    }  # fmt: skip


BOUNDS = ("disagreement", "noise", "excess", "failures", "labels", "p50", "p99", "reasons")


def _quantile(times: Histogram, percent: int) -> float | None:
    return times.quantile(percent / 100) if sum(times.counts) else None


# -- the worst differences, for a person to see -------------------------------------------------


class Worst:
    """The worst differences of a roll-out, of bounded size.

    Args:
        keep_inputs: whether requests are kept with them.
        most: how many are kept.
    """

    def __init__(self, keep_inputs: bool = False, most: int = MOST_KEPT) -> None:
        self._keep_inputs = keep_inputs
        self._most = most
        self._kept: list[tuple[tuple[bool, float], dict[str, Any]]] = []
        """Rank and difference, the worst first. What is worse ranks higher: another label, then
        what no tolerance helps, then by size."""

    def add(
        self, request_id: str, found: Comparison, live: Reply, candidate: Reply,
        body: Sequence[Buffer] = (),
    ) -> None:  # fmt: skip
        """Keep two answers if they differ and are among the worst; of equals, the earlier ones.

        A request has one place, for the worst of its differences.

        Args:
            request_id: id as the client or the server named the request.
            found: what comparing the answers found.
            live: the live version's answer.
            candidate: the candidate's answer.
            body: body of the request, as it arrived.
        """
        if found.verdict not in (Verdict.DIFFERS, Verdict.CANDIDATE_FAILED):
            return
        rank, id = (found.labels_agree is False, found.scaled), request_id[:200]
        last = next((each for each in self._kept if each[1]["requestId"] == id), None)
        if last is None and len(self._kept) >= self._most:
            last = self._kept[-1]
        if last is not None:
            if rank <= last[0]:
                return
            self._kept.remove(last)
        new = {
            "requestId": id,
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "verdict": str(found.verdict),
            "difference": found.difference,
            "live": shown(live),
            "candidate": shown(candidate),
        }
        if self._keep_inputs:
            new["input"] = _cut(b"".join(body), MOST_INPUT_BYTES)
        self._kept.append((rank, new))
        self._kept.sort(key=lambda each: each[0], reverse=True)

    def to_json(self) -> list[dict[str, Any]]:
        """Return what is kept as the management API has it, the worst first."""
        return [each for _, each in self._kept]


def shown(reply: Reply) -> dict[str, Any]:
    """Return an answer for people: status, type, and its text or its bytes in base64."""
    answer = answer_of(reply)
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


# -- signs by which a candidate is taken back at once ----------------------------------------------


MOST_RESTARTS = 3
GOLDEN_EVERY_S = 60.0
HUNG_S = 5.0
"""Least time that a request may take, however fast the live version is."""
SLOWER = 20
"""Times the live version's 99th percentile that a request may take."""
MEMORY_EVERY_S = 2.0
GROWTH_BYTES = 256 << 20
"""Least growth of a worker, beyond its size at first and beyond the live version's largest."""


class Watch:
    """Watches a candidate while it answers, for what needs no statistics, or cannot wait for them.

    Args:
        live: what it is measured by.
        live_p99_s: returns the 99th percentile of the live version's latency, 0 while unknown.
    """

    def __init__(
        self, live: ModelVersion, candidate: ModelVersion, live_p99_s: Callable[[], float]
    ) -> None:
        self._live = live
        self._candidate = candidate
        self._live_p99_s = live_p99_s
        self._failure = ""
        self._memory_at = 0.0
        self._first: dict[int, int] = {}
        """Bytes of a process when it was looked at first, in whatever state."""
        self.begin()

    def begin(self) -> None:
        """Count anew what a state may have few of; a worker that grows has grown in all states."""
        self._restarts = _restarts(self._candidate.pool)
        self._golden_at = monotonic() + GOLDEN_EVERY_S

    def look(self) -> str | None:
        """Return why the candidate must not answer any more; None where there is nothing."""
        now = monotonic()
        restarts = _restarts(self._candidate.pool) - self._restarts
        if restarts >= MOST_RESTARTS:
            return f"its workers ended {restarts} times unasked"
        if (reason := self._candidate.pool.why_none) is not None:
            return reason
        self._replay(now)
        return self._failure or self._hung(now) or self._grown(now)

    def _hung(self, now: float) -> str | None:
        waits = self._live.batchers[PREDICT].oldest_s
        limit = max(HUNG_S, SLOWER * self._live_p99_s(), waits)
        jobs = [job for worker in self._candidate.pool.workers for job in worker.flight.values()]
        taken = (job.taken_at for job in jobs if job.kind == PREDICT and job.stream is None)
        longest = now - min(taken, default=now)
        if longest > limit:
            return f"a request has no answer for {longest:.1f} s"
        if (waited := self._candidate.batchers[PREDICT].oldest_s) > limit:
            return f"a request waits for {waited:.1f} s"
        return None

    # -- golden requests -----------------------------------------------------------------------

    def _replay(self, now: float) -> None:
        """Have an idle worker answer the golden requests again, when it is time."""
        plan = self._candidate.pool.plan
        if now < self._golden_at or not plan.load["golden"] or plan.load["handler"] == "generate":
            return
        idle = (worker for worker in self._candidate.pool.workers if worker.is_idle)
        if (worker := next(idle, None)) is None:
            return
        self._golden_at = now + GOLDEN_EVERY_S
        head = wire.pack_meta((b"", b"", b"golden"))
        sink: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        sink.add_done_callback(self._replayed)
        worker.run_aside([(head, [b""], wire.GOLDEN, sink, 0)])

    def _replayed(self, sink: asyncio.Future[Reply]) -> None:
        """Take what it found; others count the deaths of workers."""
        if sink.cancelled():  # a request came first
            self._golden_at = monotonic() + 1.0
        elif sink.exception() is None:
            reply = sink.result()
            if reply.status != 200 and isinstance(reply.body, bytes | bytearray):
                self._failure = bytes(reply.body[:500]).decode("utf-8", "replace")

    # -- memory --------------------------------------------------------------------------------

    def _grown(self, now: float) -> str | None:
        """Return that a worker has come to be twice as large, and larger than the live version's.

        Those have answered the same requests, and for longer.
        """
        if now < self._memory_at:
            return None
        self._memory_at = now + MEMORY_EVERY_S
        most = max(map(_bytes_of, self._live.pool.workers), default=0)
        for worker in self._candidate.pool.workers:
            if not (size := _bytes_of(worker)):
                continue
            first = self._first.setdefault(worker.pid, size)
            if size - first > max(first, GROWTH_BYTES) and size > most + GROWTH_BYTES:
                return (
                    f"worker {worker.number} has grown from {first >> 20} MB to {size >> 20} MB; "
                    f"the live version's largest has {most >> 20} MB"
                )
        return None


def _bytes_of(worker: Worker) -> int:
    """Return the memory of a worker; 0 where it is not ready or gone."""
    try:
        return int(psutil.Process(worker.pid).memory_info().rss) if worker.is_ready else 0
    except psutil.Error:
        return 0


def _restarts(pool: Pool) -> int:
    return sum(slot.restarts for slot in pool.slots)
