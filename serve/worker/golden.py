"""Replay an archive's golden requests: a worker that answers them wrong is not ready."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from modelyard.archiver.report import Report
from modelyard.handlers.errors import LoadError
from modelyard.serve.dataplane import wire
from modelyard.serve.worker.codec import OURS, Answer, Refusal, explain_error
from modelyard.serve.worker.load import Service, describe
from modelyard.serve.worker.loop import answer_batch

Call = tuple[Any, Any]
"""Inputs and outputs of one call of a model, as the handler has them."""


class WrongAnswer(LoadError):
    """A golden request gets another answer than the archive says."""


def check_golden(service: Service, golden: Sequence[dict[str, Any]]) -> None:
    """Replay the archive's golden requests; a worker that answers them wrong is not ready.

    Raises:
        WrongAnswer: which request, what was expected and what came.
    """
    for number, example in enumerate(golden):
        expected = json.loads(Path(example["expected"]).read_bytes())
        answer, calls = answer_golden(service, example, number)
        if difference := compare_golden(
            answer, expected, example["tolerance"], calls, getattr(service.handler, "report", None)
        ):
            said = f"golden request {number} ({example['request']}): {difference}"
            if answer.status == 200:
                said += (
                    "; the weights, the labels or the preprocessing are not those that the archive "
                    "was made with: archive it again, and see `modelyard verify`"
                )
            raise WrongAnswer(said)


def replay_golden(service: Service, golden: Sequence[dict[str, Any]]) -> Answer:
    """Return whether the golden requests get their answers still: 200, or what is wrong."""
    context = service.context
    kept = context.stream, context.cancellation
    context.stream = context.cancellation = None  # nobody takes chunks
    try:
        check_golden(service, golden)
    except WrongAnswer as error:
        return Answer(500, {"content-type": "text/plain"}, str(error).encode())
    finally:
        context.stream, context.cancellation = kept
    return Answer(200, {}, b"")


def answer_golden(
    service: Service, example: dict[str, Any], number: int
) -> tuple[Answer, list[Call]]:
    """Return the handler's answer to one golden request, alone in its batch, and its model's."""
    meta = [b"", b"", b"golden-%d" % number]
    if example["content_type"]:
        meta += [b"content-type", example["content_type"].encode()]
    # The name is relative: the archive is the working folder.
    item = wire.Item(1, 0, 0, wire.pack_meta(meta), Path(example["request"]).read_bytes())
    folder = Path(service.context.system_properties["model_dir"])
    rules = replace(OURS, explain_error=partial(_explain, folder), write_error=_write)
    bare = replace(service, predict=service.golden or service.predict, rules=rules)
    with watched(service.handler) as calls:
        return answer_batch(bare, [item])[0], calls


@contextlib.contextmanager
def watched(
    handler: Any, change: Callable[[Any], Any] = lambda outputs: outputs
) -> Iterator[list[Call]]:
    """Gather the calls of a handler's model meanwhile; none where it is not one of ours.

    Args:
        handler: the handler, where it inherits from ours.
        change: what becomes of outputs on their way to the handler.
    """
    calls: list[Call] = []
    if handler is None:
        yield calls
        return
    inference, own = handler.inference, vars(handler).get("inference")

    def watch(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = inference(inputs, *args, **kwargs)
        calls.append((inputs, outputs))
        return change(outputs)

    handler.inference = watch
    try:
        yield calls
    finally:
        if own is None:
            del handler.inference
        else:
            handler.inference = own


def _explain(folder: Path, error: BaseException) -> Refusal:
    """Return an error as its author needs it: with the line of the archive's code."""
    refusal = explain_error(error)
    return refusal._replace(message=describe(error, folder)) if refusal.code == 500 else refusal


def _write(refusal: Refusal, request_id: str) -> bytes:
    return refusal.message.encode()


def compare_golden(
    answer: Answer,
    expected: dict[str, Any],
    tolerance: float,
    calls: Sequence[Call] = (),
    report: Report | None = None,
) -> str | None:
    """Return how an answer differs from what is expected, or None when it agrees.

    Args:
        answer: the handler's answer.
        expected: {"label": …} or {"answer": …, "moves": …}, and what the model read and gave.
        tolerance: largest scaled difference of an answer's numbers.
        calls: calls of the handler's model.
        report: report of its export.
    """
    if answer.status != 200:
        text = answer.body.decode("utf-8", "replace")
        return f"expected an answer, got status {answer.status}: {text}"
    got = value_of(answer)
    if "label" in expected:
        label = max(got, key=got.__getitem__) if isinstance(got, dict) and got else got
        if str(label) != expected["label"]:
            if isinstance(got, float):
                return f"expected {expected['label']}, got {got}"
            return f'expected the label "{expected["label"]}", got "{label}"'
    if "answer" not in expected:
        return None
    from modelyard.base.answers import json_difference  # and numpy, which it needs

    if difference := json_difference(got, expected["answer"], tolerance, expected.get("moves")):
        return difference
    if (recorded := expected.get("model")) is None:
        return None
    from modelyard.handlers.proof.witness import describe_difference  # and torch, which it needs

    return describe_difference(recorded, calls, report)


def value_of(answer: Answer) -> Any:
    """Return what golden answers are compared by: the answer's JSON value, else its text.

    Bytes that are not text are written out, so that two pictures of one length differ.
    """
    text = answer.body.decode("utf-8", "backslashreplace")
    try:
        return json.loads(text)
    except ValueError:
        return text
