"""Run an unpacked archive once, without a server: its golden requests and its parity.

The archiver starts `python -P -m modelyard.serve.worker --check FOLDER`, for a dry run before an
archive is written and to verify one that is. Both sides meet in files of FOLDER only:

    task.json    {"load": what a worker's LOAD message holds, without device number and batch size,
                  "proven_batch": largest batch that the report proved, or null,
                  "golden": the manifest's; an entry whose "expected" is null is recorded,
                  "parity": {"artifact": file, "twin": file, "report": file, "twin_report": file}
                            or null}
    result.json  {"device": …, "golden": [{"answer": …, "difference": text or null}, …],
                  "parity": {"cases": count, "summary": text, "differences": [text, …]} or null}
                 or {"error": why the archive does not load}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelyard.serve.worker import load
from modelyard.serve.worker.golden import answer_golden, compare_golden, value_of

DEFAULT_BATCH_SIZE = 8


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Load the handler as a worker does; replay the golden requests; compare the two artifacts.

    The archive is the working folder and its modules are the first that imports find.

    Raises:
        Exception: whatever loading raises.
    """
    message = {**task["load"], "worker": 1, "batch_size": _batch_size(task)}
    service = load.load_service(message)
    golden = [_replay(service, example, i) for i, example in enumerate(task["golden"])]
    result: dict[str, Any] = {"device": service.device, "golden": golden, "parity": None}
    if task["parity"]:
        from modelyard.serve.worker.parity import compare  # and torch, which it needs

        result["parity"] = compare(Path(message["folder"]), task["parity"], service.device)
    return result


def _batch_size(task: dict[str, Any]) -> int:
    """Return the batch size that the server would choose."""
    message = task["load"]
    config = load.read_config(Path(message["folder"]), message["config_file"])
    stated = config.get("batchSize", DEFAULT_BATCH_SIZE)
    size = stated if isinstance(stated, int) and stated > 0 else DEFAULT_BATCH_SIZE
    return min(size, task["proven_batch"] or size)


def _replay(service: load.Service, example: dict[str, Any], number: int) -> dict[str, Any]:
    answer = answer_golden(service, example, number)
    if example["expected"] is None:
        text = answer.body.decode("utf-8", "replace")
        refusal = None if answer.status == 200 else f"status {answer.status}: {text}"
        return {"answer": value_of(answer), "difference": refusal}
    expected = json.loads(Path(example["expected"]).read_bytes())
    difference = compare_golden(answer, expected, example["tolerance"])
    return {"answer": value_of(answer), "difference": difference}
