"""What every answer has, whichever process makes it: an id, common headers, the form of errors."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import uuid
from collections.abc import Iterable

from modelyard.serve.errors import Unauthorized, Unavailable, error_body, http_status

Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, Headers, bytes]
"""Status, headers and body."""

COMMON_HEADERS: Headers = [
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
]
"""On every answer, as TorchServe's clients know them."""

_RUN = str(uuid.uuid4())[:24]
_count = itertools.count(secrets.randbits(32))
"""A new id is a UUID whose last twelve digits count: a tenth of the cost of a random one."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def request_id(
    headers: Iterable[tuple[bytes, bytes]], pattern: re.Pattern[bytes] = _REQUEST_ID
) -> str:
    """Return the client's own request id when it has this form, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and pattern.fullmatch(value):
            return value.decode()
    return f"{_RUN}{next(_count):012x}"


def error_answer(error: Exception, id: str) -> Answer:
    """Return status, headers and JSON body for an error."""
    status, _ = http_status(error)
    body = json.dumps(error_body(error, id)).encode()
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, Unavailable):
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    return status, headers, body
