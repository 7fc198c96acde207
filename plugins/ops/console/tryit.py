"""Pages of one version: what its archive proves, and what it answers to an input."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from urllib.parse import parse_qsl, urlencode

from modelyard.archiver import ArchiveError, open_archive
from modelyard.archiver.errors import RefusedArchive
from modelyard.archiver.example import content_type
from modelyard.archiver.signing import read_trusted_keys
from modelyard.base.explain_options import EXPLAIN_OPTIONS
from modelyard.plugins.ops.console.answers import (
    PICTURES,
    Column,
    as_address,
    ask,
    cut,
    difference,
    text_of,
)
from modelyard.plugins.ops.console.certificate import Certificate, read_certificate
from modelyard.plugins.ops.console.forms import JSON, Form, form_of, write_body
from modelyard.plugins.ops.console.models import ModelPages
from modelyard.plugins.ops.console.visit import Page, Visit
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT
from modelyard.serve.errors import BadRequest, ServeError
from modelyard.serve.http.connection import Answer
from modelyard.serve.settings import Settings

TRY, ARCHIVE = "/try", "/archive"
FORM_ROOM_BYTES = 1 << 16
"""Room for the rest of a form beside its file."""
MOST_ASKED = 4
"""Requests that one form makes: two explanations, each with its picture."""
KEPT_ARCHIVES = 8
"""Archives; each takes the golden requests and the components that a page shows, 2 MB at most."""
METHODS = EXPLAIN_OPTIONS["method"].choices


class Archives:
    """Reads the archives of registered versions, one at a time: each is hashed from end to end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = asyncio.Lock()
        self._kept = lru_cache(KEPT_ARCHIVES)(self._open)

    async def read(self, model: ModelVersion) -> Certificate:
        """Return what the archive of a version says.

        Raises:
            ArchiveError: it is gone from the store, or is no longer what was registered.
        """
        keys = self._settings.trusted_keys
        # One of the trusted keys may have been taken out.
        changed_at = keys.stat().st_mtime if keys is not None and keys.exists() else 0.0
        async with self._lock:
            return await asyncio.to_thread(self._kept, model.file, model.digest, changed_at)

    def _open(self, file: str, digest: str, _: float) -> Certificate:
        keys = self._settings.trusted_keys
        trust = read_trusted_keys(keys) if keys is not None else None
        with open_archive(self._settings.model_store / file) as archive:
            if archive.digest != digest:
                raise RefusedArchive(
                    f"{file} has changed in the store since it was registered: its digest is "
                    f"{archive.digest[:12]}…, that of the version {digest[:12]}…"
                )
            return read_certificate(archive, trust)


class TryPages:
    """The pages.

    Args:
        models: pages of the same versions.
        settings: settings of the server.
    """

    def __init__(self, models: ModelPages, settings: Settings) -> None:
        self._models = models
        self._most_bytes = settings.max_request_bytes
        self._archives = Archives(settings)

    def pages(self) -> Sequence[Page]:
        """Return them all."""
        version = "/models/{model}/{version}"
        most = self._most_bytes + FORM_ROOM_BYTES
        return [
            Page("GET", f"{version}{ARCHIVE}", "view", self._archive),
            Page("GET", f"{version}{TRY}", "view", self._form),
            *(
                Page("POST", f"{version}{TRY}/{verb}", verb, partial(self._answer, kind), most)
                for verb, kind in (("predict", PREDICT), ("explain", EXPLAIN))
            ),
        ]

    async def _read(self, model: ModelVersion) -> tuple[Certificate | None, str]:
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
            "certificate": known,
            "problem": problem,
            "as_address": as_address,
            "text_of": text_of,
            "pictures": PICTURES,
            "cut": cut,
        }
        common = self._models.common(model, ARCHIVE)
        return visit.page("archive.html", {**common, **values})

    # -- trying it -------------------------------------------------------------------------------

    async def _form(self, visit: Visit) -> Answer:
        model = self._models.find(visit)
        known, _ = await self._read(model)
        return self._page(visit, model, known, [])

    def _page(
        self,
        visit: Visit,
        model: ModelVersion,
        known: Certificate | None,
        columns: Sequence[Column],
    ) -> Answer:
        values = {
            "form": form_of(model, known.features if known else None),
            "golden": known.golden if known else (),
            "methods": METHODS,
            "timeout_ms": int(MOST_ASKED * model.request_timeout_s * 1000),
            "as_address": as_address,
            **_shown(columns),
        }
        return visit.page("try.html", {**self._models.common(model, TRY), **values})

    async def _answer(self, kind: int, visit: Visit) -> Answer:
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
                await self._fill(
                    column, (model.name, version), kind, query, body, body_kind, visit.id
                )
        except BadRequest as error:
            columns = [Column("Nothing was asked", problem=str(error))]
        if visit.is_partial():
            return visit.part("answers.html", _shown(columns))
        return self._page(visit, model, known, columns)

    async def _fill(
        self, column: Column, place: tuple[str, str], kind: int, query: Mapping[str, str],
        body: bytes, media: str, id: str,
    ) -> None:  # fmt: skip
        """Ask, and put the answer into a column; of an explanation, what is drawn too."""
        try:
            model = self._models.get(*place)
            answered = await ask(model, kind, urlencode(query), body, media, id)
            column.show(answered, kind == EXPLAIN)
            if column.explained and not column.explained[0].words:  # which are no picture
                spelled = urlencode({**query, "format": "png"})
                drawn = await ask(model, kind, spelled, body, media, id)
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


def _read_input(visit: Visit, form: Form, known: Certificate | None) -> tuple[bytes, str]:
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
    golden = known.golden if known else ()
    place = way.removeprefix("golden-")
    if place.isdecimal() and int(place[:4]) < len(golden):
        case = golden[int(place[:4])]
        if case.request is not None:
            return case.request, case.golden.content_type
    raise BadRequest(f"{way[:40]!a} is not a way to enter an input; choose one of the form's")
