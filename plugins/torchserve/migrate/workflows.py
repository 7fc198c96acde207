"""What a workflow does, read from its archive, and how the same is done without one.

Format: `torch-workflow-archiver` 0.2.15; a zip with `WAR-INF/MANIFEST.json`, a YAML specification
of models and of which node's answer goes to which, and a file of functions.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from modelyard.archiver import ArchiveError, open_archive
from modelyard.archiver.untrusted.json import Fields, parse_json
from modelyard.archiver.untrusted.yaml import parse_yaml

MANIFEST = "WAR-INF/MANIFEST.json"


class UnreadableWorkflow(ValueError):
    """Raise when an archive does not say what its workflow does; the message is a phrase."""


def describe_workflow(file: Path) -> tuple[str, str]:
    """Return what a workflow does, in the order in which it does it, and what to do instead.

    Raises:
        UnreadableWorkflow: the archive or its specification cannot be read.
    """
    try:
        with open_archive(file, needs_manifest=False) as archive:
            fields = Fields(parse_json(archive.read(MANIFEST))).object("workflow")
            spec = parse_yaml(archive.read(fields.text("specFile") or ""))
    except KeyError as error:
        raise UnreadableWorkflow(f"it has no file {error}") from error
    except (ArchiveError, ValueError) as error:
        raise UnreadableWorkflow(str(error)) from error
    levels, models = _read_spec(spec)
    steps = [
        " and ".join(f"{node} ({models.get(node, 'a function')})" for node in level)
        for level in levels
    ]
    served = " ".join(f"--models {node}={models[node]}" for level in levels for node in level
                      if node in models)  # fmt: skip
    functions = [node for level in levels for node in level if node not in models]
    handler = fields.text("handler") or "the handler"
    return " → ".join(steps), _advise(levels, models, served, functions, handler)


def _read_spec(spec: Any) -> tuple[list[list[str]], dict[str, str]]:
    """Return the nodes, step by step, and the archives of the models among them."""
    models = spec.get("models") if isinstance(spec, dict) else None
    dag = spec.get("dag") if isinstance(spec, dict) else None
    if not isinstance(models, dict) or not isinstance(dag, dict):
        raise UnreadableWorkflow("its specification has no `models` and `dag`")
    urls = {
        str(name): str(entry["url"])
        for name, entry in models.items()
        if isinstance(entry, dict) and "url" in entry
    }
    before: dict[str, set[str]] = {str(node): set() for node in dag}
    for node, following in dag.items():
        for each in following if isinstance(following, list) else []:
            before.setdefault(str(each), set()).add(str(node))
    sorter = TopologicalSorter(before)
    try:
        sorter.prepare()
    except CycleError as error:
        raise UnreadableWorkflow(f"its dag has a circle: {' → '.join(error.args[1])}") from error
    levels = []
    while ready := sorted(sorter.get_ready()):
        levels.append(ready)
        sorter.done(*ready)
    return levels, urls


def _advise(
    levels: list[list[str]],
    models: dict[str, str],
    served: str,
    functions: list[str],
    handler: str,
) -> str:
    """Return the commands and the places that take the workflow's place."""
    calls = [[f"POST /predictions/{node}" for node in level if node in models] for level in levels]
    order = ", then ".join(" and beside it ".join(call) for call in calls if call)
    joined = " with the answers of the step before as its body" if len(models) > 1 else ""
    moved = f"; {', '.join(functions)} of {handler}: into the client, or into preprocess and " \
            "postprocess of the model's handler beside it" if functions else ""  # fmt: skip
    return f"serve the models ({served}) and let the client {order}{joined}{moved}"
