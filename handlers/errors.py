"""What can go wrong around a model.

HandlerError
├── BadInput              the client's request cannot be used          → 400
├── NoGradients           the model cannot be explained this way       → 400
├── TwinDiffers           the artifact and what explains it give different answers
├── NotMeasured           something that cannot be asked about an archive's explanations
├── InputMismatch         tensors that the artifact does not take (also a ValueError)
├── LoadError             a worker cannot load this archive
│   ├── NoEntryPoint      an archive without a usable handler (also a ValueError)
│   └── UnsafeProgram     an exported program or ONNX file that holds more than a model
└── PredictionException   an author chooses the status code

The server maps each class to a status; only the last knows HTTP, since its author sets the code.
"""

from collections.abc import Sequence


class HandlerError(Exception):
    """Base of every error that this package raises on purpose."""


class BadInput(HandlerError):
    """The request is at fault; the message is shown to its client.

    Handlers raise it from `preprocess` for anything that another request could have got right.
    """


class NoGradients(HandlerError):
    """The output does not depend on the input through anything that can be differentiated."""


class TwinDiffers(HandlerError):
    """Artifact and twin differ on an input by more than their reports allow."""


class NotMeasured(HandlerError):
    """What cannot be asked about an archive's explanations; the message is why, a phrase."""


class InputMismatch(HandlerError, ValueError):
    """An artifact was called with tensors of another number, dtype or shape than it takes."""


class LoadError(HandlerError):
    """The archive cannot be loaded here; the message says what was seen and what to do."""


class NoEntryPoint(LoadError, ValueError):
    """The handler is not there, or holds nothing that can answer requests."""


class UnsafeProgram(LoadError):
    """A file holds more than a model, or something else; nothing of it was run.

    Args:
        file: the file's name.
        findings: each part of the file that is refused, with what is wrong about it.
        expected: what it should be.
    """

    def __init__(
        self,
        file: str,
        findings: Sequence[tuple[str, str]],
        expected: str = "an exported program as torch.export.save writes it",
    ) -> None:
        self.findings = tuple(findings)
        listed = "; ".join(f"{part}: {problem}" for part, problem in self.findings)
        super().__init__(
            f"{file} is refused, and nothing of it was run: {listed}. Expected {expected}; "
            "export it again from its checkpoint"
        )


class PredictionException(HandlerError):
    """Fail the whole batch with a status code of the author's choice.

    Args:
        message: shown to the client.
        error_code: HTTP status, 400 to 599.
    """

    def __init__(self, message: str, error_code: int = 500) -> None:
        self.message = message
        self.error_code = error_code
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"
