"""A worker's boot and load without a server: a fork of one interpreter for each archive.

Importing torch for each would take minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PROBE = """
import base64, json, os, sys
import torch  # which handlers would import in each fork
from pathlib import Path
from modelyard.serve.worker import boot, golden, load
from modelyard.serve.worker.dialect import find_dialect

def value(given):
    if isinstance(given, dict) and given.keys() == {"b64"}:
        return bytearray(base64.b64decode(given["b64"]))
    return given

def answer(message):
    folder = Path(message["folder"])
    try:
        find_dialect()
        boot._enter(folder)
        service = load.load_service(message)
        golden.check_golden(service, message.get("golden", []))
        answers = []
        for kind, rows in message["batches"]:
            headers = {"explain": str(kind == "explain")}
            ids = [f"id{index}" for index in range(len(rows))]
            service.context.reset(ids, [headers] * len(rows))
            rows = [{name: value(given) for name, given in row.items()} for row in rows]
            answers.append(getattr(service, kind)(rows, service.context))
        return {"answers": answers, "metrics": service.context.metrics.drain()}
    except BaseException as error:
        return {"error": load.describe(error, folder)}

for line in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        print(json.dumps(answer(json.loads(line))), flush=True)
        os._exit(0)
"""

Run = Callable[[dict[str, Any]], dict[str, Any]]
"""LOAD message, its `golden` requests in that folder, and `batches`, each `predict` or `explain`
and its rows → the answers, or the error; a value {"b64": …} of a row becomes a bytearray."""


@contextmanager
def forks() -> Iterator[Run]:
    """Start the interpreter that loads handlers in forks of itself."""
    command = [sys.executable, "-P", "-c", PROBE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def run(message: dict[str, Any]) -> dict[str, Any]:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            found: dict[str, Any] = json.loads(stdout.readline())
            return found

        yield run
