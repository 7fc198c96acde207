"""Calls that lead kernels outside of their tensors: what stands in front of them."""

import operator
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.handlers.judge.check import load_program
from modelyard.handlers.judge.checked import call_problem, guarded

aten = torch.ops.aten
FAR = (1 << 63) - 1
LEAST = -(1 << 63)
BYTES = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Calls(nn.Module):
    """A network that makes one call."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)


def loaded(call: Callable[..., Any], folder: Path, *inputs: Tensor) -> Callable[..., Any]:
    """Return a call as a worker makes it: exported, written, read."""
    program = torch.export.export(Calls(call), inputs)
    program._example_inputs = None
    torch.export.save(program, folder / "call.pt2")
    module = load_program(folder / "call.pt2").module(check_guards=False)
    return module


def whole(*values: int) -> Tensor:
    return torch.tensor(values)


def number(n: Tensor) -> int:
    """Return what a client says, as a size."""
    return n.item()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("call", "right", "expected"),
    [
        (lambda x: x.expand(3).median(0)[0], [whole(7)], torch.tensor(7)),
        (lambda x: x.expand(4, 3).median(1)[0], [whole(7, 1, 2)], whole(2, 2, 2, 2)),
        (lambda x: x.unfold(0, 3, 1).median(1)[0], [whole(9, 1, 5, 7)], whole(5, 5)),
        (lambda x: x.expand(2, 3).kthvalue(2, 1)[0], [whole(7, 1, 2)], whole(2, 2)),
        (lambda x: x.expand(2, 3).mode(1)[0], [whole(7, 1, 7)], whole(7, 7)),
    ],
)
def test_elements_that_share_memory_are_read_where_they_lie(
    call: Callable[..., Any], right: list[Tensor], expected: Tensor, tmp_path: Path
) -> None:
    # torch 2.13 takes such a tensor as contiguous, and gives what lies behind it.
    assert loaded(call, tmp_path, *right)(*right).tolist() == expected.tolist()


def test_integers_that_a_client_sends_are_bounded(tmp_path: Path) -> None:
    x, right = torch.ones(5, 2), whole(1, 2, 1, 0, 3)
    run = loaded(lambda x, repeats: x.repeat_interleave(repeats, 0), tmp_path, x, right)
    assert run(x, right).shape == (7, 2)
    with pytest.raises(ValueError, match="repeats holds 3 to 4611686018427387904, expected"):
        run(x, WRAPPED)


def as_guarded(target: Any, *args: Any) -> Any:
    """Call an operator as a program does that learns every argument only when it runs."""
    node = torch.fx.Graph().placeholder("x")
    return guarded(target, target, [node] * len(args), {})(*args)


WRAPPED = whole(*[1 << 62] * 4, 3)
"""Whose sum is 3."""


@pytest.mark.parametrize(
    ("target", "right", "wrong"),
    [
        (aten.repeat_interleave.Tensor, [whole(1, 2)], [WRAPPED]),
        (aten.repeat_interleave.self_Tensor, [whole(8, 9), whole(1, 2), 0], [WRAPPED, WRAPPED, 0]),
        (aten.repeat_interleave.Tensor, [whole(1, 2)], [whole(1 << 28, 1)]),
        (aten.one_hot.default, [whole(1, 2), -1], [whole(1, 1 << 62), -1]),
        (aten.bincount.default, [whole(1, 2)], [whole(1, 1 << 40)]),
        (aten.replication_pad2d.default, [BYTES, [2, 2, 1, 1]], [BYTES, [FAR] * 4]),
        (aten.replication_pad3d.default, [BYTES, [2, 2, 1, 1, 0, 0]], [BYTES, [FAR] * 6]),
        (aten.repeat.default, [BYTES, [2, 1, 1, 1]], [BYTES, [1 << 16] * 4]),
        (aten.upsample_nearest2d.vec, [BYTES, None, [2.0, 2.0]], [BYTES, None, [1e-300, 2.0]]),
        (aten.narrow.Tensor, [WRAPPED, 0, torch.tensor(2), 3], [WRAPPED, 0, torch.tensor(FAR), 3]),
    ],
)
def test_what_says_how_many_elements_there_are_is_bounded(
    target: Any, right: list[Any], wrong: list[Any]
) -> None:
    assert as_guarded(target, *right).tolist() == target(*right).tolist()
    with pytest.raises(ValueError, match="expected"):
        as_guarded(target, *wrong)


@pytest.mark.parametrize(
    ("target", "args", "said"),
    [
        (aten.replication_pad3d.default, [BYTES, [FAR] * 6], "as padding, expected whole numbers"),
        (aten.zeros.default, [[1 << 30, 1 << 30]], "as size, expected a product up to"),
        (aten.roll.default, [BYTES, [1 << 32], [0]], "as shifts"),
        (aten.upsample_nearest1d.default, [BYTES[0], [16], 1e-300], "as scales, expected 1e-06"),
        (aten.upsample_nearest2d.vec, [BYTES, None, [2.0, FAR]], "as scale_factors"),
        (aten.upsample_nearest3d.vec, [BYTES[None], None, [float("nan")] * 3], "as scale_factors"),
        (aten.upsample_nearest2d.vec, [BYTES, None, [0.5, 2.0]], None),
        (aten.scaled_dot_product_attention.default, [BYTES] * 3, None),
        (aten.slice.Tensor, [BYTES, 2, 0, FAR], None),
        (aten.fill.Scalar, [BYTES, 1 << 40], None),
    ],
)
def test_constants_are_bounded_by_the_kind_of_their_argument(
    target: Any, args: list[Any], said: str | None
) -> None:
    found = call_problem(target, args, {})
    assert found is None if said is None else said in (found or "")


DIVISIONS: dict[str, Callable[..., Tensor]] = {
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "floor_divide": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "fmod": torch.fmod,
    "in place": lambda x, y: x.clone().div_(y, rounding_mode="trunc"),
    "divide": lambda x, y: torch.divide(x, y, rounding_mode="trunc"),
    "by a constant": lambda x, y: torch.div(x, -1, rounding_mode="trunc"),
    "of a constant": lambda x, y: aten.remainder.Scalar_Tensor(LEAST, y),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
@pytest.mark.parametrize("kind", DIVISIONS)
def test_the_least_integer_is_divided_by_minus_one(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """For which there is no opposite: the processor's division ends the process."""
    x = torch.tensor([7, -7, 8, -9, 0, 3], dtype=dtype)
    y = torch.tensor([2, 2, -1, -1, -1, -3], dtype=dtype)
    run = loaded(DIVISIONS[kind], tmp_path, x, y)
    assert run(x, y).tolist() == DIVISIONS[kind](x, y).tolist()
    least = torch.full((6,), torch.iinfo(dtype).min, dtype=dtype)
    found = run(least, torch.full((6,), -1, dtype=dtype))
    opposite = 0 if kind in ("remainder", "fmod", "of a constant") else int(least[0])
    assert set(found.tolist()) == {opposite}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_least_common_multiple_of_the_least_integer_ends_nothing(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """It is divided by a greatest common divisor, which is -1 there."""
    x, y = torch.tensor([[4, 6, 0], [21, 6, 5]], dtype=dtype)
    run = loaded(torch.lcm, tmp_path, x, y)
    assert run(x, y).tolist() == [84, 6, 0]
    ends = torch.iinfo(dtype)
    least, most = (torch.full((3,), each, dtype=dtype) for each in (ends.min, ends.max))
    assert run(least, most).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
def test_eigenvalues_of_numbers_that_lapack_cannot_take_are_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Those of float64 from 1e300 on had it write beyond its memory (MKL's dgeev)."""
    x = torch.randn(2, 5, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    run = loaded(lambda x: torch.linalg.eig(x).eigenvalues, tmp_path, x)
    assert torch.equal(run(x), torch.linalg.eig(x).eigenvalues)
    assert run(x * 1e30).isfinite().all()
    for far in (*(() if dtype == torch.float32 else (1e300, -1e308)), torch.inf, torch.nan):
        x[1, 3, 2] = far
        with pytest.raises(RuntimeError, match="should not contain infs or NaNs"):
            run(x)


def test_a_network_without_such_calls_is_as_it_was(tmp_path: Path) -> None:
    """What ordinary networks call in every layer has nothing in front of it."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    program = torch.export.export(layer, (torch.rand(2, 3, 16),))
    torch.export.save(program, tmp_path / "layer.pt2")
    targets = {
        str(node.target)
        for node in load_program(tmp_path / "layer.pt2").graph.nodes
        if node.op == "call_function"
    }
    assert len(targets) > 5
    assert not [each for each in targets if "guarded" in each]


def test_arithmetic_of_sizes_takes_no_tensors(tmp_path: Path) -> None:
    """`//` of two tensors would be an operator that nothing stands in front of."""

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.new_zeros(x.shape[0] // 2)

    x = torch.tensor([LEAST, 1, 2, 3])
    program = torch.export.export(Half(), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    (call,) = (node for node in program.graph.nodes if node.target is operator.floordiv)
    (given,) = (node for node in program.graph.nodes if node.op == "placeholder")
    call.args = (given, given)
    torch.export.save(program, tmp_path / "sizes.pt2")
    module = load_program(tmp_path / "sizes.pt2").module(check_guards=False)
    with pytest.raises(ValueError, match="floordiv computes with sizes, and was given a tensor"):
        module(x)


def test_a_program_is_moved_before_its_calls_are_guarded(tmp_path: Path) -> None:
    program = torch.export.export(nn.GroupNorm(2, 4), (torch.rand(2, 4, 3),))
    torch.export.save(program, tmp_path / "norm.pt2")
    moved = load_program(tmp_path / "norm.pt2", device=torch.device("meta"))
    assert all(weight.is_meta for weight in moved.state_dict.values())
