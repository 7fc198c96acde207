"""What can go wrong between a checkpoint and its artifacts.

ExportError
├── UsageError        the call itself is wrong: --input syntax, an unknown format (exit code 2)
├── CheckpointError   the checkpoint cannot be read, or does not fit the model class
├── ModelError        the model file, its class, or a run of the model on the named inputs fails
├── ConversionError   the model cannot be written in this format
└── ParityError       the artifact does not give what the checkpoint gives; it is not written

Every message says what was seen, what was expected and what to do next.
"""


class ExportError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(ExportError):
    """The arguments cannot mean anything; nothing was read or run."""


class CheckpointError(ExportError):
    """The checkpoint cannot be read, or its tensors are not those of the model class."""


class ModelError(ExportError):
    """The author's model code fails, or cannot take the inputs that were named."""


class ConversionError(ExportError):
    """The model runs but cannot be written in the wanted format."""


class ParityError(ExportError):
    """The artifact was written and checked, and is not the checkpoint's equal."""


def cause(error: BaseException) -> str:
    """Return an error's class and the first line of its message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
