"""Rows → a table's cells, and a page that holds all it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape

from modelyard.archiver.proven import DIFFERS, SAME, WITHIN
from modelyard.plugins.recertify.certify import NOT_RUN, UNTOUCHED, Row

HEADS = ("ARCHIVE", "ARTIFACT", "RUNS ON", "ANSWERS", "OF TOLERANCE", "CASES", "SHOWN BY")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8884; padding: .4rem .6rem; text-align: left }
td { vertical-align: top }
td.differs { color: #b3261e; font-weight: 600 } td.same-bits, td.within { color: #1b6e3c }
p.detail { margin: .2rem 0; overflow-wrap: anywhere } small { color: #777 }
@media (prefers-color-scheme: dark) {
  body { background: #14171a; color: #e4e6e8 } td.differs { color: #ff8a80 }
  td.same-bits, td.within { color: #7bd88f }
}
"""


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    if row.verdict in (NOT_RUN, UNTOUCHED):
        return (row.archive.name, row.artifact, row.environment, row.verdict, "", "", "")
    golden = f"{row.golden} golden, " if row.golden else ""
    return (
        row.archive.name,
        row.artifact,
        f"{row.runtime} {row.there}",
        row.verdict,
        share_text(row.share),
        f"{row.cases} ({golden}{row.further} further)",
        row.sample,
    )


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


def format_page(rows: Sequence[Row]) -> str:
    """Write a page without a script, a font or a picture of elsewhere."""
    body = []
    for row in rows:
        kind = row.verdict.replace(" ", "-")
        shown = [escape(cell) for cell in cells(row)]
        shown[-1] += "".join(
            f'<p class="detail"><small>{escape(t)}</small></p>' for t in details(row)
        )
        columns = "".join(
            f'<td class="{kind}">{cell}</td>' if place == 3 else f"<td>{cell}</td>"
            for place, cell in enumerate(shown)
        )
        body.append(f"<tr>{columns}</tr>")
    counts = {
        verdict: sum(row.verdict == verdict for row in rows)
        for verdict in (DIFFERS, SAME, WITHIN, NOT_RUN, UNTOUCHED)
    }
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    heads = "".join(f"<th>{head.capitalize()}</th>" for head in HEADS)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Recertified</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><h1>Recertified</h1>"
        f"<p>{escape(said)}. Compared with {escape(_beside(rows))}, "
        f"{datetime.now(UTC):%Y-%m-%d}.</p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></html>\n"
    )


def _beside(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({row.here for row in rows if row.here})) or "nothing"
