"""Connects the parts of the console."""

from __future__ import annotations

from collections.abc import Collection

from modelyard.plugins.ops.console import log_tail
from modelyard.plugins.ops.console.app import Console
from modelyard.plugins.ops.console.format import FILTERS
from modelyard.plugins.ops.console.log_pages import LogPages
from modelyard.plugins.ops.console.models import TABS, ModelPages
from modelyard.plugins.ops.console.readings import Watch
from modelyard.plugins.ops.console.render import Renderer
from modelyard.plugins.ops.console.rollout import ROLLOUT, RolloutPages
from modelyard.plugins.ops.console.tryit import TryPages
from modelyard.plugins.ops.rollout.control import Rollouts
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.front.begin import Front
from modelyard.serve.http.application import Answers
from modelyard.serve.http.tokens import Grants
from modelyard.serve.settings import Settings


def build_console(
    lifecycle: Lifecycle,
    rollouts: Rollouts | None,
    front: Front,
    grants: Grants | None,
    answers: Answers,
    settings: Settings,
    may_unregister: bool = True,
    unlogged: Collection[str] = (),
) -> Console:
    """Return the console of a server.

    Args:
        lifecycle: what it shows and changes.
        rollouts: the same, of roll-outs; None where the dialect has none.
        front: the way to the models.
        grants: the tokens that are known now; None asks for none.
        answers: of the API whose port it is on.
        settings: of the server.
        may_unregister: whether versions can be removed.
        unlogged: loggers that are not of the server's own log.
    """
    renderer = Renderer(FILTERS)
    tabs = [tab for tab in TABS if rollouts is not None or tab.path != ROLLOUT]
    models = ModelPages(lifecycle, renderer, Watch(lifecycle.registry), tabs, may_unregister)
    log = LogPages(log_tail.attach(unlogged), renderer)
    tries = TryPages(models, renderer, front, settings)
    pages = [*models.pages(), *tries.pages(), *log.pages()]
    if rollouts is not None:
        pages += RolloutPages(models, renderer, rollouts, settings).pages()
    return Console(pages, renderer, grants, answers)
