"""A handler's name, as an archive records it → what answers batches."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any

from modelyard.handlers.body import body_of
from modelyard.handlers.context import Context
from modelyard.handlers.errors import NoEntryPoint

Entry = Callable[[list[dict[str, Any]], Context], Any]


@dataclass(frozen=True)
class OneByOne:
    """A callable that takes one request's content, as a handler of batches.

    The content is the body, as `Context` has it: parsed JSON, text, or bytes; a form is a dict.
    """

    call: Callable[[Any], Any]

    def initialize(self, context: Context) -> None:
        """Do nothing: what it needs, it loaded when its file was imported, or it was made."""

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[Any]:
        """Answer each request by itself."""
        return [self.call(_content(row)) for row in data]


def _content(row: dict[str, Any]) -> Any:
    is_form = row and not row.keys() & {"body", "data"}
    return dict(row) if is_form else body_of(row)


@dataclass(frozen=True)
class FoundHandler:
    """An author's function, or an object of an author's or a built-in class."""

    target: Any

    def initialize(self, context: Context) -> None:
        """Let it load its model; a function is called without data for that."""
        if inspect.isroutine(self.target):
            self.target(None, context)
        else:
            self.target.initialize(context)

    @property
    def handle(self) -> Entry:
        """What answers batches; `initialize` may replace an object's."""
        entry: Entry = self.target if inspect.isroutine(self.target) else self.target.handle
        return entry


def find_handler(handler: str, built_in: Mapping[str, str]) -> FoundHandler:
    """Import a handler by the archive form's rules, without initialising it.

    `FILE.py:name` and `FILE:name` name a function or a class of a file on the path. Without a name,
    or where the file has no such thing, the function `handle` is taken, and else the file's one
    class. Of several classes, the one with a `BaseHandler` among its bases is taken.

    Beyond those rules, a function of one argument, and a class without `handle` that makes such
    callables, answer requests one by one.

    Args:
        handler: handler as the manifest has it.
        built_in: name → `module:Class`, for names that no file has.

    Raises:
        NoEntryPoint: no such file, or nothing in it that can be called.
        Exception: whatever the author's file raises.
    """
    place, _, wanted = handler.partition(":")
    name = PurePosixPath(place).name.removesuffix(".py")
    if handler in built_in and importlib.util.find_spec(name) is None:
        return _from_class(import_class(built_in[handler]))
    module = _import(name, handler, built_in)
    entry = getattr(module, wanted or "handle", None)
    if inspect.isclass(entry):
        return _from_class(entry)
    if callable(entry):
        return FoundHandler(OneByOne(entry) if _takes_one(entry) else entry)
    return _from_class(_only_class(module))


def import_class(place: str) -> type[Any]:
    """Import what `module:Class` names."""
    module, _, name = place.partition(":")
    kind: type[Any] = getattr(importlib.import_module(module), name)
    return kind


def _import(name: str, handler: str, built_in: Mapping[str, str]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name != name or not isinstance(error, ModuleNotFoundError):
            raise  # the file is there; something that it imports is not
        raise NoEntryPoint(
            f'the handler "{handler}" is neither a file of the archive nor one of '
            f"{', '.join(sorted(built_in))}"
        ) from error
    except ValueError as error:
        if name:
            raise
        raise NoEntryPoint("the archive names no handler; register it with one") from error


def _only_class(module: ModuleType) -> type[Any]:
    own = [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__
    ]
    if len(own) > 1:
        handlers = [kind for kind in own if any(b.__name__ == "BaseHandler" for b in kind.__mro__)]
        own = handlers if len(handlers) == 1 else own
    if len(own) != 1:
        raise NoEntryPoint(
            f"Expected only one class in custom service code or a function entry point {own}; "
            f"found in {module.__name__}.py; name one of them with FILE.py:Class when archiving"
        )
    return own[0]


def _from_class(kind: type[Any]) -> FoundHandler:
    found = kind()
    if not hasattr(found, "handle") and callable(found) and _takes_one(found):
        return FoundHandler(OneByOne(found))
    if not hasattr(found, "handle"):
        raise NoEntryPoint(f"Expect handle method in class {kind}")
    return FoundHandler(found)


def _takes_one(call: Callable[..., Any]) -> bool:
    """Return whether a callable can be called with one argument, and not with two."""
    try:
        signature = inspect.signature(call)
        signature.bind(None)
    except (TypeError, ValueError):  # the latter of what C code made
        return False
    try:
        signature.bind(None, None)
    except TypeError:
        return True
    return False
