"""The command `modelyard inspect`."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from modelyard.base.terminal import format_bytes, plain_table
from modelyard.exporter.cli import exit_codes, option

inspect_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_PIPE_COLUMNS = 500
_TEXT_SHOWN = 160


@inspect_app.command("inspect")
def inspect_command(
    path: Annotated[
        Path, typer.Argument(metavar="FILE|FOLDER", help="Checkpoint, artifact or archive.")
    ],
    weights_key: Annotated[
        str | None, option("Path of the weights to list, where there are several, as in ema.model.")
    ] = None,
    ema: Annotated[bool, option("List the averaged weights.", "--ema")] = False,
    top: Annotated[int, option("How many tensors to list, the largest; 0 is all.", min=0)] = 20,
    as_json: Annotated[bool, option("Print everything as one JSON object.", "--json")] = False,
    graph: Annotated[
        bool, option("Open its graph in Netron or Model Explorer, until Ctrl-C.", "--graph")
    ] = False,
) -> None:
    """Describe a checkpoint, an artifact or an archive; none of its code runs.

    Checkpoints: files of torch.save, safetensors, and the folders of Lightning, Hugging Face,
    Determined, DeepSpeed, torch.distributed and others. Artifacts: pt2, ONNX, TorchScript.
    Archives: .mar.

    For example:

        modelyard inspect runs/last.ckpt --top 5

    Exit codes: 0 described; 1 it cannot be read, and why; 2 wrong usage.
    """
    # Here, not above: importing torch takes a second that `modelyard --help` need not wait.
    from modelyard.exporter.inspection import describe

    with exit_codes():
        description = describe(path, weights_key, ema=ema)
    if as_json:
        typer.echo(json.dumps(description, indent=2, allow_nan=False))
    else:
        _print(description, top)
    if graph:
        _show_graph(path)


def _show_graph(artifact: Path) -> None:
    from modelyard.exporter.viewers import show_graph
    from modelyard.handlers.errors import LoadError

    with exit_codes("--graph: ", LoadError):
        show_graph(artifact, lambda line: typer.echo(line, err=True))


def _print(description: Mapping[str, Any], top: int) -> None:
    # Rich takes 80 columns for what is not a terminal and would fold names.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    for part in (_summary(description), *_details(description), *_tensor_tables(description, top)):
        console.print(part)
    for name in description.get("refused", []):
        console.print(f"[red]refused[/red] {escape(name)}: not imported")
    for note in description.get("notes", []):
        console.print(f"[yellow]note[/yellow] {escape(note)}")


def _summary(description: Mapping[str, Any]) -> Table:
    weights, model = description.get("weights") or {}, description.get("model") or {}
    hint = description.get("class")
    signed = "yes; `modelyard verify --public-key` checks it" if model.get("is_signed") else None
    pins = [str(pin).partition(" ")[0] for pin in model.get("requirements", ())]
    others = (weights.get("alternatives") or {}).items()
    rows: Mapping[str, Any] = {
        "file": description["file"],
        description["what"]: description["kind"],
        "writer": _joined(" ", description.get("writer"), description.get("writer_version")),
        "read by": description.get("loader"),
        "model": _joined(" ", model.get("name"), model.get("version")),
        "digest": model.get("digest"),
        "signed": signed,
        "handler": model.get("handler"),
        "artifact": (description.get("serialized") or {}).get("name"),
        "explained by": model.get("explained_by"),
        "golden requests": model.get("golden_requests"),
        "requires": _joined(", ", *pins),
        "class": hint and f"{hint['name']} ({hint['source']})",
        "weights at": weights.get("key"),
        "other weights": _joined(", ", *(f"{key} ({n:,} parameters)" for key, n in others)),
        "averaged weights": weights.get("ema_key"),
        "parameters": f"{weights['parameters']:,}" if weights else None,
        "size": format_bytes(weights.get("size_bytes") or None),
        "dtypes": _joined(", ", *(f"{k} × {n}" for k, n in description.get("dtypes", {}).items())),
        "stripped": _joined(", ", *weights.get("prefixes_stripped", ())),
        "tied": _joined("; ", *(" = ".join(names) for names in weights.get("tied", ()))),
        "not finite": _joined(", ", *weights.get("non_finite", ())),
        "takes": _joined(", ", *description.get("takes", ())),
        "batches": description.get("batching"),
        "operators": description.get("operators"),
        "opset": _joined(", ", *description.get("opset", ())),
    }
    table = plain_table(("", "left"), ("", "left"), show_header=False)
    for name, value in rows.items():
        if value not in (None, "", []):
            style = "bold red" if name == "not finite" else "bold"
            table.add_row(f"[{style}]{name}[/{style}]", _cell(value))
    return table


def _details(description: Mapping[str, Any]) -> Iterable[Table]:
    for key in ("hyper_parameters", "training", "labels", "dims"):
        if description.get(key):
            table = plain_table((key.replace("_", "-"), "left"), ("", "left"))
            for name, value in list(description[key].items())[:40]:
                table.add_row(escape(str(name)), _cell(value))
            yield table
    for key in ("inputs", "outputs"):
        if description.get(key):
            table = plain_table((key, "left"), ("dtype", "left"), ("shape", "left"))
            for value in description[key]:
                table.add_row(escape(str(value["name"])), value["dtype"], _shape(value["shape"]))
            yield table
    if description["what"] == "archive" or len(description.get("files", ())) > 1:
        table = plain_table(("file", "left"), ("bytes", "right"), ("sha256", "left"))
        for file in description["files"]:
            table.add_row(escape(file["name"]), f"{file['size_bytes']:,}", file["sha256"][:12])
        yield table


def _tensor_tables(description: Mapping[str, Any], top: int) -> Iterable[Table]:
    tensors = shown = description.get("tensors") or []
    if not tensors:
        return
    heading = f"tensor ({len(tensors)})"
    if top and len(tensors) > top:
        shown = sorted(tensors, key=lambda tensor: -(tensor["size_bytes"] or 0))[:top]
        heading = f"tensor (the {top} largest of {len(tensors)})"
    table = plain_table((heading, "left"), ("dtype", "left"), ("shape", "left"), ("size", "right"))
    for tensor in shown:
        size, name = format_bytes(tensor["size_bytes"]), escape(tensor["name"])
        table.add_row(name, tensor["dtype"], _shape(tensor["shape"]), size)
    total = sum(tensor["size_bytes"] or 0 for tensor in tensors)
    table.add_row("[bold]total[/bold]", "", "", f"[bold]{format_bytes(total)}[/bold]")
    yield table


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}…")


def _shape(shape: Iterable[Any]) -> str:
    return escape(f"[{', '.join(str(size) for size in shape)}]")


def _joined(between: str, *parts: Any) -> str:
    return between.join(str(part) for part in parts if part)
