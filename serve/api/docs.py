"""A page for each API that describes it and tries it out, without anything from elsewhere.

Every address in it is relative, so that a browser asks the port, the host and the prefix by which
it came, whatever stands in between.
"""

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse

from modelyard.serve.api.description import EVERYWHERE, SCHEMAS, error_responses
from modelyard.serve.api.oip import OPEN_PATHS

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


def add_docs(api: FastAPI, name: str, ports: Mapping[str, int]) -> None:
    """Serve `/docs` and `/openapi.json` of an API.

    Args:
        name: name of the API, as in `ports`.
        ports: where all of them listen, for links from one to the other.
    """
    document = _document(api)
    page = _page(api.title, name, ports)

    @api.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(document)

    @api.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

    # fastapi-offline carries the files of Swagger UI; its own application class is not needed.
    for folder, place, names in (
        ("assets", Path(str(files("fastapi_offline"))) / "static", ASSETS),
        ("own", Path(__file__).parent, OWN),
    ):
        for each in names:
            _add_file(api, f"/docs/{folder}/{each}", place / each)


def _add_file(api: FastAPI, path: str, file: Path) -> None:
    @api.get(path, include_in_schema=False)
    async def send() -> FileResponse:
        return FileResponse(file)


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
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
    }
    document["security"] = [{"token": []}, {}]
    return document
