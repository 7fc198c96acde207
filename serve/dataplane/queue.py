"""Jobs that wait for a replica: in which order they are taken, and how many are before one.

There are three classes. In each round every class that waits is granted its rows, the higher class
first, so that each has its share of what is served however many of the others wait. A class may
take more than it has for the job that it begins with, and is granted less for it later. What nobody
claims goes to who waits.

Within a class the job whose time ends first is first. `Admission` has the estimates behind every
refusal: whether an answer is to be expected in its time.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from modelyard.serve.dataplane.call import Call
from modelyard.serve.dataplane.poison import Poison


class Replica(Protocol):
    """What runs batches, seen from above the pool."""

    def capacity(self, kind: int) -> int:
        """Return how many more jobs of this kind it takes now."""

    def run(self, jobs: list[Call]) -> None:
        """Run the jobs and answer each one's sink exactly once, whatever happens."""

    def rest_s(self, now: float) -> float:
        """Return in how many seconds it will have answered what it holds; 0 when it is idle."""


class Engine(Protocol):
    """The replicas of one model version. `pool.py` is one; a cluster would be another."""

    @property
    def ready_count(self) -> int:
        """How many replicas can run batches now."""

    @property
    def why_none(self) -> str | None:
        """Why no replica will come up soon, or None."""

    @property
    def idle_count(self) -> int:
        """How many replicas would start a job at once."""

    @property
    def poison(self) -> Poison:
        """The jobs that ended replicas."""

    def pick(self, kind: int) -> Replica | None:
        """Return the least loaded replica with room for this kind, if any has."""

    def handed_over(self) -> int:
        """Return how many jobs replicas hold without running them, where these count as queued."""

    def batch_s(self, kind: int) -> float:
        """Return how long a batch takes of late, in seconds; 0 while unknown."""

    def job_s(self, kind: int) -> float:
        """Return what a job costs one replica of late, in seconds; 0 while unknown."""

    def expected_s(self, kind: int, queued: int) -> float:
        """Return in how many seconds one more job will be answered, behind `queued` others.

        0 while that is unknown, and where an idle replica waits for it: what was measured before
        must not keep a job from being measured.
        """


SHARES = (16, 4, 1)
"""Rows of a round, by class, as the settings have them."""
HURRIED_S = 5.0
"""A time that is longer counts as this long when jobs are put in order: nobody is overtaken for
longer than that, however little time others have."""
RATE_OVER_S = 3.0
"""Time over which the rows that come of a class are averaged, with falling weight."""

EXPECTED_SHARE = 0.75
"""Share of a job's time that its answer may be expected to take: half of all answers take longer
than expected, and at saturation every job waits as long as it may. Who waits for more of it than
that before it is begun was expected too early."""
LEAST_SHARE = 0.25
"""The same where what was expected is wrong: the processor has other work, or the front is behind.
A queue that is shorter keeps the workers as busy, and answers sooner."""
LATE_PART = 0.01
"""Part of the jobs of a look that may be late before less is expected."""
FEWER, MORE = 0.7, 0.0025
"""What the share is multiplied by at a look, a tenth of a second, when more were late, and what is
added when not: down within 0.3 s, up within 20 s."""
UNHURRIED_S = 5.0
"""A job with more time than that is only asked whether one replica could do it all."""

IsGone = Callable[[Call], bool]

_append, _popleft = deque[Call].append, deque[Call].popleft
"""Methods on every request's way, bound once: by `super()` they take longer."""


class Line(deque[Call]):
    """Jobs of one class in the order in which they are taken, and how many rows they have."""

    rows = 0
    _looked_at = 0

    def append(self, job: Call) -> None:
        """Add a job: behind all others, but before those that have more time left."""
        self.rows += job.rows
        # What has this much time is behind all that came before: it has no need to be compared.
        job.due = due = min(job.deadline, job.queued_at + HURRIED_S)
        if job.timeout_s < HURRIED_S and self and self[-1].due > due:
            at = len(self)
            for other in reversed(self):
                if other.due <= due:
                    break
                at -= 1
            self.insert(at, job)
        else:
            _append(self, job)

    def popleft(self) -> Call:
        """Take the first job."""
        job = _popleft(self)
        self.rows -= job.rows
        return job

    def take(self, place: int) -> Call:
        """Take a job from among the others."""
        job = self[place]
        del self[place]
        self.rows -= job.rows
        return job

    def rows_before(self, priority: int, arrived_at: float, timeout_s: float, rows: int) -> int:
        """Return how many rows are taken before the last one of such a job.

        Args:
            priority: class of the job.
            arrived_at: time of `time.monotonic()`.
            timeout_s: the job's time.
            rows: rows of the job.
        """
        before = self.rows + rows - 1
        if timeout_s < HURRIED_S:
            due = arrived_at + timeout_s
            for job in reversed(self):
                if job.due <= due:
                    break
                before -= job.rows
        return before

    def held(self, priority: int, rows: int) -> int:
        """Return how much of a class waits, as a job of so many rows counts it: in rows.

        One of a single row counts jobs: who sends many rows at once keeps nobody else out.
        """
        return self.rows if rows > 1 else len(self)

    def sift(self, is_gone: IsGone, most: int | None = None) -> bool:
        """Take out jobs that need no answer any more, and return whether there were any.

        Args:
            is_gone: returns whether a job is such, having seen to it.
            most: how many to look at; the next look goes on from there. None looks at all.
        """
        start = self._looked_at if most is not None and self._looked_at < len(self) else 0
        count = len(self) - start if most is None else min(most, len(self) - start)
        kept = 0
        self.rotate(-start)
        for _ in range(count):
            job = _popleft(self)
            if is_gone(job):
                self.rows -= job.rows
            else:
                _append(self, job)
                kept += 1
        self.rotate(start + kept)
        self._looked_at = start + kept
        return kept < count


class Classes:
    """The jobs of all classes, as a `Line` has those of one.

    Args:
        shares: rows of a round, by class.
        normal: the jobs of the class that most are of.
        rows_per_s: returns how many rows are served; infinite while that is unknown.
    """

    def __init__(
        self, shares: Sequence[int], normal: Line, rows_per_s: Callable[[], float]
    ) -> None:
        self.lines = (Line(), normal, Line())
        self._rows_per_s = rows_per_s
        self._shares = shares
        self._credits = list(shares)
        """Rows that a class may still begin with in this round; below 0 what it took too much."""
        self._rates = [_Rate() for _ in self.lines]

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return sum(line.rows for line in self.lines)

    def __len__(self) -> int:
        return sum(map(len, self.lines))

    def __bool__(self) -> bool:
        return any(self.lines)

    def __iter__(self) -> Iterator[Call]:
        """Yield all jobs, those of the higher classes first."""
        return chain.from_iterable(self.lines)

    def __getitem__(self, place: int) -> Call:
        """Return the job that is taken next; it has the place 0."""
        assert place == 0
        return self.lines[self._choose()][0]

    def append(self, job: Call) -> None:
        """Add a job to those of its class."""
        self._rates[job.priority].add(job.rows, job.queued_at)
        self.lines[job.priority].append(job)

    def popleft(self) -> Call:
        """Take the job whose turn it is."""
        job = self.lines[self._choose()].popleft()
        self._charge(job)
        return job

    def take(self, place: int) -> Call:
        """Take the job at a place of the iteration, whose class has one turn less for it."""
        for line in self.lines:
            if place < len(line):
                job = line.take(place)
                self._charge(job)
                return job
            place -= len(line)
        raise IndexError(place)

    def sift(self, is_gone: IsGone, most: int | None = None) -> bool:
        """Do as `Line.sift` with each class."""
        return any([line.sift(is_gone, most) for line in self.lines])

    def held(self, priority: int, rows: int) -> int:
        """Return what `Line.held` does."""
        return self.lines[priority].held(priority, rows)

    def rows_before(self, priority: int, arrived_at: float, timeout_s: float, rows: int) -> int:
        """Return what `Line.rows_before` does, as far as that can be known.

        Of another class these are the rows that wait and those that will come meanwhile, but no
        more than the rounds grant it until then.
        """
        own = self.lines[priority].rows_before(priority, arrived_at, timeout_s, rows)
        rounds, rows_per_s = own // self._shares[priority], self._rows_per_s()
        others = []
        for at, line in enumerate(self.lines):
            if at != priority:
                most = (rounds + (at < priority)) * self._shares[at]
                others.append((most, line.rows, self._rates[at].read(arrived_at) / rows_per_s))
        return round(_solve(own, others))

    def _choose(self) -> int:
        """Return the class whose turn it is."""
        waiting = [at for at, line in enumerate(self.lines) if line]
        if len(waiting) == 1:
            return waiting[0]
        credits, shares = self._credits, self._shares
        if all(credits[at] <= 0 for at in waiting):
            # Rounds in which nobody may begin are passed over. Who does not wait saves nothing.
            rounds = min(-credits[at] // shares[at] for at in waiting) + 1
            for at, share in enumerate(shares):
                credits[at] = min(credits[at] + rounds * share, share)
        return next(at for at in waiting if credits[at] > 0)

    def _charge(self, job: Call) -> None:
        if any(line for at, line in enumerate(self.lines) if at != job.priority):
            self._credits[job.priority] -= job.rows
        else:  # nobody is kept waiting: no class owes another anything
            self._credits = list(self._shares)


def _solve(own: float, others: Sequence[tuple[float, float, float]]) -> float:
    """Return the least x that is `own` and, of each other, what waits and the part of x that comes.

    Args:
        own: at least that.
        others: of each: at most that, what waits, the part.
    """

    def reaches_most(other: tuple[float, float, float]) -> float:
        most, waiting, part = other
        return (most - waiting) / part if part else math.copysign(math.inf, most - waiting)

    ordered = sorted(others, key=reaches_most)
    for count in range(len(ordered) + 1):
        free = ordered[count:]
        fixed = own + sum(most for most, _, _ in ordered[:count])
        left = 1 - sum(part for _, _, part in free)
        if left > 0:
            found = (fixed + sum(waiting for _, waiting, _ in free)) / left
            if not free or found <= reaches_most(free[0]):
                return found
    raise AssertionError("without others the answer is `own`")


class _Rate:
    """Rows that come per second."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at = -math.inf

    def add(self, rows: int, now: float) -> None:
        self._value = self.read(now) + rows / RATE_OVER_S
        self._at = now

    def read(self, now: float) -> float:
        return self._value * math.exp(min(0.0, self._at - now) / RATE_OVER_S)


class Admission:
    """What is expected of one queue.

    Args:
        batch_size: the largest batch.
    """

    def __init__(self, engine: Engine, kind: int, batch_size: int) -> None:
        self._engine = engine
        self._kind = kind
        self._most_held = 3 * batch_size
        """Jobs of a replica with its own batch behind them."""
        self._share = EXPECTED_SHARE
        self._begun = self._late = 0

    def note(self, job: Call, waited_s: float) -> None:
        """Take note of how long a job waited, which is begun, or is given up."""
        if job.must_fit:
            self._begun += 1
            self._late += waited_s > EXPECTED_SHARE * job.timeout_s

    def look(self) -> None:
        """Expect less where jobs have waited too long since the last look; called regularly."""
        if self._late > LATE_PART * self._begun:
            self._share = max(LEAST_SHARE, FEWER * self._share)
        else:
            self._share = min(EXPECTED_SHARE, MORE + self._share)
        self._begun = self._late = 0

    def excess_s(self, timeout_s: float, queued: int, waited_s: float = 0.0) -> float:
        """Return by how many seconds an answer is expected too late; negative: in time.

        Args:
            timeout_s: time of the job that comes.
            queued: how many are before it.
            waited_s: how much of its time has passed.
        """
        allowed_s = self._share * timeout_s - waited_s
        if allowed_s > UNHURRIED_S:
            most_s = (queued + self._most_held) * self._engine.job_s(self._kind)
            if most_s < allowed_s:
                return most_s - allowed_s
        return self._engine.expected_s(self._kind, queued) - allowed_s

    def wait_s(self, queued: int) -> int:
        """Return whole seconds until what waits now will have been run, at least 1."""
        return max(1, math.ceil(self._engine.expected_s(self._kind, max(0, queued - 1))))

    def gathers_until(self, job: Call, delay_s: float) -> float:
        """Return until when a job may wait for company: half of its time is for its answer."""
        until = job.queued_at + delay_s
        if not job.must_fit:
            return until
        answer_s = max(2 * self._engine.batch_s(self._kind), job.timeout_s / 2)
        return min(until, job.deadline - answer_s)
