"""The console as a person uses it, in a real browser: https://www.w3.org/TR/webdriver2/."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plugins.ops.tests.console.visits import WIDTHS, visiting
from tests.serve.live import LiveServer
from tests.shared import DIGITS

SEVEN = DIGITS / "scans" / "7.png"


@pytest.fixture(scope="module")
def server(shared_server: LiveServer, digits_store: Path) -> LiveServer:
    if not (shared_server.store / "onnx.mar").exists():  # other modules put it there too
        shutil.copy(digits_store / "onnx.mar", shared_server.store / "onnx.mar")
    assert shared_server.register("onnx.mar", initial_workers=1).status_code == 200
    return shared_server


def test_a_person_signs_in_looks_and_tries_a_picture(
    driver: str, server: LiveServer, tmp_path: Path
) -> None:
    with visiting(driver, server, tmp_path) as visitor:
        page = visitor.sign_in(server.token)
        page.shows("onnx")
        page = visitor.open("/models/onnx/1.0/archive")
        page.shows("inputs compared")
        assert page.overflow() == ""
        page = visitor.open("/models/onnx/1.0/try")
        page.find("input[name=file]").type(str(SEVEN))
        page.find("button[value=predict]").click()
        page.shows("in the handler", "#answers")
        assert page.text("#answers tbody tr th") == "7"
        expected = server.predict("onnx", SEVEN.read_bytes()).json()["7"]
        assert float(page.text("#answers tbody tr td")) == pytest.approx(expected, rel=0.01)
        page.find("button[value=explain]").click()
        page.shows("Convergence delta", "#answers", 60)
        drawn = page.find("#answers img.drawn")
        assert drawn.value_of("naturalWidth") > 200 and "heat map" in drawn.label
        page.resize(WIDTHS[0])
        assert page.overflow() == ""
