"""Rows → a table's cells, and a page that holds all it needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from modelyard.archiver.proven import DIFFERS, SAME, WITHIN
from modelyard.plugins.recertify.certify import NOT_RUN, UNTOUCHED, Row

HEADS = ("ARCHIVE", "ARTIFACT", "RUNS ON", "ANSWERS", "OF TOLERANCE", "CASES", "SHOWN BY")
VERDICTS = (DIFFERS, SAME, WITHIN, NOT_RUN, UNTOUCHED)


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    if row.verdict in (NOT_RUN, UNTOUCHED):
        return (row.archive.name, row.artifact, row.environment, row.verdict, "", "", "")
    golden = f"{row.golden} golden, " if row.golden else ""
    cases = f"{row.cases} ({golden}{row.further} further)"
    return (row.archive.name, row.artifact, f"{row.runtime} {row.there}", row.verdict,
            share_text(row.share), cases, row.sample)  # fmt: skip


def share_text(share: float) -> str:
    """Write the largest difference over what is allowed."""
    if share > 100:
        return "over 100 times" if math.isfinite(share) else "without bound"
    return f"{share:.2g} times" if share > 1 else f"{100 * share:.2g} %"


def details(row: Row) -> Iterator[str]:
    """Yield what else there is to say of a row."""
    if row.why:
        yield row.why
    if row.moved:
        yield f"{row.moved} rows have their largest value at another place"
    if row.first:
        yield f"the first value that differs: {row.first}"
    if row.note:
        yield f"compared with {row.here}, which is not what proved it: {row.note}"
    if row.written:
        yield f"a line says so in the archive, whose digest is {row.written} now"


def describe_counts(rows: Sequence[Row]) -> str:
    """Say how many rows have which verdict."""
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[each]} {each}" for each in VERDICTS if counts[each])


def format_page(rows: Sequence[Row]) -> str:
    """Write a page without a script, a font or a picture of elsewhere."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        rows=rows, heads=HEADS, cells=cells, details=details, counts=describe_counts(rows),
        beside=", ".join(sorted({row.here for row in rows if row.here})) or "nothing",
        date=f"{datetime.now(UTC):%Y-%m-%d}",
    )  # fmt: skip
