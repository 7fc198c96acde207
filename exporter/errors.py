"""What can go wrong between a checkpoint and its artifacts.

ExportError
├── UsageError        the call itself is wrong: --input syntax, an unknown format (exit code 2)
│   └── NoClass       weights, and nobody says of which class
├── CheckpointError   the checkpoint cannot be read, or does not fit the model class
├── ModelError        the model file, its class, or a run of the model on the named inputs fails
│   └── ArgumentsKnown  arguments of its class are missing, and the weights say them
├── ConversionError   the model cannot be written in this format
├── ParityError       the artifact does not give what the checkpoint gives; it is not written
└── PartialExportError  some formats were written, others could not be (exit code 3)

Every message says what was seen, what was expected and what to do next.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelyard.exporter.prove.parity import ExportReport


_OTHER_FORMAT = re.compile(
    r"(, or |; )export --format (\w+(?: or \w+)*)((?: instead)?)(?:, which [^;]*?)?(, or |(?=;|$))"
)
"""How a message proposes other formats: behind what, which, and what follows."""


class ExportError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(ExportError):
    """The arguments cannot mean anything; nothing was read or run."""


class NoClass(UsageError):
    """The checkpoint holds weights, and neither it nor the call says of which class."""


class CheckpointError(ExportError):
    """The checkpoint cannot be read, or its tensors are not those of the model class."""


class ModelError(ExportError):
    """The author's model code fails, or cannot take the inputs that were named."""


class ArgumentsKnown(ModelError):
    """The class needs arguments that nobody gave, and the weights say which.

    Attributes:
        arguments: these.
    """

    def __init__(self, problem: str, arguments: Mapping[str, object]) -> None:
        super().__init__(problem)
        self.arguments = dict(arguments)


class ConversionError(ExportError):
    """The model runs but cannot be written in the wanted format."""


class ParityError(ExportError):
    """The artifact was written and checked, and is not the checkpoint's equal."""


class PartialExportError(ExportError):
    """Some formats were written and proven, others could not be.

    Attributes:
        reports: those of the artifacts that are in their place, as `export` returns them.
        failures: format → why it was not written.
    """

    def __init__(
        self, reports: "Sequence[ExportReport]", failures: Mapping[str, ExportError]
    ) -> None:
        written = ", ".join(report.artifact.name for report in reports)
        super().__init__(f"{written} written and proven, without {join_failures(failures)}")
        self.reports = list(reports)
        self.failures = dict(failures)


def join_failures(failures: Mapping[str, ExportError]) -> str:
    """Return which formats could not be written, each with its reason."""
    return "; ".join(f"{format}: {reason(format, error)}" for format, error in failures.items())


def propose_no_failed_format(failures: Mapping[str, ExportError]) -> None:
    """Take out of the messages of one export the formats that failed in it, too."""

    def keep(found: re.Match[str]) -> str:
        others = [name for name in found[2].split(" or ") if name not in failures]
        if others:
            return found[0].replace(found[2], " or ".join(others))
        return "; " if found[4] else ""

    for error in failures.values():
        error.args = (_OTHER_FORMAT.sub(keep, str(error)),)


def reason(format: str, error: ExportError) -> str:
    """Return why a format could not be written, without its name in front."""
    return str(error).removeprefix(f"{format}: ")


def cause(error: BaseException) -> str:
    """Return an error's class and the first line of its message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
