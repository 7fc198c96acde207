"""A Python client of a Modelyard server: predictions, tensors, explanations, streams, safe retries.

It needs httpx and orjson; numpy only where arrays are sent or asked for. Importing the package
imports none of them: its names are looked up when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelyard_client.asynchronous import AsyncClient
    from modelyard_client.errors import (
        BadAnswer,
        ClientError,
        NoAnswer,
        NotTrusted,
        RequestFailed,
    )
    from modelyard_client.explanation import Explanation
    from modelyard_client.options import ExplainOptions
    from modelyard_client.retries import Outputs, Request, Retries
    from modelyard_client.synchronous import Client
else:
    _MODULES = {
        "asynchronous": ("AsyncClient",),
        "errors": ("BadAnswer", "ClientError", "NoAnswer", "NotTrusted", "RequestFailed"),
        "explanation": ("Explanation",),
        "options": ("ExplainOptions",),
        "retries": ("Outputs", "Request", "Retries"),
        "synchronous": ("Client",),
    }
    _PLACES = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> object:
        """Import a name when it is used."""
        if name in _PLACES:
            return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AsyncClient",
    "BadAnswer",
    "Client",
    "ClientError",
    "ExplainOptions",
    "Explanation",
    "NoAnswer",
    "NotTrusted",
    "Outputs",
    "Request",
    "RequestFailed",
    "Retries",
]
