"""What archives that were made for TorchServe, and handlers that import `ts`, mean in a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.forks import Run, forks
from tests.serve.test_worker_load import EXPLAINS, Load, body, loading


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with forks() as run:
        yield run


@pytest.fixture
def load(tmp_path: Path, run: Run) -> Load:
    return loading(tmp_path, run)


def test_what_handle_is_after_initialize_answers(load: Load) -> None:
    source = body("one").replace("pass", "self.handle = lambda data, context: ['replaced']")
    assert load(source, sealed=False)["answers"][0] == ["replaced"]


def test_in_an_archive_for_torchserve_handle_explains_too(load: Load) -> None:
    assert load(EXPLAINS, sealed=False)["answers"] == [["one"], ["one"]]


def test_an_envelope_is_around_both_entries(load: Load) -> None:
    source = body("one").replace("['one']", "[row.decode() for row in data]")
    assert load(source, envelope="body")["answers"] == [["hi"], ["hi"]]


def test_golden_requests_were_made_without_an_envelope(load: Load) -> None:
    source = body("one").replace("['one']", "[str(row) for row in data]")
    row = str({"body": bytearray(b"hi")})
    found = load(source, golden=row, envelope="body")
    assert found["answers"] == [[row[9:-1]]] * 2, found
    assert "golden request 0" in load(source, golden="otherwise", envelope="body")["error"]


def test_an_envelope_that_there_is_not_is_said(load: Load) -> None:
    assert (
        "service_envelope is 'soap'; expected one of body" in load(body(), envelope="soap")["error"]
    )


@pytest.mark.parametrize(
    ("sealed", "module"),
    [(True, "modelyard.handlers.base"), (False, "ts.torch_handler.base_handler")],
)
def test_whose_base_handler_an_archive_means_depends_on_who_made_it(
    load: Load, sealed: bool, module: str
) -> None:
    """Neither finds weights here; the two say so in words of their own."""
    expected = {
        "modelyard.handlers.base": "names no artifact",
        "ts.torch_handler.base_handler": "No model",
    }
    assert expected[module] in load("", "base_handler", sealed=sealed)["error"]


def test_torchserves_names_are_ours_even_where_torchserve_is_installed(load: Load) -> None:
    source = "from ts.torch_handler.base_handler import BaseHandler\n" + body("one")
    source = source.replace("['one']", "[BaseHandler.__module__]")
    assert load(source)["answers"][0] == ["ts.torch_handler.base_handler"]
