import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter.errors import ParityError
from modelyard.exporter.formats import to_torchscript
from modelyard.exporter.prove.checker import Checker
from modelyard.exporter.prove.parity import Parity, check
from modelyard.exporter.prove.reference import Reference, observe
from modelyard.handlers.proof.agree import compare


class Scale(nn.Module):
    """Gives `factor * x`, and x itself as a second output."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.factor, x


class Count(nn.Module):
    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    def forward(self, n: Tensor) -> Tensor:
        return n + self.more


class Columns(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : self.width]


def _observe(model: nn.Module, text: str, names: list[str]) -> Reference:
    return observe(model.eval(), parse_inputs([text]), names, torch.device("cpu"))


def _check(
    reference: Reference,
    other: nn.Module,
    folder: Path,
    checker: Checker,
    tolerance: float | None = None,
) -> Parity:
    """Compare `reference` with a TorchScript artifact of another model."""
    artifact = folder / "net.pt"
    to_torchscript.write(other.eval(), reference.signature, reference.example, artifact)
    return check(artifact, "torchscript", reference, checker, tolerance=tolerance)


def test_differences_are_the_known_ones() -> None:
    wanted = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    found = torch.tensor([[4.0, 3.0], [0.0, 10.0]])
    assert compare(wanted, found) == {
        "max_abs": 1.0,
        "scaled": pytest.approx(1 / (math.sqrt(13.1875) + 0.02 * 3), rel=1e-3),
        "largest": 10.0,
        "max_rel": 0.1,
        "error": pytest.approx(math.sqrt(2 / 31.25 / 4)),
        "rows": 2,
        "same": 1,
        "margin": 1.0,
    }


def test_equal_infinities_and_nans_agree_and_others_do_not() -> None:
    wanted = torch.tensor([1.0, math.inf, math.nan])
    assert compare(wanted, wanted.clone())["max_abs"] == 0.0
    assert compare(wanted, torch.tensor([1.0, -math.inf, math.nan]))["max_abs"] == math.inf
    assert compare(wanted, torch.tensor([math.nan, math.inf, math.nan]))["max_abs"] == math.inf
    assert compare(torch.zeros(1), torch.full((1,), math.nan))["max_abs"] == math.inf


def test_an_artifact_that_agrees_is_measured_in_every_batch_size(
    checker: Checker, tmp_path: Path
) -> None:
    reference = _observe(Scale(2.0), "x:float32[batch=1..4,3]", ["scaled", "same"])
    parity = _check(reference, Scale(2.0), tmp_path, checker)
    assert (parity.batches, parity.cases, parity.tolerance) == ((1, 2, 3, 4), 20, 1e-4)
    assert {name: found.max_abs for name, found in parity.outputs.items()} == {
        "scaled": 0.0,
        "same": 0.0,
    }


def test_the_output_that_differs_is_named_with_its_difference_and_place(
    checker: Checker, tmp_path: Path
) -> None:
    reference = _observe(Scale(2.0), "x:float32[batch,3]", ["scaled", "same"])
    with pytest.raises(ParityError) as caught:
        _check(reference, Scale(2.5), tmp_path, checker)
    message = str(caught.value)
    assert 'output "scaled": max_abs ' in message and " scaled, values up to " in message
    assert "over tolerance 0.0001 at batch=" in message
    assert '"same"' not in message


def test_a_tolerance_of_ones_own_decides(checker: Checker, tmp_path: Path) -> None:
    reference = _observe(Scale(2.0), "x:float32[batch,3]", ["scaled", "same"])
    parity = _check(reference, Scale(2.001), tmp_path, checker, tolerance=0.1)
    assert 1e-3 < parity.max_abs < 0.1


def test_integers_must_be_equal_whatever_the_tolerance(checker: Checker, tmp_path: Path) -> None:
    reference = _observe(Count(1), "n:int64[batch]", ["n_plus"])
    with pytest.raises(ParityError, match=r"max_abs 1\.0e\+00 .* over tolerance 0 at"):
        _check(reference, Count(2), tmp_path, checker, tolerance=10)


def test_another_shape_is_a_disagreement(checker: Checker, tmp_path: Path) -> None:
    reference = _observe(Columns(2), "x:float32[batch,5]", ["out"])
    with pytest.raises(
        ParityError, match=r'"out" is float32\[1,3\] at batch=1 .*expected float32\[1,2\]'
    ):
        _check(reference, Columns(3), tmp_path, checker)


def test_a_file_that_no_worker_can_load_is_a_disagreement(checker: Checker, tmp_path: Path) -> None:
    reference = _observe(Count(1), "n:int64[batch]", ["out"])
    (tmp_path / "net.pt").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(ParityError, match="torchscript: the artifact does not load"):
        check(tmp_path / "net.pt", "torchscript", reference, checker)


def test_outputs_that_are_not_kept_are_computed_again(
    checker: Checker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Scale(2.0)
    runs: list[int] = []
    model.register_forward_hook(lambda _, inputs, __: runs.append(len(inputs[0])))
    parities = []
    observing = []
    for kept_bytes in (2**20, 0):
        monkeypatch.setattr("modelyard.exporter.prove.reference.KEPT_BYTES", kept_bytes)
        runs.clear()
        observed = _observe(model, "x:float32[batch=1..4,3]", ["scaled", "same"])
        observing.append(len(runs))
        runs.clear()
        parities.append(_check(observed, Scale(2.0), tmp_path, checker))
        unusual = len(parities[-1].unusual.agrees)  # NaN, ±100, ±10,000
        assert unusual == 3
        assert len(runs) == unusual + (0 if kept_bytes else len(observed.cases.probes))
    assert parities[0] == parities[1]
    # The smallest and the largest, which were run to plan the others.
    assert observing[1] - observing[0] == 2


def test_what_is_exchanged_does_not_grow_with_the_cases(tmp_path: Path) -> None:
    (tmp_path / "exchange").mkdir()
    with Checker(tmp_path / "exchange") as checker:
        sizes = []
        for batch in ("batch=3..4", "batch=1..4"):
            observed = _observe(Scale(2.0), f"x:float32[{batch},3]", ["scaled", "same"])
            _check(observed, Scale(2.0), tmp_path, checker)
            files = list((tmp_path / "exchange").iterdir())
            sizes.append(sum(file.stat().st_size for file in files))
    assert sizes[0] == sizes[1]


def test_a_process_that_dies_is_a_disagreement_and_the_next_artifact_gets_another(
    tmp_path: Path,
) -> None:
    observed = _observe(Scale(2.0), "x:float32[batch=1..2,3]", ["scaled", "same"])
    (tmp_path / "exchange").mkdir()
    before = set(psutil.Process().children())
    with Checker(tmp_path / "exchange") as checker:
        (started,) = set(psutil.Process().children()) - before
        started.kill()
        with pytest.raises(
            ParityError, match=r"^torchscript: the process that checks the artifact ended with"
        ):
            _check(observed, Scale(2.0), tmp_path, checker)
        assert _check(observed, Scale(2.0), tmp_path, checker).max_abs == 0.0
    assert set(psutil.Process().children()) == before


VOCABULARY = """
import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(128_000, 8), nn.Linear(8, 128_000))
"""


@pytest.mark.nightly
def test_a_vocabulary_of_128k_at_length_512_is_proven_in_2_gb(tmp_path: Path) -> None:
    """One row is 262 MB; eight of them in three kinds of values would be 6.3 GB, and were kept."""
    (tmp_path / "net.py").write_text(VOCABULARY, encoding="utf-8")
    model = nn.Sequential(nn.Embedding(128_000, 8), nn.Linear(8, 128_000))
    torch.save(model.state_dict(), tmp_path / "net.ckpt")
    arguments = "export net.ckpt --model net.py:Net --format pt2 -o out --input"
    started = subprocess.Popen(
        [
            *(sys.executable, "-P", "-c", "from modelyard.cli import main; main()"),
            *(*arguments.split(), "ids:int64[batch,length=2..512]"),
        ],
        cwd=tmp_path,
    )
    _, status, usage = os.wait4(started.pid, 0)  # of the process and those that it has reaped
    started.returncode = os.waitstatus_to_exitcode(status)
    assert started.returncode == 0
    assert usage.ru_maxrss < 2_000_000
    report = json.loads((tmp_path / "out" / "net.pt2.report.json").read_text(encoding="utf-8"))
    assert report["parity"]["sizes"] == {"batch": [*range(1, 9)], "length": [2, 512]}
    assert report["parity"]["plan"]["left_out"][-1] == "batch=8, length=512"
