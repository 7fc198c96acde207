"""An explanation's answer has the fields that the description of the API says, and no others."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from modelyard.handlers import BaseHandler, Context, ImageClassifier
from modelyard.handlers.explain.attribute.methods import METHODS
from tests.answer_schema import wrong_in

MakeContext = Callable[..., Context]
LAYER = {"layer": "features.2"}


@pytest.fixture
def ask(make_context: MakeContext, scans: list[bytes]) -> Callable[..., Any]:
    def ask(handler: BaseHandler, **query: str) -> Any:
        context = make_context()
        handler.initialize(context)
        context.reset(["a"], queries=[query])
        body = scans[7] if isinstance(handler, ImageClassifier) else [[[0.5] * 8] * 8]
        (answer,) = handler.explain([{"body": body}], context)
        return answer

    return ask


@pytest.mark.parametrize(
    "query",
    [
        *(
            {"method": name} | (LAYER if method.cut else {})
            for name, method in METHODS.items()
            if method.suits is None
        ),
        {"target": "top-3"},
        {"target": "7", "against": "1", "output": "logit", "errors": "true"},
        {"check": "true", "quality": "true", "aggregate": "sum"},
        {"regions": "true"},
        {"regions": "true", "method": "occlusion", "window": "2"},
    ],
    ids=str,
)
def test_answers_are_as_described(ask: Callable[..., Any], query: dict[str, str]) -> None:
    assert wrong_in(ask(ImageClassifier(), **query)) == []


def test_answers_about_plain_numbers_are_too(ask: Callable[..., Any]) -> None:
    assert wrong_in(ask(BaseHandler(), n_steps="3")) == []


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """Keep the answer that all rows spoil."""
    return []


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda answer: answer.pop(name)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without("error"), "lacks error"),
        (_without("schema_version"), "lacks schema_version"),
        (_without("regions"), "is neither numbers nor regions"),
        (lambda answer: answer["regions"].pop("counts"), ".regions lacks counts"),
        (lambda answer: answer.update(eror=0.1), ".eror is not known"),
        (lambda answer: answer["regions"]["strongest"][0].update(x=1), "[0].x is not known"),
        (lambda answer: answer.update(schema_version=2), "not 1"),
        (lambda answer: answer.update(n_steps="30"), ".n_steps is '30'"),
        (lambda answer: answer.update(tolerance_met=0), ".tolerance_met is 0"),
        (lambda answer: answer.update(f_input=True), ".f_input is True"),
        (lambda answer: answer["regions"]["values"].append(None), "is None"),
        (lambda answer: answer["regions"].update(kind="grid"), "not one of"),
    ],
)
def test_what_is_described_otherwise_is_seen(
    answers: list[Any], ask: Callable[..., Any], spoil: Callable[[Any], object], said: str
) -> None:
    if not answers:
        answers.append(ask(ImageClassifier(), regions="true", n_steps="3"))
    answer = copy.deepcopy(answers[0])
    spoil(answer)
    (found,) = wrong_in(answer)
    assert said in found
