"""The metrics API in TorchServe's dialect."""

from __future__ import annotations

from urllib.parse import parse_qsl

from modelyard.serve.api.metrics import CONTENT_TYPE
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.errors import NoSuchRoute
from modelyard.serve.http.application import Answers, open_to_all
from modelyard.serve.http.connection import Answer, RequestResponseCycle
from modelyard.serve.torchserve import openapi
from modelyard.serve.torchserve.dialect import Dialect, segments

PATH = "metrics"


class Scrape:
    """One path, in any method; it needs no token."""

    def __init__(self, metrics: Metrics, answers: Answers) -> None:
        self._metrics = metrics
        document = openapi.server(metrics=True)
        self.dialect = Dialect(
            open_to_all, answers, document, self._respond, lambda path: segments(path) == [PATH]
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
