"""The names that units have in output."""

from modelyard.handlers.metrics import UNITS


class Units:
    """Short unit → its name; a unit that is not here is its own name."""

    def __init__(self) -> None:
        self.units = dict(UNITS)
