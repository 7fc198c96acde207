"""MLflow's scoring protocol, for the one model that the setting `invocations` names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response

from modelyard.serve.api.inference import Calls
from modelyard.serve.dataplane.call import PREDICT, Stream, Target
from modelyard.serve.dataplane.wire import Payload
from modelyard.serve.front.begin import Fields, Headers
from modelyard.serve.front.face import Face, Inside
from modelyard.serve.front.models import why_not_ready
from modelyard.serve.http.application import Answers, Check, Events, Route, error_answer
from modelyard.serve.http.connection import Answer, RequestResponseCycle

PATH = "/invocations"
TYPES = (b"application/json", b"text/csv")
CODES = {
    400: "BAD_REQUEST", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST", 429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip
"""HTTP's status → MLflow's code; INTERNAL_ERROR for others."""


def make_face(inside: Inside) -> Invocations | None:
    """Return the face; None where the setting `invocations` names no model."""
    return Invocations(inside) if inside.settings.invocations else None  # type: ignore[abstract]


class Invocations(Face):
    """`POST /invocations`, and the probes beside it that no other API has."""

    def __init__(self, inside: Inside) -> None:
        self._front = inside.front
        self._target = Target(PREDICT, [str(inside.settings.invocations)])
        self._check = inside.checks["inference"](lambda _: "predict")
        self._answers = MlflowAnswers(
            inside.front.state, lambda *error: as_mlflow(*error_answer(*error)),
            cors=inside.answers.cors,
        )  # fmt: skip
        self._calls = Calls(inside.front, self._answers, hides_tokens=True)

    def guard(self, api: str, check: Check) -> Check:
        """Return the check of tokens; who invokes needs the right `predict`."""

        def guarded(path: str, headers: Headers) -> None:
            (self._check if path == PATH else check)(path, headers)

        return guarded if api == "inference" else check

    def route(self, api: str, route: Route) -> Route:
        """Return what makes calls of invocations, and hands over the rest."""

        def answer(cycle: RequestResponseCycle, id: str) -> None:
            (self._begin if cycle.path == PATH and cycle.method == "POST" else route)(cycle, id)

        return answer if api == "inference" else route

    @property
    def routes(self) -> Mapping[str, Sequence[APIRouter]]:
        """The probes; `/ping` is the server's own."""
        router = APIRouter(tags=["MLflow"])

        @router.get("/health", include_in_schema=False)
        async def health() -> Response:
            """Predictions can be answered now."""
            is_ready = why_not_ready(self._front.registry, self._front.state) is None
            return Response("\n", 200 if is_ready else 503, media_type="application/json")

        @router.get("/version", summary="Version")
        async def said_version() -> Response:
            """The server's version."""
            return Response(version("modelyard"), media_type="application/json")

        return {"inference": [router]}

    def _begin(self, cycle: RequestResponseCycle, id: str) -> None:
        types = [value for name, value in cycle.headers if name == b"content-type"]
        if types and types[-1].partition(b";")[0].strip().lower() not in TYPES:
            known = b"the content type is not known; expected application/json or text/csv"
            self._answers.send(cycle, 415, [(b"content-type", b"text/plain")], known)
            return
        try:
            self._calls.begin(cycle, self._target)
        except Exception as error:
            answer = self._answers.error(error, id)
            self._calls.count_unrouted(answer[0])
            self._answers.send(cycle, *answer)


class MlflowAnswers(Answers):
    """Answers whose errors are MLflow's, a worker's too."""

    def send(
        self, cycle: RequestResponseCycle, status: int, headers: Fields,
        body: Payload | Stream | Events,
    ) -> None:  # fmt: skip
        """Send an answer."""
        if status >= 400 and isinstance(body, Payload):
            status, headers, body = as_mlflow(status, headers, body)
        super().send(cycle, status, headers, body)


def as_mlflow(status: int, headers: Fields, body: Payload) -> Answer:
    """Return an error as MLflow has it; one without a message as it is."""
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        return status, [*headers], bytes(body)
    said: dict[str, Any] = {"error_code": CODES.get(status, "INTERNAL_ERROR"), "message": message}
    return status, [*headers], json.dumps(said).encode()
