"""The envelope `body`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ts.torch_handler.request_envelope.base import BaseEnvelope


class BodyEnvelope(BaseEnvelope):
    """The handler gets each request's data or body itself; its answers stay as they are."""

    def parse_input(self, data: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the bodies."""
        return [row.get("data") or row.get("body") for row in data]

    def format_output(self, data: Any) -> Any:
        """Return the answers as they are."""
        return data
