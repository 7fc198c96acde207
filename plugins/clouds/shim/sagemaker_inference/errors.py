"""Errors that a model folder's code raises."""


class UnsupportedFormatError(Exception):
    """A media type that nothing here reads or writes."""

    def __init__(self, content_type: object) -> None:
        super().__init__(
            f"Content type {content_type} is not supported by this framework: implement input_fn "
            "to read the request, or output_fn to write the answer"
        )


class BaseInferenceToolkitError(Exception):
    """An error that says how its request is answered; authors derive theirs from it."""

    def __init__(self, status_code: int, message: str, phrase: str) -> None:
        self.status_code = status_code
        self.message = message
        self.phrase = phrase
        super().__init__(status_code, message, phrase)


class GenericInferenceToolkitError(BaseInferenceToolkitError):
    """Any other error, as an answer."""

    def __init__(
        self, status_code: int, message: str | None = None, phrase: str | None = None
    ) -> None:
        message = message or "Invalid Request"
        super().__init__(status_code, message, phrase or message)
