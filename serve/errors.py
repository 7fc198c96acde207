"""The errors of `serve`, and what every package's errors are answered by HTTP.

    ServeError
    ├── BadRequest            a parameter or body is wrong
    │   ├── BadModelConfig    model-config.yaml is wrong
    │   ├── PoisonRequest     the same request has just ended two workers
    │   └── RequirementsFailed  what an archive requires could not be installed
    ├── NoSuchRoute
    ├── MethodNotAllowed
    ├── ModelNotFound
    │   └── VersionNotFound
    ├── FileNotInStore
    │   └── UrlRefused        nothing is fetched from there
    ├── FetchFailed           an archive could not be fetched, or is too large
    ├── FileExists            the model store holds a file of the name that would be fetched
    ├── Conflict              the version is registered already
    ├── DefaultVersion        the default version cannot be removed while others exist
    ├── BodyTooLarge
    ├── UnknownCoding         the body is compressed
    ├── BadMessage            what a client sent is not an HTTP request that is taken here
    │   ├── TargetTooLong
    │   └── HeadTooLarge
    ├── RequestTooSlow        its head or body did not come in time
    ├── Unauthorized
    ├── Forbidden             by a foreign name, from a foreign web page, or off by a setting
    ├── TooManyAttempts       wrong tokens, one after the other
    ├── Unavailable           no worker can take the request now
    │   ├── QueueFull
    │   ├── QuotaUsed         the token has asked as much as it may
    │   ├── PoisonClient      requests of the same client have just ended several workers
    │   ├── TooLate           an answer is not to be expected within the request's time
    │   └── Draining
    ├── DeadlinePassed
    ├── WorkerDied            while it held the request, and again when it was tried alone
    │   └── WorkerKilled      for memory, most likely
    ├── StreamBroken          the rest of a streamed answer will not come
    ├── LoadFailed            a worker could not load the model
    │   ├── HandlerFailed     its own code raised; the traceback is in the log
    │   │   └── GoldenFailed  it answers its golden requests wrong
    │   ├── OutOfMemory
    │   └── LoadKilled        for memory, most likely
    ├── CleanupTimedOut       a version's workers had not ended in time
    ├── StorageFull           what a change writes does not fit on the disk
    └── StartError            the server cannot start or was not found (command line only)
        └── WrongUsage        an option or a setting means nothing, whatever files and servers hold

`answer` has a class name that clients compare: TorchServe's wherever it has one.
"""

import errno
import re

from modelyard.archiver.errors import ArchiveError, BadName
from modelyard.archiver.errors import WrongUsage as UnusableOption

NOT_KEPT = "query-not-kept"
"""Query of a URL whose own is not kept."""


def without_secrets(location: str) -> str:
    """Return a location as it is stored and shown: a URL's query may hold a signature."""
    if "://" not in location:
        return location
    return re.sub(r"(?<=\?)[^#]+", NOT_KEPT, re.sub("(?<=://)[^/?#]*@", "", location))


class ServeError(Exception):
    """Base of all errors of this package; a class is answered as its base unless it says how."""

    text = ""
    """What it says, where nothing more is said."""
    answer = (500, "InternalServerException")
    """HTTP status, and the `type` that clients compare."""

    def __init_subclass__(cls, answer: tuple[int, str] | None = None) -> None:
        if answer is not None:
            cls.answer = answer

    def __str__(self) -> str:
        return super().__str__() or self.text


class BadRequest(ServeError, answer=(400, "BadRequestException")):
    """A parameter or body is wrong; the message names it."""


class BadModelConfig(BadRequest):
    """The archive's model-config.yaml is wrong; the message names the key."""


class PoisonRequest(BadRequest):
    """The same request has just ended two workers; the message says how, and what follows."""


class RequirementsFailed(BadRequest, answer=(400, "ModelException")):
    """What an archive requires could not be installed; the message ends with pip's last lines."""


class NoSuchRoute(ServeError, answer=(404, "ResourceNotFoundException")):
    """The API has no such path; the words are the oldest clients' where there are no others."""

    text = "Requested resource is not found, please refer to API document."


class MethodNotAllowed(ServeError, answer=(405, "MethodNotAllowedException")):
    """The path has no such method, or what it does is switched off; words as of `NoSuchRoute`."""

    text = "Requested method is not allowed, please refer to API document."


class ModelNotFound(ServeError, answer=(404, "ModelNotFoundException")):
    """No model of that name is registered.

    Args:
        name: name that was asked for.
        hint: what else there is to say.
        served: what is there instead. Our own answers say it; clients of old compare texts.
    """

    def __init__(self, name: str, hint: str = "", served: str = "") -> None:
        super().__init__(f"Model not found: {name}{hint}")
        self.served = served


class VersionNotFound(ModelNotFound, answer=(404, "ModelVersionNotFoundException")):
    """The model has no such version."""

    def __init__(self, name: str, version: str, served: str = "") -> None:
        Exception.__init__(self, f"Model version: {version} does not exist for model: {name}")
        self.served = served


class FileNotInStore(ServeError, answer=(404, "ModelNotFoundException")):
    """The model store holds no such archive."""


class UrlRefused(FileNotInStore):
    """The settings do not allow to fetch from there.

    Args:
        url: URL as it was given.
        reason: why not, for operators.
    """

    def __init__(self, url: str, reason: str) -> None:
        url = without_secrets(url)
        super().__init__(f"Given URL {url} does not match any allowed URL(s)")
        self.reason = reason


class FetchFailed(ServeError, answer=(400, "DownloadArchiveException")):
    """An archive could not be fetched.

    Args:
        url: URL as the caller wrote it.
        reason: what went wrong, for the log and operators.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"Failed to download archive from: {without_secrets(url)}")
        self.reason = reason


class FileExists(ServeError, answer=(500, "InternalServerException")):
    """The model store holds a file of the name that would be fetched."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Model file already exists {name}")


class Conflict(ServeError, answer=(409, "ConflictStatusException")):
    """The version is registered already."""


class DefaultVersion(ServeError, answer=(403, "InvalidModelVersionException")):
    """The default version cannot be removed while others exist."""


class BodyTooLarge(ServeError, answer=(413, "RequestTooLargeException")):
    """The request body is over the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the request body is larger than {limit} bytes, the limit of this server "
            "(max_request_bytes)"
        )


class UnknownCoding(ServeError, answer=(415, "UnsupportedMediaTypeException")):
    """The body has a Content-Encoding; handlers get bodies as they come."""


class BadMessage(ServeError, answer=(400, "BadRequestException")):
    """What a client sent is not an HTTP request that is taken here."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this is not an HTTP/1.1 request: {reason}")


class TargetTooLong(BadMessage, answer=(414, "RequestTargetTooLongException")):
    """Path and query are over the limit."""

    def __init__(self, limit: int) -> None:
        Exception.__init__(
            self, f"path and query are longer than {limit} bytes; send parameters in the body"
        )


class HeadTooLarge(BadMessage, answer=(431, "RequestHeaderTooLargeException")):
    """The headers are over a limit, which the argument names."""

    def __init__(self, limit: str) -> None:
        Exception.__init__(self, f"the request's head is larger than {limit}; send fewer headers")


class RequestTooSlow(ServeError, answer=(408, "RequestTimeoutException")):
    """The head or body of a request did not come in time.

    Args:
        part: which of them.
        rate: least bytes per second; 0: all of it.
        timeout_s: measured over this time.
    """

    def __init__(self, part: str, rate: int, timeout_s: float) -> None:
        pace = f"at {rate} bytes/s over" if rate else "within"
        super().__init__(f"the {part} of the request did not come {pace} {timeout_s:g} s")


class Unauthorized(ServeError, answer=(401, "InvalidKeyException")):
    """The bearer token is missing or wrong."""


class Forbidden(ServeError, answer=(403, "ForbiddenException")):
    """The name is not this server's, a web page of elsewhere asks, or a setting is off."""


class TooManyAttempts(ServeError, answer=(429, "TooManyRequestsException")):
    """Wrong tokens came one after the other; no more are looked at for a while."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"too many wrong tokens; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Unavailable(ServeError, answer=(503, "ServiceUnavailableException")):
    """No worker can take the request now.

    Args:
        message: what the client reads.
        retry_after_s: when it is worth another try.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Unavailable):
    """The queue of the model version holds as many requests as it may."""


class TooLate(Unavailable):
    """An answer is not to be expected within the request's time, so it is not worth the work."""


class QuotaUsed(Unavailable, answer=(429, "TooManyRequestsException")):
    """The token of the request has asked as much as it may for now."""


class PoisonClient(Unavailable, answer=(429, "TooManyRequestsException")):
    """Different requests of its client have just ended workers; the message says how many."""


class Draining(Unavailable):
    """The server or the model version is being stopped."""


class DeadlinePassed(ServeError, answer=(504, "RequestTimeoutException")):
    """The request was not answered in time."""


class WorkerDied(ServeError, answer=(500, "InternalServerException")):
    """A worker died while it held the request, and the request may not be tried again.

    Clients of old compare the text.
    """

    text = "Worker died."


class WorkerKilled(WorkerDied, answer=(507, "InternalServerException")):
    """A worker was killed from outside while it held the request: for memory, most likely."""


class StreamBroken(ServeError, answer=(500, "InternalServerException")):
    """The rest of a streamed answer will not come."""


class LoadFailed(ServeError, answer=(500, "InternalServerException")):
    """A worker could not load the model; the message is the worker's own."""

    model: tuple[str, str] | None = None
    """Name and version of what was being registered."""


class HandlerFailed(LoadFailed):
    """What the worker ran to load the model raised; its log has the traceback."""


class GoldenFailed(HandlerFailed, answer=(400, "InvalidModelException")):
    """The archive's own examples get other answers: it is not what it says."""


class OutOfMemory(LoadFailed, answer=(507, "InternalServerException")):
    """A worker had too little memory for the model."""


class LoadKilled(LoadFailed):
    """A worker was killed from outside while it loaded the model: for memory, most likely."""


class StorageFull(ServeError, answer=(507, "InternalServerException")):
    """What a change writes does not fit on the disk; nothing was changed."""


class CleanupTimedOut(ServeError, answer=(408, "RequestTimeoutException")):
    """A version's workers had not ended in time."""


class StartError(ServeError):
    """The server cannot start, or none was found; the message says what to do."""


class WrongUsage(StartError):
    """An option or a setting cannot be used as it is given, whatever files and servers hold."""


def exit_code(error: Exception) -> int:
    """Return how a command ends with an error: 2 for wrong usage, 1 for a job that failed."""
    return 2 if isinstance(error, WrongUsage | UnusableOption | BadName) else 1


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error comes from a disk, or a quota of it, that is used up."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def http_status(error: Exception) -> tuple[int, str]:
    """Return the HTTP status and the `type` of an error, whichever package has declared it."""
    if isinstance(error, ArchiveError):
        return 400, "InvalidModelException"
    return error.answer if isinstance(error, ServeError) else ServeError.answer


def error_body(error: Exception, request_id: str) -> dict[str, object]:
    """Return the JSON object that a client gets for `error`.

    An error that no package declared may say anything, so only its class reaches the client.
    """
    code, kind = http_status(error)
    declared = isinstance(error, (ServeError, ArchiveError))
    message = str(error) if declared else f"internal error ({type(error).__name__})"
    if isinstance(error, ModelNotFound) and error.served:
        message = f"{message}; {error.served}"
    return {
        "code": code,
        "type": kind,
        "message": message,
        "error": message,  # the name that clients of the Open Inference Protocol know
        "request_id": request_id,
    }
