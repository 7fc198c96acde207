"""What this plug-in is to a server: its drift of reasons, its roll-outs, its console."""

from __future__ import annotations

from modelyard.plugins.ops.console.app import Console, is_console
from modelyard.plugins.ops.console.events import Alerts, Events
from modelyard.plugins.ops.console.log import LogPages, attach
from modelyard.plugins.ops.console.models import ModelPages
from modelyard.plugins.ops.console.readings import Watch
from modelyard.plugins.ops.console.render import Renderer
from modelyard.plugins.ops.console.rollout import RolloutPages
from modelyard.plugins.ops.console.tryit import TryPages
from modelyard.plugins.ops.reasons import Drifts
from modelyard.plugins.ops.rollout.control import Rollouts, rollout_routes
from modelyard.serve.control.register import Report
from modelyard.serve.control.state import StateDir, read_json
from modelyard.serve.http.connection import RequestResponseCycle
from modelyard.serve.observers import Host


def how_it_ended(state: StateDir) -> str:
    """Return that the server before this one of the same state folder died, where it did."""
    try:
        pid = read_json(state.server_file)["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"; the one before, process {pid}, died: nothing stopped it as it should be"


class Ops:
    """The `Observer` of one server."""

    def __init__(self, host: Host) -> None:
        lifecycle = host.lifecycle
        registry, settings = lifecycle.registry, lifecycle.policy.settings
        registry.on_change.append(Drifts(settings, host.metrics, registry).changed)
        self._rollouts = rollouts = Rollouts(lifecycle, host.metrics)
        self.routers = [rollout_routes(rollouts)]
        self._watch, self._events = Watch(registry), Events()
        self._watch.on_reading = self._events.look
        self._alerts = Alerts(settings)
        self._events.on_event.append(self._alerts)
        registry.on_change.append(self._events.changed)
        registry.on_event.append(self._events.told)
        self._before = how_it_ended(lifecycle.policy.state)
        models = ModelPages(lifecycle, self._watch, self._events, host.may_register)
        log = LogPages(attach(host.unlogged), models, lifecycle.policy.state.log_file.parent)
        tries = TryPages(models, settings)
        pages = [*models.pages(), *tries.pages(), *log.pages()]
        if host.may_register:
            pages += RolloutPages(models, rollouts, settings.model_store).pages()
        self._console = Console(pages, Renderer(), host.grants, host.answers)

    def owns(self, path: str) -> bool:
        """Return whether a path is the console's, which signs people in itself."""
        return is_console(path)

    def __call__(self, cycle: RequestResponseCycle, id: str) -> None:
        """Answer a request for a page of the console."""
        self._console(cycle, id)

    async def restore(self, report: Report) -> None:
        """Go on with the roll-outs where the server ended."""
        await self._rollouts.restore(report)
        self._watch.start()
        self._events.open(self._before)

    async def stop(self) -> None:
        """End what looks on."""
        self._watch.close()
        self._alerts.close()
        await self._rollouts.stop()
