"""Run an unpacked archive once, behind the walls that its workers would have.

The archiver starts `python -P -m modelyard.serve.rehearse FOLDER`, for a dry run before an archive
is written and to verify one that is; `worker/check.py` says what lies in FOLDER. This process plans
the walls by the settings that the environment states, as a server does, and starts the worker's
process in which the archive's code runs. What that starts, in whatever session, ends with it.
"""

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from modelyard.base.disk import remove
from modelyard.base.threads import thread_environment
from modelyard.serve.control.sandbox import Sandbox, check_machine, own_variables, scratch_of
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.process import spawn, worker_command
from modelyard.serve.errors import ServeError
from modelyard.serve.settings import Settings, load_settings
from modelyard.serve.walls.environment import PASSED, choose_variables
from modelyard.serve.walls.measures import LACKING
from modelyard.serve.walls.raising import Walls, die_with_parent


def main() -> int:
    """Run what `task.json` says; the exit code is the worker's."""
    die_with_parent()
    exchange = Path(sys.argv[1])
    task = json.loads((exchange / "task.json").read_bytes())
    with (exchange / "result.json").open("wb") as result:
        try:
            settings = load_settings({})
            measures = check_machine(settings)
            walls = _plan(task, settings)
        except ServeError as error:
            result.write(json.dumps({"error": str(error)}).encode())
            return 0
        task["walls"] = asdict(walls) if walls else None
        task["lacking"] = [each.name for each in measures if each.status == LACKING]
        code = asyncio.run(_run(task, settings, result.fileno()))
        remove(scratch_of(Path(task["load"]["folder"])))  # whoever started this would not get deep
    if code < 0:
        os.kill(os.getpid(), -code)  # end as it did: the archiver says how
    return code


def _plan(task: dict[str, Any], settings: Settings) -> Walls | None:
    """Return the walls that a server would raise; requests to be explained may be read too."""
    load = task["load"]
    is_sealed = "modelyard" in load["manifest"]
    folder, network = Path(load["folder"]), settings.network_of(is_sealed)
    walls = Sandbox(settings).plan(folder, network, settings.files, may_write=not is_sealed)
    if walls is None or walls.has_files or not task["reference"]:
        return walls
    return replace(walls, reads=(*walls.reads, task["reference"]))


async def _run(task: dict[str, Any], settings: Settings, result: int) -> int:
    everything = () if settings.sandbox else os.environ
    environment = {
        **choose_variables(os.environ, (*PASSED, *settings.pass_variables, *everything)),
        **thread_environment(task.get("threads")),
    }
    walls = task["walls"]
    if walls and not walls["has_files"]:
        environment |= own_variables(Path(task["load"]["folder"]))
    file = os.memfd_create("task")
    os.write(file, json.dumps(task).encode())
    os.lseek(file, 0, os.SEEK_SET)
    worker = spawn(
        [*worker_command(), "--check", str(file), str(result)],
        environment,
        stdout=sys.stdout.fileno(),
        stderr=sys.stderr.fileno(),
        pass_fds=(file, result),
        end=wire.END,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.kill)
    return await worker.ended


if __name__ == "__main__":
    sys.exit(main())
