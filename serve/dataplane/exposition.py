"""Metrics whose names, labels and values others choose.

The form is that of TorchServe's Java library, which dashboards were made with: no `_total` is
added to a counter's name, no `_created` series stands beside it, and every list of labels ends in
a comma.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from modelyard.serve.dataplane.metrics import GAUGE, HISTOGRAM, TYPES, Family, Values
from modelyard.serve.dataplane.wire import MAX_RECORDS

logger = logging.getLogger(__name__)

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
MOST_SERIES = 1000
"""Series of one metric; a label whose values never end must not fill the server's memory."""
MOST_FAMILIES = 500
MOST_SAID = 1000
"""Letters of a record, as Python writes it: each series keeps its labels."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Recorded(Family):
    """A metric that a handler or a configuration names."""

    total, last = "", ","

    def __init__(self, name: str, kind: str, unit: str, labels: Sequence[str]) -> None:
        text = f"Torchserve prometheus {kind} metric with unit: {unit}"
        super().__init__(kind, name, labels, text, BUCKETS)
        self.unit = unit
        self._is_full = False

    def add(self, values: Values, amount: float) -> None:
        """Count a counter up, set a gauge, or observe a histogram."""
        if values not in self._series and len(self._series) >= MOST_SERIES:
            if not self._is_full:
                self._is_full = True
                logger.warning("metric %s has %d series; new values of its labels %s are dropped",
                               self.name, MOST_SERIES, ", ".join(self.labels))  # fmt: skip
        elif self.kind == HISTOGRAM:
            self.histogram(*values).observe(amount)
        elif self.kind == GAUGE:
            self.count(*values).value = amount
        else:
            self.count(*values).value += amount

    def forget_label(self, label: str, value: str) -> None:
        """Drop the series in which a label has this value."""
        if label in self.labels:
            at = self.labels.index(label)
            for values in [each for each in self._series if each[at] == value]:
                self._drop(values)


class Record(NamedTuple):
    """One value that a handler reported."""

    name: str
    value: float
    unit: str
    kind: str
    dimensions: dict[str, str]
    request_id: str


def read_records(records: object) -> Iterator[Record]:
    """Yield a worker's records, and leave out what is not one: authors' code runs there.

    What is left out of one message is logged in one line.
    """
    given = records if isinstance(records, list) else []
    refused, first = max(0, len(given) - MAX_RECORDS), f"more than {MAX_RECORDS}"
    for record in given[:MAX_RECORDS]:
        try:
            if len(repr(record)) > MOST_SAID:
                raise ValueError(f"more than {MOST_SAID} letters")
            yield Record(
                str(record["name"]),
                float(record["value"]),
                str(record["unit"]),
                str(record["type"]).lower(),
                {str(k): str(v) for k, v in record["dimensions"].items()},
                str(record.get("request_id") or ""),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            refused += 1
            if len(given) <= MAX_RECORDS and refused == 1:
                first = f"{error!r}: {record!a:.200}"
    if refused:
        logger.warning("%d of %d records of a worker are left out (%s)", refused, len(given), first)


@dataclass(eq=False)
class HandlerMetrics:
    """What handlers measure. A metric's declaration, else its first record, decides what it is."""

    hostname: str
    """The value of the label `Hostname`, which each metric has."""
    declared: Iterable[Recorded] = ()
    """Families that exist from the start."""
    detects: bool = True
    """Whether a metric that was not declared is taken."""
    reserved: Collection[str] = ()
    """Names that handlers cannot use."""

    def __post_init__(self) -> None:
        self._refused: set[str] = set()
        self.families = {family.name: family for family in self.declared}

    def reported(self, records: object, seconds: float) -> None:
        """Take what a handler measured in one batch, which its worker had for `seconds`."""
        for record in read_records(records):
            self.record(record)

    def exposed(self, own: Iterable[Family] = ()) -> Iterable[Family]:
        """Return what there is to see beside the server's own metrics, and those."""
        return (*self.families.values(), *own)

    def record(self, record: Record) -> None:
        """Take one record; one that cannot be taken is left out, with a warning."""
        name, value, kind = record.name, record.value, record.kind
        dimensions = {"Hostname": self.hostname, **record.dimensions}
        family = self.families.get(name)
        if family is None:
            if (reason := self._why_not(name, kind, dimensions)) is not None:
                self._refuse(name, reason)
                return
            family = self.families[name] = Recorded(
                name, kind, record.unit, (*(d for d in dimensions if d != "Hostname"), "Hostname")
            )
        if set(family.labels) != set(dimensions):
            self._refuse(
                name,
                f"its labels are {', '.join(family.labels)}; it came with {', '.join(dimensions)}",
            )
        elif family.kind == "counter" and value < 0:
            self._refuse(name, f"a counter cannot grow by {value}")
        else:
            family.add(tuple(dimensions[label] for label in family.labels), value)

    def _why_not(self, name: str, kind: str, labels: Iterable[str]) -> str | None:
        """Return why a metric that nobody declared is not taken, or None."""
        if not self.detects:
            return (
                "it is not declared; add it to model_metrics of the metrics configuration, or set "
                "model_metrics_auto_detect=true"
            )
        if name in self.reserved or name.startswith("modelyard_"):
            return "the server has a metric of this name"
        if not _NAME.fullmatch(name) or not all(map(_LABEL.fullmatch, labels)):
            return "Prometheus has no such names; use letters, digits and underscores"
        if kind not in TYPES:
            return f"its type is {kind!r}; expected {', '.join(TYPES)}"
        if len(self.families) >= MOST_FAMILIES:
            return f"there are {MOST_FAMILIES} metrics already"
        return None

    def _refuse(self, name: str, reason: str) -> None:
        """Warn once for each metric."""
        if name not in self._refused and len(self._refused) < MOST_FAMILIES:
            self._refused.add(name)
            logger.warning("metric %s of a handler is dropped: %s", name, reason)

    def forget(self, model: str) -> None:
        """Drop the series of a model."""
        for family in self.families.values():
            family.forget_label("ModelName", model)
