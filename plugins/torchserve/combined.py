"""Several of TorchServe's APIs on one port, as KServe configures it."""

from collections.abc import Sequence

from modelyard.plugins.torchserve.dialect import Dialect
from modelyard.serve.http.application import Application
from modelyard.serve.http.connection import Answer, RequestResponseCycle


class Combined:
    """Hands each request to the API that its path belongs to; each checks its own key.

    Args:
        apis: APIs in the order of their addresses; the first answers what is nobody's, and
            describes the port.
    """

    def __init__(self, apis: Sequence[Dialect]) -> None:
        self._first, *self._others = apis
        paths = {path: item for api in apis for path, item in api.document["paths"].items()}
        self._first.document = {**self._first.document, "paths": paths}

    def accept(self, cycle: RequestResponseCycle) -> None:
        """Dispatch by path."""
        self._choose(cycle.path).accept(cycle)

    def refuse(self, error: Exception, cycle: RequestResponseCycle | None) -> Answer:
        """Return the last answer on a connection."""
        return self._first.application.refuse(error, cycle)

    def _choose(self, path: str) -> Application:
        return next((api for api in self._others if api.owns(path)), self._first).application
