"""What a program takes for granted of sizes: where the proven range breaks it, it has to be tried.

A trace follows the one way through forward() that the example takes. What was asked of the sizes on
that way are the program's guards. Many change nothing (whether a tensor lies in memory as a copy
of it would); others choose what is computed, and then the program is wrong wherever they do not
hold. Which of the two a guard is, shows at such a size alone.
"""

import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from sympy import Eq, Integer  # type: ignore[import-untyped]
from torch.export import ExportedProgram
from torch.utils._sympy.printers import PythonPrinter

from modelyard.archiver.signature import Dim, Signature
from modelyard.exporter.formats.to_exported_program import dynamic_sizes
from modelyard.handlers.proof.probes import Probe, example_sizes

MOST_SIZES, MOST_OF_TORCH = 20_000, 512
"""Sizes, of a dim or of several together, at which a guard of forward() is evaluated, and one that
torch asks itself, of which there are hundreds: how tensors lie in memory."""

_FOLDERS = re.compile(r"(?<=\()[^()]*/")

Sizes = dict[str, int]


class Guards:
    """The guards of a trace.

    Args:
        program: the trace.
        signature: the inputs.
    """

    def __init__(self, program: ExportedProgram, signature: Signature) -> None:
        dims: dict[Any, dict[str, Dim]] = {}
        places: dict[Any, str] = {}
        for dim, _, size in dynamic_sizes(program, signature):
            dims.setdefault(size.node.expr, {})[dim.name] = dim
            places |= {guard.expr: str(guard.sloc) for guard in size.node.shape_env.guards}
        self._usual = example_sizes(signature)
        self._guards: list[tuple[_Guard, list[Sizes]]] = []
        for expression, place in places.items():
            symbols = expression.free_symbols
            # What is known only when it runs, the program itself asks about.
            if symbols and symbols <= dims.keys():
                names = {str(symbol): next(iter(dims[symbol])) for symbol in symbols}
                guard = _Guard(expression, place, names)
                most = MOST_OF_TORCH if guard.is_torchs else MOST_SIZES
                sizes = _sizes([dims[symbol] for symbol in symbols], most)
                if broken := [each for each in sizes if not guard.holds(each)]:
                    self._guards.append((guard, broken))

    def probes(self) -> list[Probe]:
        """Return what to try: of each guard the two smallest sizes, and one in the middle."""
        chosen: list[Sizes] = []
        for _, broken in self._guards:
            by_size = sorted(broken, key=lambda sizes: math.prod(sizes.values()))
            for sizes in (*by_size[:2], *by_size[len(by_size) // 2 :][:1]):
                if (each := self._usual | sizes) not in chosen:
                    chosen.append(each)
        return [Probe("random", sizes) for sizes in chosen]

    def larger(self) -> Sizes:
        """Return the smallest sizes at which what the trace holds for one (window, chunk) is more.

        Nothing where there is no such, or where it is one at some larger sizes again.
        """
        for guard, broken in self._guards:
            above = all(n >= self._usual[name] for sizes in broken for name, n in sizes.items())
            if above and guard.is_of_one:
                return self._usual | min(broken, key=lambda sizes: math.prod(sizes.values()))
        return {}

    def broken_at(self, sizes: Mapping[str, int]) -> str:
        """Return the first guard of forward() that does not hold, and its line; empty if all do."""
        broken = (
            str(each) for each, _ in self._guards if not (each.is_torchs or each.holds(sizes))
        )
        return next(broken, "")


class _Guard:
    """One guard.

    Args:
        expression: sympy's, of symbols.
        place: where it was asked, as torch writes it.
        names: symbol → the dim whose size it is.
    """

    def __init__(self, expression: Any, place: str, names: Mapping[str, str]) -> None:
        self._expression = expression
        self._place = _FOLDERS.sub("", place)
        self.is_torchs = place.startswith("(_")  # the files in which it lays tensors out
        self._names = names
        self.is_of_one = isinstance(expression, Eq) and 1 in expression.args

    def __str__(self) -> str:
        names = self._names
        text = re.sub(
            r"[a-z]\w*",
            lambda word: names.get(word[0], word[0]),
            PythonPrinter().doprint(self._expression),
        )
        return f"{text} {self._place}"

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether it is true of these sizes."""
        symbols = self._expression.free_symbols
        known = {symbol: Integer(sizes[self._names[str(symbol)]]) for symbol in symbols}
        try:
            return bool(self._expression.xreplace(known))
        except (ArithmeticError, TypeError):  # a division by zero; nothing that is true or false
            return False


def _sizes(symbols: Sequence[dict[str, Dim]], most: int) -> Iterator[Sizes]:
    """Yield sizes that dims may have together: all, or the ends and some that a seed draws.

    Args:
        symbols: dims that have the same size, for each symbol.
        most: how many of them, at most.
    """
    ranges: dict[tuple[str, ...], list[int]] = {}
    for alike in symbols:
        first, *others = alike.values()
        some = (*first.sizes()[:most], *first.sizes()[most:][-1:])
        ranges[tuple(alike)] = [size for size in some if all(size in dim for dim in others)]
    together: Iterable[Sequence[int]] = product(*ranges.values())
    if math.prod(map(len, ranges.values())) > most:
        draw = random.Random(0).choice
        ends = product(*((sizes[0], sizes[-1]) for sizes in ranges.values()))
        together = [*ends, *(tuple(map(draw, ranges.values())) for _ in range(most))]
    for chosen in together:
        yield {name: size for alike, size in zip(ranges, chosen, strict=True) for name in alike}
