"""Connects the parts of the console."""

from __future__ import annotations

from modelyard.serve.api.inference import Calls
from modelyard.serve.console import log_tail
from modelyard.serve.console.app import Console
from modelyard.serve.console.format import FILTERS
from modelyard.serve.console.log_pages import LogPages
from modelyard.serve.console.models import ModelPages
from modelyard.serve.console.readings import Watch
from modelyard.serve.console.render import Renderer
from modelyard.serve.console.rollout import RolloutPages
from modelyard.serve.console.tryit import TryPages
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.http.application import Answers
from modelyard.serve.http.auth import Grants
from modelyard.serve.rollout.control import Rollouts
from modelyard.serve.settings import Settings


def build_console(
    lifecycle: Lifecycle,
    rollouts: Rollouts,
    calls: Calls,
    grants: Grants | None,
    answers: Answers,
    settings: Settings,
) -> Console:
    """Return the console of a server.

    Args:
        lifecycle: what it shows and changes.
        rollouts: the same, of roll-outs.
        calls: the way to the models.
        grants: the tokens that are known now; None asks for none.
        answers: of the API whose port it is on.
        settings: of the server.
    """
    renderer = Renderer(FILTERS)
    models = ModelPages(lifecycle, renderer, Watch(lifecycle.registry))
    log = LogPages(log_tail.attach(), renderer)
    tries = TryPages(models, renderer, calls, settings)
    rolls = RolloutPages(models, renderer, rollouts, settings)
    pages = [*models.pages(), *tries.pages(), *rolls.pages(), *log.pages()]
    return Console(pages, renderer, grants, answers)
