"""Several of TorchServe's APIs on one port, as KServe configures it."""

from __future__ import annotations

from collections.abc import Sequence

from modelyard.serve.api.asgi import Receive, Scope, Send
from modelyard.serve.http.answers import Answer
from modelyard.serve.http.connection import WholeRequest
from modelyard.serve.torchserve.dialect import Dialect, segments
from modelyard.serve.torchserve.management import TorchServeManagement, is_management
from modelyard.serve.torchserve.scrape import Scrape


class Combined:
    """Hands each request to the API that its path belongs to; each checks its own key.

    Args:
        apis: in the order of their addresses; the first answers what is nobody's, and describes
            the port.
    """

    def __init__(self, apis: Sequence[Dialect]) -> None:
        self._first = apis[0]
        self._apis = {type(api): api for api in apis}
        paths = {path: item for api in apis for path, item in api.document["paths"].items()}
        self._first.document = {**self._first.document, "paths": paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch by path."""
        await self._choose(scope["path"])(scope, receive, send)

    def take(self, exchange: WholeRequest) -> bool:
        """Dispatch by path."""
        return self._choose(exchange.scope["path"]).take(exchange)

    def refuse(self, error: Exception) -> Answer:
        """Return the last answer on a connection, to what could not be read as a request."""
        return self._first.refuse(error)

    def _choose(self, path: str) -> Dialect:
        kind = type(self._first)
        if is_management(path):
            kind = TorchServeManagement
        elif segments(path) == ["metrics"]:
            kind = Scrape
        return self._apis.get(kind, self._first)
