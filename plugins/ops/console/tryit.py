"""Pages of one version: what its archive proves, and what it answers to an input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import parse_qsl, urlencode

from modelyard.archiver import ArchiveError
from modelyard.archiver.example import content_type
from modelyard.base.explain_options import EXPLAIN_OPTIONS
from modelyard.plugins.ops.console.answers import (
    PICTURES,
    Column,
    as_address,
    cut,
    difference,
    text_of,
)
from modelyard.plugins.ops.console.archives import Archives, Known
from modelyard.plugins.ops.console.ask import ask
from modelyard.plugins.ops.console.forms import JSON, Form, form_of, write_body
from modelyard.plugins.ops.console.models import ModelPages
from modelyard.plugins.ops.console.render import Renderer
from modelyard.plugins.ops.console.visit import Page, Visit
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT, Target
from modelyard.serve.errors import BadRequest, ServeError
from modelyard.serve.front.begin import Front
from modelyard.serve.http.connection import Answer
from modelyard.serve.settings import Settings

TRY, ARCHIVE = "/try", "/archive"
FORM_ROOM_BYTES = 1 << 16
"""Of a form beside its file."""
MOST_ASKED = 4
"""Requests that one form makes: two explanations, each with its picture."""
METHODS = EXPLAIN_OPTIONS["method"].choices


class TryPages:
    """The pages.

    Args:
        models: pages of the same versions.
        renderer: makes their HTML.
        front: the way to the models.
        settings: of the server.
    """

    def __init__(
        self, models: ModelPages, renderer: Renderer, front: Front, settings: Settings
    ) -> None:
        self._models = models
        self._renderer = renderer
        self._front = front
        self._most_bytes = settings.max_request_bytes
        self._archives = Archives(settings)

    def pages(self) -> Sequence[Page]:
        """Return them all."""
        version = "/models/{model}/{version}"
        most = self._most_bytes + FORM_ROOM_BYTES
        return [
            Page("GET", f"{version}{ARCHIVE}", "view", self._archive),
            Page("GET", f"{version}{TRY}", "view", self._form),
            Page("POST", f"{version}{TRY}/predict", "predict", self._predict, most),
            Page("POST", f"{version}{TRY}/explain", "explain", self._explain, most),
        ]

    async def _read(self, model: ModelVersion) -> tuple[Known | None, str]:
        """Return what the archive of a version says, or why nobody can tell."""
        try:
            return await self._archives.read(model), ""
        except ArchiveError as error:
            return None, str(error)

    # -- the archive -----------------------------------------------------------------------------

    async def _archive(self, visit: Visit) -> Answer:
        model = self._models.find(visit)
        known, problem = await self._read(model)
        values = {
            "certificate": known.certificate if known else None,
            "problem": problem,
            "as_address": as_address,
            "text_of": text_of,
            "pictures": PICTURES,
            "cut": cut,
        }
        common = self._models.common(model, ARCHIVE)
        return self._renderer.page(visit, "archive.html", {**common, **values})

    # -- trying it -------------------------------------------------------------------------------

    async def _form(self, visit: Visit) -> Answer:
        model = self._models.find(visit)
        known, _ = await self._read(model)
        return self._page(visit, model, known, [])

    def _page(
        self, visit: Visit, model: ModelVersion, known: Known | None, columns: Sequence[Column]
    ) -> Answer:
        values = {
            "form": form_of(model, known.features if known else None),
            "golden": known.certificate.golden if known else (),
            "methods": METHODS,
            "timeout_ms": int(MOST_ASKED * model.request_timeout_s * 1000),
            "as_address": as_address,
            **_shown(columns),
        }
        return self._renderer.page(visit, "try.html", {**self._models.common(model, TRY), **values})

    async def _predict(self, visit: Visit) -> Answer:
        return await self._answer(visit, PREDICT)

    async def _explain(self, visit: Visit) -> Answer:
        return await self._answer(visit, EXPLAIN)

    async def _answer(self, visit: Visit, kind: int) -> Answer:
        """Ask once for each column, one after the other: their times are to be compared."""
        model = self._models.find(visit)
        known, _ = await self._read(model)
        columns: list[Column] = []
        try:
            form = form_of(model, known.features if known else None)
            body, body_kind = _read_input(visit, form, known)
            for version, query, title in _asked(visit.fields, model, kind):
                column = Column(title)
                columns.append(column)
                target = Target(kind, [model.name, version])
                await self._fill(column, target, query, body, body_kind, visit.id)
        except BadRequest as error:
            columns = [Column("Nothing was asked", problem=str(error))]
        if visit.is_partial():
            return self._renderer.part("answers.html", _shown(columns))
        return self._page(visit, model, known, columns)

    async def _fill(
        self, column: Column, target: Target, query: Mapping[str, str], body: bytes, kind: str,
        id: str,
    ) -> None:  # fmt: skip
        """Ask, and put the answer into a column; of an explanation, what is drawn too."""
        is_explanation = target.kind == EXPLAIN
        try:
            answered = await ask(self._front, target, urlencode(query).encode(), body, kind, id)
            column.show(answered, is_explanation)
            if column.explained and not column.explained[0].words:  # which are no picture
                spelled = urlencode({**query, "format": "png"}).encode()
                drawn = await ask(self._front, target, spelled, body, kind, id)
                if drawn.status == 200:
                    column.picture = as_address(drawn.body, drawn.kind)
        except ServeError as error:
            column.problem = str(error)


def _shown(columns: Sequence[Column]) -> dict[str, object]:
    return {"columns": columns, "difference": difference(columns)}


def _asked(
    fields: Mapping[str, str], model: ModelVersion, kind: int
) -> Iterable[tuple[str, Mapping[str, str], str]]:
    """Yield version, options and title of each answer that is wanted.

    Raises:
        BadRequest: the further options are none.
    """
    versions = [model.version, fields.get("version2") or model.version]
    if kind == PREDICT:
        for version in dict.fromkeys(versions):
            yield version, {}, f"{model.name} {version}"
        return
    written = fields.get("more", "").strip()
    more = dict(parse_qsl(written, keep_blank_values=True))
    if written and not more:
        raise BadRequest("further options: expected NAME=VALUE, with & between several")
    if target := fields.get("target", "").strip():
        more["target"] = target
    methods = [fields.get("method") or METHODS[0]]
    methods.append(fields.get("method2") or methods[0])
    for version, method in dict.fromkeys(zip(versions, methods, strict=True)):
        options = {**more, "method": method} if model.takes_our_options else more
        yield version, options, f"{model.name} {version}: {method.replace('_', ' ')}"


def _read_input(visit: Visit, form: Form, known: Known | None) -> tuple[bytes, str]:
    """Return body and Content-Type of what was entered.

    Raises:
        BadRequest: nothing was, or something else than expected.
    """
    way = visit.fields.get("way", "")
    if way == "file":
        upload = visit.files.get("file")
        if upload is None or not upload.content:
            raise BadRequest("no file is chosen, or it is empty")
        return upload.content, content_type(upload.name)
    if way == "entries":
        contents = {name: upload.content for name, upload in visit.files.items()}
        return write_body(form.entries, visit.fields, contents), JSON
    if way == "json":
        if not (text := visit.fields.get("json", "")).strip():
            raise BadRequest("nothing is entered; expected the body of a request, as JSON")
        return text.encode(), JSON
    golden = known.certificate.golden if known else ()
    place = way.removeprefix("golden-")
    if place.isdecimal() and int(place[:4]) < len(golden):
        case = golden[int(place[:4])]
        if case.request is not None:
            return case.request, case.golden.content_type
    raise BadRequest(f"{way[:40]!a} is not a way to enter an input; choose one of the form's")
