"""Export PyTorch checkpoints, archive them with their handlers, serve predictions and explanations.

    from modelyard import archive, export, serve

    export("digits.pt", "net.py:DigitsNet")
    with serve(archive("digits", artifact="build/digits.onnx"), port=0) as server:
        server.client().predict("digits", Path("7.png"))

The five packages are folders at the top of the repository and links in this one: an archive, or a
project that runs a command here, may have its own `serve.py`, `handlers.py` or `exporter/`, and the
names never meet. Importing this package imports none of them, and no name of it imports torch
before it is called.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelyard.archiver.api import archive, verify
    from modelyard.client import AsyncClient, Client, Explanation
    from modelyard.exporter.request import export
    from modelyard.serve.tools.handle import serve

    __version__: str
else:
    _LAZY = {
        "AsyncClient": "client",
        "Client": "client",
        "Explanation": "client",
        "archive": "archiver.api",
        "export": "exporter.request",
        "verify": "archiver.api",
    }

    def __getattr__(name: str) -> object:
        """Import a name when it is used; `serve` is the package, which can be called."""
        if name == "__version__":
            return import_module("importlib.metadata").version(__name__)
        if name == "serve":
            return import_module("modelyard.serve")
        if name in _LAZY:
            return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AsyncClient",
    "Client",
    "Explanation",
    "__version__",
    "archive",
    "export",
    "serve",
    "verify",
]
