"""Explain a share of live predictions, unasked, and expose how far their reasons have moved.

A worker that only explains, and has nothing else to do, is given a prediction that was just
answered, with the flag SHARES. What is not taken at once is dropped and counted: there is no queue.
The worker gives up between two passes as soon as somebody asks it for an explanation.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

from modelyard.archiver.reference import MAX_BYTES, Reference, parse_reference
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.untrusted.names import REFERENCE_NAME
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Call, Reply, Stream
from modelyard.serve.dataplane.metrics import COUNTER, GAUGE, HISTOGRAM, MODEL, Family, Metrics
from modelyard.serve.dataplane.pool import Pool
from modelyard.serve.errors import BadModelConfig, WorkerDied
from modelyard.serve.settings import Settings

logger = logging.getLogger(__name__)

WINDOW = 100
"""Explanations over which shares are averaged: each moves the mean, which begins as the
reference's, by so small a part of its distance."""
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
OUTCOMES = ("explained", "busy", "interrupted", "failed")
"""What may become of a prediction that was drawn to be explained."""
_OF_A_JOB = wire.LEGACY | wire.KSERVE | wire.PARTS
"""Flags by which a worker reads a request."""
_OTHER_FORMS = wire.TENSORS | wire.INSTANCES
"""Flags of requests that are not one body for the handler."""


class Drifts:
    """The drift of every version that the settings, or its archive, have explained unasked."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        registry, part = metrics.registry, (*MODEL, "part")
        self.explained = Family(
            registry, COUNTER, "explained_predictions", (*MODEL, "outcome"),
            "Predictions drawn to be explained unasked, by what became of them.",
        )  # fmt: skip
        self.shares = Family(
            registry, HISTOGRAM, "attribution_share", part,
            "Share of a part of the input in the sum of an explanation's absolute attributions.",
            SHARES,
        )  # fmt: skip
        self.reference = Family(
            registry, GAUGE, "attribution_reference", part,
            "Mean share of a part in the archive's reference.",
        )  # fmt: skip
        self.distance = Family(
            registry, GAUGE, "attribution_drift", MODEL,
            "Total variation distance of the latest shares' means to the archive's reference.",
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
            drift = self._of[key] = Drift(self, model, model.explainers, share, reference)
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
        explainers: the version's workers that only explain.
        share: share of the predictions that are explained, above 0 and at most 1.
        reference: what their shares are compared with.
    """

    def __init__(
        self,
        drifts: Drifts,
        model: ModelVersion,
        explainers: Pool,
        share: float,
        reference: Reference,
    ) -> None:
        self._drifts = drifts
        self._model = model
        self._key = key = model.name, model.version
        self._label = model.pool.plan.label
        self._share = share
        self._reference = reference
        self._explainers = explainers
        self._draw = random.Random().random
        self._means = dict(reference.shares)
        self._has_warned = False
        self._is_ended = False
        for part, mean in reference.shares.items():
            drifts.shares.histogram(*key, part)
            drifts.reference.count(*key, part).value = mean
        self._distance = drifts.distance.count(*key)
        self._counts = {each: drifts.explained.count(*key, each) for each in OUTCOMES}

    def remove(self) -> None:
        """Explain nothing more, and forget the series."""
        self._is_ended = True
        drifts = self._drifts
        for family in (drifts.shares, drifts.reference, drifts.distance, drifts.explained):
            family.forget(*self._key)

    def offer(self, answered: Sequence[tuple[Call, Reply]]) -> None:
        """Explain what was just answered, where it is drawn and a worker has time."""
        for job, reply in answered:
            if reply.status != 200 or isinstance(reply.body, Stream):
                continue
            if self._draw() >= self._share or self._is_ended or job.flags & _OTHER_FORMS:
                continue
            if not self._explainers.slots:
                self._model.start_explainers()
            worker = next((w for w in self._explainers.workers if w.is_idle), None)
            if worker is None or any(queue.waiting > 0 for queue in self._model.batchers):
                self._counts["busy"].inc()
                continue
            flags = job.flags & _OF_A_JOB | wire.SHARES
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
            shares = self._read(reply)
        except ValueError as error:
            self._counts["failed"].inc()
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s: a prediction could not be explained unasked: %s; "
                               "further ones are counted only", self._label, error)  # fmt: skip
            return
        self._counts["explained"].inc()
        if not shares or self._is_ended:  # it was as the baseline is, or nobody wants to know
            return
        for name, share in shares.items():
            self._drifts.shares.histogram(*self._key, name).observe(share)
            self._means[name] += (share - self._means[name]) / WINDOW
        self._distance.value = self._reference.distance(self._means)

    def _read(self, reply: Reply) -> dict[str, float]:
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
        shares = parse_json(body, MAX_BYTES)
        parts = self._reference.shares
        if shares == {}:
            return {}
        if not isinstance(shares, dict) or shares.keys() != parts.keys():
            raise ValueError(f"expected shares of {', '.join(parts)}, got {text}")
        if not all(isinstance(each, float | int) and 0 <= each <= 1 for each in shares.values()):
            raise ValueError(f"expected shares from 0 to 1, got {text}")
        return shares
