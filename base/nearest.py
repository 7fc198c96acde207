"""The known name that was likely meant, for messages about an unknown one."""

import difflib
from collections.abc import Iterable

_CUTOFF = 0.6


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a name; None when none is."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=_CUTOFF)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message about an unknown name: the nearest one, where there is one."""
    near = nearest(name, known)
    return f"; did you mean {prefix}{near}?" if near else ""
