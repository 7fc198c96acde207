#!/usr/bin/env python3
"""What scripts/matrix found: results of runs → docs/tested.json → the table in docs/install.md.

matrix_results.py add NAME RESULTS PART  count a run; PART is 1 where it was told to run a part
matrix_results.py table                  write the table
"""

import json
import platform
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTED = ROOT / "docs" / "tested.json"
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- scripts/matrix -->\n", "<!-- end -->\n"


def count(results: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped; the last outcome of each counts."""
    lines = results.read_text().splitlines() if results.exists() else []
    last = {line["test"]: line["outcome"] for line in map(json.loads, lines)}
    counted = Counter(last.values())
    return {outcome: counted[outcome] for outcome in ("passed", "failed", "skipped")}


def add(name: str, results: Path, is_part: bool) -> int:
    """Keep what a run counted, and return the exit status of its environment."""
    found = count(results)
    print(f"{name}: {', '.join(f'{number} {outcome}' for outcome, number in found.items())}")
    if not is_part:
        tested = json.loads(TESTED.read_text()) if TESTED.exists() else {}
        commit = ["git", "rev-parse", "--short=12", "HEAD"]
        tested[name] = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
            "python": platform.python_version(),
            "torch": version("torch"),
            **found,
        }
        TESTED.write_text(json.dumps(dict(sorted(tested.items())), indent=1) + "\n")
    return 0 if found["passed"] and not found["failed"] else 1


def format_table() -> str:
    """Return the table of the install page."""
    lines = [
        "| Python | torch | other packages | when | commit | passed | failed | skipped |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, run in json.loads(TESTED.read_text()).items():
        packages = "lower bounds" if name == "lowest" else "locked"
        cells = (run["python"], run["torch"], packages, run["date"], f"`{run['commit']}`")
        counts = (f"{run[outcome]:,}" for outcome in ("passed", "failed", "skipped"))
        lines.append(f"| {' | '.join((*cells, *counts))} |")
    return "\n".join(lines) + "\n"


def write_table() -> None:
    """Put the table between its marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + format_table() + END + rest.split(END)[1])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["add", name, results, part]:
            sys.exit(add(name, Path(results), part == "1"))
        case ["table"]:
            write_table()
        case _:
            sys.exit(__doc__)
