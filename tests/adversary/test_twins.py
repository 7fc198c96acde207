"""A twin or a compiled program that is wrong at one output beside a much larger one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, TensorSpec
from modelyard.base.scale import Scale
from modelyard.handlers import TwinDiffers
from modelyard.handlers.errors import LoadError
from modelyard.handlers.explain.explanation import explain_batch
from modelyard.handlers.explain.request.options import parse_options
from modelyard.handlers.explain.request.targets import ExplainedModel
from modelyard.handlers.models.backends import Artifact
from modelyard.handlers.models.packed import compile_artifact
from modelyard.handlers.proof.agree import Rule
from tests.adversary.gallery import Row, judge

SPEC = TensorSpec("x", "float32", (Dim("batch"), 3))
CHANGES: list[tuple[str, Callable[[Tensor], Tensor], bool]] = [
    ("the chance turned", lambda chance: 1 - chance, True),
    ("always 1", torch.ones_like, True),
    ("1 % more", lambda chance: chance * 1.01, True),
    ("the same", lambda chance: chance, False),
    ("a last place", lambda chance: torch.nextafter(chance, torch.ones_like(chance)), False),
]


class PriceAndChance(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor], together: bool = False) -> None:
        super().__init__()
        self.change, self.together = change, together

    def forward(self, x: Tensor) -> Any:
        price, chance = 2e5 + 1e5 * x[:, :1], self.change(torch.sigmoid(x[:, 1:2]))
        return torch.cat([price, chance], 1) if self.together else (price, chance)


def artifact(module: nn.Module) -> Artifact:
    return Artifact("pt2", module.eval(), (SPEC,), torch.device("cpu"), module)


def test_a_further_output_of_a_twin_is_not_measured_by_the_first() -> None:
    rule = Rule(2e-4, scale=Scale(np.array([[2e5]]), np.array([[1e5]])))
    right = artifact(PriceAndChance(lambda chance: chance))
    without_gradients = Artifact("onnx", right.module, (SPEC,), torch.device("cpu"))  # type: ignore[arg-type]
    model = ExplainedModel(
        without_gradients, right, rule, str,
        lambda name, inputs, seed: tuple(each * 0 for each in inputs),
        lambda sizes, side: (side or 1,), output_name="price", output_names=("price", "chance"),
    )  # fmt: skip
    rows = []
    options = [parse_options({"output_name": "chance", "target": "0"})]
    for change, make, is_wrong in CHANGES:
        twin = artifact(PriceAndChance(make))
        try:
            explain_batch(replace(model, twin=twin), (torch.tensor([[0.1, 0.7, 0.0]]),), options)
            is_caught = False
        except TwinDiffers:
            is_caught = True
        rows.append(Row("explanation", change, is_wrong, is_caught))
    judge(rows)


@pytest.mark.filterwarnings("ignore")
def test_what_a_compiler_makes_of_one_column_is_measured_by_that_column() -> None:
    program = artifact(PriceAndChance(lambda chance: chance, together=True))
    rule = Rule(2e-4, scale=Scale(np.array([[2e5, 0.5]]), np.array([[1e5, 0.2]])))
    draw = torch.Generator().manual_seed(0)
    inputs = [(torch.randn(size, 3, generator=draw),) for size in (2, 5)]
    rows = []
    for change, make, is_wrong in CHANGES:

        def backend(
            graph: torch.fx.GraphModule, _: Any, make: Callable[[Tensor], Tensor] = make
        ) -> Any:
            def run(*tensors: Any) -> Any:
                return [
                    torch.cat([each[:, :1], make(each[:, 1:])], 1)
                    for each in graph.forward(*tensors)
                ]

            return run

        torch.compiler.reset()
        try:
            compile_artifact(program, {"backend": backend}, inputs, [rule])
            is_caught = False
        except LoadError as error:
            assert "differs from the artifact" in str(error)
            is_caught = True
        rows.append(Row("pt2.compile", change, is_wrong, is_caught))
    judge(rows)
