"""FastAPI's routes behind an `Application`: everything that is not a call.

Each API has a page that describes it and tries it out, without anything from elsewhere. Every
address in it is relative, so that a browser asks the port, the host and the prefix by which it
came, whatever stands in between.
"""

import asyncio
from collections.abc import Iterable, Mapping, MutableMapping
from functools import partial
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from modelyard.archiver import ArchiveError
from modelyard.base.nearest import did_you_mean
from modelyard.serve.api.description import (
    EVERYWHERE,
    SCHEMAS,
    SECURITY,
    TOKEN_SCHEME,
    error_responses,
)
from modelyard.serve.api.oip import OPEN_PATHS
from modelyard.serve.errors import BadRequest, MethodNotAllowed, NoSuchRoute, ServeError
from modelyard.serve.http.application import Answers
from modelyard.serve.http.connection import RequestResponseCycle
from modelyard.serve.settings import what_is_wrong

Message = MutableMapping[str, Any]
READ = "/v2/"
"""Paths whose routes read bodies."""
_SHOWN = 200
"""Characters of a path, in messages."""
ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
OWN = ("docs.js", "docs.css")
DOCS_PATHS = ("/docs", *(f"/docs/assets/{name}" for name in ASSETS),
              *(f"/docs/own/{name}" for name in OWN))  # fmt: skip
"""A browser that opens a page sends no token. The page says the same on every server; what the
server's own answers to `/openapi.json`, it asks for with the token that its reader types in."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'"
)


class Routes:
    """A FastAPI application whose errors are our JSON.

    Args:
        description: description for the documentation.
        answers: shared with the `Application` in front.
    """

    def __init__(self, title: str, description: str, answers: Answers, *routers: APIRouter) -> None:
        self._answers = answers
        self.elsewhere: Mapping[str, tuple[Routes, int]] = {}
        """Name of each other API → its routes, and the port that it is on."""
        self.fastapi = FastAPI(
            title=title,
            description=description,
            version=version("modelyard"),
            openapi_url=None,  # `add_docs` has a document that says more
        )
        for kind in (ServeError, ArchiveError, Exception):
            self.fastapi.add_exception_handler(kind, self._respond)
        self.fastapi.add_exception_handler(RequestValidationError, self._answer_validation)  # type: ignore[arg-type]
        self.fastapi.add_exception_handler(HTTPException, self._answer_http)  # type: ignore[arg-type]
        self.routes = [
            route for each in routers for route in each.routes if isinstance(route, APIRoute)
        ]
        for router in routers:
            self.fastapi.include_router(router)

    def add_docs(self, name: str, ports: Mapping[str, int]) -> None:
        """Serve `/docs` and `/openapi.json` of the API.

        Args:
            name: name of the API, as in `ports`.
            ports: where all of them listen, for links from one to the other.
        """
        about, page = orjson.dumps(_document(self.fastapi)), _page(self.fastapi.title, name, ports)
        get = partial(self.fastapi.get, include_in_schema=False)

        @get("/openapi.json")
        async def openapi() -> Response:
            return Response(about, media_type="application/json")

        @get("/docs")
        async def docs() -> HTMLResponse:
            return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

        def add_file(path: str, file: Path) -> None:
            @get(path)
            async def send() -> FileResponse:
                return FileResponse(file)

        # fastapi-offline carries the files of Swagger UI; its own application class is not needed.
        swagger = Path(str(files("fastapi_offline"))) / "static"
        for each in ASSETS:
            add_file(f"/docs/assets/{each}", swagger / each)
        for each in OWN:
            add_file(f"/docs/own/{each}", Path(__file__).with_name(each))

    def has(self, path: str) -> bool:
        """Return whether one of the routes is of this path."""
        return any(route.path_regex.match(path) for route in self.routes)

    def __call__(self, cycle: RequestResponseCycle, id: str) -> None:
        """Have a task route a request, and answer it.

        Few need their bodies; the others are not waited for. HEAD is answered as GET; the
        connection leaves the body out.
        """
        if cycle.path.startswith(READ):
            cycle.read_body(lambda parts: cycle.run(self._run(cycle, id, b"".join(parts))))
        else:
            cycle.run(self._run(cycle, id))

    async def _run(self, cycle: RequestResponseCycle, id: str, body: bytes = b"") -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET" if cycle.method == "HEAD" else cycle.method,
            "path": cycle.path,
            "raw_path": cycle.head.raw_path,
            "query_string": cycle.query,
            "root_path": "",
            "headers": cycle.headers,
            "state": {"request_id": id},
            **cycle.connection.endpoints,
        }

        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            """Return the body once: no route looks for a client that leaves."""
            return messages.pop() if messages else await asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                own = message["headers"]
                await cycle.start(status, [*own, *self._answers.begin(cycle, id, status)])
            else:
                await cycle.write(message.get("body", b""), message.get("more_body", False))

        await self.fastapi(scope, receive, send)

    async def _respond(self, request: Request, error: Exception) -> Response:
        status, headers, body = self._answers.error(error, request.state.request_id)
        return Response(body, status, {k.decode(): v.decode() for k, v in headers})

    async def _answer_validation(self, request: Request, error: RequestValidationError) -> Response:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in each['loc'][1:])}: {what_is_wrong(each)}"
            for each in error.errors()
        )
        return await self._respond(request, BadRequest(problems))

    def _what_there_is(self, request: Request) -> str:
        """Return which path is near one that is not there, or which API has it."""
        path = request.url.path[:_SHOWN]
        for name, (routes, port) in self.elsewhere.items():
            if routes.has(path):
                return f"this API has no {path}; the {name} API has it, on port {port}"
        templates = [route.path for route in self.routes]
        return f"this API has no {path}{_near(path, templates)}; GET /docs shows what it has"

    async def _answer_http(self, request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return await self._respond(request, NoSuchRoute(self._what_there_is(request)))
        if error.status_code == 405:
            path = request.url.path
            routes = [route for route in self.routes if route.path_regex.match(path)]
            names = list(dict.fromkeys(name for route in routes for name in route.methods or ()))
            names += ["HEAD"] if "GET" in names else []
            allowed, path = ", ".join(names), path[:_SHOWN]
            said = f"{request.method} is not taken by {path}; expected {allowed}"
            answer = await self._respond(request, MethodNotAllowed(said))
            answer.headers["allow"] = allowed
            return answer
        return await self._respond(request, BadRequest(str(error.detail)))


def _near(path: str, templates: Iterable[str]) -> str:
    """Return which path was likely meant; the names in it stay those that were asked for."""
    asked = path.strip("/").split("/")
    known = []
    for template in templates:
        parts = template.strip("/").split("/")
        if len(parts) == len(asked):
            pairs = zip(parts, asked, strict=True)
            known.append("/" + "/".join(own if part[:1] == "{" else part for part, own in pairs))
        else:
            known.append(template)
    return did_you_mean(path, known)


def _page(title: str, name: str, ports: Mapping[str, int]) -> str:
    links = [
        f"<a aria-current=page>{each}</a>"
        if each == name
        else f"<a data-port={port} title='on port {port} of the server'>{each}</a>"
        for each, port in ports.items()
    ]
    text = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
    fields = {"TITLE": escape(title), "PORT": str(ports[name]), "NAV": "".join(links)}
    for field, value in fields.items():
        text = text.replace(field, value)
    return text


def _document(api: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an API, whose server is where the document came from."""
    document = {**api.openapi(), "servers": [{"url": "."}]}
    for path, item in document["paths"].items():
        for operation in item.values():
            operation["responses"].pop("422", None)  # wrong parameters are answered 400
            is_open = path in OPEN_PATHS
            if is_open:
                operation["security"] = []
            for code in EVERYWHERE if is_open else (401, *EVERYWHERE):
                shared = {"$ref": f"#/components/responses/{code}"}
                operation["responses"].setdefault(str(code), shared)
    document["components"] = {
        "responses": {
            str(code): response for code, response in error_responses(401, *EVERYWHERE).items()
        },
        "schemas": SCHEMAS,
        **TOKEN_SCHEME,
    }
    document["security"] = SECURITY
    return document
