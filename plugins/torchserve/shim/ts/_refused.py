"""Names of TorchServe that import and refuse when they are used: what they need is not served."""

from typing import Any, NoReturn

from modelyard.handlers.errors import LoadError
from modelyard.plugins.torchserve.archiver.refused import REASONS
from ts.torch_handler.base_handler import BaseHandler


def refused_handler(name: str) -> type[BaseHandler]:
    """Return a class of handlers that do not load."""

    class Refused(BaseHandler):
        """A handler that archives name; it does not load."""

        def initialize(self, context: Any) -> None:
            """Refuse.

            Raises:
                LoadError: always.
            """
            raise LoadError(f"the handler {name} is not served: {REASONS[name]}")

    return Refused


def refused_function(name: str) -> Any:
    """Return a function that raises LoadError whatever it is called with."""

    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise LoadError(f"{name} is not served: {REASONS[name]}")

    return refuse
