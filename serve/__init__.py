"""Archive → HTTP. Called, the package starts a server: `modelyard.serve("digits")`.

A worker process imports `modelyard.serve.worker`, passes through here and must not reach the web
stack on the way: what the call needs is imported by the call.
"""

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that is a function too (docs/decisions/README.md)."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from modelyard.serve.tools.handle import serve

        return serve(*arguments, **options)

    @property
    def __signature__(self) -> Signature:
        from modelyard.serve.tools.handle import serve

        return signature(serve)


sys.modules[__name__].__class__ = _Callable
