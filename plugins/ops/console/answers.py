"""What a page shows of a model's answer: bounded, as text, in words that people read."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import orjson

from modelyard.archiver.example import TOLERANCE
from modelyard.base import explain_words as say
from modelyard.base.explain_options import check_query
from modelyard.plugins.ops.console.forms import JSON
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import EXPLAIN, Call, Reply, Stream
from modelyard.serve.errors import BadRequest, StreamBroken, http_status

MOST_ROWS = 20
"""Labels of an answer, and explanations, that are shown."""
MOST_WORDS = 1000
MOST_CHARACTERS = 20_000
"""Most characters of an answer that is shown as text."""
MOST_PICTURE_BYTES = 8 << 20
MOST_JSON_BYTES = 8 << 20
"""Most bytes of an answer that is read to be shown; the server does nothing else meanwhile."""
PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp")
SHADES = 5
"""Strengths in which words are coloured."""
OF_OURS = frozenset({
    *("method", "f_input", "f_baseline", "n_steps", "label", "target", "baseline", "output"),
    *("tolerance", "convergence_delta"),
})  # fmt: skip
"""What every explanation of ours says; a handler of an author's own answers what it likes."""


class Row(NamedTuple):
    """A label with its number."""

    name: str
    value: float
    share: float
    """Share of the largest in size, where that is not known to be 1."""


class Word(NamedTuple):
    """A token of a text."""

    text: str
    shade: int
    """Shade from −`SHADES` to `SHADES`."""
    value: str


@dataclass(frozen=True)
class Explained:
    """What an explanation says of itself."""

    title: str
    facts: Sequence[tuple[str, str]]
    warnings: Sequence[str]
    error: float | None
    """How far the values are off, as a share of their size."""
    tolerance: float
    words: Sequence[Word]

    @property
    def tolerance_text(self) -> str:
        """What was asked for, as people read it."""
        return say.percent(self.tolerance)


@dataclass
class Column:
    """One of the answers that stand side by side."""

    title: str
    answered: Answered | None = None
    problem: str = ""
    """Why there is no answer."""
    rows: Sequence[Row] = ()
    hidden_rows: int = 0
    text: str = ""
    picture: str = ""
    """Address that holds the picture."""
    explained: Sequence[Explained] = ()
    value: Any = None
    """The answer, where it is JSON."""

    def show(self, answered: Answered, is_explanation: bool) -> None:
        """Take an answer, in the form in which a page shows it."""
        self.answered = answered
        media = answered.kind.partition(";")[0].strip().lower()
        if media in PICTURES and answered.status == 200:
            self.picture = as_address(answered.body, media)
        elif media != JSON or len(answered.body) > MOST_JSON_BYTES:
            self.text = text_of(answered.body, media)
        else:
            self._show_json(answered, is_explanation)

    def _show_json(self, answered: Answered, is_explanation: bool) -> None:
        try:
            self.value = value = orjson.loads(answered.body)
        except ValueError:
            self.text = text_of(answered.body, JSON)
            return
        if answered.status != 200:
            message = value.get("message") if isinstance(value, dict) else None
            self.problem = cut(str(message or _pretty(value)))
        elif is_explanation and (each := _read_explanations(value)):
            self.explained = each
        elif rows := _rows(value):
            self.rows, self.hidden_rows = rows[:MOST_ROWS], max(0, len(rows) - MOST_ROWS)
        else:
            self.text = _pretty(value)


def difference(columns: Sequence[Column]) -> str:
    """Return whether two predictions agree, in words; empty where there are not two."""
    if len(columns) != 2 or any(each.problem or each.explained for each in columns):
        return ""
    first, second = columns
    if first.value is None or second.value is None:
        return ""
    from modelyard.base.answers import json_difference  # and numpy, which no start waits for

    found = json_difference(second.value, first.value, TOLERANCE)
    if found is None:
        return f"Both answer the same, within {TOLERANCE:g} of the largest number."
    return f"They differ: {cut(found, 300)}."


def as_address(content: bytes, media: str) -> str:
    """Return a picture as an address; empty where it is too large, or not a picture."""
    if len(content) > MOST_PICTURE_BYTES or media not in PICTURES:
        return ""
    return f"data:{media};base64,{base64.b64encode(content).decode()}"


def text_of(content: bytes, media: str) -> str:
    """Return a text to its most characters, of anything else how long it is."""
    if media.startswith("text/") or media in ("", JSON):
        return cut(content.decode("utf-8", "replace"))
    return f"{len(content)} bytes of {cut(media, 100)}"


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text, shortened where it is longer than a page shows."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _pretty(value: Any) -> str:
    return cut(json.dumps(value, indent=1, ensure_ascii=False))


def _rows(value: Any) -> list[Row]:
    """Return labels with their numbers, the largest first; none where it is something else."""
    if not isinstance(value, dict) or not value:
        return []
    if not all(type(each) in (int, float) for each in value.values()):
        return []
    sizes = [abs(each) for each in value.values()]
    are_shares = max(sizes) <= 1 and min(value.values()) >= 0
    most = 1.0 if are_shares else max(sizes)
    rows = [Row(cut(name, 200), each, abs(each) / most) for name, each in value.items()]
    return sorted(rows, key=lambda row: -row.value)


def _read_explanations(value: Any) -> list[Explained]:
    """Return the explanations of an answer; none where it is something else."""
    each = value.get("explanations", [value]) if isinstance(value, dict) else None
    if not isinstance(each, list):
        return []
    if not all(isinstance(one, dict) and one.keys() >= OF_OURS for one in each):
        return []
    try:
        return [_explained(one) for one in each[:MOST_ROWS]]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return []  # of another handler, which has the same names for something else


def _explained(answer: Mapping[str, Any]) -> Explained:
    off, gap, asked = answer.get("error"), answer["convergence_delta"], answer["tolerance"]
    met, left, file = map(answer.get, ("tolerance_met", "net_share", "explained_with"))
    error = "not known of this method"
    if off is not None:
        error = f"{say.error(answer).removeprefix('error ')} of the values' size"
    sums = "this method promises no sum"
    if gap is not None:
        sums = "; ".join(filter(None, (say.signed(gap), say.delta(answer))))
    facts = [("Method", say.method(answer)), ("Output", say.way(answer)), ("Error", error),
             ("Convergence delta", sums)]  # fmt: skip
    if met is not None:
        facts.append(("Tolerance", f"{say.percent(asked)}, {'met' if met else 'not met'}"))
    if left is not None:
        facts.append(("Left after cancelling", say.percent(left)))
    if file:
        facts.append(("Explained with", cut(str(file), 200)))
    said = [*(answer.get("warnings") or ()), (answer.get("check") or {}).get("summary")]
    warnings = [cut(str(each), 500) for each in said if each]
    words = tuple(_words(answer.get("tokens")))
    return Explained(cut(say.question(answer), 300), facts, warnings, off, asked, words)


def _words(tokens: Any) -> Iterable[Word]:
    """Yield the tokens of a text, each with the strength of its word."""
    if not isinstance(tokens, list):
        return
    found = [each for each in tokens if isinstance(each, dict) and not each.get("is_special")]
    found = found[:MOST_WORDS]
    values = [float(each.get("word") or each.get("attribution") or 0) for each in found]
    most = max(map(abs, values), default=0.0) or 1.0
    for each, value in zip(found, values, strict=True):
        yield Word(str(each.get("token", "")), round(SHADES * value / most), say.number(value))


# -- a request of a page, which waits in the model's queue as every client's does ------------------


MOST_STREAMED_BYTES = 1 << 20
"""Longest answer in pieces; a page shows it when it is whole."""


@dataclass(frozen=True)
class Answered:
    """What a model answered, and how long that took."""

    status: int
    kind: str
    """The Content-Type."""
    body: bytes
    took_s: float
    """Time since the request was queued."""
    waited_s: float
    """Time in which it waited for its turn at the worker; 0 in a streamed answer."""
    handled_s: float
    """Time of the handler's call that answered it."""


async def ask(
    model: ModelVersion, kind: int, query: str, body: bytes, media: str, id: str
) -> Answered:
    """Ask a model as a client does that says nothing of itself.

    Args:
        kind: PREDICT or EXPLAIN.
        query: the options of an explanation.
        body: the input.
        media: its Content-Type.
        id: id of the request, for the log.

    Raises:
        ServeError: it is refused, or there is no answer.
    """
    began, status = monotonic(), 500
    try:
        if kind == EXPLAIN and query and model.takes_our_options:
            try:
                check_query(parse_qsl(query, keep_blank_values=True))
            except ValueError as error:
                raise BadRequest(str(error)) from error
        head = (
            b"",
            query.encode(),
            id.encode(),
            b"content-type",
            media.encode("latin-1", "replace"),
        )
        sink: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        # Whose browser has gone waits no more.
        packed = wire.pack_meta(head)
        Call(model, kind, packed, sink, has_left=sink.cancelled, must_fit=False).submit([body])
        reply = await sink
        status = reply.status
    except Exception as error:
        status = http_status(error)[0]
        raise
    finally:
        model.metrics.kinds[kind].answered(status, monotonic() - began)
    fields = wire.unpack_meta(reply.headers)
    headers = dict(zip(map(bytes.lower, fields[::2]), fields[1::2], strict=True))
    return Answered(
        status,
        headers.get(b"content-type", b"").decode("latin-1"),
        await _gather(reply.body) if isinstance(reply.body, Stream) else bytes(reply.body),
        monotonic() - began,
        reply.queue_us / 1e6,
        reply.handler_us / 1e6,
    )


async def _gather(stream: Stream) -> bytes:
    whole = bytearray()
    try:
        async for chunk in stream.read():
            whole += chunk
            if len(whole) > MOST_STREAMED_BYTES:
                raise StreamBroken(f"the answer has more than {MOST_STREAMED_BYTES} bytes")
    finally:
        stream.close()
    return bytes(whole)
