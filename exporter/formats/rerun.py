"""One ONNX file with two models: rows that eight bits leave undecided run again in float32.

A row is undecided where its two largest values are closer than twice the largest error of eight
bits on the samples: two values that are each off by less cannot change places. An If keeps the
float32 model from running where there is no such row; else it runs on those rows alone.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelyard.archiver.signature import Dim, Signature
from modelyard.exporter.errors import ConversionError
from modelyard.exporter.inputs.samples import Sample
from modelyard.handlers.models.backends import open_artifact
from modelyard.handlers.proof.agree import run

_CANNOT = "--exact-labels cannot be had: "


def write(
    path: Path,
    full: Path,
    signature: Signature,
    samples: Sequence[Sample],
    checkpoint: Callable[[Sample], Sequence[Tensor]],
) -> dict[str, object]:
    """Put the float32 model into the file of the quantised one, and say which rows it takes.

    Args:
        path: the quantised model, which is replaced.
        full: the same model in float32.
        signature: inputs and outputs of both.
        samples: rows by which the largest error is found.
        checkpoint: gives what is right.

    Raises:
        ConversionError: the main output holds no labels of rows.
    """
    import onnx

    place, main = next(
        (at, spec) for at, spec in enumerate(signature.outputs) if spec is signature.main
    )
    batch = signature.batch
    is_row_wise = isinstance(batch, Dim) and all(
        spec.shape and spec.shape[0] == batch for spec in (*signature.inputs, *signature.outputs)
    )
    classes = main.shape[1] if len(main.shape) == 2 else 0
    if not is_row_wise or not isinstance(classes, int) or classes < 2:
        raise ConversionError(
            f'{_CANNOT}output "{main.name}" is {main}; expected a number for each class, and rows '
            f"[batch,…] in every input and output: export without it"
        )
    artifact = open_artifact(path, "onnx")
    errors = [
        (run(artifact, sample.inputs)[place] - checkpoint(sample)[place]).abs().amax(1)
        for sample in samples
    ]
    least = 2 * float(torch.cat(errors).max())
    merged = _merged(onnx.load(path), onnx.load(full), main.name, least)
    onnx.checker.check_model(merged)
    onnx.save(merged, path)
    return {"exact_labels": {"output": main.name, "below": least}}


def _merged(fast: Any, full: Any, main: str, least: float) -> Any:
    """Return the model that runs `full` on the rows whose two largest values are that close."""
    from onnx import compose, helper, numpy_helper

    inputs = [each.name for each in fast.graph.input]
    outputs = [each.name for each in fast.graph.output]
    fast, full = (
        compose.add_prefix(each, prefix, rename_inputs=False, rename_outputs=True)
        for each, prefix in ((fast, "fast_"), (full, "full_"))
    )
    node = helper.make_node

    def typed(prefix: str) -> list[Any]:
        values = [type(each).FromString(each.SerializeToString()) for each in full.graph.output]
        for value, name in zip(values, outputs, strict=True):
            value.name = f"{prefix}{name}"
        return values

    names = {name: f"full_rows_{name}" for name in inputs}
    for each in full.graph.node:
        each.input[:] = [names.get(name, name) for name in each.input]
    again = helper.make_graph(
        [
            *(node("Gather", [name, "undecided"], [names[name]], axis=0) for name in inputs),
            *full.graph.node,
            *(
                node(
                    "ScatterND",
                    [f"fast_{name}", "undecided_rows", f"full_{name}"],
                    [f"again_{name}"],
                )
                for name in outputs
            ),
        ],
        "again",
        [],
        typed("again_"),
        full.graph.initializer,
    )
    kept = helper.make_graph(
        [node("Identity", [f"fast_{name}"], [f"kept_{name}"]) for name in outputs],
        "kept",
        [],
        typed("kept_"),
    )
    constants: dict[str, NDArray[Any]] = {
        "undecided_two": np.array([2], np.int64),
        "undecided_last": np.array([-1], np.int64),
        "undecided_first": np.array([0], np.int64),
        "undecided_least": np.array(least, np.float32),
        "undecided_none": np.array(0, np.int64),
    }
    nodes = [
        *fast.graph.node,
        node("TopK", [f"fast_{main}", "undecided_two"], ["undecided_most", "undecided_at"], axis=1),
        node("Split", ["undecided_most"], ["undecided_1", "undecided_2"], axis=1, num_outputs=2),
        node("Sub", ["undecided_1", "undecided_2"], ["undecided_lead"]),
        node("GreaterOrEqual", ["undecided_lead", "undecided_least"], ["decided"]),
        node("Not", ["decided"], ["undecided_by_row"]),  # NaN is undecided
        node("Squeeze", ["undecided_by_row", "undecided_last"], ["undecided_flags"]),
        node("NonZero", ["undecided_flags"], ["undecided_places"]),
        node("Squeeze", ["undecided_places", "undecided_first"], ["undecided"]),
        node("Unsqueeze", ["undecided", "undecided_last"], ["undecided_rows"]),
        node("Size", ["undecided"], ["undecided_count"]),
        node("Greater", ["undecided_count", "undecided_none"], ["is_undecided"]),
        node("If", ["is_undecided"], outputs, then_branch=again, else_branch=kept),
    ]
    graph = helper.make_graph(
        nodes,
        fast.graph.name,
        fast.graph.input,
        typed(""),
        [
            *fast.graph.initializer,
            *(numpy_helper.from_array(value, name) for name, value in constants.items()),
        ],
    )
    sets = {each.domain: each.version for each in (*full.opset_import, *fast.opset_import)}
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(*each) for each in sets.items()],
        functions=[*fast.functions, *full.functions],
        ir_version=max(fast.ir_version, full.ir_version),
    )
