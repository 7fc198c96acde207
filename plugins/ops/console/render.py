"""Pages from templates, whose every value is escaped; their headers; how numbers are written."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from modelyard.plugins.ops.console.readings import Percentile
from modelyard.serve.errors import NoSuchRoute
from modelyard.serve.http.connection import Answer, Headers
from modelyard.serve.log import escape_controls

HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing runs but our own files, and no style stands in a page: what is put into one does nothing
there."""
HEADERS: Headers = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    # Of another origin than ours none; `no-referrer` would have forms say `Origin: null`.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
KINDS = {
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".LICENSE": b"text/plain; charset=utf-8",
}


class Renderer:
    """Makes answers of templates and files."""

    def __init__(self) -> None:
        self.headers = HEADERS
        self._static = {
            file.name: (KINDS[file.suffix], file.read_bytes())
            for file in sorted((HERE / "static").iterdir())
            if file.suffix in KINDS
        }
        self._digests = {
            name: hashlib.sha256(content).hexdigest()[:12]
            for name, (_, content) in self._static.items()
        }
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters.update(FILTERS)
        self._environment.globals["digests"] = self._digests
        self._compiling: asyncio.Future[Any] | None = None

    async def prepare(self) -> None:
        """Compile the templates, once, beside the loop: it takes as long as many requests."""
        if self._compiling is None:
            made = self._environment
            compiling = asyncio.to_thread(lambda: [*map(made.get_template, made.list_templates())])
            self._compiling = asyncio.ensure_future(compiling)
        await self._compiling

    def text(self, template: str, values: Mapping[str, object]) -> str:
        """Return what a template makes of values."""
        return self._environment.get_template(template).render(values)

    def static(self, name: str) -> Answer:
        """Return a file that pages load; its address names its content, so it is kept for good.

        Raises:
            NoSuchRoute: there is none of that name.
        """
        if name not in self._static:
            raise NoSuchRoute
        kind, content = self._static[name]
        kept = b"public, max-age=31536000, immutable"
        return 200, [(b"content-type", kind), (b"cache-control", kept)], content


# -- numbers and times ---------------------------------------------------------------------------

NOTHING = "–"
"""Text where there is no number yet."""
THIN = "\u202f"
"""Space between thousands, which does not break."""


def count(value: int) -> str:
    """Write a whole number, thousands apart."""
    return f"{value:,}".replace(",", THIN)


def number(value: float | None) -> str:
    """Write a mean."""
    return NOTHING if value is None else f"{value:.1f}"


def rate(value: float) -> str:
    """Write how many there are in a second."""
    if value >= 100:
        return count(round(value))
    return "0" if value == 0 else f"{value:.1f}"


def duration(seconds: float | None) -> str:
    """Write a time of microseconds to hours, to three digits."""
    if seconds is None:
        return NOTHING
    if seconds == float("inf"):
        return "without end"
    for below, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if seconds < below:
            return f"{seconds * factor:.3g}{THIN}{unit}"
    return f"{seconds / 60:.3g}{THIN}min"


def bounds(of: Percentile) -> str:
    """Write between what a percentile lies; a histogram knows no more."""
    if of.high == float("inf"):
        return f"above {duration(of.low)}"
    return f"between {duration(of.low)} and {duration(of.high)}"


def size(bytes: int | None) -> str:
    """Write an amount of memory."""
    if bytes is None:
        return NOTHING
    for unit in ("B", "KB", "MB"):
        if bytes < 1000:
            return f"{bytes:.3g}{THIN}{unit}"
        bytes = bytes / 1000  # type: ignore[assignment]
    return f"{bytes:.3g}{THIN}GB"


def percent(share: float) -> str:
    """Write a share."""
    return f"{share * 100:.0f}{THIN}%"


def clock(at: float) -> str:
    """Write a time of now, to the millisecond, in UTC."""
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    return f"{whole}.{int(at % 1 * 1000):03d}"


FILTERS: dict[str, Callable[..., str]] = {
    "bounds": bounds,
    "bytes": size,
    "clock": clock,
    "count": count,
    "duration": duration,
    "number": number,
    "percent": percent,
    "rate": rate,
    "visible": escape_controls,
}
