"""The names that units have in output."""

from __future__ import annotations


class Units:
    """Short unit → its name; a unit that is not here is its own name."""

    def __init__(self) -> None:
        self.units: dict[str | None, str] = {
            "ms": "Milliseconds",
            "s": "Seconds",
            "percent": "Percent",
            "count": "Count",
            "MB": "Megabytes",
            "GB": "Gigabytes",
            "kB": "Kilobytes",
            "B": "Bytes",
            "": "unit",
            None: "unit",
        }
