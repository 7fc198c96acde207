"""The operators that a program from anywhere may call: those that `operators.txt` lists.

Each computes on the elements of tensors that it is given, checks every index, offset and size that
reaches one, and returns nothing that was not written. They are what exports of real models call,
counted by `python -m tests.breadth.operators`, with their overloads, and what torch itself marks as
working on single elements (`pointwise`) or as its core; `tests/breadth/operator_rules.py` says what
never comes in, and `python -m tests.fuzz` tries all of it. A name that another torch does not have
is not an error: such a program does not load there.
"""

from importlib.resources import files

_LINES = files(__package__).joinpath("operators.txt").read_text(encoding="ascii").splitlines()

ALLOWED = frozenset(line for line in _LINES if not line.startswith("#"))
