"""What a stranger's program may not call, or a file cannot hold, is written in terms of others."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from modelyard.exporter.formats.to_exported_program import write
from modelyard.handlers.errors import UnsafeProgram
from modelyard.handlers.judge.check import load_program
from modelyard.handlers.models.backends import open_artifact
from modelyard.handlers.proof.agree import run
from tests.breadth.operator_networks import LAYERS, NETWORKS, PLACES, Calls, network, square

aten = torch.ops.aten

ONE_SIZE = {
    *("fill_diagonal_", "irfft2", "gradient", "multi_dot", "kron", "chain_matmul"),
    *("take_along_dim", "affine_grid"),
}
"""Networks that torch traces for one number of rows alone."""
REFUSED = {
    "lu_solve": "aten.linalg_lu_solve.default",  # LAPACK takes pivots as they are
    "sparse.mm": "aten.to_sparse.default",
}
BY_DAY = ("GRUCell", "Mish", "scatter_", "fftn", "as_strided", "svd")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.slow) for name in NETWORKS],
)
def test_an_ordinary_network_is_written_so_that_nobody_has_to_trust_it(
    name: str, tmp_path: Path
) -> None:
    model, file = network(name), tmp_path / "net.pt2"
    torch.manual_seed(3)
    dims = None if name in ONE_SIZE or name in REFUSED else ({0: torch.export.Dim.DYNAMIC},)
    rows = torch.randn(4 if dims else 2, 6)
    details = write(torch.export.export(model, (rows.clone(),), dynamic_shapes=dims), file)
    if name in REFUSED:
        trusted = details["trusted_operators"]
        assert isinstance(trusted, list)
        assert REFUSED[name] in trusted
        return
    assert details == {}
    artifact = open_artifact(file, "pt2")
    for count in (2, 5) if dims else (2,):
        x = torch.randn(count, 6)
        torch.manual_seed(0)
        with torch.no_grad():
            expected = model(x.clone())
        torch.manual_seed(0)
        found = run(artifact, (x,))
        expected = expected if isinstance(expected, tuple) else (expected,)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_the_table_is_of_at_least_133_networks_and_misses_at_most_three() -> None:
    assert len(NETWORKS) >= 133
    assert len(REFUSED) <= 3
    assert {"LSTMCell", "GRUCell", "MaxUnpool2d"} <= set(LAYERS)


# A kernel of the heart of a network keeps its own operator beside one that is decomposed.
def test_what_is_listed_stays_whole_beside_what_is_decomposed(tmp_path: Path) -> None:
    weight = torch.randn(6, 6)

    def call(x: Tensor) -> Tensor:
        y = functional.layer_norm(functional.linear(x, weight), (6,))
        y = functional.scaled_dot_product_attention(y[None], y[None], y[None])[0]
        return functional.cosine_embedding_loss(y, x, x[:, 0].sign(), reduction="none")

    assert write(torch.export.export(Calls(call), (torch.randn(4, 6),)), tmp_path / "n.pt2") == {}
    program = torch.export.load(tmp_path / "n.pt2")
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    whole = {"linear", "layer_norm", "scaled_dot_product_attention"}
    assert {f"aten.{name}.default" for name in whole - {"layer_norm"}} <= called
    assert any("layer_norm" in name for name in called)


FAR = torch.full((6,), 99, dtype=torch.int32)
HOSTILE: dict[str, Callable[[Tensor], Any]] = {
    # Reads beside what it is given: a view's memory is more than the view.
    "as_strided of a view": lambda x: (x * 1)[:, 1:].as_strided((3, 6), (6, 1), 0),
    "as_strided of a turned one": lambda x: (x * 1).T.as_strided((3,), (1,)),
    "pivots": lambda x: torch.linalg.lu_solve(square(x), FAR, x.T),
    "pivots of old": lambda x: torch.lu_solve(x.T, square(x), FAR),
    "pivots to unpack": lambda x: torch.lu_unpack(square(x), FAR)[0],
    "pivots of LDL": lambda x: torch.linalg.ldl_solve(square(x), FAR, x.T),
    "offsets": lambda x: aten._embedding_bag_forward_only(x, PLACES, PLACES * 9)[0],
    "memory that nobody wrote": lambda x: torch.empty_strided((4, 6), (6, 1)) + x,
    "resize": lambda x: aten.resize(x, [100]),
    "Fourier transforms": lambda x: aten._fft_r2c(x, [0], 0, True).real,
    "distances": aten._pdist_forward,
    "sparse": lambda x: (x * 1).to_sparse().to_dense(),
    "packed": lambda x: aten._pack_padded_sequence(x[None], torch.tensor([2]), True)[0],
}
"""What no decomposition makes safe: torch's own kernels check none of it."""
CHECKED: dict[str, Callable[[Tensor], Any]] = {
    "unsafe index": lambda x: aten._unsafe_index(x, [x[:, 0].long()]),
    "unsafe put": lambda x: aten._unsafe_index_put(x, [x[:, 0].long()], x),
    "put": lambda x: x.put(x.long(), x),
    "a backward": lambda x: aten.max_pool2d_with_indices_backward(
        x[None], x[None], [1, 1], [1, 1], [0, 0], [1, 1], False, x[None].long()
    ),
    "segments": lambda x: torch.segment_reduce(x, "sum", lengths=x[:, 0].long(), unsafe=True),
    "as_strided": lambda x: x.clone().as_strided((5, 6), (6, 1)),
    "eigvals": lambda x: torch.linalg.eigvals(x[:, :4] * math.inf),
}
"""What becomes listed operators, that check places which come with the request."""


LIKE_OTHERS = {
    *("as_strided of a turned one", "pivots of old", "pivots to unpack", "pivots of LDL"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in LIKE_OTHERS)) for name in HOSTILE],
)
def test_what_is_unsafe_comes_in_by_no_decomposition(name: str, tmp_path: Path) -> None:
    program = torch.export.export(Calls(HOSTILE[name]), (torch.randn(4, 6),))
    assert write(program, tmp_path / "net.pt2")["trusted_operators"]
    with pytest.raises(UnsafeProgram, match="is not among the"):
        load_program(tmp_path / "net.pt2")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHECKED)
def test_what_is_decomposed_checks_what_it_is_given(name: str, tmp_path: Path) -> None:
    program = torch.export.export(Calls(CHECKED[name]), (torch.rand(4, 6),))
    assert write(program, tmp_path / "net.pt2") == {}
    found = load_program(tmp_path / "net.pt2").module()
    for hostile in (1e6, -1e6, math.nan):
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            found(torch.full((4, 6), hostile))


SIZES: dict[str, Callable[[int], Any]] = {
    "ceil": lambda n: math.ceil(n / 8),
    "ceil below zero": lambda n: math.ceil(-n / 8) + n,
    "floor": lambda n: math.floor(n / 3),
    "floor below zero": lambda n: math.floor(-n / 3) + n,
    "round": lambda n: round(n * 0.5),
    "abs": lambda n: abs(9 - n),
    "trunc": lambda n: math.trunc(n / 1.5),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "names",
    [tuple(SIZES), *(pytest.param((name,), marks=pytest.mark.nightly) for name in SIZES)],
    ids="-".join,
)
def test_a_size_through_pythons_numbers_is_saved(names: tuple[str, ...], tmp_path: Path) -> None:
    def call(x: Tensor) -> Any:
        sizes = (SIZES[name](x.shape[1]) for name in names)
        return [x.new_ones(size + 1).cumsum(0) + x.sum() for size in sizes]

    model = Calls(call)
    dims = ({1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(model, (torch.randn(2, 10),), dynamic_shapes=dims)
    before = str(program.graph)
    assert write(program, tmp_path / "net.pt2") == {}
    assert str(program.graph) == before  # which ONNX is made of
    found = load_program(tmp_path / "net.pt2").module(check_guards=False)
    for length in (3, 4, 5, 8, 9, 15, 16, 25, 26, 31):
        x = torch.randn(2, length)
        torch.testing.assert_close(found(x), model(x))
