"""What plug-ins register, by entry points: core asks here, and imports and names none of them.

| group | a name → what its value is |
| --- | --- |
| `modelyard.commands` | subcommand → a `Command` |
| `modelyard.tasks` | handler that archives may name → its class |
| `modelyard.methods` | attribution method → its `Method` |
| `modelyard.measures` | option of an explanation that asks how good it is → its `Measure` |
| `modelyard.certifiers` | `explanations` → what measures those of an archive, a `Certifier` |
| `modelyard.exports` | `generate` → what makes a decoder's module of a model (`exporter/trip.py`) |
| `modelyard.sources` | scheme of a location → what fetches a checkpoint (`exporter/sources.py`) |
| `modelyard.faces` | another way in → a `Face` of the server |
| `modelyard.texts` | `embeddings` → what answers texts with a model's numbers, in a worker |
| `modelyard.observers` | what looks on → an `Observer` of the server |
| `modelyard.servers` | `shared_port` → what runs several servers behind one port |
| `modelyard.policies` | a dialect → what it does otherwise in a worker |

A checkout may lack the folder of a plug-in that was there when it was installed; its entries are
left out.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import NamedTuple


class Command(NamedTuple):
    """Where a subcommand lives, and its line in the overview."""

    module: str
    app: str
    """The `typer.Typer` in that module."""
    help: str


@cache
def registered(group: str) -> dict[str, EntryPoint]:
    """Return name → entry point of a group, in the order of the names; nothing is imported.

    Args:
        group: without the leading `modelyard.`.
    """
    found = sorted(entry_points(group=f"modelyard.{group}"), key=lambda entry: entry.name)
    return {entry.name: entry for entry in found if _is_there(entry.module)}


@cache
def _is_there(module: str) -> bool:
    try:
        return find_spec(module.rpartition(".")[0] or module) is not None
    except ModuleNotFoundError:  # of a folder above it
        return False
