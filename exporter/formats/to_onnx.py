"""The exported program → ONNX, weights inside, every dynamic dim under its own name."""

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from modelyard.archiver.signature import Signature
from modelyard.exporter.errors import ConversionError, cause
from modelyard.exporter.formats.decompose import nodes_of
from modelyard.exporter.formats.diagnose import explain
from modelyard.exporter.formats.to_exported_program import any_length, quiet, replaced
from modelyard.exporter.ingest.onnx_file import MAX_BYTES

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
            f"{size_bytes / 1e9:.1f} GB are over an ONNX file's 2 GB; export --format pt2 instead"
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
    values = (node.meta.get("val") for node in program.graph.nodes)
    is_double = any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in values)
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


def _restore_numbers(converted: torch.onnx.ONNXProgram) -> None:
    """Give constants that become float64 the numbers of the program again.

    The converter writes a number of Python as float32, and a cast behind it: 0.97 is 3e-8 off.
    """
    import onnx_ir

    assert converted.exported_program is not None
    rounded: dict[float, set[float]] = {}
    for node in nodes_of(converted.exported_program.graph_module):
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


def _shapes(signature: Signature) -> tuple[dict[int, str], ...]:
    return tuple(
        {axis: size.name for axis, size in enumerate(spec.shape) if not isinstance(size, int)}
        for spec in signature.inputs
    )
