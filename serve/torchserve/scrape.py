"""The metrics API in TorchServe's dialect."""

from __future__ import annotations

from urllib.parse import parse_qsl

from modelyard.serve.api.asgi import Phase, Scope, open_to_all
from modelyard.serve.api.metrics import CONTENT_TYPE
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.errors import NoSuchRoute
from modelyard.serve.http.answers import Answer
from modelyard.serve.torchserve import openapi
from modelyard.serve.torchserve.dialect import Dialect
from modelyard.serve.torchserve.settings import TorchServeSettings


class Scrape(Dialect):
    """One path, in any method; it needs no token."""

    def __init__(
        self,
        metrics: Metrics,
        phase: Phase,
        settings: TorchServeSettings,
        max_request_bytes: int,
    ) -> None:
        document = openapi.server(metrics=True)
        super().__init__(open_to_all, phase, settings, max_request_bytes, document)
        self._metrics = metrics

    async def route(self, scope: Scope, path: list[str], body: bytes, id: str) -> Answer:
        """Return the metrics, all or those that `name[]` names."""
        if path != ["metrics"]:
            raise NoSuchRoute
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        names = [value for name, value in query if name == "name[]"]
        headers = [(b"content-type", CONTENT_TYPE.encode())]
        return 200, headers, self._metrics.text(names).encode()
