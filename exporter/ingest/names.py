"""Names of tensors: prefixes that wrappers add, and the names that a class expects."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

# Each is put in front of every name, or inside a name, by the wrapper of that name.
WRAPPERS = (
    "module.",
    "_orig_mod.",
    "_forward_module.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
)
_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
ATTRIBUTES = ("model.", "net.", "network.", "backbone.", "module.", "student.")
"""Names that a training module gives to the network inside it."""

_AVERAGED = "n_averaged"
_CUTOFF = 0.6


def strip_wrappers(names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Strip what wrappers put in front of every name, repeatedly, and inside names.

    Returns:
        Old name → new name, in order, without `n_averaged` of an averaged model; and what was
        stripped.
    """
    renamed = {name: name for name in names}
    stripped: list[str] = []
    if _AVERAGED in renamed and len(renamed) > 1:
        # torch's AveragedModel: its own counter, and the model below `module.`.
        rest = [name for name in renamed if name != _AVERAGED]
        if all(name.startswith("module.") for name in rest):
            renamed = {name: name for name in rest}
    while prefix := _common(renamed.values(), WRAPPERS):
        renamed = {old: new.removeprefix(prefix) for old, new in renamed.items()}
        stripped.append(prefix)
    for inner in _INNER:
        if any(f".{inner}" in f".{name}" for name in renamed.values()):
            candidate = {old: _without(new, inner) for old, new in renamed.items()}
            if len(set(candidate.values())) == len(candidate):
                renamed = candidate
                stripped.append(f"….{inner}")
    return renamed, tuple(stripped)


def _without(name: str, inner: str) -> str:
    return f".{name}".replace(f".{inner}", ".").removeprefix(".")


def _common(names: Iterable[str], prefixes: Sequence[str]) -> str | None:
    names = list(names)
    if not names:
        return None
    for prefix in prefixes:
        if all(name.startswith(prefix) and len(name) > len(prefix) for name in names):
            return prefix
    return None


def fit_names(
    tensors: Mapping[str, Tensor], original: Mapping[str, str], wanted: Iterable[str]
) -> tuple[dict[str, Tensor], str | None]:
    """Return the tensors under the names that a class expects, as far as a prefix decides it.

    Args:
        tensors: under names without wrappers' prefixes.
        original: each of those names → the name in the file.
        wanted: names of the class's state dict.

    Returns:
        The tensors under the names of the file where the class has those, else without the prefix
        of an attribute that the class has not; and that prefix.
    """
    wanted = set(wanted)
    in_file = {original.get(name, name): tensor for name, tensor in tensors.items()}
    if not set(tensors) & wanted and set(in_file) & wanted:
        return in_file, None
    prefix = _common(tensors, ATTRIBUTES)
    if prefix is not None and not any(name.startswith(prefix) for name in wanted):
        return {name.removeprefix(prefix): value for name, value in tensors.items()}, prefix
    return dict(tensors), None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a name; None when none is."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=_CUTOFF)
    return found[0] if found else None
