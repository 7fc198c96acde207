"""The clouds' routes, beside the inference API's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelyard.plugins.clouds.contract import NAME, CloudPolicy
from modelyard.serve.api.inference import Calls
from modelyard.serve.api.oip import read_object
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.call import PREDICT, Target
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.errors import BadRequest, FileNotInStore, MethodNotAllowed
from modelyard.serve.front.face import Face, Inside
from modelyard.serve.front.models import why_not_ready
from modelyard.serve.http.application import Route
from modelyard.serve.http.connection import RequestResponseCycle

JSON = [(b"content-type", b"application/json")]


def make_face(inside: Inside) -> Face | None:
    """Return the routes of a container that a cloud runs; None in any other server."""
    policy = inside.lifecycle.policy
    if not isinstance(policy, CloudPolicy):
        return None
    return CloudFace(inside, policy)  # type: ignore[abstract]


class CloudFace(Face):
    """Health, predictions, and models that come and go."""

    def __init__(self, inside: Inside, policy: CloudPolicy) -> None:
        self._inside, self._front, self._contract = inside, inside.front, policy.contract
        self._calls = Calls(inside.front, inside.answers)
        self._urls: dict[str, str] = {}
        """Name → what a model was loaded from, as the platform wrote it."""

    def route(self, api: str, route: Route) -> Route:
        """Return what answers the cloud's paths, and hands all others on."""
        if api != "inference":
            return route

        def answer(cycle: RequestResponseCycle, id: str) -> None:
            parts = cycle.path.strip("/").split("/")
            if cycle.path == self._contract.health and cycle.method in ("GET", "HEAD"):
                self._send(cycle, *self._health())
            elif cycle.path == self._contract.predict and not self._contract.has_several:
                self._predict(cycle, NAME)
            elif not self._contract.has_several or parts[0] != "models":
                route(cycle, id)
            elif len(parts) == 3 and parts[2] == "invoke":
                self._predict(cycle, parts[1])
            else:
                cycle.read_body(lambda body: cycle.run(self._manage(cycle, parts[1:], body)))

        return answer

    def _predict(self, cycle: RequestResponseCycle, name: str) -> None:
        if cycle.method != "POST":
            raise MethodNotAllowed(f"{cycle.method} is not taken by {cycle.path}; expected POST")
        self._calls.begin(cycle, Target(PREDICT, [name]))

    def _send(self, cycle: RequestResponseCycle, status: int, body: Any) -> None:
        self._inside.answers.send(cycle, status, JSON, json.dumps(body).encode())

    def _health(self) -> tuple[int, dict[str, str]]:
        """Return 200 where every model answers: not while one loads, and not where one failed."""
        reason = why_not_ready(self._front.registry, self._front.state)
        if reason is None:
            return 200, {"status": "Healthy"}
        why = [f"{m.name}: {m.state[1]}" for m in self._front.registry if not m.takes_requests]
        return 503, {"status": "Unhealthy", "reason": "; ".join([reason, *why])}

    async def _manage(
        self, cycle: RequestResponseCycle, path: list[str], body: Sequence[Buffer]
    ) -> None:
        try:
            self._send(cycle, 200, await self._change(cycle.method, path, b"".join(body)))
        except Exception as error:
            self._inside.answers.send(cycle, *self._inside.answers.error(error, cycle.id))

    async def _change(self, method: str, path: list[str], body: bytes) -> dict[str, Any]:
        """List, load, describe or unload models."""
        registry, lifecycle = self._front.registry, self._inside.lifecycle
        if method == "GET" and not path:
            return {"models": [self._describe(model) for model in registry]}
        if method == "POST" and not path:
            return {"status": await self._load(read_object(body))}
        if len(path) != 1 or method not in ("GET", "DELETE"):
            raise MethodNotAllowed
        model = registry.get(path[0])
        if method == "GET":
            return self._describe(model)
        await lifecycle.unregister(model)
        return {"status": f'Model "{model.name}" unregistered'}

    def _describe(self, model: ModelVersion) -> dict[str, Any]:
        return {"modelName": model.name, "modelUrl": self._urls[model.name]}

    async def _load(self, said: dict[str, Any]) -> str:
        name, url = said.get("model_name"), said.get("url")
        if not isinstance(name, str) or not isinstance(url, str):
            raise BadRequest('expected {"model_name": NAME, "url": FOLDER}')
        settings = self._inside.settings
        folder = Path(url).resolve()
        if not any(folder.is_relative_to(place.resolve()) for place in settings.read_paths):
            raise FileNotInStore(
                f"{url} is not below {', '.join(map(str, settings.read_paths))}, which is what "
                "workers may read; name its folder in MODELYARD_READ_PATHS"
            )
        self._front.registry.refuse_duplicate(name, "1.0")
        archive = self._contract.archive(name, folder, settings.model_store)
        model = await self._inside.lifecycle.register(archive.name, name)
        self._urls[name] = url
        count = len(model.pool.slots)
        return f'Model "{name}" Version: {model.version} registered with {count} initial workers'
