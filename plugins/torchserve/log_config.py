"""What is logged, and where to: TorchServe's defaults, in the form that `log4j.py` reads a file to.

A record is written by the appenders of its logger and of those above it, as log4j does it; each
appender gets it once.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ACCESS_LOG = "ACCESS_LOG"
MODEL_LOG = "MODEL_LOG"
MODEL_METRICS = "MODEL_METRICS"
TS_METRICS = "TS_METRICS"
LOGGERS = (ACCESS_LOG, MODEL_LOG, MODEL_METRICS, TS_METRICS)

OWN_LOGGER = "modelyard"
THEIR_LOGGER = "org.pytorch.serve"
"""What a file says of TorchServe's own code is said of ours."""
OFF = 100
LEVELS = {
    "ALL": 1, "TRACE": 5, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING,
    "WARNING": logging.WARNING, "ERROR": logging.ERROR, "FATAL": logging.CRITICAL, "OFF": OFF,
}  # fmt: skip
"""log4j's levels as Python's numbers, of which 0 would mean: as the logger above."""

WITH_THREAD = "%d{ISO8601} [%-5p] %t %c - %m%n"
BARE = "%d{ISO8601} - %m%n"
FILE_BYTES = 100 * 2**20
FILES_KEPT = 5


@dataclass(frozen=True)
class Rolling:
    """When a file is put aside, and under what name."""

    max_bytes: int | None = FILE_BYTES
    period: str | None = "%d"
    """Field of `layout.FINEST` whose change ends a file: %d each day, %H each hour."""
    pattern: str | None = None
    """Pattern of the name, with %d{date} and %i; None adds .1 for the newest, .2 …"""
    keep: int = FILES_KEPT
    newest_first: bool = False
    """Whether %i is 1 for the newest file; else it is the highest."""
    at_start: bool = False


@dataclass(frozen=True)
class Appender:
    """A file, or standard output."""

    name: str
    pattern: str = WITH_THREAD
    file: Path | None = None
    is_stderr: bool = False
    threshold: int = 0
    appends: bool = True
    rolling: Rolling | None = None


@dataclass(frozen=True)
class LoggerRule:
    """What is said of one logger and those below it."""

    level: int | None = None
    appenders: tuple[tuple[str, int], ...] = ()
    """Names, and from which level each gets records."""
    is_additive: bool = True
    """Whether the appenders of the loggers above get its records too."""


@dataclass(frozen=True)
class LogConfig:
    """Everything that is said."""

    appenders: Mapping[str, Appender]
    loggers: Mapping[str, LoggerRule]
    """Rules of loggers by name; the root is ""."""

    def level(self, name: str) -> int:
        """Return the least level of records that somebody gets."""
        rules = (self.loggers[above] for above in self._above(name))
        said = next((rule.level for rule in rules if rule.level is not None), logging.ERROR)
        return max(said, min(self._thresholds(name).values(), default=OFF))

    def appenders_of(self, name: str, level: int) -> list[Appender]:
        """Return those that get a logger's records of a level."""
        thresholds = self._thresholds(name).items()
        return [self.appenders[each] for each, least in thresholds if level >= least]

    def _thresholds(self, name: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for above in self._above(name):
            rule = self.loggers[above]
            for appender, least in rule.appenders:
                if appender in self.appenders:
                    least = max(least, self.appenders[appender].threshold)
                    found[appender] = min(least, found.get(appender, OFF))
            if not rule.is_additive:
                break
        return found

    def _above(self, name: str) -> list[str]:
        """Return the loggers that something is said of, the logger itself first, the root last."""
        names = _ancestors(name)
        if name.partition(".")[0] == OWN_LOGGER:
            names += _ancestors(THEIR_LOGGER)
        return [each for each in [*names, ""] if each in self.loggers]


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def default_config(log_dir: Path, metrics_dir: Path) -> LogConfig:
    """Return TorchServe's defaults: five files, and all of it on standard output.

    Args:
        log_dir: folder of access_log.log, ts_log.log and model_log.log.
        metrics_dir: folder of ts_metrics.log and model_metrics.log.
    """

    def file(path: Path, pattern: str) -> Appender:
        return Appender(path.stem, pattern, path, rolling=Rolling())

    files = {
        ACCESS_LOG: file(log_dir / "access_log.log", BARE),
        MODEL_LOG: file(log_dir / "model_log.log", WITH_THREAD),
        MODEL_METRICS: file(metrics_dir / "model_metrics.log", BARE),
        TS_METRICS: file(metrics_dir / "ts_metrics.log", BARE),
        "": file(log_dir / "ts_log.log", WITH_THREAD),
    }
    console = Appender("STDOUT")
    return LogConfig(
        {appender.name: appender for appender in (*files.values(), console)},
        {
            name: LoggerRule(logging.INFO, ((appender.name, 0), (console.name, 0)), False)
            for name, appender in files.items()
        },
    )
