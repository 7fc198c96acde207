"""A model that has no one answer in a case is judged there by its own movement, and only there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter import ParityError
from modelyard.exporter.formats import to_torchscript
from modelyard.exporter.prove.checker import Checker
from modelyard.exporter.prove.parity import Parity, check
from modelyard.exporter.prove.reference import Reference, observe
from modelyard.handlers.proof.agree import Rule, allowance

INPUT = "x:float32[batch=1..2,3,8,8]"


class Norm(nn.Module):
    """Instance norm as it is defined, whose sums another library may round otherwise.

    Args:
        moved: what rounding adds before it.
    """

    def __init__(self, moved: float) -> None:
        super().__init__()
        self.moved = moved

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[-1]) * self.moved
        x = x * (1 + steps)
        apart = x - x.mean((2, 3), keepdim=True)
        out: Tensor = apart * torch.rsqrt(apart.square().mean((2, 3), keepdim=True) + 1e-5)
        return out


class Net(nn.Module):
    """Convolutions between norms: on zeros every norm makes more of what rounding left.

    Args:
        moved: by rounding; 0 in the checkpoint.
        on_zeros: what a fault adds to the answer on zeros.
        on_rest: what a fault adds to all others.
    """

    def __init__(self, moved: float = 0.0, on_zeros: float = 0.0, on_rest: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Norm(moved), nn.PReLU()) for _ in "123")
        )
        self.on_zeros, self.on_rest = on_zeros, on_rest

    def forward(self, x: Tensor) -> Tensor:
        is_zero = (x.abs().amax((1, 2, 3), keepdim=True) < 1e-30).to(x.dtype)
        out: Tensor = self.layers(x) + is_zero * self.on_zeros + (1 - is_zero) * self.on_rest
        return out


@pytest.fixture(scope="module")
def reference() -> Reference:
    return observe(Net().eval(), parse_inputs([INPUT]), ["y"], torch.device("cpu"))


def _check(reference: Reference, other: nn.Module, checker: Checker, folder: Path) -> Parity:
    to_torchscript.write(other.eval(), reference.signature, reference.example, folder / "net.pt")
    return check(folder / "net.pt", "torchscript", reference, checker)


def _places(reference: Reference, *kinds: str) -> list[int]:
    probes = reference.cases.probes
    return [place for place, probe in enumerate(probes) if probe.kind in kinds]


def test_a_model_moves_where_it_divides_rounding_by_nothing_and_nowhere_else(
    reference: Reference,
) -> None:
    ill = [reference.cases.sensitivity(place) for place in _places(reference, "zeros", "tiny")]
    assert all(moved > 1e-2 for (moved,) in ill)
    well = [reference.cases.sensitivity(place) for place in _places(reference, "random", "large")]
    assert all(moved < 1e-5 for (moved,) in well)


@pytest.mark.parametrize("size", [0.0, 1.0], ids=["zeros", "ones"])
def test_sums_of_nothing_and_layers_of_all_day_do_not_move(size: float) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    observed = observe(model, parse_inputs(["x:float32[2,3,8]"]), (), torch.device("cpu"))
    assert max(observed.cases.sensitivity(0) + observed.cases.sensitivity(1)) < 1e-5


def test_an_artifact_that_rounds_otherwise_agrees_and_the_report_says_where(
    reference: Reference, checker: Checker, tmp_path: Path
) -> None:
    parity = _check(reference, Net(moved=3e-7), checker, tmp_path)
    cases = {case.case for case in parity.ill_conditioned}
    assert cases
    assert cases <= {f"batch={n} ({kind} values)" for n in (1, 2) for kind in ("zeros", "tiny")}
    for case in parity.ill_conditioned:
        assert 1e-4 < case.found <= case.allowed == pytest.approx(4 * case.moved)
    # The rest is judged, and reported, as ever.
    assert parity.outputs["y"].scaled <= 1e-4
    assert len(parity.to_json()["ill_conditioned"]["cases"]) == len(cases)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        pytest.param(Net(on_rest=0.5), r"5\.\de-01", id="on ordinary values"),
        pytest.param(Net(moved=3e-7, on_rest=5e-4), r"5\.\de-04", id="a little on ordinary values"),
        pytest.param(Net(on_zeros=1e3), r"1\.0e\+03", id="far on zeros"),
        pytest.param(Net(on_zeros=float("nan")), "inf", id="not a number on zeros"),
    ],
)
def test_a_wrong_artifact_of_such_a_model_is_refused(
    fault: nn.Module, seen: str, reference: Reference, checker: Checker, tmp_path: Path
) -> None:
    with pytest.raises(ParityError, match=f'output "y": max_abs {seen} '):
        _check(reference, fault, checker, tmp_path)


class Steady(Net):
    def forward(self, x: Tensor) -> Tensor:
        is_zero = (x.abs().amax((1, 2, 3), keepdim=True) < 1e-30).to(x.dtype)
        return x + is_zero * self.on_zeros


def test_a_fault_on_zeros_of_a_model_that_is_well_conditioned_there_is_refused(
    checker: Checker, tmp_path: Path
) -> None:
    observed = observe(Steady().eval(), parse_inputs([INPUT]), ["y"], torch.device("cpu"))
    with pytest.raises(ParityError, match=r"max_abs 5\.0e-04 .* at batch=1 \(zeros values\)"):
        _check(observed, Steady(on_zeros=5e-4), checker, tmp_path)


@pytest.mark.parametrize(
    ("rule", "kind", "moved", "allowed"),
    [
        pytest.param(Rule(1e-4), "zeros", 1e-5, None, id="steady"),
        pytest.param(Rule(1e-2), "zeros", 5e-3, None, id="within the tolerance"),
        pytest.param(Rule(0.0), "zeros", 5e-7, None, id="a tolerance of none is meant"),
        pytest.param(Rule(1e-4), "zeros", 0.5, 2.0, id="zeros"),
        pytest.param(Rule(1e-4), "random", 2e-4, 8e-4, id="random, a little"),
        pytest.param(Rule(1e-4), "random", 0.5, 1e-3, id="random, and no more"),
        pytest.param(Rule(1e-4), "sample", 0.5, 1e-3, id="sample"),
        pytest.param(Rule(1e-4), "zeros", float("inf"), None, id="not finite"),
        pytest.param(Rule(1e-4, is_quantized=True), "zeros", 0.5, None, id="quantised"),
    ],
)
def test_what_is_allowed_is_bounded(
    rule: Rule, kind: str, moved: float, allowed: float | None
) -> None:
    found = allowance(rule, kind, moved)
    assert found == (None if allowed is None else pytest.approx(allowed))
