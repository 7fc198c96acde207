"""A saved ONNX model → one of 8 bits, with weights alone or activations too; and both in one file.

Of a file with both, rows that eight bits leave undecided run again in float32. A row is undecided
where its two largest values are closer than twice the largest error of eight bits on the samples:
two values that are each off by less cannot change places. An If keeps the float32 model from
running where there is no such row; else it runs on those rows alone.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelyard.archiver.signature import Dim, Signature
from modelyard.exporter.errors import ConversionError, cause
from modelyard.exporter.inputs.samples import Sample
from modelyard.handlers.models.backends import open_artifact, torch_dtype
from modelyard.handlers.proof.agree import run

# What onnxruntime's quantiser puts in the place of an operator with weights.
_QUANTIZED = ("MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM", "QAttention")
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# What onnxruntime's quantiser says of models that are right. The second: a layer norm's weights
# have one scale, not one for each channel.
_ADVICE = ("Please consider to run pre-processing", "is out-of-range for weight")


@contextmanager
def _without_shapes(path: Path) -> Iterator[Path]:
    """Yield a copy without shapes of inner values, while the quantiser's advice is not heard.

    It infers shapes anew, and takes those of transposed weights for a contradiction.
    """
    import onnx

    model, copy, root = onnx.load(path), path.with_name("plain.onnx"), logging.getLogger()
    del model.graph.value_info[:]
    onnx.save(model, copy)
    root.addFilter(_is_not_advice)
    try:
        yield copy
    finally:
        root.removeFilter(_is_not_advice)
        copy.unlink(missing_ok=True)


def quantize_dynamic(path: Path) -> dict[str, object]:
    """Replace the weights of a saved model by 8-bit ones; activations are quantised as it runs.

    Weights are unsigned: signed ones saturate on CPUs without VNNI, which changes the answers.

    Raises:
        ConversionError: nothing in the model can be quantised.
    """
    import onnx
    from onnxruntime import quantization

    with _without_shapes(path) as plain:
        quantization.quantize_dynamic(plain, path, weight_type=quantization.QuantType.QUInt8)
    model = onnx.load(path)
    _scale_each_row(model.graph)
    onnx.save(model, path)
    count = sum(node.op_type in _QUANTIZED for node in model.graph.node)
    return _counted("int8-dynamic", count, "matrix product, convolution or LSTM with weights")


def _scale_each_row(graph: Any) -> None:
    """Give each row of an activation a scale of its own, so that no row changes another's answer.

    onnxruntime's quantiser takes one for the whole batch (DynamicQuantizeLinear). A row is that of
    a matrix product, and all of an example for a convolution. An LSTM's are inside of its operator.
    """
    from onnx import helper, numpy_helper

    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    weights = {each.name: len(each.dims) for each in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    constants: dict[str, NDArray[Any]] = {}
    nodes: list[Any] = []
    after: dict[str, Any] = {}
    for node in graph.node:
        is_scaled = node.op_type == "DynamicQuantizeLinear" and all(
            user.input[0] == node.output[0] and weights.get(user.input[1], 0) > 1
            for user in users[node.output[0]]
        )
        if not is_scaled:
            nodes.append(node)
            if later := after.get(node.output[0]):
                node.output[0] = later.input[0]
                nodes.append(later)
            continue
        (value,), (quantized, scale, zero) = node.input, node.output
        # What is never negative has all 256 steps above zero.
        is_positive = value in makers and makers[value].op_type in ("Relu", "Sigmoid", "Softmax")
        steps, middle = ("row_255", "row_0") if is_positive else ("row_127", "row_128")
        constants |= {"row_least": np.array(1e-30, np.float32), "row_unit": np.array(1, np.float32)}
        constants[steps] = np.array(255 if is_positive else 127, np.float32)
        constants[middle] = np.array(0 if is_positive else 128, np.uint8)
        kernel = [user for user in users[quantized] if user.op_type == "ConvInteger"]
        along = list(range(1, weights[kernel[0].input[1]])) if kernel else [-1]
        dims = f"row_dims_{len(along)}"
        constants[dims] = np.array(along, np.int64)
        size, largest, most, ratio = (f"{scale}_{n}" for n in ("size", "largest", "most", "ratio"))
        nodes += [
            helper.make_node("Abs", [value], [size]),
            helper.make_node("ReduceMax", [size, dims], [largest]),
            helper.make_node("Max", [largest, "row_least"], [most]),
            helper.make_node("Div", [most, steps], [scale]),
            helper.make_node("Div", [value, scale], [ratio]),
            helper.make_node("QuantizeLinear", [ratio, "row_unit", middle], [quantized]),
        ]
        for user in users[zero]:
            user.input[list(user.input).index(zero)] = middle
        # Divided last: of a product of scales onnxruntime makes one operator, for one scale only.
        for user in users[scale]:
            user.input[list(user.input).index(scale)] = most
            name = user.output[0]
            after[name] = helper.make_node("Div", [f"{name}_most", steps], [name])
    graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in constants.items()
    )
    del graph.node[:]
    graph.node.extend(nodes)


def _counted(kind: str, count: int, what: str) -> dict[str, object]:
    """Return how many operators were quantised; refuse a model without any."""
    if not count:
        raise ConversionError(f"--quantize {kind} found no {what}; export without it")
    return {"quantize": kind, "quantized_operators": count}


def quantize_static(
    path: Path, signature: Signature, samples: Sequence[Sample]
) -> dict[str, object]:
    """Replace weights and activations of a saved model by 8-bit ones, in ranges that samples reach.

    Weights have a scale for each channel and seven bits: products of eight saturate on CPUs without
    VNNI, which changes the answers.

    Args:
        path: the model, which is replaced.
        signature: its inputs.
        samples: inputs of sizes that it takes.

    Raises:
        ConversionError: nothing in the model can be quantised, or onnxruntime fails to.
    """
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    feeds = (
        {
            spec.name: value.to(torch_dtype(spec.dtype)).numpy()
            for spec, value in zip(signature.inputs, sample.inputs, strict=True)
        }
        for sample in samples
    )
    try:
        with _without_shapes(path) as prepared:
            # It folds batch-norm into convolutions, which are then quantised as one.
            quant_pre_process(prepared, prepared, skip_symbolic_shape=True)
            quantization.quantize_static(
                prepared,
                path,
                SimpleNamespace(get_next=lambda: next(feeds, None)),
                per_channel=True,
                reduce_range=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                calibrate_method=quantization.CalibrationMethod.MinMax,
            )
    # Calibration runs the model; onnxruntime has an error of its own for each way to fail.
    except Exception as error:
        raise ConversionError(
            f"--quantize int8-static: onnxruntime cannot quantise the model: {cause(error)}; "
            "use int8-dynamic, or export without it"
        ) from error
    model = onnx.load(path)
    nodes = model.graph.node
    # onnxruntime names every set of operators that it knows.
    used = {node.domain for node in nodes}
    sets = [each for each in model.opset_import if each.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(sets)
    onnx.save(model, path)
    eight_bits = {
        name for node in nodes if node.op_type == "DequantizeLinear" for name in node.output
    }
    count = sum(
        node.op_type in _WEIGHTED and eight_bits.issuperset(node.input[:2]) for node in nodes
    )
    return _counted("int8-static", count, "matrix product or convolution")


def _is_not_advice(record: logging.LogRecord) -> bool:
    """Drop what onnxruntime's quantiser says through the root logger."""
    return not any(text in record.getMessage() for text in _ADVICE)


# -- the float32 model beside it, for undecided rows -----------------------------------------------


def run_undecided_again(
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
            f'--exact-labels cannot be had: output "{main.name}" is {main}; expected a number for '
            "each class, and rows [batch,…] in every input and output: export without it"
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


_UNDECIDED = """
selection () => () <
    int64[1] undecided_two = {{2}}, int64[1] undecided_last = {{-1}},
    int64[1] undecided_first = {{0}}, int64 undecided_none = {{0}}
> {{
    undecided_most, undecided_at = TopK <axis = 1> (fast_{main}, undecided_two)
    undecided_1, undecided_2 = Split <axis = 1, num_outputs = 2> (undecided_most)
    undecided_lead = Sub (undecided_1, undecided_2)
    decided = GreaterOrEqual (undecided_lead, undecided_least)
    undecided_by_row = Not (decided)
    undecided_flags = Squeeze (undecided_by_row, undecided_last)
    undecided_places = NonZero (undecided_flags)
    undecided = Squeeze (undecided_places, undecided_first)
    undecided_rows = Unsqueeze (undecided, undecided_last)
    undecided_count = Size (undecided)
    is_undecided = Greater (undecided_count, undecided_none)
}}
"""
"""Which rows of the output `main` are undecided; NaN is, by `Not`."""


def _merged(fast: Any, full: Any, main: str, least: float) -> Any:
    """Return the model that runs `full` on the rows whose two largest values are that close."""
    from onnx import compose, helper, numpy_helper, parser

    inputs = [each.name for each in fast.graph.input]
    outputs = [each.name for each in fast.graph.output]
    fast, full = (
        compose.add_prefix(each, prefix, rename_inputs=False, rename_outputs=True)
        for each, prefix in ((fast, "fast_"), (full, "full_"))
    )

    def typed(prefix: str) -> list[Any]:
        values = [type(each).FromString(each.SerializeToString()) for each in full.graph.output]
        for value, name in zip(values, outputs, strict=True):
            value.name = f"{prefix}{name}"
        return values

    def nodes(form: str, names: Sequence[str]) -> list[Any]:
        lines = "\n".join(form.format(name) for name in names)
        return list(parser.parse_graph(f"lines () => () {{\n{lines}\n}}").node)

    for each in full.graph.node:
        each.input[:] = [f"full_rows_{name}" if name in inputs else name for name in each.input]
    taken = nodes("full_rows_{0} = Gather <axis = 0> ({0}, undecided)", inputs)
    put = nodes("again_{0} = ScatterND (fast_{0}, undecided_rows, full_{0})", outputs)
    again = helper.make_graph(
        [*taken, *full.graph.node, *put], "again", [], typed("again_"), full.graph.initializer
    )
    kept = nodes("kept_{0} = Identity (fast_{0})", outputs)
    branches = {
        "then_branch": again,
        "else_branch": helper.make_graph(kept, "kept", [], typed("kept_")),
    }
    selection = parser.parse_graph(_UNDECIDED.format(main=main))
    below = numpy_helper.from_array(np.array(least, np.float32), "undecided_least")
    graph = helper.make_graph(
        [
            *fast.graph.node,
            *selection.node,
            helper.make_node("If", ["is_undecided"], outputs, **branches),
        ],
        fast.graph.name,
        fast.graph.input,
        typed(""),
        [*fast.graph.initializer, *selection.initializer, below],
    )
    sets = {each.domain: each.version for each in (*full.opset_import, *fast.opset_import)}
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(*each) for each in sets.items()],
        functions=[*fast.functions, *full.functions],
        ir_version=max(fast.ir_version, full.ir_version),
    )
