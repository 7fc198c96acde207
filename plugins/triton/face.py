"""The extensions by HTTP; by gRPC its face asks for the same answers, by the names of its calls.

https://github.com/triton-inference-server/server/tree/main/docs/protocol
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request

from modelyard.plugins.triton.describe import Descriptions
from modelyard.plugins.triton.memory import Regions
from modelyard.serve.api.description import ModelName, error_responses, of_model
from modelyard.serve.api.oip import read_object
from modelyard.serve.front.begin import Headers
from modelyard.serve.front.face import Face, Inside
from modelyard.serve.http.application import Check

MEMORY = ("/v2/systemsharedmemory/", "/v2/cudasharedmemory/")
KINDS = {"systemsharedmemory": "System", "cudasharedmemory": "Cuda"}


def _value(setting: Mapping[str, Any]) -> Any:
    """Return the one value of a setting's message."""
    (found,) = setting.values()
    return found[0] if isinstance(found, list) else found


class Triton(Face):
    """The extensions of one server."""

    def __init__(self, inside: Inside) -> None:
        regions = Regions(inside.settings, inside.budget)
        self._calls = inside.front.extensions.calls
        self._calls |= {**Descriptions(inside.front, inside.settings).calls(), **regions.calls()}
        names = inside.front.extensions.names
        names += ["model_configuration", "statistics"]
        if inside.settings.shared_memory:
            names.append("system_shared_memory")
            inside.front.extensions.bring = regions.bring
        self._check = inside.checks["inference"](lambda _: "predict")

    def guard(self, api: str, check: Check) -> Check:
        """Return the check of tokens; shared memory is for those who may predict."""

        def guarded(path: str, headers: Headers) -> None:
            (self._check if path.startswith(MEMORY) else check)(path, headers)

        return guarded if api == "inference" else check

    @property
    def routes(self) -> Mapping[str, Sequence[APIRouter]]:
        """The routes that the inference API has too."""
        router = APIRouter(prefix="/v2", tags=["Triton"], responses=error_responses(400, 404))
        self._add_descriptions(router)
        self._add_settings(router)
        self._add_memory(router)
        return {"inference": [router]}

    def _ask(self, call: str, headers: Headers = (), **fields: Any) -> dict[str, Any]:  # type: ignore[assignment]
        return self._calls[call](fields, headers)

    def _add_descriptions(self, router: APIRouter) -> None:
        @router.get("/models/stats", summary="Statistics of all models")
        async def all_statistics() -> dict[str, Any]:
            """Counts and times of every version, since it is served."""
            return self._ask("ModelStatistics")

        one, of_version = "/models/{model}", "/models/{model}/versions/{version}"

        @of_model(
            router, "GET", ("statistics", f"{one}/stats", "Statistics of a model's versions"),
            ("version_statistics", f"{of_version}/stats", "Statistics of a version"),
        )  # fmt: skip
        async def statistics(model: ModelName, version: str | None) -> dict[str, Any]:
            """Counts and times, since a version is served."""
            return self._ask("ModelStatistics", name=model, version=version)

        @of_model(
            router, "GET", ("configuration", f"{one}/config", "A model's configuration"),
            ("version_configuration", f"{of_version}/config", "A version's configuration"),
        )  # fmt: skip
        async def configuration(model: ModelName, version: str | None) -> dict[str, Any]:
            """The configuration as Triton would have it."""
            found: dict[str, Any] = self._ask("ModelConfig", name=model, version=version)["config"]
            return found

    def _add_settings(self, router: APIRouter) -> None:
        async def setting(request: Request) -> dict[str, Any]:
            """The state; nothing can be changed by this route."""
            is_trace = request.url.path.endswith("/trace/setting")
            settings = read_object(await request.body()) if request.method == "POST" else {}
            model = request.path_params.get("model", "")
            call = "TraceSetting" if is_trace else "LogSettings"
            found = self._ask(call, settings=settings, model_name=model)["settings"]
            return {
                name: each["value"] if name == "trace_level" else _value(each)
                for name, each in found.items()
            }

        for path, summary in (
            ("/trace/setting", "Settings of traces"),
            ("/models/{model}/trace/setting", "Settings of a model's traces"),
            ("/logging", "Settings of logs"),
        ):
            for method in ("GET", "POST"):
                name = f"{method.lower()} {summary}"
                router.add_api_route(
                    path, setting, methods=[method], summary=summary, name=name,
                    responses=error_responses(403), include_in_schema="{model}" not in path,
                )  # fmt: skip

    def _add_memory(self, router: APIRouter) -> None:
        def add(kind: str, call: str) -> None:
            async def status(region: str = "") -> list[dict[str, Any]]:
                """The regions that are registered."""
                return list(self._ask(f"{call}SharedMemoryStatus", name=region)["regions"].values())

            async def register(region: str, request: Request) -> dict[str, Any]:
                """Register a region, if the setting `shared_memory` is on."""
                fields = {**read_object(await request.body()), "name": region}
                headers: Headers = request.scope["headers"]
                return self._ask(f"{call}SharedMemoryRegister", headers, **fields)

            async def unregister(region: str = "") -> dict[str, Any]:
                """Forget a region, or all."""
                return self._ask(f"{call}SharedMemoryUnregister", name=region)

            for path, method, answer in (
                ("/status", "GET", status),
                ("/region/{region}/status", "GET", status),
                ("/region/{region}/register", "POST", register),
                ("/unregister", "POST", unregister),
                ("/region/{region}/unregister", "POST", unregister),
            ):
                router.add_api_route(
                    f"/{kind}{path}", answer, methods=[method], name=f"{kind}{path}",
                    summary=f"{call} shared memory", responses=error_responses(403, 409),
                )  # fmt: skip

        for kind, call in KINDS.items():
            add(kind, call)
