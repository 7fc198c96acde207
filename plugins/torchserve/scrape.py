"""The metrics API in TorchServe's dialect."""

from __future__ import annotations

from urllib.parse import parse_qsl

from modelyard.plugins.torchserve import openapi
from modelyard.plugins.torchserve.dialect import Dialect, segments
from modelyard.serve.api.management import CONTENT_TYPE
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.errors import NoSuchRoute
from modelyard.serve.front.begin import let_everybody
from modelyard.serve.http.application import Answers
from modelyard.serve.http.connection import Answer, RequestResponseCycle

PATH = "metrics"


class Scrape:
    """One path, in any method; it needs no token."""

    def __init__(self, metrics: Metrics, answers: Answers) -> None:
        self._metrics = metrics
        document = openapi.server()
        self.dialect = Dialect(
            let_everybody, answers, document, self._respond, lambda path: segments(path) == [PATH]
        )

    async def _respond(
        self, cycle: RequestResponseCycle, path: list[str], body: bytes, id: str
    ) -> Answer:
        """Return the metrics, all or those that `name[]` names."""
        if path != [PATH]:
            raise NoSuchRoute
        query = parse_qsl(cycle.query.decode("latin-1"))
        names = [value for name, value in query if name == "name[]"]
        headers = [(b"content-type", CONTENT_TYPE.encode())]
        return 200, headers, self._metrics.text(names).encode()
