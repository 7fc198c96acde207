"""Pickle → plain values and placeholders. Nothing that a pickle names is imported or called.

`pickle.Unpickler` does as it is told: it imports names, calls them and sets attributes on what
they give. This machine has the same opcodes and none of that. A name becomes a `Global`, a call an
`UnresolvedCall`; only the calls in `rebuild` give values, each of its own checked arguments.

Source: the opcodes of protocols 0 to 5, https://docs.python.org/3/library/pickletools.html
"""

import _compat_pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast

from modelyard.exporter.ingest.source import Window

MAX_OPCODES = 50_000_000
_MAX_KEY_DEPTH = 4

PersistentLoad = Callable[[Any], Any]
"""Turns a persistent id into a value; raises `BadPickle` for what it does not know."""

Rebuild = Callable[["Global", tuple[Any, ...]], Any]
"""Returns the value of a call that is known to be harmless, else `NOT_REBUILT`."""

NameValue = Callable[["Global"], Any]
"""Returns the value of a name that stands for a constant, else the name."""

NOT_REBUILT = object()


class BadPickle(ValueError):
    """The pickle is damaged, or wants what no checkpoint needs."""


@dataclass(frozen=True)
class Global:
    """A name that the pickle wanted imported; it was not."""

    module: str
    name: str

    @property
    def dotted(self) -> str:
        """Return module and name as one, as in `collections.OrderedDict`."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class UnresolvedCall:
    """A call that was not made, with what the pickle put into its result afterwards."""

    function: Any
    """A Global, or another UnresolvedCall: a class that itself would come from a call."""
    args: tuple[Any, ...]
    state: list[Any] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def dotted(self) -> str:
        """Return the name of the class or function, or `?` when a call would have made it."""
        return self.function.dotted if isinstance(self.function, Global) else "?"

    @property
    def attributes(self) -> dict[str, Any]:
        """Return what would be the object's `__dict__`, slots included."""
        found: dict[str, Any] = {}
        for state in self.state:
            parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
            for part in parts:
                if isinstance(part, Mapping):
                    found.update({k: v for k, v in part.items() if isinstance(k, str)})
        return found


@dataclass(frozen=True)
class Pickled:
    """What a pickle holds."""

    value: Any
    """Plain containers, values that are rebuilt, and placeholders for everything else."""
    wanted: frozenset[str]
    """Dotted names of every global in it."""
    protocol: int


def read_pickle(
    stream: Window,
    persistent_load: PersistentLoad,
    rebuild: Rebuild,
    name_value: NameValue = lambda name: name,
) -> Pickled:
    """Read one pickle of any protocol from where the stream is.

    Raises:
        BadPickle: it is damaged, too long, or tries what no checkpoint needs.
    """
    machine = _Machine(persistent_load, rebuild, name_value)
    try:
        for number, (opcode, argument, _) in enumerate(
            pickletools.genops(cast("IO[bytes]", stream))
        ):
            if number > MAX_OPCODES:
                raise BadPickle(f"more than {MAX_OPCODES} opcodes")
            machine.step(opcode.name, argument)
    except BadPickle:
        raise
    # What is not a pickle fails in whatever decoder it reaches; a stack that is too short likewise.
    except (
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        MemoryError,
        RuntimeError,
    ) as error:
        raise BadPickle(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    return Pickled(machine.result(), frozenset(machine.wanted), machine.protocol)


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(
        self, persistent_load: PersistentLoad, rebuild: Rebuild, name_value: NameValue
    ) -> None:
        self.persistent_load = persistent_load
        self.rebuild = rebuild
        self.name_value = name_value
        self.wanted: set[str] = set()
        self.protocol = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.stopped = False

    def step(self, opcode: str, argument: Any) -> None:
        if opcode in _PUSHES_ARGUMENT:
            self.stack.append(argument)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode]())
        elif (action := _ACTIONS.get(opcode)) is not None:
            action(self, argument)
        elif opcode not in _IGNORED:
            raise BadPickle(f"opcode {opcode}, which no checkpoint needs")

    def result(self) -> Any:
        if not self.stopped or len(self.stack) != 1 or self.marks:
            raise BadPickle("it does not end with one value")
        return self.stack[0]

    def proto(self, version: int) -> None:
        if version > 5:
            raise BadPickle(f"protocol {version}")
        self.protocol = max(self.protocol, version)

    # Stack and memo.

    def pop_mark(self) -> list[Any]:
        start = self.marks.pop()
        if start > len(self.stack):
            raise BadPickle("a mark above the stack")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def top(self) -> Any:
        if self.marks and self.marks[-1] >= len(self.stack):
            raise BadPickle("a value from below a mark")
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def popped(self, count: int) -> tuple[Any, ...]:
        return tuple([self.pop() for _ in range(count)][::-1])

    def drop(self, _: Any) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.pop()

    def put(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.top()

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise BadPickle(f"memo {index}, which was never set")
        self.stack.append(self.memo[index])

    # Containers.

    def dict_of(self, _: Any) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.set_pairs(items)

    def extend(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, UnresolvedCall):
            target.items.extend(items)
        else:
            raise BadPickle(f"items for a {type(target).__name__}")

    def add_items(self, _: Any) -> None:
        items = self.pop_mark()
        target = self.top()
        if type(target) is set:
            target.update(hashable(item) for item in items)
        else:
            self.extend(items)

    def set_pairs(self, items: Sequence[Any]) -> None:
        if len(items) % 2:
            raise BadPickle("a key without a value")
        target = self.top()
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, UnresolvedCall):
            target.pairs.extend(pairs)
        elif isinstance(target, dict):
            for key, value in pairs:  # not update(): a Counter would add
                target[hashable(key)] = value
        else:
            raise BadPickle(f"keys for a {type(target).__name__}")

    # Names and calls: recorded, never made.

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.push_name(module, name)

    def stack_name(self, _: Any) -> None:
        module, name = self.popped(2)
        if not isinstance(name, str) or not isinstance(module, str):
            raise BadPickle("a name that is not text")
        self.push_name(module, name)

    def push_name(self, module: str, name: str) -> None:
        if self.protocol < 3:  # as pickle does: Python 2 wrote these protocols
            module, name = _python3_name(module, name)
        found = Global(module, name)
        self.wanted.add(found.dotted)
        self.stack.append(self.name_value(found))

    def call_with_keywords(self, _: Any) -> None:
        *called, keywords = self.popped(3)
        made = self.push_call(*called)
        if keywords and isinstance(made, UnresolvedCall):
            made.state.append(keywords)

    def instance(self, argument: str) -> None:
        items = self.pop_mark()
        self.name(argument)
        self.push_call(self.pop(), tuple(items))

    def object(self, _: Any) -> None:
        function, *args = self.pop_mark()
        self.push_call(function, tuple(args))

    def push_call(self, function: Any, args: Any) -> Any:
        if not isinstance(function, Global | UnresolvedCall) or not isinstance(args, tuple):
            raise BadPickle(f"a call of a {type(function).__name__}")
        made = self.rebuild(function, args) if isinstance(function, Global) else NOT_REBUILT
        self.stack.append(UnresolvedCall(function, args) if made is NOT_REBUILT else made)
        return self.stack[-1]

    def build(self, _: Any) -> None:
        state, target = self.pop(), self.top()
        if isinstance(target, UnresolvedCall):
            target.state.append(state)
        elif not isinstance(target, OrderedDict):
            raise BadPickle(f"attributes for a {type(target).__name__}")
        elif isinstance(state, dict) and isinstance(versions := state.get("_metadata"), dict):
            vars(target)["_metadata"] = versions  # as torch reads them: of each module's own form


def hashable(value: Any, depth: int = 0) -> Any:
    """Refuse what cannot be hashed, or only by a recursion as deep as the file likes."""
    if isinstance(value, tuple):
        if depth >= _MAX_KEY_DEPTH:
            raise BadPickle("a key of deeply nested tuples")
        for part in value:
            hashable(part, depth + 1)
    elif isinstance(value, list | dict | set | bytearray):
        raise BadPickle(f"a {type(value).__name__} as a key")
    return value


def is_module(value: Any) -> bool:
    """Return whether a placeholder stands for an nn.Module."""
    if not isinstance(value, UnresolvedCall):
        return False
    attributes = value.attributes
    return isinstance(attributes.get("_modules"), Mapping) and isinstance(
        attributes.get("_parameters"), Mapping
    )


def _python3_name(module: str, name: str) -> tuple[str, str]:
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[(module, name)]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


_PUSHES_ARGUMENT = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
        *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_IGNORED = frozenset(["FRAME"])
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_ACTIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.proto,
    "STOP": lambda machine, _: setattr(machine, "stopped", True),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "POP": _Machine.drop,
    "POP_MARK": lambda machine, _: machine.pop_mark().clear(),
    "DUP": lambda machine, _: machine.stack.append(machine.top()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_mark())),
    "TUPLE1": lambda machine, _: machine.stack.append(machine.popped(1)),
    "TUPLE2": lambda machine, _: machine.stack.append(machine.popped(2)),
    "TUPLE3": lambda machine, _: machine.stack.append(machine.popped(3)),
    "LIST": lambda machine, _: machine.stack.append(machine.pop_mark()),
    "DICT": _Machine.dict_of,
    "FROZENSET": lambda machine, _: machine.stack.append(
        frozenset(hashable(item) for item in machine.pop_mark())
    ),
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_mark()),
    "ADDITEMS": _Machine.add_items,
    "SETITEM": lambda machine, _: machine.set_pairs(machine.popped(2)),
    "SETITEMS": lambda machine, _: machine.set_pairs(machine.pop_mark()),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stack_name,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda machine, _: machine.push_call(*machine.popped(2))),
    "NEWOBJ_EX": _Machine.call_with_keywords,
    "INST": _Machine.instance,
    "OBJ": _Machine.object,
    "BUILD": _Machine.build,
    "BINPERSID": lambda machine, _: machine.stack.append(machine.persistent_load(machine.pop())),
}
