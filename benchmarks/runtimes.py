"""Archives on other runtimes than a server's: what is proven there, what is refused, and misses.

    python -m benchmarks.runtimes STORE [--runtime openvino]... [--in PYTHON]... [--faults 5]

STORE is filled as by `benchmarks.recertify` where it holds none. Each pair of archive and runtime
is proven, or refused with the layer that differs first or with the runtime's own sentence.
`--faults` seeds wrongs of plugins/recertify/tests/runtime_faults.py into onnxruntime-web and
OpenVINO for the first so many archives: an agreement is a miss, unless the wrong changes nothing
of the archive. Of harmless changes, every difference is a false alarm.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.recertify import fill, largest
from modelyard.plugins.recertify.certify import Row, recertify
from modelyard.plugins.recertify.environments import Environment, existing
from modelyard.plugins.recertify.environments import plan_other as plan
from plugins.recertify.tests import runtime_faults as seeds

VERDICTS = ("same bits", "within", "differs", "not run")


def main(
    store: Annotated[Path, typer.Argument(help="Folder of the archives.")],
    runtime: Annotated[list[str], typer.Option(help="Repeatable.")] = [],  # noqa: B006
    in_: Annotated[list[Path], typer.Option("--in", help="Repeatable.")] = [],  # noqa: B006
    models: Annotated[int, typer.Option(min=1)] = 50,
    faults: Annotated[int, typer.Option(min=0, help="Archives that are tried with them.")] = 0,
    rows_file: Annotated[Path | None, typer.Option(help="Where each row goes, as JSON.")] = None,
) -> None:
    """State what is proven, refused and missed.

    Example: python -m benchmarks.runtimes build/recertified --runtime openvino
    """
    if not list(store.glob("*.mar")):
        fill(store, models, ["onnx"])
    archives = sorted(store.glob("*.mar"))[:models]
    environments = [*map(plan, runtime), *map(existing, in_)]
    if environments:
        rows = judged(archives, environments, rows_file)
        print_table(rows, environments)
        print(f"largest share of a tolerance that agrees: {largest(rows):.3g}")
    if faults:
        seeded(archives[:faults], rows_file)


def judged(
    archives: Sequence[Path], environments: Sequence[Environment], rows_file: Path | None
) -> list[Row]:
    """Run all pairs; print those that are refused."""
    found = []
    for rows in recertify(archives, environments):
        found += rows
        for row in rows:
            if row.verdict not in ("same bits", "within"):
                said = row.first or row.why
                print(f"{row.archive.stem} on {row.environment}: {row.verdict}: {said}", flush=True)
            if rows_file:
                with rows_file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row), default=str) + "\n")
    return found


def print_table(rows: Sequence[Row], environments: Sequence[Environment]) -> None:
    """Print how many rows of each environment have which verdict."""
    print(f"\n{'':44} {'rows':>5}" + "".join(f"{each:>10}" for each in VERDICTS))
    for environment in environments:
        of = [row.verdict for row in rows if row.environment == environment.name]
        counts = "".join(f"{of.count(each):10}" for each in VERDICTS)
        print(f"{environment.name:44} {len(of):5}{counts}")


def seeded(archives: Sequence[Path], rows_file: Path | None) -> None:
    """Print what is said of each wrong, and of each harmless change."""
    tables = (
        ("onnxruntime-web", seeds.WEB, seeds.WEB_HARMLESS),
        ("openvino", seeds.OPENVINO, seeds.OPENVINO_HARMLESS),
    )
    for name, wrongs, harmless in tables:
        made = plan(name)
        made.build()
        beside = made.python.parents[2]  # where links are cheap
        with tempfile.TemporaryDirectory(dir=beside) as scratch:
            places = enumerate((wrongs | harmless).items())
            copies = [
                seeds.seeded(made, f"{name}: {what}", fault, Path(scratch, str(place)))
                for place, (what, fault) in places
            ]
            rows = judged(archives, [made, *copies], rows_file)
        print_table(rows, copies)
        right = {row.archive: row for row in rows if row.environment == name}
        untouched = [
            row
            for row in rows
            if row.verdict == "within" and row.environment.partition(": ")[2] in wrongs
        ]
        for row in untouched:
            was = right[row.archive]
            is_same = (row.share, row.max_abs) == (was.share, was.max_abs)
            kind = "changes nothing of it" if is_same else "MISSED"
            print(f"{row.archive.stem} with {row.environment}: {kind}, share {row.share:.2g}")


if __name__ == "__main__":
    typer.run(main)
