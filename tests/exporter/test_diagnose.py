"""Every way in which a model is known to resist, on a model small enough to see why."""

import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter import ConversionError, ExportError, ModelError, export
from modelyard.exporter.formats import to_exported_program
from modelyard.exporter.formats.diagnose import draft_change
from modelyard.exporter.prove.reference import observe

Author = Callable[[str], tuple[Path, str]]

# Each class is written to net.py below four lines.
BRANCH = """
class Net(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x
"""
LOOP = """
class Net(nn.Module):
    def forward(self, x):
        while x.sum() < 100:
            x = 2 * x + 1
        return x
"""
COUNT = """
class Net(nn.Module):
    def forward(self, x):
        for _ in range(int(x.abs().sum())):
            x = x + 1
        return x
"""
FIXED_VIEW = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(15))

    def forward(self, x):
        rows = x.shape[0]
        return sum([x + row for row in range(rows)])
"""
EACH_ROW = """
class Net(nn.Module):
    def forward(self, x):
        rows = []
        for row in x:
            rows.append(2 * row)
        return torch.stack(rows)
"""
CHOOSES = """
class Net(nn.Module):
    def forward(self, x):
        if x.shape[0] > 4:
            return 2 * x
        return x + x
"""
PACKED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x):
        lengths = (x[:, :, 0] != 0).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return self.lstm(packed)[1][0][0]
"""
NUMPY = """
class Net(nn.Module):
    def forward(self, x):
        return x + len(x.numpy().tobytes())
"""
BESSEL = """
class Net(nn.Module):
    def forward(self, x):
        y = 2 * x
        return torch.special.bessel_j0(y)
"""
NEITHER = """
class Net(nn.Module):
    def forward(self, x):
        answer = eval("x * 2")
        if torch.jit.is_tracing():
            raise ValueError("not while it is traced")
        return answer
"""


def _refused(author: Author, source: str, format: str, *inputs: str) -> str:
    checkpoint, model = author(source)
    with pytest.raises(ConversionError) as caught:
        export(
            checkpoint,
            model,
            inputs or ["x:float32[batch,3]"],
            output_dir=checkpoint.parent / "out",
            formats=[format],
        )
    assert not (checkpoint.parent / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "format", "place", "construct", "advice"),
    [
        pytest.param(
            BRANCH,
            "pt2",
            'net.py:7 "if x.sum() > 0:"',
            "branches on a tensor's values",
            'write "return torch.where(x.sum() > 0, x, -x)" in its place, or export --format torch',
            id="branch",
        ),
        pytest.param(
            LOOP,
            "onnx",
            'net.py:7 "while x.sum() < 100:"',
            "branches on a tensor's values",
            "torch.cond",
            id="loop",
        ),
        pytest.param(
            COUNT, "pt2", 'net.py:7 "for _ in range', "read out of a tensor", "_check", id="count"
        ),
        pytest.param(
            FIXED_VIEW,
            "pt2",
            'net.py:12 "return sum([x + row for row in range(rows)])"',
            'fixes dim "batch" of input "x" to 5',
            "compute over the whole dim at once",
            id="batch fixed inside",
        ),
        pytest.param(
            EACH_ROW,
            "pt2",
            'net.py:8 "for row in x:"',
            'fixes dim "batch" of input "x" to 5',
            "compute over the whole dim at once",
            id="loop over rows",
        ),
        pytest.param(
            NUMPY, "pt2", 'net.py:7 "return x + len(x.n', "goes through numpy", "same", id="numpy"
        ),
        pytest.param(
            BESSEL, "onnx", "net.py:8", "no ONNX form", "--format pt2 instead", id="operator"
        ),
        pytest.param(
            NEITHER, "torchscript", "net.py:7", "neither scripted", "--format pt2", id="neither"
        ),
    ],
)
def test_a_failure_names_the_line_the_construct_and_the_way_out(
    source: str, format: str, place: str, construct: str, advice: str, author: Author
) -> None:
    message = _refused(author, source, format)
    assert place in message
    assert construct in message
    assert advice in message
    assert "\n" not in message


def test_a_packed_sequence_is_named_and_torchscript_takes_it(author: Author) -> None:
    inputs = ("x:float32[batch,length=2..6,3]",)
    message = _refused(author, PACKED, "pt2", *inputs)
    assert "packed sequences take their lengths from a tensor" in message
    assert "net.py:13" in message
    checkpoint, model = author(PACKED)
    (report,) = export(
        checkpoint, model, inputs, output_dir=checkpoint.parent, formats=["torchscript"], name="out"
    )
    assert report.parity.max_abs <= 1e-6


def test_the_line_of_a_library_is_named_behind_the_authors_own(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "solver.py"
    library.parent.mkdir()
    library.write_text("def solve(x):\n    return x if x.sum() > 0 else -x\n", encoding="utf-8")
    own = tmp_path / "net.py"
    own.write_text("def forward(x):\n    return solve(x)\n", encoding="utf-8")
    names: dict[str, Any] = {}
    for file in (library, own):
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = names["forward"](x)
            return found

    reference = observe(Net(), parse_inputs(["x:float32[batch,3]"]), (), torch.device("cpu"))
    place = r'at net\.py:2 "return solve\(x\)", in solver\.py:2 "return x if x\.sum'
    with pytest.raises(ConversionError, match=place) as caught:
        to_exported_program.capture(reference.model, reference.signature, reference.example)
    assert "use torch.where or torch.cond" in str(caught.value)  # no draft of another's line


@pytest.mark.parametrize(
    ("lines", "line", "change"),
    [
        pytest.param(
            ["if a > 0:", "    return b", "return c"], 1, "return torch.where(a > 0, b, c)", id="if"
        ),
        pytest.param(
            ["if not a:", "    x = b", "else:", "    x = c"],
            1,
            "x = torch.where(a, c, b)",
            id="else",
        ),
        pytest.param(["if a:", "    x = b"], 1, "x = torch.where(a, b, x)", id="one side"),
        pytest.param(["y = b if a else c"], 1, "y = torch.where(a, b, c)", id="ternary"),
        pytest.param(["y = x * float(a.sum())"], 1, "y = x * a.sum()", id="float"),
        pytest.param(
            ["with b:", "    y = x[", "        a.item()", "    ]"], 3, "y = x[a]", id="item"
        ),
        pytest.param(["if a is None:", "    x = b"], 1, "", id="not of a tensor"),
        pytest.param(["if a and b:", "    x = b"], 1, "", id="two questions"),
        pytest.param(["if a:", "    x = b", "    y = c"], 1, "", id="two statements"),
        pytest.param(["while a > 0:", "    a = a - 1"], 1, "", id="loop"),
        pytest.param(["if a:", "    raise ValueError"], 1, "", id="a check"),
        pytest.param(["if a"], 1, "", id="not Python"),
    ],
)
def test_a_change_is_drafted_where_it_is_mechanical(
    lines: list[str], line: int, change: str, tmp_path: Path
) -> None:
    file = tmp_path / "net.py"
    text = "".join(f"    {each}\n" for each in lines)
    file.write_text(f"def forward(a, b, c, x):\n{text}", encoding="utf-8")
    assert draft_change(str(file), line + 1) == change


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_layers_quantised_by_torch_ao_are_named() -> None:
    layers: nn.Module = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
        nn.Sequential(nn.Linear(3, 3)), {nn.Linear}
    )
    signature = parse_inputs(["x:float32[batch,3]"])
    reference = observe(layers.eval(), signature, (), torch.device("cpu"))
    with pytest.raises(ConversionError, match=r"torch\.ao's quantised layers .*--quantize int8"):
        to_exported_program.capture(layers, reference.signature, reference.example)


def test_a_choice_by_size_says_for_which_sizes_the_trace_holds(author: Author) -> None:
    message = _refused(author, CHOOSES, "pt2")
    assert "what the example took holds for batch=5..… only" in message


def test_two_names_for_one_size_are_told_to_share_a_name(author: Author) -> None:
    source = "\nclass Net(nn.Module):\n    def forward(self, x, y):\n        return x + y\n"
    checkpoint, model = author(source)
    inputs = ["x:float32[n=2..3]", "y:float32[m=2..3]"]
    with pytest.raises(ExportError, match="size of tensor a"):
        export(checkpoint, model, inputs, output_dir=checkpoint.parent / "out")


def test_the_full_report_lies_in_a_file_that_only_its_owner_reads(author: Author) -> None:
    message = _refused(author, BRANCH, "pt2")
    named = re.search(r"full report: (\S+modelyard-export-\S+\.log)$", message)
    assert named is not None
    report = Path(named[1])
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    text = report.read_text(encoding="utf-8")
    assert "torch.export failed" in text
    assert "input x:float32[batch=1..8,3]" in text
    assert "GuardOnDataDependentSymNode" in text


@pytest.mark.parametrize(
    ("inputs", "seen"),
    [
        pytest.param(["x:float32[batch,4]"], "mat1 and mat2", id="shape"),
        pytest.param(["x:int64[batch,3]"], 'input "x" int64[5,3]', id="dtype"),
        pytest.param(["x:float64[batch,3]"], 'input "x" float64[5,3]', id="width"),
    ],
)
def test_an_example_that_does_not_fit_is_found_before_it_is_traced(
    inputs: list[str], seen: str, author: Author
) -> None:
    source = "\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 2)\n"
    checkpoint, model = author(source)
    with pytest.raises(ModelError) as caught:
        export(checkpoint, model, inputs, output_dir=checkpoint.parent / "out")
    assert seen in str(caught.value)


def test_a_range_that_starts_at_one_is_traced_with_more_rows(author: Author) -> None:
    checkpoint, model = author(
        "\nclass Net(nn.Module):\n    def forward(self, x):\n        return 2 * x\n"
    )
    (report,) = export(
        checkpoint, model, ["x:float32[batch=1..2]"], output_dir=checkpoint.parent, formats=["pt2"]
    )
    assert report.parity.batches == (1, 2)


HOPELESS = """
class Net(nn.Module):
    def forward(self, x):
        assert not (torch.jit.is_tracing() or torch.compiler.is_exporting()), f"not {type(x)} now"
        return eval("x * 2")
"""


def test_no_message_sends_to_a_format_that_failed_too(author: Author) -> None:
    checkpoint, model = author(HOPELESS)
    with pytest.raises(ExportError) as caught:
        export(
            checkpoint,
            model,
            ["x:float32[batch,3]"],
            output_dir=checkpoint.parent / "out",
            formats=["torchscript", "onnx", "pt2"],
        )
    message = str(caught.value)
    assert "torchscript: " in message
    assert "--format" not in message


def test_the_line_is_named_once_and_cut_where_that_shows(author: Author) -> None:
    message = _refused(author, HOPELESS, "torchscript")
    assert message.count("net.py:7") == 1
    assert '{typ …": it can be neither' in message


def test_reports_of_failed_exports_do_not_gather(author: Author) -> None:
    for _ in range(2):
        _refused(author, BRANCH, "pt2")
    assert len(list(Path(tempfile.gettempdir()).glob("modelyard-export-*"))) == 1
