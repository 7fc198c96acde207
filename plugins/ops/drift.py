"""Explain a share of live predictions, unasked, and keep how far their reasons have moved.

A worker that only explains, and has nothing else to do, is given a prediction that was just
answered, with the flag SHARES. What is not taken at once is dropped and counted: there is no queue.
The worker gives up between two passes as soon as somebody asks it for an explanation.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from modelyard.archiver.reference import MAX_BYTES, Reference
from modelyard.archiver.untrusted.json import parse_json
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Call, Reply, Stream
from modelyard.serve.errors import WorkerDied

if TYPE_CHECKING:
    from modelyard.serve.dataplane.metrics import DriftMetrics
    from modelyard.serve.dataplane.pool import Pool

logger = logging.getLogger(__name__)

WINDOW = 100
"""Explanations over which shares are averaged: each moves the mean, which begins as the
reference's, by so small a part of its distance."""
_OF_A_JOB = wire.LEGACY | wire.KSERVE | wire.PARTS
"""Flags by which a worker reads a request."""
_OTHER_FORMS = wire.TENSORS | wire.INSTANCES
"""Of requests that are not one body for the handler."""


class Drift:
    """The reasons of one model version's predictions. Lives on the event loop; a `ReplySink`.

    Args:
        label: of the model version, for the log.
        share: of the predictions that are explained, above 0 and at most 1.
        reference: what their shares are compared with.
        explainers: the workers that only explain.
        start: starts these.
        is_busy: whether requests wait for a worker, predictions or explanations.
    """

    def __init__(
        self,
        label: str,
        share: float,
        reference: Reference,
        metrics: DriftMetrics,
        explainers: Pool,
        start: Callable[[], object],
        is_busy: Callable[[], bool],
    ) -> None:
        self._label = label
        self._share = share
        self._reference = reference
        self._metrics = metrics
        self._explainers = explainers
        self._start = start
        self._is_busy = is_busy
        self._draw = random.Random().random
        self._means = dict(reference.shares)
        self._has_warned = False
        self._is_ended = False

    def offer(self, job: Call, reply: Reply) -> None:
        """Explain a prediction that was just answered, if it is drawn and a worker has time."""
        if reply.status != 200 or isinstance(reply.body, Stream):
            return
        if self._draw() >= self._share or self._is_ended or job.flags & _OTHER_FORMS:
            return
        if not self._explainers.slots:
            self._start()
        worker = next((w for w in self._explainers.workers if w.is_idle), None)
        if worker is None or self._is_busy():
            self._metrics.busy.inc()
            return
        worker.run_aside(job.head, job.parts, job.flags & _OF_A_JOB | wire.SHARES, self)

    # -- the sink ------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return False: it takes every reply."""
        return False

    def cancel(self) -> bool:
        """Count an explanation that gave way to one that somebody waits for."""
        self._metrics.interrupted.inc()
        return True

    def set_exception(self, error: Exception, /) -> None:
        """Explain nothing more, unasked, once a worker has died of it."""
        self._metrics.failed.inc()
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
            self._metrics.failed.inc()
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s: a prediction could not be explained unasked: %s; "
                               "further ones are counted only", self._label, error)  # fmt: skip
            return
        self._metrics.explained.inc()
        if not shares:  # it was as the baseline is
            return
        for name, share in shares.items():
            self._metrics.shares[name].observe(share)
            self._means[name] += (share - self._means[name]) / WINDOW
        self._metrics.distance.set(self._reference.distance(self._means))

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
