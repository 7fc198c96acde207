"""The values of `runtime` in a manifest."""

from enum import Enum


class RuntimeType(Enum):
    """What runs a handler."""

    PYTHON = "python"
    PYTHON3 = "python3"
    LSP = "LSP"
