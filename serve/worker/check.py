"""Run an unpacked archive once, without a server: its golden requests and its parity.

The archiver has it run, for a dry run before an archive is written and to verify one that is:
`serve/rehearse.py` raises the walls around it. Both sides meet in two files of a folder only:

    task.json    {"load": what a worker's LOAD message holds, without device number and batch size,
                  "proven_batch": largest batch that the report proved, or null,
                  "golden": the manifest's; an entry whose "expected" is null is answered,
                  "record": whether what the model reads and gives is recorded,
                  "inputs": whether what the model reads is seen whole, and nothing is recorded,
                  "parity": {"artifact": file, "twin": file, "report": file, "twin_report": file}
                            or null,
                  "reference": path of the requests whose reasons are averaged, or null,
                  "explained": {"requests": [{"file": …, "content_type": …}, …], "budget_s": …}
                               of the requests whose explanations are measured, or null,
                  "doubts": whether to end where nothing says what the model's numbers are,
                  "threads": how many, or null,
                  "batches": what workers had before, to be answered again}
    result.json  {"device": …, "lacking": [name of a wall that does not stand, …],
                  "golden": [{"answer": …, "difference": text or null,
                              "seen": what is added to what is expected, or
                                      {"inputs": [{"type": …, "values": …}, …]}}, …],
                  "parity": {"cases": count, "summary": text, "differences": [text, …]} or null,
                  "coverage": {change of the pipeline: what an example that notices it must have,
                               "" where one does}, where it was recorded,
                  "reference": the content of `archiver.reference`'s file, where there is a path,
                  "explained": the content of `archiver.explanations`' file, or why there is none,
                  "batches": [{"answers": [{"status": …, "body": in Base64}, …],
                               "read": inputs, as "seen" has them}, …]}
                 or {"error": why the archive does not load}
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from modelyard.archiver.reference import format_reference, make_reference, ranges_of, read_requests
from modelyard.base.answers import differences, pair_up
from modelyard.handlers.errors import HandlerError, LoadError
from modelyard.serve.dataplane import wire
from modelyard.serve.worker import load
from modelyard.serve.worker.golden import answer_golden, compare_golden, value_of, watched
from modelyard.serve.worker.loop import answer_batch

DEFAULT_BATCH_SIZE = 8
_DRAWS = 4
_MARGIN = 2.0
"""Times as far as it was seen to move in so few draws."""
MOST_TRIED = 8
"""Examples whose inputs are tried again, changed."""


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Load the handler as a worker does; replay the golden requests; compare the two artifacts.

    The archive is the working folder and its modules are the first that imports find.

    Raises:
        Exception: whatever loading raises.
    """
    message = {"batch_size": _batch_size(task), **task["load"], "worker": 1}
    service = load.load_service(message)
    seen: list[Any] = []
    golden = [_replay(service, task, number, seen) for number in range(len(task["golden"]))]
    if task.get("doubts") and not any(each["difference"] for each in golden):
        _refuse_doubts(service.handler, seen[:MOST_TRIED])
    result: dict[str, Any] = {
        "device": service.device,
        "lacking": task["lacking"],
        "golden": golden,
        "parity": None,
        "batches": [_answer_again(service, batch, task["inputs"]) for batch in task["batches"]],
    }
    if task["record"] and golden and all("seen" in each for each in golden):
        result["coverage"] = _cover(service, task["golden"][:MOST_TRIED], golden)
    if task.get("reference"):
        result["reference"] = _explain_reference(service, Path(task["reference"]))
    if task.get("explained"):
        from modelyard.serve.worker.measured import measure_explanations  # and torch

        result["explained"] = measure_explanations(service, task["explained"])
    if task["parity"]:
        from modelyard.serve.worker.measured import compare  # and torch

        result["parity"] = compare(Path(message["folder"]), task["parity"], service.device)
    return result


def _answer_again(service: load.Service, batch: list[Any], inputs: bool) -> dict[str, Any]:
    items, read = [], []
    for number, each in enumerate(batch, 1):
        head, body = b64decode(each["head"]), bytearray(b64decode(each["body"]))
        items.append(wire.Item(number, each["rows"], each["flags"], head, body))
    with watched(service.handler if inputs else None) as calls:
        given = answer_batch(service, items)
    if inputs:
        from modelyard.handlers.proof.witness import inputs_read

        read = inputs_read(calls)
    answers = [{"status": each.status, "body": b64encode(each.body).decode()} for each in given]
    return {"answers": answers, "read": read}


def _explain_reference(service: load.Service, place: Path) -> str:
    """Return the file of the mean shares of requests: a JSON list of bodies, or a folder of files.

    Raises:
        LoadError: a request cannot be used; it is named.
    """
    rows: list[Any] = []
    numbers: list[Mapping[str, float]] = []
    try:
        for name, body in read_requests(place):
            service.context.reset([name])
            try:
                rows += service.shares([{"body": body}], service.context)
                if service.handler is not None:
                    numbers.append(service.handler.numbers({"body": body}))
            except HandlerError as error:
                raise LoadError(f"--reference: {name} cannot be explained: {error}") from error
        return format_reference(replace(make_reference(rows), ranges=ranges_of(numbers))).decode()
    except ValueError as error:
        raise LoadError(f"--reference: {error}") from error


def _batch_size(task: dict[str, Any]) -> int:
    """Return the batch size that the server would choose."""
    message = task["load"]
    config = load.read_config(Path(message["folder"]), message["config_file"])
    stated = config.get("batchSize", DEFAULT_BATCH_SIZE)
    size = stated if isinstance(stated, int) and stated > 0 else DEFAULT_BATCH_SIZE
    return min(size, task["proven_batch"] or size)


def _refuse_doubts(handler: Any, seen: list[Any]) -> None:
    """End the dry run of one of our classifiers whose numbers may be probabilities already.

    Raises:
        LoadError: why, and what to say.
    """
    if not load.is_classifier(handler):
        return
    from modelyard.handlers.proof.doubt import doubt

    if problem := doubt(handler, seen):
        raise LoadError(problem)


def _replay(
    service: load.Service, task: dict[str, Any], number: int, seen: list[Any]
) -> dict[str, Any]:
    """Answer one golden request; `seen` gets the inputs of the model's calls."""
    example = task["golden"][number]
    answer, calls = answer_golden(service, example, number)
    seen += [given for given, _ in calls]
    value = value_of(answer)
    result: dict[str, Any] = {"answer": value, "difference": None}
    if task["inputs"]:
        from modelyard.handlers.proof.witness import inputs_read

        result["seen"] = {"inputs": inputs_read(calls)}
    wrong = (service.handler.wrong_kind(outputs) for _, outputs in calls)
    if problem := next(filter(None, wrong), None):
        return result | {"difference": problem}
    if (expected := _read_expected(example)) is not None:
        tolerance, report = example["tolerance"], getattr(service.handler, "report", None)
        result["difference"] = compare_golden(answer, expected, tolerance, calls, report)
    elif answer.status != 200:
        text = answer.body.decode("utf-8", "replace")
        result["difference"] = f"got status {answer.status}: {text}"
    if task["record"] and calls and result["difference"] is None:
        from modelyard.handlers.proof.witness import record  # and torch, which it needs

        if model := record(calls):
            moves = _moves(service, example, number, value)
            result["seen"] = {"answer": value, "moves": moves, "model": model}
    return result


def _read_expected(example: dict[str, Any]) -> dict[str, Any] | None:
    """Return what is expected; None where the archiver has not been told."""
    name = example["expected"]
    return None if name is None else json.loads(Path(name).read_bytes())


def _cover(
    service: load.Service, examples: list[dict[str, Any]], replayed: list[dict[str, Any]]
) -> dict[str, str]:
    """Return changes of the pipeline → what an example must have to notice it; "" if one does."""
    from modelyard.handlers.proof.mutation import mutated, mutations

    expected = [
        each["seen"] | (_read_expected(example) or {})
        for example, each in zip(examples, replayed, strict=False)
    ]

    def is_noticed(number: int) -> bool:
        answer, calls = answer_golden(service, examples[number], number)
        tolerance, report = examples[number]["tolerance"], service.handler.report
        return bool(compare_golden(answer, expected[number], tolerance, calls, report))

    missed: dict[str, str] = {}
    for mutation in mutations(service.handler):
        missed.setdefault(mutation.name, "")
        with mutated(service.handler, mutation):
            is_seen = any(map(is_noticed, range(len(expected))))
        if not is_seen and not missed[mutation.name]:
            missed[mutation.name] = mutation.example
    return missed


def _moves(
    service: load.Service, example: dict[str, Any], number: int, value: Any
) -> dict[str, list[float]]:
    """Return how far an answer's numbers move when the model's move as far as they may."""
    from modelyard.handlers.proof.witness import nudged

    moves: dict[str, Any] = {}
    handler = service.handler
    for seed in range(_DRAWS):
        change = partial(nudged, report=handler.report, seed=seed)
        with watched(handler, change):
            other = value_of(answer_golden(service, example, number)[0])
        differs, groups = pair_up(value, other)
        for name, group in {} if differs else groups.items():
            moves[name] = np.maximum(moves.get(name, 0.0), _MARGIN * differences(*group.numbers()))
    return {name: [float(f"{move:.3g}") for move in each.flat] for name, each in moves.items()}
