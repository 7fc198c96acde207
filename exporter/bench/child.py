"""The process that one subject of a bench runs in, and how it counts and measures.

It is asked for "ready" once torch is imported, and for "open" before any other method of `Session`.
"""

import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, parse_signature
from modelyard.exporter.arguments import choose_outputs, flatten, give_outputs, take_inputs
from modelyard.exporter.checkpoint import open_model
from modelyard.exporter.child import answer_questions
from modelyard.exporter.prove.watch import count
from modelyard.handlers.models.backends import open_artifact, set_precision
from modelyard.handlers.proof.probes import Probe, make_inputs

Tensors = tuple[Tensor, ...]

_MOVES = 20
_WARM_CALLS = 3
_SEED = 1
_RAPL = Path("/sys/class/powercap")
"""A folder for each package of a CPU, `intel-rapl:0`; AMD's have the same name."""


class Session:
    """One subject: opens it, and measures its calls.

    Args:
        stack: closes what is open when the process ends.
        folder: where it leaves its outputs.
    """

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._compile_s = 0.0
        self._inputs: dict[int, Tensors] = {}
        self._run: Callable[..., Any]
        self._module: nn.Module | None

    def ready(self) -> None:
        """Return, now that torch is imported."""

    def open(
        self, kind: str, path: str, signature: Mapping[str, Any], device: str, **checkpoint: Any
    ) -> None:
        """Load the subject; `checkpoint` holds what `open_model` takes."""
        self._before = _memory()
        self._signature = parse_signature(signature)
        self._kind, self._device = kind, torch.device(device)
        started = time.perf_counter()
        set_precision(self._device)
        if kind in ("eager", "compile"):
            model, arguments = checkpoint["model"], checkpoint["model_args"]
            built = self._stack.enter_context(open_model(Path(path), model, arguments))
            module = take_inputs(built.to(self._device), self._signature)
            self._run = self._module = self._with_outputs(module)
            if kind == "compile":
                self._run = torch.compile(self._run, dynamic=False)
        else:
            artifact = open_artifact(Path(path), kind, self._device)
            self._device = artifact.device
            self._run, self._module = artifact, artifact.module
        self._load_s = time.perf_counter() - started

    def _with_outputs(self, module: nn.Module) -> nn.Module:
        """Keep what the artifacts give of what the checkpoint's model gives; all where unknown."""
        if not self._signature.outputs:
            return module
        batch = self._signature.batch
        with torch.inference_mode():
            given = module(*self._made(batch.min if isinstance(batch, Dim) else 1))
        wanted = [spec.name for spec in self._signature.outputs]
        outputs = choose_outputs(given, wanted, [spec.name for spec in self._signature.inputs])
        return give_outputs(module, self._signature, outputs, given)

    def _made(self, batch: int) -> Tensors:
        """Make the inputs of a batch size; every process makes the same."""
        sizes = {name: dim.max for name, dim in self._signature.dims.items()}
        if isinstance(self._signature.batch, Dim):
            sizes[self._signature.batch.name] = batch
        made = make_inputs(self._signature, Probe("random", sizes), seed=_SEED)
        return tuple(tensor.to(self._device) for tensor in made)

    def _warm_up(self, batch: int) -> None:
        """Run the first calls, which compile and allocate, and keep what they give."""
        if batch in self._inputs:
            return
        self._inputs[batch] = self._made(batch)
        with self._range("warm-up"):
            started = time.perf_counter()
            outputs = flatten(self._call(batch))
            self._compile_s += time.perf_counter() - started
            for _ in range(_WARM_CALLS - 1):
                self._call(batch)
        kept = [value.detach().cpu().clone() for value in outputs.values()]
        torch.save(kept, self._folder / f"{batch}.pt")

    def _call(self, batch: int) -> Any:
        with torch.inference_mode():
            output = self._run(*self._inputs[batch])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return output

    def time(self, batch: int, seconds: float) -> dict[str, Any]:
        """Call for `seconds`, once at least; return what each call and, on CUDA, moves take."""
        self._warm_up(batch)
        latencies: list[float] = []
        before, joules = self._held(), read_joules(self._device)
        with self._range(f"run batch {batch}"):
            ends = time.perf_counter() + seconds
            while not latencies or time.perf_counter() < ends:
                started = time.perf_counter_ns()
                self._call(batch)
                latencies.append((time.perf_counter_ns() - started) / 1e6)
        used = None if joules is None else (read_joules(self._device) or 0.0) - joules
        found: dict[str, Any] = {
            "latencies_ms": latencies,
            "before_bytes": before,
            "after_bytes": self._held(),
            "joules": used if used is None or used >= 0 else None,  # the counter began anew
            "moves": {},
        }
        if self._device.type == "cuda":
            inputs = [tensor.cpu() for tensor in self._inputs[batch]]
            outputs = [*flatten(self._call(batch)).values()]
            found["moves"] = {
                "to_device_ms": self._moved("inputs to device", inputs, self._device),
                "from_device_ms": self._moved("outputs from device", outputs, torch.device("cpu")),
            }
        return found

    def _moved(self, name: str, tensors: Sequence[Tensor], place: torch.device) -> float:
        taken = []
        for _ in range(_MOVES):
            with self._range(name):
                started = time.perf_counter_ns()
                for tensor in tensors:
                    tensor.to(place)
                torch.cuda.synchronize(self._device)
                taken.append((time.perf_counter_ns() - started) / 1e6)
        return statistics.median(taken)

    def _held(self) -> int:
        """Return the memory that is in use now: that of the device, else of the process."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _memory("VmRSS:")

    def profile(self, batch: int, path: str) -> dict[str, Any]:
        """Write a trace of a few calls, for Perfetto, and return its operators by their time."""
        self._warm_up(batch)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True
        ) as trace:
            for _ in range(_WARM_CALLS):
                with torch.profiler.record_function(f"call with batch {batch}"):
                    self._call(batch)
        trace.export_chrome_trace(path)
        found = [
            {
                "operator": each.key,
                "calls": each.count,
                "self_ms": (each.self_cpu_time_total + each.self_device_time_total) / 1e3,
                "total_ms": (each.cpu_time_total + each.device_time_total) / 1e3,
                "own_bytes": each.self_cpu_memory_usage + each.self_device_memory_usage,
            }
            for each in trace.key_averages()
        ]
        return {"operators": sorted(found, key=lambda each: -each["self_ms"])}

    def facts(self) -> dict[str, Any]:
        """Return the subject's cost beside its calls; memory first, since counting takes some."""
        peak = _memory()
        facts: dict[str, Any] = {
            "load_s": self._load_s,
            "peak_bytes": peak,
            "own_bytes": max(peak - self._before, 0),
            "compile_s": self._compile_s if self._kind == "compile" else None,
        }
        if self._device.type == "cuda":
            facts["cuda_peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        if self._module is not None:
            facts["parameters"] = sum(value.numel() for value in self._module.parameters())
        if self._module is None or self._kind == "torchscript" or not self._inputs:
            return {**facts, "flops_note": "unknown: this format cannot be counted"}
        batch, module = min(self._inputs), self._module
        total, unknown = count_flops(lambda: module(*self._inputs[batch]))
        if total is None:
            return {**facts, "flops_note": f"unknown: no formula for {', '.join(unknown)}"}
        return {**facts, "flops_per_item": round(total / max(batch, 1))}

    def _range(self, name: str) -> Any:
        """Mark a stage for Nsight Systems, on CUDA only."""
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.nvtx.range(f"modelyard {self._kind}: {name}")


def _memory(line_of: str = "VmHWM:") -> int:
    """Return the most memory that this process has had, in bytes, or what it has now (VmRSS).

    Not ru_maxrss: that starts with what the process had which started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith(line_of))
    return int(line.split()[1]) * 1024


def read_joules(device: torch.device) -> float | None:
    """Return a counter of energy: of the CPUs' packages by RAPL, of a GPU by NVML.

    Returns:
        None where there is none, or it cannot be read; RAPL's are for root on most machines.
    """
    if device.type == "cuda":
        try:
            import pynvml  # type: ignore[import-not-found]

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except Exception:  # not installed, an older GPU, or an error of the driver's
            return None
    try:
        counters = [(each / "energy_uj").read_text() for each in _RAPL.glob("intel-rapl:?")]
    except OSError:
        return None
    return sum(map(int, counters)) / 1e6 if counters else None


# -- floating-point operations: torch's own formulas, and what they leave out ----------------------

_Shape = Sequence[int]
_WITHOUT_FORMULA = frozenset(
    (
        *("_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_cudnn_rnn"),
        *("_fft_r2c", "_fft_c2c", "_fft_c2r", "linalg_lu", "linalg_qr", "_linalg_svd", "cdist"),
        *("_embedding_bag_dense_backward", "_cdist_forward", "quantize_per_tensor"),
    )
)
"""Arithmetic that no formula covers: a count without it would be wrong, not low."""


def count_flops(call: Callable[[], object]) -> tuple[int | None, list[str]]:
    """Count the operations of one call, which is made; a multiplication and an addition are two.

    Only matrix products, convolutions, attention and recurrent layers count; element-wise operators
    do not, as everywhere in the literature.

    Returns:
        The count, or None where operators without a formula were met; and these.
    """
    with torch.no_grad(), count(_FORMULAS) as counted:
        call()
    unknown = sorted(counted.names & _WITHOUT_FORMULA)
    return None if unknown else round(counted.gflop * 1e9), unknown


def _recurrent(steps: _Shape, inner: _Shape, outer: _Shape, *_: object, **__: object) -> int:
    """Count one layer in one direction: two products per step, the gates stacked in the weights.

    Args:
        steps: (length, N, inputs).
        inner: (gates * hidden, inputs).
        outer: (gates * hidden, hidden).
    """
    return 2 * steps[0] * steps[1] * (math.prod(inner) + math.prod(outer))


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: object, **__: object) -> int:
    """Count two products of (N, heads, length, width): with the keys and with the values."""
    *batch, length, width = query
    return 2 * math.prod(batch) * length * key[-2] * (width + value[-1])


# torch gives a formula the shapes of the tensors.
_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}


def main(folder: Path) -> None:
    """Answer questions until the input ends."""
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        answer_questions(Session(stack, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
