"""Requests of tensors by name → what a handler's model answers.

A `BaseHandler` takes them natively: the inputs and outputs are the model's own, as its signature
states them, without what `preprocess` and `postprocess` make of bodies and answers. Requests of
several rows share calls of the model with others.

Any other handler is given one dict per request, input name → array; an input of one element of
BYTES is a bytearray, as the part of a form is. It answers

- a dict of arrays, torch's tensors or bytes: outputs by name,
- one of them: the output `output`,
- text, or anything else that JSON can hold: the output `output`, one element of BYTES.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from modelyard.archiver.signature import OIP_DATATYPES, Dim, TensorSpec, fits
from modelyard.handlers.context import Context
from modelyard.handlers.entry_point import Entry, FoundHandler
from modelyard.handlers.errors import BadInput, HandlerError
from modelyard.handlers.tensors import (
    BF16,
    BYTES,
    LENGTH_HEADER,
    Array,
    TensorRequest,
    as_document,
    datatype_of,
    read_document,
    read_request,
    write_answer,
)

if TYPE_CHECKING:
    from torch import Tensor

    from modelyard.handlers.base import BaseHandler

OUTPUT = "output"
"""Of an answer that names none."""
Outputs = Mapping[str, Array]
Run = Callable[[Sequence[TensorRequest], Context], Sequence[Outputs]]


def tensor_entry(handler: FoundHandler, enveloped: Entry | None = None) -> Entry:
    """Return what answers requests of tensors, as `handle` answers others: bytes for each.

    Args:
        enveloped: the handler behind what reads and writes the protocol's JSON itself.
    """
    base = sys.modules.get("modelyard.handlers.base")  # imported by whoever inherits from it
    kind = type(handler.target)
    is_native = (
        base is not None
        and isinstance(handler.target, base.BaseHandler)
        and kind.handle is base.BaseHandler.handle
    )
    run: Run = _Native(handler.target) if is_native else _Mapped(handler.handle)
    if enveloped is not None:
        run = _Mapped(enveloped, is_enveloped=True)
    labels = getattr(handler.target, "mapping", None) if is_native else None

    def answer(data: list[dict[str, Any]], context: Context) -> list[bytes]:
        requests = [_read(row, index, context) for index, row in enumerate(data)]
        version = str(((context.manifest or {}).get("model") or {}).get("modelVersion", ""))
        answers = []
        for index, found in enumerate(run(requests, context)):
            request = requests[index]
            _check_wanted(request, found)
            body, headers = write_answer(request, found, context.model_name, version, labels)
            for name, value in headers.items():
                context.set_response_header(index, name, value)
            answers.append(body)
        return answers

    return answer


def _read(row: Mapping[str, Any], index: int, context: Context) -> TensorRequest:
    header = context.get_request_header
    return read_request(
        row["body"], header(index, LENGTH_HEADER), (header(index, "content-encoding") or "").lower()
    )


def _check_wanted(request: TensorRequest, outputs: Outputs) -> None:
    for each in request.wanted or ():
        if each.name not in outputs:
            raise BadInput(f'output "{each.name}" is unknown; expected {", ".join(outputs)}')


class _Native:
    """Runs the model of a `BaseHandler`."""

    def __init__(self, handler: BaseHandler) -> None:
        self._handler = handler

    def __call__(self, requests: Sequence[TensorRequest], context: Context) -> Sequence[Outputs]:
        self._handler.context = context
        return self._handler.infer(requests)


def run_tensors(handler: BaseHandler, requests: Sequence[TensorRequest]) -> list[Outputs]:
    """Return the model's outputs for each request, in as few calls as its batch range allows.

    Raises:
        BadInput: inputs of other names, datatypes, shapes or values than the signature states.
    """
    inputs = [_inputs(handler.inputs, request) for request in requests]
    answers: list[Outputs] = []
    for group in _groups(handler, inputs):
        answers += _call(handler, group)
    return answers


def _inputs(specs: Sequence[TensorSpec], request: TensorRequest) -> tuple[Tensor, ...]:
    """Return the inputs of a request in the order of the model's, held to what it states."""
    import torch

    from modelyard.handlers.limits import refused_values

    names = [spec.name for spec in specs]
    if missing := [name for name in names if name not in request.inputs]:
        raise BadInput(f'input "{missing[0]}" is missing; expected {", ".join(names)}')
    if extra := [name for name in request.inputs if name not in names]:
        raise BadInput(f'input "{extra[0]}" is unknown; expected {", ".join(names)}')
    sizes: dict[str, int] = {}
    tensors = []
    for spec in specs:
        value, datatype = request.inputs[spec.name], request.datatypes[spec.name]
        wanted = OIP_DATATYPES.get(spec.dtype, datatype)
        if datatype != wanted or datatype == BYTES:
            raise BadInput(f'input "{spec.name}" is {datatype}; expected {wanted}')
        shape = tuple(value.shape)
        if spec.dtype and not (len(shape) == len(spec.shape) and all(map(fits, shape, spec.shape))):
            raise BadInput(
                f'input "{spec.name}" has the shape {list(shape)}; expected '
                f"[{', '.join(map(str, spec.shape))}]"
            )
        for dim, size in zip(spec.shape, shape, strict=False):
            if isinstance(dim, Dim) and sizes.setdefault(dim.name, size) != size:
                raise BadInput(
                    f'input "{spec.name}" has {dim.name}={size}, another {sizes[dim.name]}; '
                    "expected one size"
                )
        if datatype != BF16:
            value = torch.from_numpy(value if value.flags.writeable else value.copy())
        tensors.append(value)
    for spec, tensor in zip(specs, tensors, strict=True):
        if spec.values and (problem := refused_values(spec, tensor, sizes)):
            raise BadInput(f'input "{spec.name}" {problem}')
    return tuple(tensors)


def _groups(
    handler: BaseHandler, inputs: Sequence[tuple[Tensor, ...]]
) -> list[list[tuple[Tensor, ...]]]:
    """Return the requests in order, those together that one call of the model can answer."""
    groups: list[list[tuple[Tensor, ...]]] = []
    rows = 0
    for tensors in inputs:
        own = len(tensors[0]) if tensors[0].ndim else 0
        if groups and handler.has_rows and _joins(groups[-1][0], tensors, rows + own, handler):
            groups[-1].append(tensors)
            rows += own
        else:
            groups.append([tensors])
            rows = own
    return groups


def _joins(
    first: tuple[Tensor, ...], other: tuple[Tensor, ...], rows: int, handler: BaseHandler
) -> bool:
    return all(
        one.ndim and one.shape[1:] == two.shape[1:] and fits(rows, spec.shape[0])
        for one, two, spec in zip(first, other, handler.inputs, strict=True)
        if spec.shape
    )


def _call(handler: BaseHandler, group: Sequence[tuple[Tensor, ...]]) -> list[Outputs]:
    """Call the model once, and share its outputs out."""
    import torch

    columns = zip(*group, strict=True)
    inputs = group[0] if len(group) == 1 else tuple(map(torch.cat, columns))
    outputs = handler.inference(inputs[0] if len(inputs) == 1 else inputs)
    tensors = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    names = handler.output_names or tuple(f"output_{at}" for at in range(len(tensors)))
    arrays = [_array(tensor) for tensor in tensors]
    if len(group) == 1:
        return [dict(zip(names, arrays, strict=True))]
    counts = [len(each[0]) for each in group]
    ends = np.cumsum(counts)
    if any(len(array) != ends[-1] for array in arrays):
        raise HandlerError(f"an output of the model has not {ends[-1]} rows, as its inputs have")
    return [
        {name: array[end - count : end] for name, array in zip(names, arrays, strict=True)}
        for count, end in zip(counts, ends.tolist(), strict=True)
    ]


def _array(tensor: Tensor) -> Array:
    import torch

    tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


class _Mapped:
    """Gives tensors to a handler as a dict for each request, and reads its answers.

    Args:
        handle: the handler's.
        is_enveloped: whether it reads the protocol's JSON.
    """

    def __init__(self, handle: Entry, is_enveloped: bool = False) -> None:
        self._handle = handle
        self._is_enveloped = is_enveloped

    def __call__(self, requests: Sequence[TensorRequest], context: Context) -> list[Outputs]:
        if self._is_enveloped:
            rows: list[dict[str, Any]] = [{"body": as_document(each)} for each in requests]
        else:
            rows = [{name: _plain(each) for name, each in one.inputs.items()} for one in requests]
        answers = self._handle(rows, context)
        if not isinstance(answers, list) or len(answers) != len(requests):
            raise HandlerError(
                f"the handler answered {type(answers).__name__} to {len(requests)} requests; "
                "expected a list with one answer per request"
            )
        return [_outputs(answer) for answer in answers]


def _plain(value: Array) -> Any:
    """Return one element of BYTES as a bytearray, as the part of a form comes."""
    is_one = isinstance(value, np.ndarray) and value.dtype == object and value.shape == (1,)
    return bytearray(value[0]) if is_one else value


def _outputs(answer: Any) -> Outputs:
    """Return a handler's answer as outputs by name."""
    if isinstance(answer, Mapping) and isinstance(answer.get("outputs"), list):
        try:
            return read_document(answer["outputs"])
        except BadInput as error:
            raise HandlerError(f"the handler's answer is not the protocol's: {error}") from error
    if isinstance(answer, Mapping) and answer:
        arrays = {str(name): _as_array(value) for name, value in answer.items()}
        if all(array is not None for array in arrays.values()):
            return arrays
    if (array := _as_array(answer)) is None:
        array = _as_array(answer if isinstance(answer, str) else orjson.dumps(answer))
    return {OUTPUT: array}


def _as_array(value: Any) -> Array | None:
    """Return an array, a tensor, bytes or text as an array; None for everything else."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes | bytearray):
        found = np.empty(1, dtype=object)
        found[0] = bytes(value)
        return found
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = _array(value)
    elif not isinstance(value, np.ndarray):
        return None
    try:
        datatype_of(value)
    except KeyError:
        return None
    return value
