"""`modelyard web-page`: in Chromium it verifies the model, and predicts only then."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from modelyard.handlers.tasks.pictures import RESAMPLINGS
from plugins.recertify.tests.test_runtimes import made
from tests.browser import Browser, browsing, find_missing, running_driver
from tests.serve.live import modelyard

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "plugins" / "recertify" / "web_page.js"
SEVEN = ROOT / "examples" / "digits" / "scans" / "7.png"


@pytest.mark.parametrize("name", RESAMPLINGS)
def test_a_picture_is_resized_to_pillows_bytes(name: str) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not here: apt-get install nodejs")
    noise = np.random.default_rng(0).integers(0, 256, (23, 31), dtype=np.uint8)
    sizes = ((8, 8), (31, 40), (64, 23), (13, 57))
    text = SCRIPT.read_text(encoding="utf-8")
    part = text[text.index("const FILTERS") : text.index("// Where the box lies")]
    call = f"[...resized(Uint8Array.from({noise.flatten().tolist()}), 31, 23, w, h, '{name}')]"
    code = f"{part}; console.log(JSON.stringify({json.dumps(sizes)}.map(([w, h]) => {call})))"

    found = json.loads(subprocess.run([node, "-"], input=code, capture_output=True, text=True,
                                      check=True).stdout)  # fmt: skip

    for size, values in zip(sizes, found, strict=True):
        expected = np.asarray(Image.fromarray(noise).resize(size, RESAMPLINGS[name]))
        assert np.array_equal(np.reshape(values, expected.shape), expected), size


def test_the_rule_of_a_page_takes_nothing_unknown_for_right() -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not here: apt-get install nodejs")
    text = SCRIPT.read_text(encoding="utf-8")
    part = text[text.index("function furthest") : text.index("function judge")]
    cases = (
        ("[1, 2]", "[1, 2]", "[1, 1]", 0),
        ("[1, 2.5]", "[1, 2]", "[1, 2]", 0.25),
        ("[NaN]", "[1]", "[1]", None),
        ("[1]", "[NaN]", "[1]", None),
        ("[NaN]", "[NaN]", "[1]", 0),
        ("[1, 0]", "[Infinity, 0]", "[1, 1]", None),
        ("[-Infinity]", "[Infinity]", "[1]", None),
        ("[Infinity]", "[Infinity]", "[1]", 0),
        ("[1e-9]", "[0]", "[0]", None),
        ("[3n]", "[2n]", "[1]", 1),
        ("[]", "[1]", "[1]", None),
    )
    calls = ",".join(f"furthest({a}, {b}, {units})" for a, b, units, _ in cases)
    code = f"{part}; console.log(JSON.stringify([{calls}].map(v => v === Infinity ? null : v)))"

    found = json.loads(subprocess.run([node, "-"], input=code, capture_output=True, text=True,
                                      check=True).stdout)  # fmt: skip

    assert found == [expected for *_, expected in cases]


@pytest.mark.nightly
def test_an_archive_without_onnx_is_refused(digits_store: Path, tmp_path: Path) -> None:
    made("onnxruntime-web")
    page = tmp_path / "page.html"

    ran = modelyard("web-page", str(digits_store / "pt2.mar"), "-o", str(page))

    assert ran.returncode == 1 and "export it with --format onnx" in ran.stderr.replace("\n", " ")
    assert not page.exists()


@pytest.fixture(scope="module")
def page(digits_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of digits."""
    made("onnxruntime-web")
    file = tmp_path_factory.mktemp("page") / "digits.html"
    ran = modelyard("web-page", str(digits_store / "onnx.mar"), "-o", str(file))
    assert ran.returncode == 0, ran.stderr
    return file


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the browser's driver; yield its address."""
    if (missing := find_missing()) is not None:
        pytest.skip(missing)
    with running_driver(tmp_path_factory.mktemp("driver") / "driver.log") as address:
        yield address


def opened(browser: Browser, file: Path) -> str:
    """Open a page, and return what it says when it knows."""
    browser.open(file.as_uri())
    browser.wait(lambda: "Verifying" not in browser.text("#state"), "a verdict", 120)
    return browser.text("#state")


def planted(page: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """Write a page whose model is another one."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r'id="model">([^<]*)<', text)
    assert found is not None
    model = onnx.load_from_string(gzip.decompress(base64.b64decode(found[1])))
    change(model)
    other = base64.b64encode(gzip.compress(model.SerializeToString())).decode()
    file = page.with_name("planted.html")
    file.write_text(text[: found.start(1)] + other + text[found.end(1) :], encoding="utf-8")
    return file


def one_weight(model: onnx.ModelProto) -> None:
    """Move one weight of the first convolution by 0.05."""
    tensor = next(each for each in model.graph.initializer if len(each.dims) == 4)
    values = onnx.numpy_helper.to_array(tensor).copy()
    values.flat[7] += 0.05
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


@pytest.mark.slow
def test_a_page_verifies_and_then_predicts(page: Path, driver: str) -> None:
    with browsing(driver) as browser:
        said = opened(browser, page)
        assert said.startswith("Verified in this browser"), said

        browser.find("#file").type(str(SEVEN))
        assert browser.shows("100.0 %", "#answer").splitlines()[0] == "7"
        browser.find('button[title="golden request 0"]').click()
        browser.shows("%", "#answer")
        browser.find("#more").click()
        verdicts = {row.text for row in browser.find_all("#cases td:last-child")}
        assert verdicts == {"agrees"}
        assert browser.faint_texts() == [] and browser.overflow() == ""
        browser.look()
        assert browser.requests == [page.as_uri()] and browser.problems == []


@pytest.mark.slow
def test_a_page_with_a_wrong_weight_says_so_and_does_not_predict(page: Path, driver: str) -> None:
    with browsing(driver) as browser:
        said = opened(browser, planted(page, one_weight))

        assert "does not verify" in said and "does not predict" in said
        assert not browser.find("#predict").is_shown
        assert browser.find_all("#examples button") == []
        assert "differs" in browser.text("#cases")


@pytest.mark.slow
def test_a_page_whose_model_does_not_load_says_so(page: Path, driver: str) -> None:
    def unknown(model: onnx.ModelProto) -> None:
        model.graph.node[0].op_type = "NoSuchOperator"

    with browsing(driver) as browser:
        said = opened(browser, planted(page, unknown))

        assert "does not run" in said and "NoSuchOperator" in said
        assert not browser.find("#predict").is_shown
