"""Explain a share of live predictions, unasked, and expose how far their reasons have moved.

A worker that only explains, and has nothing else to do, is given a prediction that was just
answered, with the flag SHARES. What is not taken at once is dropped and counted: there is no queue.
The worker gives up between two passes as soon as somebody asks it for an explanation.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

from modelyard.archiver.reference import WINDOW, Reference, distance, parse_reference
from modelyard.archiver.untrusted.names import REFERENCE_NAME
from modelyard.plugins.ops.reasons import (
    OF_A_JOB,
    OTHER_FORMS,
    Change,
    idle_explainer,
    read_answer,
)
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Call, Reply, Stream
from modelyard.serve.dataplane.metrics import COUNTER, GAUGE, HISTOGRAM, MODEL, Family, Metrics
from modelyard.serve.errors import BadModelConfig, WorkerDied
from modelyard.serve.settings import Settings

logger = logging.getLogger(__name__)

SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
CALM = 1000
"""Explanations without an alarm after which the next one is told of again."""
OUTCOMES = ("explained", "busy", "interrupted", "failed")
"""What may become of a prediction that was drawn to be explained."""


class Drifts:
    """The drift of every version that the settings, or its archive, have explained unasked."""

    def __init__(self, settings: Settings, metrics: Metrics, models: Registry) -> None:
        self._settings = settings
        self.tell = models.tell
        part = (*MODEL, "part")
        self.explained = metrics.add(
            COUNTER, "explained_predictions", (*MODEL, "outcome"),
            "Predictions drawn to be explained unasked, by what became of them.",
        )  # fmt: skip
        self.shares = metrics.add(
            HISTOGRAM, "attribution_share", part,
            "Share of a part of the input in the sum of an explanation's absolute attributions.",
            SHARES,
        )  # fmt: skip
        self.reference = metrics.add(
            GAUGE, "attribution_reference", part,
            "Mean share of a part in the archive's reference.",
        )  # fmt: skip
        self.distance = metrics.add(
            GAUGE, "attribution_drift", MODEL,
            "Total variation distance of the latest shares' means to those of the same classes in "
            "the archive's reference.",
        )  # fmt: skip
        self.floor = metrics.add(
            GAUGE, "attribution_drift_floor", MODEL,
            "What the drift is at most while nothing changes, 95 % of the time.",
        )  # fmt: skip
        self.evidence = metrics.add(
            GAUGE, "attribution_evidence", MODEL,
            "Evidence that reasons are others than the reference's; 1 raises an alarm.",
        )  # fmt: skip
        self.alarms = metrics.add(
            COUNTER, "attribution_alarms", part,
            "Times at which the shares of a part were shown to have changed.",
        )  # fmt: skip
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
    """The reasons of one model version's predictions. Lives on the event loop; a `ReplySink`.

    Args:
        drifts: what exposes its metrics.
        share: share of the predictions that are explained, above 0 and at most 1.
        reference: what their shares are compared with.
    """

    def __init__(
        self, drifts: Drifts, model: ModelVersion, share: float, reference: Reference
    ) -> None:
        self._drifts = drifts
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
        for part, mean in reference.shares.items():
            drifts.shares.histogram(*key, part)
            drifts.alarms.count(*key, part)
            drifts.reference.count(*key, part).value = mean
        self._distance, self._evidence = drifts.distance.count(*key), drifts.evidence.count(*key)
        if reference.floor is not None:
            drifts.floor.count(*key).value = reference.floor
        self._counts = {each: drifts.explained.count(*key, each) for each in OUTCOMES}

    def remove(self) -> None:
        """Explain nothing more, and forget the series."""
        self._is_ended = True
        for family in vars(self._drifts).values():
            if isinstance(family, Family):
                family.forget(*self._key)

    def offer(self, answered: Sequence[tuple[Call, Reply]]) -> None:
        """Explain what was just answered, where it is drawn and a worker has time."""
        for job, reply in answered:
            if reply.status != 200 or isinstance(reply.body, Stream):
                continue
            if self._draw() >= self._share or self._is_ended or job.flags & OTHER_FORMS:
                continue
            if (worker := idle_explainer(self._model)) is None:
                self._counts["busy"].inc()
                continue
            flags = job.flags & OF_A_JOB | wire.SHARES
            worker.run_aside([(job.head, job.parts, flags, self, 0)])

    # -- the sink ------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return False: it takes every reply."""
        return False

    def cancel(self) -> bool:
        """Count an explanation that gave way to one that somebody waits for."""
        self._counts["interrupted"].inc()
        return True

    def set_exception(self, error: Exception, /) -> None:
        """Explain nothing more, unasked, once a worker has died of it."""
        self._counts["failed"].inc()
        if isinstance(error, WorkerDied) and not self._is_ended:
            self._is_ended = True
            logger.error(
                "%s: a worker died while it explained a prediction unasked; none is explained any "
                "more until the model is registered again", self._label
            )  # fmt: skip

    def set_result(self, reply: Reply, /) -> None:
        """Take the shares of one explanation."""
        try:
            said = read_answer(reply, self._reference.shares)
        except ValueError as error:
            self._counts["failed"].inc()
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s: a prediction could not be explained unasked: %s; "
                               "further ones are counted only", self._label, error)  # fmt: skip
            return
        self._counts["explained"].inc()
        if not said.shares or self._is_ended:  # it was as the baseline is, or nobody wants to know
            return
        usual = self._reference.usual(said.label)
        for (name, share), mean in zip(said.shares.items(), usual, strict=True):
            self._drifts.shares.histogram(*self._key, name).observe(share)
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
        self._drifts.alarms.count(*self._key, part).inc()
        if self._calm > CALM:
            self._drifts.tell(
                "reasons changed", *self._key,
                f'the share of "{part}" is not as in the reference, where "{label}" is predicted; '
                f"all parts have moved by {self._distance.value:.3f}, by chance up to "
                f"{self._reference.floor:.3f}",
            )  # fmt: skip
        self._calm = 0
