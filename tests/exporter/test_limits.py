"""Values that nobody promised: an artifact that differs for them states it, and is not asked."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, max_pool1d, scaled_dot_product_attention

from modelyard.archiver.report import read_report
from modelyard.archiver.signature import parse_inputs, parse_signature
from modelyard.archiver.values import Limits
from modelyard.exporter import export
from modelyard.exporter.formats import to_torchscript
from modelyard.exporter.prove.checker import Checker
from modelyard.exporter.prove.limits import Unusual, with_limits
from modelyard.exporter.prove.parity import check
from modelyard.exporter.prove.reference import observe
from modelyard.handlers.errors import BadInput
from modelyard.handlers.limits import check_stated

FLOATS = ("x:float32[batch,6]",)
TOKENS = ("ids:int64[batch,length=2..9]", "mask:int64[batch,length=2..9]")
COUNT = ("n:int64[batch,3]",)
Step = Callable[..., Tensor]


class One(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


class Two(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.step(ids, mask)


def mean(ids: Tensor, mask: Tensor) -> Tensor:
    return (ids * mask).sum(1) / mask.sum(1).clamp(min=1)


def tokens(n: Tensor) -> Tensor:
    if (n < 0).any():
        raise IndexError("there is no such token")
    return n.float()


def below(limit: float) -> Callable[[Limits], bool]:
    return lambda limits: (
        limits.low == -(limits.high or 0) and limit / 2 <= (limits.high or 0) <= limit
    )


# The network, what an artifact does instead, and the limit that says where.
DIFFERS: dict[str, tuple[tuple[str, ...], Step, Step, object]] = {
    "NaN is a zero": (FLOATS, lambda x: x, lambda x: x.nan_to_num(), Limits(nan=True)),
    "NaN is passed over": (
        FLOATS,
        lambda x: x.amax(1),
        lambda x: x.nan_to_num(-100.0).amax(1),
        Limits(nan=True),
    ),
    "another class for NaN": (
        FLOATS,
        lambda x: x.argmax(1),
        lambda x: x.nan_to_num(-100.0).argmax(1),
        Limits(nan=True),
    ),
    "cut off at 60": (FLOATS, lambda x: x, lambda x: x.clamp(-60, 60), below(60)),
    "pixels are taken for shares": (
        FLOATS,
        lambda x: torch.where(x.abs().max() > 50, x / 255, x),
        lambda x: x,
        below(50),
    ),
    "underflows at -90": (
        FLOATS,
        logsigmoid,
        lambda x: torch.where(x < -90, -torch.inf, logsigmoid(x)),
        below(95),
    ),
    "float16 ends": (
        FLOATS,
        lambda x: x * 32,
        lambda x: torch.where((x * 32).abs() > 65504, torch.inf * x, x * 32),
        below(2047),
    ),
    "cut off at 3,000": (FLOATS, lambda x: x, lambda x: x.clamp(-3e3, 3e3), below(3000)),
    "closed rows give NaN": (
        TOKENS,
        mean,
        lambda ids, mask: (ids * mask).sum(1) / mask.sum(1),
        Limits(closed=True),
    ),
    "positions count from the left": (
        TOKENS,
        mean,
        lambda ids, mask: mean(ids, mask) * torch.where(mask[:, 0] == 0, 2, 1),
        Limits(padded=True),
    ),
    "rounded to zero instead of down": (
        COUNT,
        lambda n: n // 7,
        lambda n: torch.div(n, 7, rounding_mode="trunc"),
        Limits(low=0),
    ),
    "counts from the end": (COUNT, tokens, lambda n: n.float(), Limits(low=0)),
    "32 bits": (COUNT, lambda n: n * 1, lambda n: n.int().long(), Limits(high=999)),
}
AGREES: dict[str, tuple[tuple[str, ...], Step, Step]] = {
    "rounds otherwise": (FLOATS, lambda x: x * 3, lambda x: x * (3 + 3e-7)),
    "sums in another order": (FLOATS, lambda x: x.sum(1), lambda x: x.flip(1).sum(1)),
    "NaN stays NaN": (FLOATS, lambda x: x.relu() - 1, lambda x: (x.relu() - 1) * 1.0000001),
    "overflows alike": (FLOATS, lambda x: x.exp(), lambda x: x.exp() * 1.0000001),
    "softmax": (FLOATS, lambda x: x.softmax(1), lambda x: x.log_softmax(1).exp()),
    "sines of much": (FLOATS, lambda x: (x * 1e3).sin(), lambda x: (x * 1e3).sin()),
    "attention over nothing": (TOKENS, mean, lambda ids, mask: mean(ids, mask) * 1.0000001),
    "closed positions give anything": (
        TOKENS,
        lambda ids, mask: ids * mask.float(),
        lambda ids, mask: ids * mask + 7.0 * (mask != 1).float() * (mask[:, :1] != 1),
    ),
    "any integer": (COUNT, lambda n: n // 7, lambda n: (n - n % 7) // 7),
    "refused by both": (COUNT, tokens, tokens),
}


def _find(
    inputs: tuple[str, ...], step: Step, other: Step, checker: Checker, path: Path
) -> Unusual:
    kind = Two if len(inputs) > 1 else One
    reference = observe(kind(step).eval(), parse_inputs(inputs), (), torch.device("cpu"))
    to_torchscript.write(kind(other).eval(), reference.signature, reference.example, path)
    return check(path, "torchscript", reference, checker).unusual


@pytest.mark.parametrize("name", DIFFERS)
def test_what_differs_on_unusual_values_is_a_limit(
    name: str, checker: Checker, tmp_path: Path
) -> None:
    inputs, step, other, wanted = DIFFERS[name]
    found = _find(inputs, step, other, checker, tmp_path / "net.pt")
    assert len(found.limits) == 1, found
    (limits,) = found.limits.values()
    assert wanted(limits) if callable(wanted) else limits == wanted, limits


@pytest.mark.parametrize("name", AGREES)
def test_honest_arithmetic_has_no_limit(name: str, checker: Checker, tmp_path: Path) -> None:
    found = _find(*AGREES[name], checker, tmp_path / "net.pt")
    assert not found.limits
    assert found.agrees


def test_a_request_is_held_to_the_limits_that_a_report_states() -> None:
    signature = parse_inputs(["x:float32[batch,3]", "mask:int64[batch,3]"])
    limits = {"x": Limits(nan=True, low=-2.0, high=50.0), "mask": Limits(closed=True, padded=True)}
    stated = parse_signature(with_limits(signature, limits).to_json())
    assert {spec.name: spec.limits for spec in stated.inputs} == limits
    whole, left = torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 1]])
    check_stated(stated.inputs, (torch.tensor([[-2.0, 0.0, 50.0]]), whole))
    for row in ([torch.nan, 0, 0], [0, -2.1, 0], [0, 0, 51]):
        with pytest.raises(
            BadInput, match=r'"x" holds what .*: NaN or a value below -2 or .* above 50;'
        ):
            check_stated(stated.inputs, (torch.tensor([row]), whole))
    for mask in (left, whole * 0):
        with pytest.raises(
            BadInput, match=r'"mask" holds what .*: a row that is masked everywhere or'
        ):
            check_stated(stated.inputs, (torch.zeros(1, 3), mask))
    check_stated(signature.inputs, (torch.full((1, 3), torch.nan), left))


@pytest.mark.parametrize(
    ("stated", "problem"),
    [({"nan": 1}, "limits.nan: expected true or false"), ({"low": "x"}, "limits.low: expected a")],
)
def test_limits_that_are_none_are_refused(stated: object, problem: str) -> None:
    spec = {"name": "x", "dtype": "float32", "shape": [3], "limits": stated}
    with pytest.raises(ValueError, match=problem):
        parse_signature({"inputs": [spec], "outputs": [], "dims": {}})


class Missing(nn.Module):
    """Pools what may be missing, and attends to what may be masked everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 8)

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        held = self.table(ids)[:, None]
        open_ = mask[:, None, None, :].bool()
        attended = scaled_dot_product_attention(held, held, held, attn_mask=open_)
        return max_pool1d(x[:, None], 2), attended.mean((1, 2)), x.argmax(1)


@pytest.mark.nightly
def test_the_onnx_of_a_network_states_what_another_library_does_otherwise(tmp_path: Path) -> None:
    torch.save(Missing(), tmp_path / "net.pth")
    (report,) = export(
        tmp_path / "net.pth",
        "tests.exporter.test_limits:Missing",
        [FLOATS[0], *TOKENS],
        formats=["onnx"],
        output_dir=tmp_path,
        announce=lambda *_: None,
    )
    stated = read_report(report.artifact)
    assert stated is not None
    assert {spec.name: spec.limits for spec in stated.signature.inputs} == {
        "x": Limits(nan=True),
        "ids": Limits(low=0),
        "mask": Limits(closed=True),
    }
    assert report.parity.unusual.untried == {
        "infinity": "it is not tried",
        "integers above": "neither the checkpoint nor the artifact takes them",
    }
