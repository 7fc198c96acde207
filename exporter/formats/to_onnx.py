"""The exported program → ONNX, weights inside, every dynamic dim under its own name."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._decomp import decomposition_table
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from modelyard.archiver.signature import Signature
from modelyard.exporter.errors import ConversionError, cause
from modelyard.exporter.formats.diagnose import explain
from modelyard.exporter.formats.to_exported_program import any_length, quiet, replaced
from modelyard.exporter.ingest.onnx_file import MAX_BYTES
from modelyard.exporter.inputs.samples import Sample
from modelyard.handlers.models.backends import torch_dtype

_OPERATOR = re.compile(r"target=torch\.ops\.\w+\.(\w+)")


def write(program: ExportedProgram, signature: Signature, path: Path) -> dict[str, object]:
    """Convert, check against the ONNX specification and save as one file.

    Raises:
        ConversionError: an operator has no ONNX form, the model is over 2 GB, or ONNX refuses it.
    """
    import onnx
    from onnx_ir.passes import PassError

    _check_recurrent(program)
    try:
        try:
            converted = _convert(program, signature, optimize=True)
        except PassError:  # the optimizer fails on some splits; what it is given runs as well
            converted = _convert(program, signature, optimize=False)
    # The converter wraps whatever one of its hundreds of functions raised.
    except Exception as error:
        log = _where(program, str(error.__cause__ or error))
        raise explain(error, "ONNX", signature, log=log) from error
    size_bytes = sum(weight.nbytes for weight in program.state_dict.values())
    if size_bytes > MAX_BYTES:
        raise ConversionError(
            f"the model's {size_bytes / 1e9:.1f} GB do not fit in one ONNX file of at most 2 GB; "
            "export --format pt2 instead"
        )
    converted.save(path, external_data=False)
    try:
        try:
            onnx.checker.check_model(path, full_check=True)
        except onnx.shape_inference.InferenceError:
            # Some operators' forms state another shape of an inner value than they give.
            model = onnx.load(path)
            del model.graph.value_info[:]
            onnx.save(model, path)
            onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ConversionError(
            f"ONNX's own checker refuses the file: {cause(error)}; export --format pt2 instead"
        ) from error
    return {"opset": converted.model.opset_imports[""]}


def _convert(
    program: ExportedProgram, signature: Signature, *, optimize: bool
) -> torch.onnx.ONNXProgram:
    is_double = _computes_in_double(program)
    with (
        quiet("torch.onnx._internal.exporter._registration"),
        any_length(),
        # `1.0 - mask` with its dtype stated: the converter's own step loses it.
        replaced(decomposition_table, {torch.ops.aten.rsub.Scalar: _number_minus}),
        # As the converter's first step runs. With gradients, its second would take another
        # attention kernel for a learned mask, whose answer lies in memory in another order.
        torch.no_grad(),
    ):
        converted = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            optimize=optimize and not is_double,
            input_names=[spec.name for spec in signature.inputs],
            output_names=[spec.name for spec in signature.outputs],
            dynamic_shapes=_shapes(signature),
        )
        assert converted is not None
        if is_double:
            _restore_numbers(converted)
            if optimize:
                converted.optimize()
    return converted


def _computes_in_double(program: ExportedProgram) -> bool:
    values = (node.meta.get("val") for node in program.graph.nodes)
    return any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in values)


def _restore_numbers(converted: torch.onnx.ONNXProgram) -> None:
    """Give constants that become float64 the numbers of the program again.

    The converter writes a number of Python as float32, and a cast behind it: 0.97 is 3e-8 off.
    """
    import onnx_ir

    assert converted.exported_program is not None
    rounded: dict[float, set[float]] = {}
    for module in converted.exported_program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            for number in tree_leaves((node.args, node.kwargs)):
                if isinstance(number, float):
                    with np.errstate(over="ignore"):
                        rounded.setdefault(float(np.float32(number)), set()).add(number)
    for constant in converted.model.graph.all_nodes():
        attribute = constant.attributes.get("value") if constant.op_type == "Constant" else None
        if attribute is None or attribute.value.dtype != onnx_ir.DataType.FLOAT:
            continue
        if attribute.value.shape:  # of more than a number
            continue
        numbers = list(rounded.get(float(attribute.value.numpy()), ()))
        users = [user for user, _ in constant.outputs[0].uses()]
        if len(numbers) == 1 and all(user.op_type in ("Cast", "CastLike") for user in users):
            exact = onnx_ir.tensor(np.array(numbers[0], dtype=np.float64))
            constant.attributes["value"] = onnx_ir.AttrTensor("value", exact)
            constant.outputs[0].dtype = onnx_ir.DataType.DOUBLE


def _number_minus(tensor: Tensor, number: float, alpha: float = 1) -> Tensor:
    """Return number - alpha * tensor, in the dtype that torch gives it."""
    dtype = torch.result_type(tensor, number)
    return torch.sub(torch.full((), number, dtype=dtype), tensor.to(dtype), alpha=alpha)


def _check_recurrent(program: ExportedProgram) -> None:
    """Refuse plain RNNs: the converter has no form for them, and would take them apart wrongly."""
    plain = {torch.ops.aten.rnn_tanh.input, torch.ops.aten.rnn_relu.input}
    if any(node.target in plain for node in program.graph.nodes):
        raise ConversionError(
            "the model cannot be written by ONNX: torch's converter has no form for nn.RNN; use "
            "nn.GRU or nn.LSTM, or export --format pt2 instead"
        )


def _where(program: ExportedProgram, message: str) -> str:
    """Find the lines that asked for the operator which has no ONNX form."""
    named = _OPERATOR.search(message)
    if named is None:
        return ""
    traces = (
        str(node.meta.get("stack_trace", ""))
        for node in program.graph.nodes
        if node.op == "call_function" and named[1] in str(node.target)
    )
    return next(traces, "")


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


def quantize(path: Path) -> dict[str, object]:
    """Replace the weights of a saved model by 8-bit ones; activations are quantised as it runs.

    Weights are unsigned: signed ones saturate on CPUs without VNNI, which changes the answers.

    Raises:
        ConversionError: nothing in the model can be quantised.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _without_shapes(path) as plain:
        quantize_dynamic(plain, path, weight_type=QuantType.QUInt8)
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


# What onnxruntime's quantiser puts in the place of an operator with weights.
_QUANTIZED = ("MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM", "QAttention")


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

    try:
        with _without_shapes(path) as prepared:
            # It folds batch-norm into convolutions, which are then quantised as one.
            quant_pre_process(prepared, prepared, skip_symbolic_shape=True)
            quantization.quantize_static(
                prepared,
                path,
                _Calibration(signature, samples),
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


_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class _Calibration:
    """Samples as onnxruntime's calibration reads them: one after the other, then None."""

    def __init__(self, signature: Signature, samples: Sequence[Sample]) -> None:
        self._feeds = (
            {
                spec.name: value.to(torch_dtype(spec.dtype)).numpy()
                for spec, value in zip(signature.inputs, sample.inputs, strict=True)
            }
            for sample in samples
        )

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def _shapes(signature: Signature) -> tuple[dict[int, str], ...]:
    return tuple(
        {axis: size.name for axis, size in enumerate(spec.shape) if not isinstance(size, int)}
        for spec in signature.inputs
    )


def _is_not_advice(record: logging.LogRecord) -> bool:
    """Drop what onnxruntime's quantiser says through the root logger of models that are right."""
    return not any(text in record.getMessage() for text in _ADVICE)


# The second: a layer norm's weights have one scale, not one for each channel.
_ADVICE = ("Please consider to run pre-processing", "is out-of-range for weight")
