"""`ts.handler_utils.micro_batching`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ts.handler_utils.micro_batching import MicroBatching
from ts.torch_handler.base_handler import BaseHandler

from modelyard.handlers.context import Context

MakeContext = Callable[..., Context]


class Squares(BaseHandler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int | None, int]] = []
        self.handle: Any = MicroBatching(self, micro_batch_size=3)

    def step(self, name: str, data: list[int]) -> None:
        self.seen.append((name, self.handle.get_micro_batch_idx(), len(data)))

    def preprocess(self, data: Any) -> list[int]:
        self.step("preprocess", data)
        return [row["body"] for row in data]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> list[int]:
        self.step("inference", data)
        return [100 // (value - 50) * 0 + value * value for value in data]

    def postprocess(self, data: list[int]) -> list[str]:
        self.step("postprocess", data)
        return [str(value) for value in data]

    def get_insights(self, tensor_data: Any, inputs: Any, target: Any) -> list[str]:
        return ["why"] * len(tensor_data)


@pytest.fixture
def handler() -> Iterator[Squares]:
    squares = Squares()
    yield squares
    squares.handle.shutdown()


def rows(*values: int) -> list[dict[str, int]]:
    return [{"body": value} for value in values]


@pytest.mark.parametrize("parallelism", [{}, {"preprocess": 3, "inference": 4, "postprocess": 2}])
def test_the_answers_of_all_parts_come_in_order(
    handler: Squares, make_context: MakeContext, parallelism: dict[str, int]
) -> None:
    handler.handle.parallelism = parallelism
    for _ in range(20):
        answers = handler.handle(rows(*range(10)), make_context(requests=10))
        assert answers == [str(value * value) for value in range(10)]
    sizes = sorted({(index, size) for name, index, size in handler.seen if name == "inference"})
    assert sizes == [(0, 3), (1, 3), (2, 3), (3, 1)]
    assert handler.handle.get_micro_batch_idx() is None


def test_a_step_that_fails_fails_the_batch_and_not_the_next(
    handler: Squares, make_context: MakeContext
) -> None:
    with pytest.raises(ZeroDivisionError):
        handler.handle(rows(1, 2, 3, 4, 50, 6), make_context(requests=6))
    assert handler.handle(rows(1, 2), make_context(requests=2)) == ["1", "4"]


def test_the_number_of_threads_can_change(handler: Squares, make_context: MakeContext) -> None:
    before = threading.active_count()
    handler.handle.parallelism = {"inference": 3}
    assert threading.active_count() == before + 2
    assert handler.handle.parallelism == {"inference": 3}
    handler.handle.parallelism = {"inference": 1}
    assert [len(group) for group in handler.handle.thread_groups.values()] == [1, 1, 1]
    assert handler.handle(rows(*range(7)), make_context(requests=7))[-1] == "36"


@pytest.mark.parametrize("wrong", [{"inference": 0}, {"other": 1}])
def test_what_is_no_number_of_threads_is_refused(handler: Squares, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected a number of threads from 1 for some of"):
        handler.handle.parallelism = wrong


def test_headers_and_metrics_are_those_of_every_handler(
    handler: Squares, make_context: MakeContext
) -> None:
    context = make_context(headers={"explain": "True"}, requests=4)
    assert handler.handle(rows(1, 2, 3, 4), context) == ["why"] * 4
    assert [record["name"] for record in context.metrics.drain()] == ["HandlerTime"]
    assert handler.handle(rows(1), make_context(headers={"describe": "True"})) == [None]
