"""`handler` of model-config.yaml, which knows what of it somebody has asked for."""

from collections.abc import Iterator, Mapping
from typing import Any

from modelyard.base.nearest import did_you_mean


class Asked(Mapping[str, Any]):
    """Entries, and the names of all that were asked for, there or not.

    Whoever goes through all of them has asked for each.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self._asked: dict[Any, None] = {}

    def __getitem__(self, key: Any) -> Any:
        self._asked[key] = None
        return self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        self._asked |= dict.fromkeys(self._entries)
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def unread(self) -> list[str]:
        """Return a sentence for each entry that nobody has asked for."""
        return [
            f"handler.{key} is not a setting of this handler; expected some of "
            f"{', '.join(self._asked)}{did_you_mean(str(key), self._asked)}"
            for key in self._entries
            if key not in self._asked
        ]
