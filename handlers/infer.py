"""Requests of tensors by name → what a handler's model answers.

A `BaseHandler` takes them natively: the inputs and outputs are the model's own, as its signature
states them, without what `preprocess` and `postprocess` make of bodies and answers. Requests of
several rows share calls of the model with others.

Any other handler is given one dict per request, input name → array; an input of one element of
BYTES is a bytearray, as the part of a form is. It answers

- a dict of arrays, torch's tensors or bytes: outputs by name,
- one of them: the output `output`,
- text, or anything else that JSON can hold: the output `output`, one element of BYTES.

What it streams is a whole answer each time, where the request asks for a stream; else it comes in
one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from modelyard_client.tensors import BF16, BYTES, LENGTH_HEADER

from modelyard.archiver.signature import OIP_DATATYPES, TensorSpec, fits
from modelyard.handlers import tensors as oip
from modelyard.handlers.body import join_chunks
from modelyard.handlers.context import Context
from modelyard.handlers.entry_point import Entry, FoundHandler
from modelyard.handlers.errors import BadInput, HandlerError

if TYPE_CHECKING:
    from torch import Tensor

    from modelyard.handlers.base import BaseHandler

OUTPUT = "output"
"""Name of an output whose answer names none."""
Outputs = Mapping[str, oip.Array]


def tensor_entry(
    handler: FoundHandler, enveloped: Entry | None = None, streams: bool = False
) -> Entry:
    """Return what answers requests of tensors, as `handle` answers others: bytes for each.

    Args:
        enveloped: the handler behind what reads and writes the protocol's JSON itself.
        streams: whether what the handler streams is sent on.
    """
    base = sys.modules.get("modelyard.handlers.base")  # imported by whoever inherits from it
    is_native = (
        enveloped is None
        and base is not None
        and isinstance(handler.target, base.BaseHandler)
        and type(handler.target).handle is base.BaseHandler.handle
    )
    handle = enveloped or handler.handle
    labels = getattr(handler.target, "mapping", None) if is_native else None

    def answer(data: list[dict[str, Any]], context: Context) -> list[bytes]:
        jobs = [
            TensorJob(row["body"], context.get_all_request_header(index), context, labels)
            for index, row in enumerate(data)
        ]
        requests = [job.request for job in jobs]
        if is_native:
            handler.target.context = context
            found = handler.target.infer(requests)
        else:
            # What reads the protocol's JSON itself gets that.
            rows = [
                _row_of(each) if enveloped is None else {"body": oip.as_document(each)}
                for each in requests
            ]
            if streams and context.stream is not None:
                return _stream_mapped(handle, rows, jobs, context)
            found = _run_mapped(handle, rows, context)
        return [job.write(outputs, context, at) for at, (job, outputs) in enumerate(
            zip(jobs, found, strict=True)
        )]  # fmt: skip

    return answer


class TensorJob:
    """One request of tensors, and what its answers are written as.

    Args:
        headers: headers of the request, found in any case.
        labels: index of a class → its name.

    Raises:
        BadInput: the body is not such a request.
    """

    def __init__(
        self, body: bytes | bytearray, headers: Mapping[str, Any], context: Context,
        labels: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        encoding = str(headers.get("content-encoding") or "").lower()
        self.request = oip.read_request(body, headers.get(LENGTH_HEADER), encoding)
        self._name = context.model_name
        model = (context.manifest or {}).get("model") or {}
        self._version = str(model.get("modelVersion", ""))
        self._labels = labels

    @property
    def row(self) -> dict[str, Any]:
        """What a handler of bodies gets of it."""
        return _row_of(self.request)

    def write(self, outputs: Outputs, context: Context, index: int) -> bytes:
        """Return an answer, and set its headers as those of request `index`."""
        body, headers = self.answer(outputs)
        for name, value in headers.items():
            context.set_response_header(index, name, value)
        return body

    def answer(self, outputs: Outputs) -> tuple[bytes, dict[str, str]]:
        """Return body and headers of an answer."""
        for each in self.request.wanted or ():
            if each.name not in outputs:
                raise BadInput(f'output "{each.name}" is unknown; expected {", ".join(outputs)}')
        return oip.write_answer(self.request, outputs, self._name, self._version, self._labels)

    def answer_with(self, value: Any) -> tuple[bytes, dict[str, str]]:
        """Return body and headers for what a handler of bodies answered."""
        return self.answer(outputs_of(value))

    def chunk(self, value: Any) -> bytes:
        """Return one of several answers of such a handler, behind the length of its JSON."""
        body, headers = self.answer_with(value)
        length = int(headers.get(LENGTH_HEADER, len(body)))
        return length.to_bytes(4, "little") + body


def run_tensors(handler: BaseHandler, requests: Sequence[oip.TensorRequest]) -> list[Outputs]:
    """Return the model's outputs for each request, in as few calls as its batch range allows.

    Raises:
        BadInput: inputs of other names, datatypes, shapes or values than the signature states.
    """
    inputs = [_inputs(handler.inputs, request) for request in requests]
    answers: list[Outputs] = []
    for group in _groups(handler, inputs):
        answers += _call(handler, group)
    return answers


def _inputs(specs: Sequence[TensorSpec], request: oip.TensorRequest) -> tuple[Tensor, ...]:
    """Return the inputs of a request in the order of the model's, held to what it states."""
    import torch

    from modelyard.handlers.limits import check_stated

    names = [spec.name for spec in specs]
    if missing := [name for name in names if name not in request.inputs]:
        raise BadInput(f'input "{missing[0]}" is missing; expected {", ".join(names)}')
    if extra := [name for name in request.inputs if name not in names]:
        raise BadInput(f'input "{extra[0]}" is unknown; expected {", ".join(names)}')
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
        if datatype != BF16:
            value = torch.from_numpy(value if value.flags.writeable else value.copy())
        tensors.append(value)
    check_stated(specs, tensors)
    return tuple(tensors)


def _groups(
    handler: BaseHandler, inputs: Sequence[tuple[Tensor, ...]]
) -> list[list[tuple[Tensor, ...]]]:
    """Return the requests in order, those together that one call of the model can answer."""
    groups: list[list[tuple[Tensor, ...]]] = []
    rows = 0
    for tensors in inputs:
        own = len(tensors[0]) if tensors[0].ndim else 0
        rows += own
        if (
            groups
            and handler.has_rows
            and all(
                one.ndim and one.shape[1:] == two.shape[1:] and fits(rows, spec.shape[0])
                for one, two, spec in zip(groups[-1][0], tensors, handler.inputs, strict=True)
                if spec.shape
            )
        ):
            groups[-1].append(tensors)
        else:
            groups.append([tensors])
            rows = own
    return groups


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


def _array(tensor: Tensor) -> oip.Array:
    import torch

    tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _run_mapped(handle: Entry, rows: list[dict[str, Any]], context: Context) -> list[Outputs]:
    """Return what a handler answers to a dict for each request; what it streams comes in one."""
    kept: list[list[Any]] = [[] for _ in rows]

    def keep(values: list[Any]) -> None:
        context.check_cancelled()
        for chunks, value in zip(kept, values, strict=True):
            chunks.append(value)

    answers = _call_mapped(handle, rows, context, keep)
    return [
        outputs_of(join_chunks([*chunks, answer]) if chunks else answer)
        for chunks, answer in zip(kept, answers, strict=True)
    ]


def _stream_mapped(
    handle: Entry, rows: list[dict[str, Any]], jobs: Sequence[TensorJob], context: Context
) -> list[bytes]:
    """Send on what a handler streams, and return its last answers."""
    send = context.stream
    assert send is not None
    has_sent = False

    def pass_on(values: list[Any]) -> None:
        nonlocal has_sent
        send([job.chunk(value) for job, value in zip(jobs, values, strict=True)])
        has_sent = True

    answers = _call_mapped(handle, rows, context, pass_on)
    if has_sent:
        return [job.chunk(answer) for job, answer in zip(jobs, answers, strict=True)]
    return [job.write(outputs_of(answer), context, at) for at, (job, answer) in enumerate(
        zip(jobs, answers, strict=True)
    )]  # fmt: skip


def _call_mapped(
    handle: Entry, rows: list[dict[str, Any]], context: Context,
    stream: Callable[[list[Any]], None],
) -> list[Any]:  # fmt: skip
    """Call a handler, whose chunks go to `stream`."""
    before, context.stream = context.stream, stream
    try:
        answers = handle(rows, context)
    finally:
        context.stream = before
    if not isinstance(answers, list) or len(answers) != len(rows):
        raise HandlerError(
            f"the handler answered {type(answers).__name__} to {len(rows)} requests; "
            "expected a list with one answer per request"
        )
    return answers


def _row_of(request: oip.TensorRequest) -> dict[str, Any]:
    """Return a request as a handler of bodies gets it: input name → array.

    One element of BYTES is a bytearray, as the part of a form comes.
    """
    return {
        name: bytearray(value[0])
        if isinstance(value, np.ndarray) and value.dtype == object and value.shape == (1,)
        else value
        for name, value in request.inputs.items()
    }


def outputs_of(answer: Any) -> Outputs:
    """Return a handler's answer as outputs by name."""
    if isinstance(answer, Mapping) and isinstance(answer.get("outputs"), list):
        try:
            return oip.read_document(answer["outputs"])
        except BadInput as error:
            raise HandlerError(f"the handler's answer is not the protocol's: {error}") from error
    if isinstance(answer, Mapping) and answer:
        arrays = {str(name): _as_array(value) for name, value in answer.items()}
        if all(array is not None for array in arrays.values()):
            return arrays
    if (array := _as_array(answer)) is None:
        array = _as_array(answer if isinstance(answer, str) else orjson.dumps(answer))
    return {OUTPUT: array}


def _as_array(value: Any) -> oip.Array | None:
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
        oip.datatype_of(value)
    except KeyError:
        return None
    return value
