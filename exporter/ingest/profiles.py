"""Which names beside torch's own a pickle of a kind may use for values: `allowed.yaml`."""

from collections.abc import Iterable, Mapping

from modelyard.exporter.ingest.pickles import Global
from modelyard.exporter.ingest.plain import stock_class
from modelyard.exporter.ingest.rebuild import is_known
from modelyard.exporter.tables import read_table

_TABLES = read_table(__package__, "allowed")
PROFILES: Mapping[str, frozenset[str]] = {
    name: frozenset(names) for name, names in _TABLES["profiles"].items()
}


def profiles_for(kind: str) -> list[str]:
    """Name the profiles of a kind of checkpoint, the narrowest first."""
    found: list[str] = next(
        names for start, names in _TABLES["by_kind"].items() if kind.startswith(start)
    )
    return found


def allowed_names(kind: str) -> frozenset[str]:
    """Unite the names that a kind's profiles hold."""
    return frozenset().union(*(PROFILES[name] for name in profiles_for(kind)))


def match_profiles(kind: str, names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the profiles that hold names beyond torch's, and the names that none holds."""
    unknown = {name for name in names if not is_known(name)}
    used = []
    for profile in profiles_for(kind):
        if covered := {name for name in unknown if _covers(profile, name)}:
            used.append(profile)
            unknown -= covered
    return tuple(used), tuple(sorted(unknown))


def _covers(profile: str, name: str) -> bool:
    if profile == "torch-nn":
        module, _, last = name.rpartition(".")
        return stock_class(Global(module, last)) is not None
    return name in PROFILES[profile]
