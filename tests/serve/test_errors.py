import inspect
import json
import re
from types import SimpleNamespace

import pytest

from modelyard.archiver.errors import ArchiveError, RefusedArchive
from modelyard.serve import errors
from modelyard.serve.errors import (
    BadModelConfig,
    BadRequest,
    BodyTooLarge,
    Conflict,
    DeadlinePassed,
    DefaultVersion,
    Draining,
    FileNotInStore,
    LoadFailed,
    ModelNotFound,
    QueueFull,
    ServeError,
    StartError,
    Unauthorized,
    VersionNotFound,
    WorkerDied,
    WrongUsage,
    error_body,
    http_status,
)
from modelyard.serve.front.begin import ServerState
from modelyard.serve.http.application import Answers


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), 400, "BadRequestException"),
        (BadModelConfig("x"), 400, "BadRequestException"),
        (RefusedArchive("x"), 400, "InvalidModelException"),
        (Unauthorized("x"), 401, "InvalidKeyException"),
        (DefaultVersion("x"), 403, "InvalidModelVersionException"),
        (ModelNotFound("x"), 404, "ModelNotFoundException"),
        (VersionNotFound("x", "1"), 404, "ModelVersionNotFoundException"),
        (FileNotInStore("x"), 404, "ModelNotFoundException"),
        (Conflict("x"), 409, "ConflictStatusException"),
        (BodyTooLarge(1), 413, "RequestTooLargeException"),
        (WorkerDied(), 500, "InternalServerException"),
        (LoadFailed("x"), 500, "InternalServerException"),
        (QueueFull("x"), 503, "ServiceUnavailableException"),
        (Draining("x"), 503, "ServiceUnavailableException"),
        (DeadlinePassed("x"), 504, "RequestTimeoutException"),
        (ServeError("x"), 500, "InternalServerException"),
        (ZeroDivisionError("x"), 500, "InternalServerException"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_has_its_status_and_type(error: Exception, status: int, kind: str) -> None:
    assert http_status(error) == (status, kind)


def test_every_error_that_a_client_can_meet_has_a_status_of_its_own() -> None:
    declared = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, ServeError) and kind not in (ServeError, StartError, WrongUsage)
    ]
    bases = {kind: kind.__mro__[: kind.__mro__.index(ServeError)] for kind in declared}
    without = [kind for kind in declared if not any("answer" in vars(each) for each in bases[kind])]
    assert not without


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    defined = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, ServeError) and kind is not ServeError
    }
    assert drawn == defined


def test_the_message_of_a_declared_error_reaches_the_client() -> None:
    assert error_body(ArchiveError("x.mar is refused"), "id-1") == {
        "code": 400,
        "type": "InvalidModelException",
        "message": "x.mar is refused",
        "error": "x.mar is refused",
        "request_id": "id-1",
    }


def test_what_an_undeclared_error_says_stays_inside() -> None:
    body = error_body(OSError("/home/someone/secret"), "id-1")
    assert body["message"] == "internal error (OSError)"


def test_torchserves_messages_are_kept() -> None:
    assert str(ModelNotFound("cats")) == "Model not found: cats"
    expected = "Model version: 2 does not exist for model: cats"
    assert str(VersionNotFound("cats", "2")) == expected
    assert str(WorkerDied()) == "Worker died."


def test_a_refusal_whose_bytes_are_kept_names_its_own_request() -> None:
    cycle = SimpleNamespace(id="1234", served=None, keeps_alive=True)
    status, pieces = Answers(ServerState())._prepare(cycle, QueueFull("full", 1))  # type: ignore[arg-type]
    answer = b"abcd".join(pieces)
    assert (status, len(pieces)) == (503, 3)
    assert b"x-request-id: abcd\r\n" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["request_id"] == "abcd"
