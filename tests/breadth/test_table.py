"""What the matrix rests on; it runs by `make nightly`, in an environment of its own."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from tests.breadth import bare, new
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


class Attention(nn.Module):
    """A part as libraries have them: what it is built from has no defaults and no types."""

    def __init__(self, dim, num_heads, act_layer, drop=0.1):  # type: ignore[no-untyped-def]
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, dim), act_layer, nn.Linear(dim, num_heads))

    def forward(self, queries: Tensor, keys: Tensor) -> Any:
        return self.net(queries) @ self.net(keys).transpose(1, 2)


class Lucky(nn.Module):
    """It runs at the sizes of which four fit, and at no other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        assert x.shape[1] in (2, 9, 4), "none of those"
        return self.layer(x)


def test_classes_are_built_and_get_inputs() -> None:
    row = new.search(Attention)
    built = new.make(Attention, row["call"])
    texts = parse_inputs(row["inputs"])
    assert row["call"] == "Attention(dim=16, num_heads=2, act_layer=torch.nn.ReLU())"
    assert [spec.name for spec in texts.inputs] == ["queries", "keys"] and len(texts.dims) == 2
    assert new.takes(built, texts)
    assert not new.takes(Lucky(), SIGNATURE)
    assert new.search(nn.ReLU)["skipped"] == "has 0 parameters"


def test_formats_that_only_a_bare_call_gets_right_are_lost(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "package": "p",
        "version": "1",
        "class": "m:C",
        "call": "C()",
        "inputs": ["x:float32[1]"],
    }
    row |= {"ours": {"pt2": "ok"}, "bare": {"pt2": "", "onnx": "ok", "torchscript": "WRONG"}}
    row |= {"traceback": False, "narrowed": False, "message": "error: no form; full report: f"}
    row |= {"cpu_s": {"ours": 4.0}, "peak_mb": {"ours": 300}}
    skipped = {"package": "p", "version": "1", "class": "m:D", "skipped": "no inputs found"}
    assert new.lost(row) == ["onnx"]
    text = new.page([row, skipped])
    assert "1 networks of 1 libraries. 1 further classes" in text
    assert "- onnx: right in 0. Of the others a bare call is right in 1" in text
    assert "| p `C()` | `x:float32[1]` | onnx | error: no form |" in text
    wrong = row | {"ours": {"pt2": "WRONG at {}: by 1"}}
    assert "Written as proven and wrong: 1 files" in new.totals([wrong])
