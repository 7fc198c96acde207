"""Answers of several servers as one: descriptions of models, statuses, metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

COUNTED = ("minWorkers", "maxWorkers")
STATUS = re.compile(r"(with|scaled to) (\d+)")
"""Words of a status before the number of workers."""
AMOUNTS = re.compile(r"modelyard_\w+_(length|length_by_priority|in_flight|workers|bytes)")
"""Gauges that add up; of all others (what is served, a share, a handler's) the largest holds."""

Samples = dict[str, float]
"""A series as it is written → its value."""


def merge_models(described: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each version once, with the workers of all servers and what they add up to."""
    merged: dict[str, dict[str, Any]] = {}
    for number, models in enumerate(described, 1):
        for model in models:
            for worker in (*model["workers"], *model["explainWorkers"]):
                worker["id"] = f"{number}.{worker['id']}"
            first = merged.setdefault(model["modelVersion"], model)
            if first is model:
                continue
            for name in COUNTED:
                first[name] += model[name]
            for name in ("workers", "explainWorkers"):
                first[name] += model[name]
            for name in ("jobQueueStatus", "cacheStatus"):
                for key, value in model.get(name, {}).items():
                    first[name][key] += value
    return list(merged.values())


def merge_statuses(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of several answers to a change, with the workers of all servers."""
    texts = [STATUS.search(str(answer.get("status", ""))) for answer in answers]
    total = sum(int(found[2]) for found in texts if found)
    if not total:
        return answers[0]
    return {"status": STATUS.sub(rf"\g<1> {total}", answers[0]["status"], count=1)}


class SummedMetrics:
    """Metrics of several servers as those of one, which never fall when a server starts again."""

    def __init__(self) -> None:
        self._counted: dict[tuple[int, int], Samples] = {}
        """What each server had counted when it was last asked, also those that have died."""

    def merge(self, texts: Mapping[tuple[int, int], str]) -> str:
        """Return the text of all.

        Args:
            texts: number of a server and how often it was started → its text.
        """
        families: dict[str, dict[str, list[float]]] = {}  # name → each line of its head, and series
        kinds: dict[str, str] = {}
        for server, text in texts.items():
            counted = self._counted[server] = {}
            name = ""
            for line in text.splitlines():
                if line.startswith("#"):
                    _, word, name, rest = line.split(" ", 3)
                    families.setdefault(name, {}).setdefault(line, [])
                    if word == "TYPE":
                        kinds[name] = rest
                    continue
                series, _, value = line.rpartition(" ")
                families[name].setdefault(series, []).append(float(value))
                if kinds[name] != "gauge":
                    counted[series] = float(value)
        lines = []
        for name, rows in families.items():
            for row, values in rows.items():
                if values and kinds[name] != "gauge":
                    values = [each.get(row, 0.0) for each in self._counted.values()]
                adds = kinds[name] != "gauge" or AMOUNTS.fullmatch(name)
                lines.append(f"{row} {(sum if adds else max)(values)}" if values else row)
        return "".join(f"{line}\n" for line in lines)
