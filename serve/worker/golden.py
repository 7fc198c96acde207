"""Replay an archive's golden requests: a worker that answers them wrong is not ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from modelyard.base.answers import json_difference
from modelyard.handlers.errors import LoadError
from modelyard.serve.dataplane import wire
from modelyard.serve.worker.codec import OURS, Answer, Refusal, explain_error
from modelyard.serve.worker.load import Service, describe
from modelyard.serve.worker.loop import answer_batch


def check_golden(service: Service, golden: Sequence[dict[str, Any]]) -> None:
    """Replay the archive's golden requests; a worker that answers them wrong is not ready.

    Raises:
        LoadError: which request, what was expected and what came.
    """
    for number, example in enumerate(golden):
        expected = json.loads(Path(example["expected"]).read_bytes())
        answer = answer_golden(service, example, number)
        if difference := compare_golden(answer, expected, example["tolerance"]):
            said = f"golden request {number} ({example['request']}): {difference}"
            if answer.status == 200:
                said += (
                    "; the weights, the labels or the preprocessing are not those that the archive "
                    "was made with"
                )
            raise LoadError(said)


def replay_golden(service: Service, golden: Sequence[dict[str, Any]]) -> Answer:
    """Return whether the golden requests get their answers still: 200, or what is wrong."""
    context = service.context
    kept = context.stream, context.cancellation
    context.stream = context.cancellation = None  # nobody takes chunks
    try:
        check_golden(service, golden)
    except LoadError as error:
        return Answer(500, {"content-type": "text/plain"}, str(error).encode())
    finally:
        context.stream, context.cancellation = kept
    return Answer(200, {}, b"")


def answer_golden(service: Service, example: dict[str, Any], number: int) -> Answer:
    """Return the handler's answer to one golden request, alone in its batch."""
    meta = [b"", b"", b"golden-%d" % number]
    if example["content_type"]:
        meta += [b"content-type", example["content_type"].encode()]
    # The name is relative: the archive is the working folder.
    item = wire.Item(1, 0, 0, wire.pack_meta(meta), Path(example["request"]).read_bytes())
    folder = Path(service.context.system_properties["model_dir"])
    rules = replace(OURS, explain_error=partial(_explain, folder), write_error=_write)
    bare = replace(service, predict=service.golden or service.predict, rules=rules)
    return answer_batch(bare, [item])[0]


def _explain(folder: Path, error: BaseException) -> Refusal:
    """Return an error as its author needs it: with the line of the archive's code."""
    refusal = explain_error(error)
    return refusal._replace(message=describe(error, folder)) if refusal.code == 500 else refusal


def _write(refusal: Refusal, request_id: str) -> bytes:
    return refusal.message.encode()


def compare_golden(answer: Answer, expected: dict[str, Any], tolerance: float) -> str | None:
    """Return how an answer differs from {"label": …} or {"answer": …}, or None when it agrees."""
    if answer.status != 200:
        text = answer.body.decode("utf-8", "replace")
        return f"expected an answer, got status {answer.status}: {text}"
    got = value_of(answer)
    if "label" in expected:
        label = max(got, key=got.__getitem__) if isinstance(got, dict) and got else got
        agrees = str(label) == expected["label"]
        return None if agrees else f'expected the label "{expected["label"]}", got "{label}"'
    return json_difference(got, expected["answer"], tolerance)


def value_of(answer: Answer) -> Any:
    """Return what golden answers are compared by: the answer's JSON value, else its text."""
    text = answer.body.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
