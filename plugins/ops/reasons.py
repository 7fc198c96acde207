"""What a worker says of one answer's reasons, and whether the reasons of a stream have changed.

Means do not show a sensor that is stuck: its part was small and stays small. What changes is how
its shares lie among those of before. So each share is ranked among all earlier ones of its part and
of the same predicted class, the reference's rows first. While rows come as the reference's did, the
rank is even between 0 and 1, and tells nothing of the ranks before it, whatever the shares are and
however few the reference knows: that few rows know little is in the ranks already. What is bet on
is that ranks are uneven. Classes are bet on apart: more customers of one kind change nothing.

V. Fedorova, A. Gammerman, I. Nouretdinov and V. Vovk, "Plug-in martingales for testing
exchangeability on-line", ICML 2012; when to raise an alarm: Shin, Ramdas and Rinaldo as in
`rollout.evidence.Drift`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modelyard.archiver.reference import (
    CELLS,
    MAX_BYTES,
    WINDOW,
    Reasons,
    Reference,
    cell_of,
    distance,
    parse_reference,
    read_reasons,
)
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.untrusted.names import REFERENCE_NAME
from modelyard.plugins.ops.rollout.evidence import FALSE_ALARMS
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Call, Reply, Stream
from modelyard.serve.dataplane.metrics import COUNTER, GAUGE, HISTOGRAM, MODEL, Metrics
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.dataplane.worker import Worker
from modelyard.serve.errors import BadModelConfig, ServeError, WorkerDied
from modelyard.serve.settings import Settings

OF_A_JOB = wire.LEGACY | wire.KSERVE | wire.PARTS
"""Flags by which a worker reads a request."""
OTHER_FORMS = wire.TENSORS | wire.INSTANCES
"""Flags of requests that are not one body for the handler."""
SLACK = 0.05
"""Share of a class's rows whose shares may lie elsewhere without being news."""
RARER = 4.0
"""Times as rare, or frequent, as in the reference that a class may be which is bet on: the few that
are predicted wrong are most of a class which has nearly gone, and have other reasons."""


def _bets() -> Iterator[Sequence[float]]:
    """Yield what a stake becomes by the eighth of a rank: shares that fall, gather or rise.

    Each is fair while ranks are even, and unfavourable while less than `SLACK` of them lie
    elsewhere than even ones do.
    """
    for low, high in ((0, 1), (0, 4), (3, 4), (4, 5), (2, 6), (4, 8), (7, 8)):
        more = 4.5 if high - low == 1 else 1.5
        yield [(more if low <= at < high else 0.5) / (1 + SLACK * (more - 0.5)) for at in range(8)]
    yield [(2.5 if at in (0, 7) else 0.5) / (1 + SLACK * 2) for at in range(8)]


BETS = tuple(_bets())


def _idle_explainer(model: ModelVersion) -> Worker | None:
    """Return a worker that only explains and has nothing to do, while no request waits."""
    if model.explainers is None:
        return None
    if model.pool.slots and not model.explainers.slots:
        model.load_explainers()
    if any(queue.waiting > 0 for queue in model.batchers):
        return None
    return next((each for each in model.explainers.workers if each.is_idle), None)


def explain(
    models: Sequence[ModelVersion], head: bytes, parts: Sequence[Buffer], flags: int
) -> Sequence[asyncio.Future[Reply]]:
    """Have each version explain a request; none does where one has no idle worker for it.

    What gives way to an explanation that somebody waits for is cancelled.

    Args:
        flags: flags of the request.
    """
    workers = [worker for each in models if (worker := _idle_explainer(each)) is not None]
    if len(workers) < len(models):
        return ()
    loop, flags = asyncio.get_running_loop(), flags & OF_A_JOB | wire.SHARES
    sinks: list[asyncio.Future[Reply]] = [loop.create_future() for _ in workers]
    for worker, sink in zip(workers, sinks, strict=True):
        worker.run_aside([(head, parts, flags, sink, 0)])
    return sinks


def read_answer(reply: Reply, parts: Mapping[str, float]) -> Reasons:
    """Return what a worker says, which runs authors' code.

    Raises:
        ValueError: it is not what a worker of ours says.
    """
    body = reply.body
    if not isinstance(body, bytes | bytearray):
        raise ValueError("it came as a stream")
    text = body[:200].decode("utf-8", "replace")
    if reply.status != 200:
        raise ValueError(f"status {reply.status}: {text}")
    label, shares = read_reasons(parse_json(body, MAX_BYTES))
    if shares and shares.keys() != parts.keys():
        raise ValueError(f"expected shares of {', '.join(parts)}, got {text}")
    if not all(isinstance(each, float | int) and 0 <= each <= 1 for each in shares.values()):
        raise ValueError(f"expected shares from 0 to 1, got {text}")
    return Reasons(label, {name: shares[name] for name in parts} if shares else {})


class Ranks:
    """The shares of one part and class that were seen, and what bets on their ranks have won."""

    def __init__(self, cells: list[int]) -> None:
        self._cells = cells + [0] * (CELLS - len(cells))
        self._total = sum(cells)
        self.won = [0.0] * len(BETS)

    def put(self, share: float) -> float:
        """Rank a share, and return what all bets together have."""
        at = cell_of(share)
        self._cells[at] += 1  # equal ones, itself among them, are ranked by lot
        self._total += 1
        above = sum(self._cells[:at]) + random.random() * self._cells[at]
        eighth = min(int(8 * above / self._total), 7)
        self.won = [
            (won + 1) * bet[eighth] for won, bet in zip(self.won, BETS, strict=True)
        ]  # another one begins
        return sum(self.won)


class Change:
    """Sees the reasons of a stream change.

    While nothing changes an alarm comes, on average, after `FALSE_ALARMS` explanations or more, and
    within the first n with a chance of at most n / `FALSE_ALARMS`. After one it begins anew, so
    that further ones come for as long as the reasons are others than the reference's.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._begin()

    def _begin(self) -> None:
        self._ranks = {
            label: [Ranks(list(cells)) for cells in group.cells]
            for label, group in self._reference.classes.items()
        }
        self._won = dict.fromkeys(self._ranks, 0.0)
        rows = self._reference.rows
        self._usual = {label: each.rows / rows for label, each in self._reference.classes.items()}
        self._recent = dict(self._usual)

    @property
    def evidence(self) -> float:
        """What the bets have, as a share of what raises an alarm."""
        bets = len(self._ranks) * len(self._reference.shares) * len(BETS)
        return sum(self._won.values()) / (bets * FALSE_ALARMS) if bets else 0.0

    def _is_as_frequent(self, label: str) -> bool:
        """Count a class; return whether it was about as frequent before as in the reference."""
        usual, recent = self._usual[label], self._recent[label]
        for each, share in self._recent.items():
            self._recent[each] = share + ((each == label) - share) / WINDOW
        return usual / RARER <= recent <= usual * RARER

    def put(self, reasons: Reasons) -> str:
        """Take an explanation; return the part that has changed most if it raises an alarm."""
        ranks = self._ranks.get(reasons.label)
        if ranks is None or not self._is_as_frequent(reasons.label):
            return ""
        won = [each.put(share) for each, share in zip(ranks, reasons.shares.values(), strict=True)]
        self._won[reasons.label] = sum(won)
        if self.evidence < 1:
            return ""
        self._begin()
        return list(reasons.shares)[won.index(max(won))]


# -- a share of live predictions, explained unasked ------------------------------------------------


logger = logging.getLogger(__name__)

SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
CALM = 1000
"""Explanations without an alarm after which the next one is told of again."""
OUTCOMES = ("explained", "busy", "interrupted", "failed")
"""What may become of a prediction that was drawn to be explained."""


_PART = (*MODEL, "part")
_FAMILIES: dict[str, tuple[Any, ...]] = {
    "explained": (COUNTER, "explained_predictions", (*MODEL, "outcome"),
                  "Predictions drawn to be explained unasked, by what became of them."),
    "shares": (HISTOGRAM, "attribution_share", _PART, "Share of a part of the input in the sum of "
               "an explanation's absolute attributions.", SHARES),
    "reference": (GAUGE, "attribution_reference", _PART,
                  "Mean share of a part in the archive's reference."),
    "distance": (GAUGE, "attribution_drift", MODEL, "Total variation distance of the latest "
                 "shares' means to those of the same classes in the archive's reference."),
    "floor": (GAUGE, "attribution_drift_floor", MODEL,
              "What the drift is at most while nothing changes, 95 % of the time."),
    "evidence": (GAUGE, "attribution_evidence", MODEL,
                 "Evidence that reasons are others than the reference's; 1 raises an alarm."),
    "alarms": (COUNTER, "attribution_alarms", _PART,
               "Times at which the shares of a part were shown to have changed."),
}  # fmt: skip
"""Name of ours → kind, name, labels and text of a metric."""


class Drifts:
    """The drift of every version that the settings, or its archive, have explained unasked.

    A worker that only explains, and has nothing else to do, is given a prediction that was just
    answered, with the flag SHARES. What is not taken at once is dropped and counted: there is no
    queue. The worker gives up between two passes as soon as somebody asks it for an explanation.
    """

    def __init__(self, settings: Settings, metrics: Metrics, models: Registry) -> None:
        self._settings = settings
        self.tell = models.tell
        self.families = {name: metrics.add(*about) for name, about in _FAMILIES.items()}
        self._of: dict[tuple[str, str], Drift] = {}

    def changed(self, model: ModelVersion, is_there: bool) -> None:
        """Watch a version that comes, and forget the series of one that has gone.

        Raises:
            BadModelConfig: its reference is wrong.
        """
        key, share, file = (model.name, model.version), model.config.explain_share, model.file
        if not is_there:
            if (drift := self._of.pop(key, None)) is not None:
                drift.remove()
        elif share and model.explainers is not None:
            try:
                reference = parse_reference((model.folder / REFERENCE_NAME).read_bytes())
            except ValueError as error:
                raise BadModelConfig(f"{file}: {REFERENCE_NAME} is wrong: {error}") from error
            drift = self._of[key] = Drift(self, model, share, reference)
            model.pool.on_answer = (*model.pool.on_answer, drift.offer)
        elif self._settings.explain_share and not (model.folder / REFERENCE_NAME).exists():
            logger.warning(
                "%s: explain_share is %g, and %s has no reference to compare with; its predictions "
                "are not explained (modelyard archive --reference FILE)",
                model.pool.plan.label, self._settings.explain_share, file,
            )  # fmt: skip


class Drift:
    """The reasons of one model version's predictions. Lives on the event loop.

    Args:
        drifts: what exposes its metrics.
        share: share of the predictions that are explained, above 0 and at most 1.
        reference: what their shares are compared with.
    """

    def __init__(
        self, drifts: Drifts, model: ModelVersion, share: float, reference: Reference
    ) -> None:
        self._families, self._tell = drifts.families, drifts.tell
        self._model = model
        self._key = key = model.name, model.version
        self._label = model.pool.plan.label
        self._share = share
        self._reference = reference
        self._draw = random.Random().random
        self._moved = dict.fromkeys(reference.shares, 0.0)
        """How far the mean share of each part has moved from those of the classes predicted."""
        self._change = Change(reference)
        self._calm = CALM
        """Explanations since the latest alarm."""
        self._has_warned = False
        self._is_ended = False
        families = self._families
        for part, mean in reference.shares.items():
            families["shares"].histogram(*key, part)
            families["alarms"].count(*key, part)
            families["reference"].count(*key, part).value = mean
        self._distance, self._evidence = (
            families[name].count(*key) for name in ("distance", "evidence")
        )
        if reference.floor is not None:
            families["floor"].count(*key).value = reference.floor
        self._counts = {each: families["explained"].count(*key, each) for each in OUTCOMES}

    def remove(self) -> None:
        """Explain nothing more, and forget the series."""
        self._is_ended = True
        for family in self._families.values():
            family.forget(*self._key)

    def offer(self, answered: Sequence[tuple[Call, Reply]]) -> None:
        """Explain what was just answered, where it is drawn and a worker has time."""
        for job, reply in answered:
            if reply.status != 200 or isinstance(reply.body, Stream):
                continue
            if self._draw() >= self._share or self._is_ended or job.flags & OTHER_FORMS:
                continue
            for sink in (sinks := explain([self._model], job.head, job.parts, job.flags)):
                sink.add_done_callback(self._ended)
            if not sinks:
                self._counts["busy"].inc()

    def _ended(self, sink: asyncio.Future[Reply]) -> None:
        """Take one explanation; what was cancelled gave way to one that somebody waits for."""
        if sink.cancelled():
            self._counts["interrupted"].inc()
            return
        try:
            said = read_answer(sink.result(), self._reference.shares)
        except (ValueError, ServeError) as error:
            self._counts["failed"].inc()
            if isinstance(error, WorkerDied) and not self._is_ended:
                self._is_ended = True
                logger.error(
                    "%s: a worker died while it explained a prediction unasked; none is explained "
                    "any more until the model is registered again", self._label
                )  # fmt: skip
            elif not isinstance(error, ServeError) and not self._has_warned:
                self._has_warned = True
                logger.warning("%s: a prediction could not be explained unasked: %s; "
                               "further ones are counted only", self._label, error)  # fmt: skip
            return
        self._counts["explained"].inc()
        if not said.shares or self._is_ended:  # it was as the baseline is, or nobody wants to know
            return
        usual = self._reference.usual(said.label)
        for (name, share), mean in zip(said.shares.items(), usual, strict=True):
            self._families["shares"].histogram(*self._key, name).observe(share)
            self._moved[name] += (share - mean - self._moved[name]) / WINDOW
        self._distance.value = distance(list(self._moved.values()))
        self._calm += 1
        if part := self._change.put(said):
            self._alarm(part, said.label)
        self._evidence.value = self._change.evidence

    def _alarm(self, part: str, label: str) -> None:
        """Count that the shares of a part have changed; tell of it, unless that was told just now.

        Alarms come again and again for as long as it is so.
        """
        self._families["alarms"].count(*self._key, part).inc()
        if self._calm > CALM:
            self._tell(
                "reasons changed", *self._key,
                f'the share of "{part}" is not as in the reference, where "{label}" is predicted; '
                f"all parts have moved by {self._distance.value:.3f}, by chance up to "
                f"{self._reference.floor:.3f}",
            )  # fmt: skip
        self._calm = 0
