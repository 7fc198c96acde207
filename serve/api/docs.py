"""One page that documents all three APIs, without fetching anything from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles

from modelyard.serve.api.description import EVERYWHERE, error_responses
from modelyard.serve.api.health import OPEN_PATHS


def add_docs(api: FastAPI, others: Mapping[str, FastAPI], own_url: str) -> None:
    """Serve `/docs` and `/openapi.json` of all APIs on `api`.

    Args:
        api: the inference API.
        others: base URL → API on another port; their routes name it as their server.
        own_url: base URL of `api`.
    """
    document = _merged(api, others, own_url)
    # fastapi-offline carries the files of Swagger UI; its own application class is not needed.
    assets = str(files("fastapi_offline") / "static")
    api.mount("/docs/assets", StaticFiles(directory=assets))

    @api.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(document)

    @api.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="Modelyard",
            swagger_js_url="/docs/assets/swagger-ui-bundle.js",
            swagger_css_url="/docs/assets/swagger-ui.css",
            swagger_favicon_url="/docs/assets/favicon.png",
        )


def _merged(api: FastAPI, others: Mapping[str, FastAPI], own_url: str) -> dict[str, Any]:
    """Return one OpenAPI document; a route of another port names its server."""
    document = {**api.openapi(), "servers": [{"url": own_url}]}
    document["paths"] = dict(document["paths"])
    for url, other in others.items():
        for path, item in other.openapi()["paths"].items():
            document["paths"][path] = {**item, "servers": [{"url": url}]}
    for path, item in document["paths"].items():
        for operation in item.values():
            if isinstance(operation, dict):
                operation["responses"].pop("422", None)  # wrong parameters are answered 400
                needs_token = path not in OPEN_PATHS
                for code in (401, *EVERYWHERE) if needs_token else EVERYWHERE:
                    shared = {"$ref": f"#/components/responses/{code}"}
                    operation["responses"].setdefault(str(code), shared)
    document["components"] = {
        "responses": {
            str(code): response for code, response in error_responses(401, *EVERYWHERE).items()
        },
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
    }
    document["security"] = [{"token": []}, {}]
    return document
