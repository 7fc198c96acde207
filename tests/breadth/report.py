"""Results → what is printed, and the table of docs/breadth.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.breadth.table import CASES

START, END = "<!-- table: make nightly -->", "<!-- end of table -->"
HEAD = (
    "architecture",
    "library",
    "saved as",
    "bare pt2",
    "bare ONNX",
    "exported",
    "parity",
    "batchable",
    "CPU s",
    "served",
)
Result = dict[str, Any]


def is_right(verdict: str | None) -> bool:
    """Return whether a call gave a right program."""
    return verdict == "ok"


def bare_right(result: Result) -> list[str]:
    """Return the formats that torch's own calls give rightly."""
    bare = result.get("bare") or {}
    return [kind for kind in ("pt2", "onnx") if is_right(bare.get(kind))]


def ours_right(result: Result) -> list[str]:
    """Return the formats that were written, and are right by the matrix's own inputs."""
    right = result.get("right", {})
    return [kind for kind in result["formats"] if is_right(right.get(kind))]


def print_summary(results: Mapping[str, Result]) -> str:
    """Return a line for each result."""
    return "\n".join(
        f"{name:28} bare {'+'.join(bare_right(result)) or '-':9} "
        f"ours {'+'.join(sorted(ours_right(result))) or '-':9} "
        f"served {result['served'][:60] or '-':4} {result.get('cpu_s', 0):6.1f} s  "
        f"{(result.get('broken') or _last(result.get('message', '')))[-220:]}"
        for name, result in results.items()
    )


def counts(results: Mapping[str, Result]) -> str:
    """Return how much of what torch's calls get right is exported, and served."""
    lines = []
    for title, is_new in (("looked at while building", False), ("not looked at", True)):
        part = {n: r for n, r in results.items() if CASES[n].is_new == is_new}
        bare = {n: r for n, r in part.items() if bare_right(r)}
        ours = [n for n, r in bare.items() if ours_right(r)]
        both = [n for n, r in bare.items() if set(bare_right(r)) <= set(ours_right(r))]
        more = [n for n, r in part.items() if r.get("bare") and n not in bare and ours_right(r)]
        written = [n for n, r in part.items() if ours_right(r)]
        served = [n for n, r in part.items() if is_right(r["served"])]
        lines.append(
            f"- Families {title}: {len(part)} architectures, "
            f"{len(written)} exported. A bare call is right for "
            f"{len(bare)}; of these {len(ours)} are exported ({len(both)} in every format that "
            f"a bare call gets right), and {len(more)} that no bare call gets right. "
            f"{len(served)} answer through a worker."
        )
    dead = sum(bool(r["dead"]) for r in results.values())
    tracebacks = sum(bool(r["traceback"]) for r in results.values())
    alone = sum(not r.get("bare") for r in results.values())
    unasked = sum(bool(r["formats"]) and not r["served"] for r in results.values())
    if alone or unasked:
        lines.append(
            f"- Left out of this run, and empty below: torch's own calls of {alone}, and serving "
            f"of {unasked} architectures."
        )
    return "\n".join([*lines, f"- Tracebacks: {tracebacks}. Workers that died: {dead}."])


def write_table(results: Mapping[str, Result], file: Path | None) -> str:
    """Return the counts; write them and the table between the marks of a markdown file."""
    text = counts(results)
    if file is not None:
        rows = [HEAD, *map(_row, results, results.values())]
        write_between(file, START, f"{text}\n\n{table(rows)}")
    return text


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of markdown, its head first."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_between(file: Path, start: str, text: str) -> None:
    """Replace what a markdown file has from a mark to the end of a table."""
    before, _, rest = file.read_text(encoding="utf-8").partition(start)
    _, _, after = rest.partition(END)
    file.write_text(f"{before}{start}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _row(name: str, result: Result) -> tuple[str, ...]:
    case, bare, formats = CASES[name], result.get("bare") or {}, result["formats"]
    found = [each["max_abs"] for each in formats.values() if each["max_abs"] is not None]
    batchable = {each["batchable"] for each in formats.values()}
    return (
        f"{name}{'*' if case.is_new else ''}",
        case.library,
        case.saved,
        _verdict(bare.get("pt2")),
        _verdict(bare.get("onnx")),
        ", ".join(sorted(ours_right(result), reverse=True)) or "no",
        f"{max(found):.0e}" if found else "",
        {True: "yes", False: "no"}.get(batchable.pop(), "") if len(batchable) == 1 else "",
        f"{result['cpu_s']:.0f}" if "cpu_s" in result else "",
        "" if formats and not result["served"] else "yes" if is_right(result["served"]) else "no",
    )


def _verdict(text: str | None) -> str:
    return "right" if text == "ok" else (text or "").partition(" ")[0].lower()


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
