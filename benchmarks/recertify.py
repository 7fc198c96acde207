"""Archives on other versions, and on versions with a wrong kernel: false alarms, and misses.

    python -m benchmarks.recertify STORE [--models 50] [--with onnxruntime==1.29.0]... [--faults 12]

STORE is filled first, with small networks of tests/breadth: what torch alone builds. Each is run by
`modelyard recertify` with the versions that are named, where every difference is a false alarm, and
the first of them (`--faults`) with each wrong kernel, where every agreement is a miss, unless the
network has no operator of the kind or none of its numbers comes near the fault: `--draws 40` tries
as many times as many further inputs on these.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated

import torch
import typer
from torch import nn

from modelyard.archiver import write_archive
from modelyard.exporter import export
from modelyard.plugins.recertify.certify import Row, recertify
from modelyard.plugins.recertify.environments import Environment, existing, plan
from plugins.recertify.tests.faults import HARMLESS, ONNX_FAULTS, WHEN, interpreter

PLACE = "modelyard_benchmarked"
VERDICTS = ("differs", "within", "same bits", "untouched", "not run")


def main(
    store: Annotated[Path, typer.Argument(help="Folder of the archives; filled once.")],
    models: Annotated[int, typer.Option(min=1)] = 50,
    with_: Annotated[list[str], typer.Option("--with", help="Repeatable.")] = [],  # noqa: B006
    in_: Annotated[list[Path], typer.Option("--in", help="Repeatable.")] = [],  # noqa: B006
    faults: Annotated[int, typer.Option(min=0, help="Networks that are tried with them.")] = 0,
    draws: Annotated[int, typer.Option(help="Inputs of each kind, where a fault is missed.")] = 3,
    formats: Annotated[list[str], typer.Option(help="Repeatable.")] = ["onnx"],  # noqa: B006
) -> None:
    """State false alarms and misses.

    Example: python -m benchmarks.recertify build/recertified --with onnxruntime==1.32.0
    """
    fill(store, models, formats)
    archives = sorted(store.glob("*.mar"))[:models]
    environments = [*plan(with_), *map(existing, in_)]
    if environments:
        began = cpu()
        rows = list(judged(archives, environments))
        print("\n" + "  ".join([f"{'environment':34}", "rows", *VERDICTS]))
        for environment in environments:
            of = [row for row in rows if row.environment == environment.name]
            print(f"{environment.name:34}  {len(of):4}  {counted(of)}")
        print(f"largest share of a tolerance that agrees: {largest(rows):.3g}")
        spent = (cpu() - began) / len(archives)
        print(f"{spent:.1f} s of CPU an archive, {len(environments)} environments")
    if faults:
        seeded(archives[:: max(1, len(archives) // faults)][:faults], draws)


def counted(rows: list[Row]) -> str:
    """Return how many rows have each verdict."""
    verdicts = [row.verdict for row in rows]
    return "  ".join(f"{verdicts.count(each):{len(each)}}" for each in VERDICTS)


def cpu() -> float:
    """Return the seconds that this process and its children have computed."""
    of = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in of)


def judged(archives: list[Path], environments: list[Environment]) -> Iterator[Row]:
    """Yield the rows of all, and print those that say anything."""
    for rows in recertify(archives, environments):
        for row in rows:
            if row.verdict in ("differs", "not run"):
                print(
                    f"{row.archive.name} {row.artifact} {row.environment}: {row.verdict}: {row.why}"
                )
                print(f"    {row.first}")
        yield from rows


def largest(rows: list[Row]) -> float:
    """Return the largest share of what agrees."""
    return max((row.share for row in rows if row.verdict == "within"), default=0.0)


def seeded(archives: list[Path], draws: int) -> None:
    """Print what is said of each wrong kernel, and whether further inputs show what was missed."""
    with tempfile.TemporaryDirectory() as name:
        made = {
            fault: existing(interpreter(Path(name, str(at)), fault))
            for at, fault in enumerate((*ONNX_FAULTS, *WHEN, *HARMLESS))
        }
        rows = list(judged(archives, list(made.values())))
        print("\n" + "  ".join([f"{'seeded':44}", *VERDICTS, "layer named"]))
        for fault, environment in made.items():
            of = [row for row in rows if row.environment == environment.name]
            kinds = ONNX_FAULTS.get(fault, ("",))[0].split()
            named = sum(any(f"({kind}" in row.first for kind in kinds) for row in of)
            print(f"{fault:44}  {counted(of)}  {named if kinds else ''}")
        faults = {each.name: fault for fault, each in made.items() if fault not in HARMLESS}
        for archive in archives:
            missed = {
                row.environment: row
                for row in rows
                if row.archive == archive and row.environment in faults and row.verdict != "differs"
            }
            environments = [each for each in made.values() if each.name in missed]
            for (again,) in [recertify([archive], environments, draws)] if environments else []:
                for row in again:
                    before = missed[row.environment]
                    print(f"{archive.stem}, {faults[row.environment]}: {before.verdict}, "
                          f"{before.share:.2g}; with {row.further} further: {row.verdict}, "
                          f"{row.share:.2g}", flush=True)  # fmt: skip


def fill(store: Path, models: int, formats: list[str]) -> None:
    """Export and archive networks until there are as many."""
    store.mkdir(parents=True, exist_ok=True)
    skipped = json.loads(text.read_text()) if (text := store / "skipped.json").exists() else []
    for name, network, inputs in networks():
        if len(list(store.glob("*.mar"))) >= models:
            return
        if name in skipped or (store / f"{name}.mar").exists():
            continue
        try:
            torch.manual_seed(0)
            archive(store, name, network, inputs, formats)
        # Not every network of the list can be exported, or without a package that is not here.
        except Exception as error:
            print(f"left out {name}: {str(error).splitlines()[:1]}", file=sys.stderr)
            skipped.append(name)
            text.write_text(json.dumps(skipped))


def networks() -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Yield networks that torch alone builds, largest first, with what they take."""
    from tests.breadth.operator_networks import LAYERS, WAVES, network
    from tests.breadth.table import CASES, build

    for name, case in CASES.items():
        if case.library == "torch":
            torch.manual_seed(0)
            yield name, build(case), case.inputs
    for name in (*LAYERS, *WAVES):
        torch.manual_seed(0)
        layered = nn.Sequential(nn.Linear(6, 6), network(name))
        yield (
            "".join(each if each.isalnum() else "_" for each in name),
            layered.eval(),
            ("input:float32[batch=1..4,6]",),
        )


def archive(
    store: Path, name: str, network: nn.Module, inputs: tuple[str, ...], formats: list[str]
) -> None:
    """Export a network, and archive the first artifact."""
    place = sys.modules[PLACE] = ModuleType(PLACE)
    place.make = lambda: network  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, f"{name}.pt")
        torch.save(network.state_dict(), weights)
        export(weights, f"{PLACE}:make", inputs, output_dir=folder, formats=formats, name=name)
        (artifact, *_) = [*Path(folder).glob("*.onnx"), *Path(folder).glob("*.pt2")]
        write_archive(name, artifact=artifact, handler="base_handler", output_dir=store)


if __name__ == "__main__":
    typer.run(main)
