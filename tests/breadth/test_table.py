"""What the matrix rests on; it runs by `make nightly`, in an environment of its own."""

from pathlib import Path

from torch import nn

from modelyard.archiver.signature import parse_inputs
from tests.breadth import bare
from tests.breadth.report import counts, write_table
from tests.breadth.table import CASES

SIGNATURE = parse_inputs(["x:float32[batch=1..3,length=2..9,4]"])


def result(bare_pt2: str, ours: str, served: str = "ok") -> dict[str, object]:
    return {
        "bare": {"pt2": bare_pt2, "onnx": "FAIL"},
        "formats": {"pt2": {"max_abs": 1e-6, "batchable": True}} if ours else {},
        "right": {"pt2": ours},
        "served": served,
        "traceback": False,
        "dead": False,
        "cpu_s": 3.2,
    }


def test_every_architecture_states_inputs_that_can_be_read() -> None:
    assert len(CASES) > 100
    assert all(parse_inputs(case.inputs).dims or "[1," in case.inputs[0] for case in CASES.values())


def test_program_that_is_right_at_one_size_is_judged_wrong() -> None:
    model = nn.Linear(4, 2).eval()
    called = bare.Bare(model, SIGNATURE, {})
    assert bare.judge(called, lambda inputs: called(inputs)) == "ok"
    frozen = called(bare.make_inputs(SIGNATURE, bare.choose_sizes(SIGNATURE)[0], 0))
    assert bare.judge(called, lambda inputs: frozen).startswith("WRONG at {'batch': 1")
    nearly = bare.judge(called, lambda inputs: [each + 0.01 for each in called(inputs)])
    assert "by 1.0e-02" in nearly


def test_counts_are_of_what_a_bare_call_gets_right(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- table: make nightly -->\nold\n<!-- end of table -->\nAfter\n")
    results = {
        "tcn": result("ok", "ok"),
        "dlrm": result("ok", "", served=""),
        "ode_rk4": result("FAIL", "ok", served="500"),
    }
    text = write_table(results, page)
    assert text == counts(results)
    assert "3 architectures, 2 exported. A bare call is right for 2; of these 1" in text
    assert "and 1 that no bare call gets right. 1 answer through a worker." in text
    written = page.read_text()
    assert "| tcn | torch | state dict | right | fail | pt2 | 1e-06 | yes | 3 | yes |" in written
    assert "old" not in written
    assert written.startswith("Before\n") and written.endswith("After\n")
