"""`plan --try`: one planned cell on this machine, under its part of the load."""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import quote

from modelyard.archiver import open_archive
from modelyard.plugins.ops.tune.load import Load, make_request, run_open_load
from modelyard.plugins.ops.tune.plan import Plan
from modelyard.plugins.ops.tune.tune import golden_bodies, on_own_ports, running
from modelyard.serve.control.sizing import this_machine
from modelyard.serve.control.store import find_archive
from modelyard.serve.errors import WrongUsage
from modelyard.serve.settings import Settings

WARM_S = 1.0


def try_cell(plan: Plan, settings: Settings, seconds: float) -> dict[str, Load]:
    """Start one cell as planned, send what it would get for so long, stop it.

    The requests are the archives' golden ones, at random moments.

    Raises:
        WrongUsage: a cell has more cores than this machine, or an archive has no golden request.
        ServeError, ArchiveError: it cannot be started, or does not answer.
    """
    if plan.cell.cores > (cores := this_machine().cores):
        raise WrongUsage(
            f"--try runs one of the planned cells, of {plan.cell.cores} cores, and this machine "
            f"has {cores}; plan with --cores {cores}, or try it on such a machine"
        )
    bodies, model_settings = {}, {}
    for each in plan.cell.models:
        name = each.model.name
        with open_archive(find_archive(settings.model_store, name)) as archive:
            bodies[name] = golden_bodies(archive)
        if not bodies[name]:
            raise WrongUsage(f"{name} holds no golden request to try it with; archive --example")
        model_settings[name] = {
            **settings.model_settings.get(name, {}),
            "minWorkers": each.workers,
            "workerThreads": each.model.threads,
            "batchSize": each.model.batch_size,
        }
    with tempfile.TemporaryDirectory(prefix="modelyard-plan-") as folder:
        own = on_own_ports(settings, tuple(bodies), Path(folder))
        own = own.model_copy(update={"model_settings": model_settings})
        with running(own) as (url, _):
            mix = {
                each.model.name: (
                    each.rate,
                    [
                        make_request(url, f"/predictions/{quote(each.model.name)}", *body)
                        for body in bodies[each.model.name]
                    ],
                )
                for each in plan.cell.models
            }
            return run_open_load(url, mix, seconds, WARM_S)
