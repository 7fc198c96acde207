"""Predictions in two halves on a CUDA device: a batch computes while the next one is read.

A batch passes three streams, each in its own order: copied in, computed, copied out. Events tie a
batch's steps together, and the process waits at one place only, for its outputs on the host. Two
slots hold the memory of two batches; a slot is taken again when its batch has been answered, so
nothing of it is in use by then.

`Cuda` is all that calls CUDA. Where there is none, tests run everything else over a device of their
own, which takes the steps in any order that the events allow.
"""

import bisect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from modelyard.archiver.signature import TensorSpec
from modelyard.handlers.backends import Artifact, Output, torch_dtype
from modelyard.handlers.base import BaseHandler
from modelyard.handlers.context import Context
from modelyard.handlers.errors import LoadError

_log = logging.getLogger(__name__)

SLOTS = 2
"""Batches in flight: one computes, one is copied in or out."""
STEPS = ("handle", "preprocess", "inference", "postprocess")
WARM_UP_RUNS = 3
"""TorchScript compiles in its second run; libraries choose their kernels in the first."""
TOLERANCE = 1e-4
"""Between a graph and the artifact itself, where no certificate states one."""

Run = Callable[..., Output]


class Event(Protocol):
    """A point in a stream, as torch.cuda.Event has it."""

    def record(self, stream: Any) -> None:
        """Come after all that the stream has been given so far."""

    def query(self) -> bool:
        """Return whether that is done."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Device(Protocol):
    """Where a slot's steps run. A stream is opaque but for its `wait_event`."""

    copy_in: Any
    compute: Any
    copy_out: Any

    def host_memory(self, size_bytes: int) -> Tensor:
        """Return bytes of the host that the device copies from and to by itself."""

    def memory(self, size_bytes: int) -> Tensor:
        """Return bytes of the device."""

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        """Copy when the stream comes to it; nobody waits."""

    def run(self, call: Callable[[], Any]) -> Any:
        """Call what gives work to the device, in the order of the compute stream."""

    def event(self) -> Event:
        """Return an event; who waits for it does not keep a core busy."""

    def record_graph(self, call: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
        """Return what repeats the call on the same memory, and the outputs that it writes."""

    def synchronize(self) -> None:
        """Wait for all work.

        Raises:
            RuntimeError: the device failed in a way that this process cannot get over.
        """


class Cuda:
    """A CUDA device, and three streams of it.

    Args:
        device: with its index.
        pinned: whether the host's memory is pinned; measurements compare the two.
    """

    def __init__(self, device: torch.device, pinned: bool = True) -> None:
        self._device = device
        self._pinned = pinned
        self._graph_memory: Any = None
        self.copy_in, self.compute, self.copy_out = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )

    def host_memory(self, size_bytes: int) -> Tensor:
        """Return pinned bytes; pinning takes milliseconds, so only a larger batch asks again."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def memory(self, size_bytes: int) -> Tensor:
        """Return bytes of the device, of the pool of the stream that writes them first."""
        with torch.cuda.stream(self.copy_in):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        """Copy when the stream comes to it."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def run(self, call: Callable[[], Any]) -> Any:
        """Call with the compute stream as torch's current one."""
        with torch.cuda.stream(self.compute):
            return call()

    def event(self) -> Event:
        """Return an event whose waiting sleeps instead of spinning."""
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return event

    def record_graph(self, call: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
        """Capture a CUDA graph; all share their memory, since one stream runs them in turn."""
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=self.compute):
            outputs = call()
        return graph.replay, outputs

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self._device)


class Memory:
    """Blocks that grow to the largest batch and are used again by each.

    Args:
        allocate: number of bytes → bytes.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._blocks: dict[int, Tensor] = {}

    def take(self, at: int, like: Tensor) -> Tensor:
        """Return block `at` as a tensor of the shape and dtype of another."""
        size_bytes = like.numel() * like.element_size()
        block = self._blocks.get(at)
        if block is None or block.numel() < size_bytes:
            block = self._blocks[at] = self._allocate(size_bytes)
        return block[:size_bytes].view(like.dtype).view(like.shape)


class Slot:
    """The memory and the events of one batch in flight."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._staged = Memory(device.host_memory)
        self._inputs = Memory(device.memory)
        self._fetched = Memory(device.host_memory)
        self._copied, self._computed, self.done = (device.event() for _ in range(3))
        self._outputs: tuple[Tensor, ...] = ()

    @torch.inference_mode()
    def start(self, run: Run, tensors: Sequence[Tensor]) -> Output:
        """Return a batch to the device.

        Args:
            run: called with the tensors on the device.
            tensors: on the host; free again on return.

        Returns:
            The outputs on the host, which hold their values once `done` has passed.
        """
        device = self._device
        inputs = []
        for at, tensor in enumerate(tensors):
            staged = self._staged.take(at, tensor).copy_(tensor)
            inputs.append(self._inputs.take(at, tensor))
            device.copy(device.copy_in, inputs[at], staged)
        self._copied.record(device.copy_in)
        device.compute.wait_event(self._copied)
        outputs: Output = device.run(lambda: run(*inputs))
        # Their memory would be another batch's as soon as nobody holds them.
        self._outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        self._computed.record(device.compute)
        device.copy_out.wait_event(self._computed)
        fetched = tuple(self._fetched.take(at, each) for at, each in enumerate(self._outputs))
        for target, source in zip(fetched, self._outputs, strict=True):
            device.copy(device.copy_out, target, source)
        self.done.record(device.copy_out)
        return fetched[0] if isinstance(outputs, Tensor) else fetched

    def clear(self) -> None:
        """Let go of the outputs on the device; call it when nothing of the batch runs any more."""
        self._outputs = ()


class Launched:
    """A batch on its way; `result` must be called once."""

    def __init__(self, overlap: "Overlap", slot: Slot, context: Context, outputs: Output) -> None:
        self._overlap = overlap
        self._slot = slot
        self._context = context
        self._outputs = outputs

    def is_done(self) -> bool:
        """Return whether `result` would not wait for the device."""
        return self._slot.done.query()

    def result(self) -> list[Any]:
        """Wait for the outputs and give the answers, as `handle` would."""
        return self._overlap.finish(self._slot, self._context, self._outputs)


class Overlap:
    """A handler's `handle` in two halves.

    Args:
        handler: initialised; what `can_overlap` accepts.
        device: where its model computes.
        run: the model, or graphs of it.
    """

    def __init__(self, handler: BaseHandler, device: Device, run: Run) -> None:
        self._handler = handler
        self._device = device
        self._run = run
        self._free = [Slot(device) for _ in range(SLOTS)]

    def launch(self, data: Sequence[Mapping[str, Any]], context: Context) -> Launched:
        """Read a batch and give it to the device; no more than `SLOTS` batches at once.

        Args:
            data: one dict per request.
            context: the batch's own until its result is there.

        Raises:
            Exception: whatever preprocess and the model raise; the slot is free again.
        """
        self._handler.context = context
        inputs = self._handler.preprocess(data)
        tensors = (inputs,) if isinstance(inputs, Tensor) else inputs
        slot = self._free.pop()
        try:
            return Launched(self, slot, context, slot.start(self._run, tensors))
        except BaseException:
            # What the device has got of it writes nothing that a later batch does not write again.
            self._release(slot)
            raise

    def finish(self, slot: Slot, context: Context, outputs: Output) -> list[Any]:
        """Wait for a batch and give its answers; its outputs are valid until postprocess returns.

        Raises:
            Exception: whatever the device and postprocess raise; the slot is free then, too.
        """
        try:
            slot.done.synchronize()
            self._handler.context = context
            return self._handler.postprocess(outputs)
        finally:
            self._release(slot)

    def warm_up(self, batch_size: int) -> None:
        """Run batches of zeros of each size through both slots; the largest sets their memory.

        Raises:
            torch.OutOfMemoryError: a batch of the largest size does not fit.
        """
        for size in reversed(sizes_of_graphs(batch_size)):
            tensors = _examples(self._handler.inputs, size, None)
            if tensors is None or not self._handler.model.accepts(tensors):
                continue
            for slot in self._free:
                slot.start(self._run, tensors)
            self._device.synchronize()
            for slot in self._free:
                slot.clear()

    def _release(self, slot: Slot) -> None:
        slot.clear()
        self._free.append(slot)


class NoGraphs(Exception):
    """An artifact cannot be recorded as graphs; the message says why."""


class Graph:
    """One recorded run of an artifact, for batches of up to `size` rows."""

    def __init__(self, inputs: Sequence[Tensor], replay: Callable[[], None], out: Output) -> None:
        self.inputs = inputs
        self.replay = replay
        self.outputs = out

    def __call__(self, tensors: Sequence[Tensor], rows: int) -> Output:
        """Run a batch; the rows beyond its own are zeros and reach no answer."""
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static[:rows].copy_(tensor, non_blocking=True)
            static[rows:].zero_()
        self.replay()
        # The next run of the graph writes over its outputs, perhaps before they are fetched.
        if isinstance(self.outputs, Tensor):
            return self.outputs[:rows].clone()
        return tuple(output[:rows].clone() for output in self.outputs)


class Graphs:
    """An artifact of which a batch's work is given to the device at once, kernel by kernel no more.

    What no graph fits is run by the artifact itself.

    Args:
        artifact: what was recorded.
        graphs: rows → graph.
    """

    def __init__(self, artifact: Artifact, graphs: Mapping[int, Graph]) -> None:
        self._artifact = artifact
        self._sizes = sorted(graphs)
        self._graphs = graphs

    def __call__(self, *tensors: Tensor) -> Output:
        """Run the artifact on the device's current stream."""
        rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
        at = bisect.bisect_left(self._sizes, rows)
        if not rows or at == len(self._sizes) or not self._artifact.accepts(tensors):
            return self._artifact(*tensors)
        graph = self._graphs[self._sizes[at]]
        if not _fit(graph.inputs, tensors, rows):
            return self._artifact(*tensors)
        return graph(tensors, rows)


def sizes_of_graphs(batch_size: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … and the batch size: a batch is padded to the next of them."""
    powers = (1 << power for power in range(batch_size.bit_length()))
    return (*(size for size in powers if size < batch_size), batch_size)


def can_overlap(target: object, built_in: Iterable[type[BaseHandler]]) -> bool:
    """Return whether a handler may read one batch before it has answered the one before.

    Its steps must be those of one of our classes: an author's preprocess may leave on the handler
    what their postprocess reads there. Who says `overlaps = True` does no such thing, and may
    change these two.
    """
    model = getattr(target, "model", None)
    if not isinstance(target, BaseHandler) or not isinstance(model, Artifact):
        return False
    steps = ("handle", "inference") if target.overlaps else STEPS
    own = [getattr(getattr(target, step), "__func__", None) for step in steps]
    return model.device.type == "cuda" and any(
        own == [getattr(kind, step) for step in steps] for kind in built_in
    )


def open_overlap(handler: BaseHandler, context: Context, device: Device) -> Overlap:
    """Record graphs where the model has them, and run every size of batch once.

    Args:
        handler: initialised; what `can_overlap` accepts.
        context: what it was initialised with.
        device: where its model computes.

    Raises:
        torch.OutOfMemoryError: the largest batch does not fit.
    """
    batch_size = context.system_properties["batch_size"]
    device.synchronize()  # the weights came by another stream
    run: Run = handler.model
    section = context.model_yaml_config.get("handler")
    if not isinstance(section, Mapping) or section.get("cuda_graphs", True):
        try:
            run = record_graphs(handler.model, handler.inputs, batch_size,
                                _read_tolerance(context), device)  # fmt: skip
        except NoGraphs as reason:
            _log.info("the model runs without CUDA graphs: %s", reason)
    overlap = Overlap(handler, device, run)
    overlap.warm_up(batch_size)
    return overlap


@torch.inference_mode()
def record_graphs(
    artifact: Artifact,
    inputs: Sequence[TensorSpec],
    batch_size: int,
    tolerance: float,
    device: Device,
) -> Graphs:
    """Record one graph per size of batch, each proven to give what the artifact gives.

    Args:
        inputs: of the signature; TorchScript does not know its own.
        tolerance: as a certificate has it: of floats, over the largest value where that is over 1.

    Raises:
        NoGraphs: shapes vary, the work cannot be recorded, or a graph answers something else.
        torch.OutOfMemoryError: a batch of the largest size does not fit.
    """
    if artifact.format not in ("pt2", "torchscript"):
        raise NoGraphs(f"{artifact.format} is launched as it is")
    largest = _examples(inputs, batch_size, None)
    if largest is None:
        raise NoGraphs("a shape varies, or is unknown, beside the batch")
    static = [
        device.memory(each.numel() * each.element_size()).view(each.dtype).view(each.shape)
        for each in largest
    ]
    graphs: dict[int, Graph] = {}
    for size in reversed(sizes_of_graphs(batch_size)):  # smaller ones fit into the largest's memory
        views = [block[:size] for block in static]
        if not artifact.accepts(views):
            continue
        try:
            graphs[size] = _record(artifact, inputs, views, tolerance, device)
        except (torch.OutOfMemoryError, NoGraphs):
            raise
        # What cannot be recorded says so by an error of whichever library met it first.
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise NoGraphs(f"{type(error).__name__}: {first}") from error
    if not graphs:
        raise NoGraphs(f"the artifact takes no batch of {sizes_of_graphs(batch_size)} rows")
    return Graphs(artifact, graphs)


def _record(
    artifact: Artifact,
    inputs: Sequence[TensorSpec],
    views: Sequence[Tensor],
    tolerance: float,
    device: Device,
) -> Graph:
    size = len(views[0])
    _fill(device, views, inputs, seed=1)
    for _ in range(WARM_UP_RUNS):
        device.run(lambda: artifact(*views))
    device.synchronize()
    replay, recorded = device.record_graph(lambda: artifact(*views))
    outputs = (recorded,) if isinstance(recorded, Tensor) else recorded
    if not all(output.dim() and len(output) == size for output in outputs):
        shapes = ", ".join(str(list(output.shape)) for output in outputs)
        raise NoGraphs(f"outputs of shapes {shapes} do not have a row for each of {size} requests")
    # Other numbers than were recorded: a graph that holds on to what it saw is found out.
    _fill(device, views, inputs, seed=2)
    device.run(replay)
    expected = device.run(lambda: artifact(*views))
    device.synchronize()
    expected = (expected,) if isinstance(expected, Tensor) else expected
    for at, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if not _agree(found.cpu(), wanted.cpu(), tolerance):
            raise NoGraphs(
                f"output {at} of a batch of {size} is not what the model gives, within {tolerance}"
            )
    return Graph(views, replay, recorded)


def _fill(
    device: Device, targets: Sequence[Tensor], inputs: Sequence[TensorSpec], seed: int
) -> None:
    examples = _examples(inputs, len(targets[0]), seed)
    assert examples is not None
    for target, example in zip(targets, examples, strict=True):
        device.copy(device.compute, target, example)


def _examples(inputs: Sequence[TensorSpec], rows: int, seed: int | None) -> list[Tensor] | None:
    """Return a batch, None where the specs do not say its shapes.

    Floats are in [0, 1) by a seed, or zero without one; all else is zero, which indexes something
    in any table.
    """
    random = torch.Generator().manual_seed(seed or 0)
    tensors = []
    for spec in inputs:
        sizes = [each for each in spec.shape[1:] if isinstance(each, int)]
        if not spec.shape or len(sizes) != len(spec.shape) - 1:
            return None
        if spec.is_float and seed is not None:
            tensors.append(torch.rand(rows, *sizes, generator=random).to(torch_dtype(spec.dtype)))
        else:
            tensors.append(torch.zeros(rows, *sizes, dtype=torch_dtype(spec.dtype)))
    return tensors or None


def _fit(static: Sequence[Tensor], tensors: Sequence[Tensor], rows: int) -> bool:
    return all(
        tensor.dtype == block.dtype and tensor.shape == (rows, *block.shape[1:])
        for block, tensor in zip(static, tensors, strict=True)
    )


def _agree(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return torch.allclose(found, expected, rtol=0, atol=tolerance * scale, equal_nan=True)


def _read_tolerance(context: Context) -> float:
    """Return the tolerance that the artifact was proven within."""
    report = ((context.manifest or {}).get("modelyard") or {}).get("report")
    if report is None:
        return TOLERANCE
    path = Path(context.system_properties["model_dir"]) / report
    try:
        parity = json.loads(path.read_text(encoding="utf-8")).get("parity") or {}
        return float(parity.get("tolerance", TOLERANCE))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise LoadError(f"{report} cannot be read ({error!r}); build the archive again") from error
