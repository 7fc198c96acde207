"""Run an unpacked archive once, without a server: its golden requests and its parity.

The archiver starts `python -P -m modelyard.serve.worker --check FOLDER`, for a dry run before an
archive is written and to verify one that is. Both sides meet in files of FOLDER only:

    task.json    {"load": what a worker's LOAD message holds, without device number and batch size,
                  "proven_batch": largest batch that the report proved, or null,
                  "golden": the manifest's; an entry whose "expected" is null is recorded,
                  "parity": {"artifact": file, "twin": file, "report": file, "twin_report": file}
                            or null,
                  "reference": path of the requests whose reasons are averaged, or null,
                  "doubts": whether to end where nothing says what the model's numbers are}
    result.json  {"device": …, "golden": [{"answer": …, "difference": text or null}, …],
                  "parity": {"cases": count, "summary": text, "differences": [text, …]} or null,
                  "reference": the content of `archiver.reference`'s file, where there is a path}
                 or {"error": why the archive does not load}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelyard.archiver.reference import format_reference, make_reference
from modelyard.archiver.untrusted.json import parse_json
from modelyard.handlers.errors import HandlerError, LoadError
from modelyard.serve.worker import load
from modelyard.serve.worker.golden import answer_golden, compare_golden, value_of

DEFAULT_BATCH_SIZE = 8
MOST_TRIED = 8
"""Examples whose inputs are tried again, changed."""


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Load the handler as a worker does; replay the golden requests; compare the two artifacts.

    The archive is the working folder and its modules are the first that imports find.

    Raises:
        Exception: whatever loading raises.
    """
    message = {**task["load"], "worker": 1, "batch_size": _batch_size(task)}
    service = load.load_service(message)
    seen: list[Any] = []
    wrong = _watch_outputs(service.handler, seen)
    golden = [_replay(service, example, i, wrong) for i, example in enumerate(task["golden"])]
    if task.get("doubts") and not any(each["difference"] for each in golden):
        _refuse_doubts(service.handler, seen[:MOST_TRIED])
    result: dict[str, Any] = {"device": service.device, "golden": golden, "parity": None}
    if task.get("reference"):
        result["reference"] = _explain_reference(service, Path(task["reference"]))
    if task["parity"]:
        from modelyard.serve.worker.parity import compare  # and torch, which it needs

        result["parity"] = compare(Path(message["folder"]), task["parity"], service.device)
    return result


def _explain_reference(service: load.Service, place: Path) -> str:
    """Return the file of the mean shares of requests: a JSON list of bodies, or a folder of files.

    Raises:
        LoadError: a request cannot be used; it is named.
    """
    rows: list[dict[str, float]] = []
    for name, body in _read_requests(place):
        service.context.reset([name])
        try:
            rows += service.shares([{"body": body}], service.context)
        except HandlerError as error:
            raise LoadError(f"--reference: {name} cannot be explained: {error}") from error
    try:
        return format_reference(make_reference(rows)).decode()
    except ValueError as error:
        raise LoadError(f"--reference: {place.name}: {error}") from error


def _read_requests(place: Path) -> Iterator[tuple[str, Any]]:
    """Yield a name and a body for each request."""
    files = sorted(each for each in place.rglob("*") if each.is_file()) or [place]
    for file in files:
        content = bytearray(file.read_bytes())
        if file.suffix != ".json":
            yield file.name, content
            continue
        try:
            rows = parse_json(content)
        except ValueError as error:
            raise LoadError(f"--reference: {file.name} is not JSON: {error}") from error
        if not isinstance(rows, list) or not rows:
            raise LoadError(
                f"--reference: {file.name} holds no list; expected request bodies in one"
            )
        yield from ((f"{file.name}[{at}]", row) for at, row in enumerate(rows))


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


def _watch_outputs(handler: Any, seen: list[Any]) -> list[str]:
    """Return a list that gets what is wrong about outputs of the handler's model, as they come.

    `seen` gets the inputs of its calls.
    """
    wrong: list[str] = []
    if handler is not None:
        inference = handler.inference

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.extend(args[:1])
            outputs = inference(*args, **kwargs)
            if problem := handler.wrong_kind(outputs):
                wrong.append(problem)
            return outputs

        handler.inference = watched
    return wrong


def _replay(
    service: load.Service, example: dict[str, Any], number: int, wrong: list[str]
) -> dict[str, Any]:
    wrong.clear()
    answer = answer_golden(service, example, number)
    if wrong:
        return {"answer": value_of(answer), "difference": wrong[0]}
    if example["expected"] is None:
        text = answer.body.decode("utf-8", "replace")
        refusal = None if answer.status == 200 else f"got status {answer.status}: {text}"
        return {"answer": value_of(answer), "difference": refusal}
    expected = json.loads(Path(example["expected"]).read_bytes())
    difference = compare_golden(answer, expected, example["tolerance"])
    return {"answer": value_of(answer), "difference": difference}
