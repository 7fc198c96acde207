"""Refuses the body `bad`, breaks on the body `broken`, says what it was told else."""

from modelyard.handlers import BadInput, PredictionException


def handle(data, context):
    if data is None:
        return None
    return [answer(at, bytes(row["body"]), context) for at, row in enumerate(data)]


def answer(at, body, context):
    if body == b"bad":
        raise BadInput("body is bad; expected anything else")
    if body == b"broken":
        raise ZeroDivisionError("secret is not for clients only")
    if body == b"teapot":
        raise PredictionException("short and stout", 418)
    if body == b"nowhere":
        raise PredictionException("no such status", 70000)
    if body == b"unprintable":
        raise Unprintable
    if body == b"exit":
        raise SystemExit(3)
    if body == b"nul header":
        context.set_response_header(at, "x-note", "one\0two")
    if body == b"split header":
        context.set_response_header(at, "x-note", "one\r\nx-injected: two")
    if body == b"own header":
        context.set_response_header(at, "x-note", "mine")
        context.set_response_content_type(at, "text/csv")
    if body == b"status 999":
        context.set_response_status(999, "odd", at)
    if body == b"status 202":
        context.set_response_status(202, "later", at)
    return f"fine: {body.decode()}"


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("cannot be printed")
