"""`from ts.metrics.dimension import Dimension`."""

from typing import Any


class Dimension:
    """A label of a metric and its value; as text `name:value`."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, Any]:
        """Return the two as a dict."""
        return {"Name": self.name, "Value": self.value}
