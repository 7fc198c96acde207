"""The process that one subject of a bench runs in: `python -P -m modelyard.exporter.bench.child`.

It writes `{}` once torch is imported. Then it reads one order per line, `["open", {arguments}]` or
a method of `Session` with its arguments, and answers each with one JSON object, which holds "error"
where the order failed. Whatever else is printed goes to the standard error.
"""

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, parse_signature
from modelyard.exporter.arguments import choose_outputs, flatten, give_outputs, take_inputs
from modelyard.exporter.bench.flops import count_flops
from modelyard.exporter.bench.machine import read_joules
from modelyard.exporter.checkpoint import open_model
from modelyard.exporter.errors import cause
from modelyard.handlers.models.backends import open_artifact
from modelyard.handlers.proof.agree import full_precision
from modelyard.handlers.proof.probes import Probe, make_inputs

Tensors = tuple[Tensor, ...]

_MOVES = 20
_WARM_CALLS = 3
_SEED = 1


class Session:
    """One subject, open: measures its calls."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        kind: str,
        path: str,
        model: str | None,
        model_args: Mapping[str, Any],
        signature: Mapping[str, Any],
        device: str,
        folder: str,
    ) -> None:
        self.before = _memory()
        self.signature = parse_signature(signature)
        self.kind = kind
        self.device = torch.device(device)
        self.folder = Path(folder)
        self.compile_s = 0.0
        self._inputs: dict[int, Tensors] = {}
        started = time.perf_counter()
        self.run: Callable[..., Any]
        self.module: nn.Module | None
        if kind in ("eager", "compile"):
            built = stack.enter_context(open_model(Path(path), model, model_args))
            module = take_inputs(built.to(self.device), self.signature)
            self.module = self._with_outputs(module)
            compiled = kind == "compile"
            self.run = torch.compile(self.module, dynamic=False) if compiled else self.module
        else:
            artifact = open_artifact(Path(path), kind, self.device)
            self.device = artifact.device
            self.run, self.module = artifact, artifact.module
        self.load_s = time.perf_counter() - started

    def _with_outputs(self, module: nn.Module) -> nn.Module:
        """Keep what the artifacts give of what the checkpoint's model gives; all where unknown."""
        if not self.signature.outputs:
            return module
        batch = self.signature.batch
        with torch.inference_mode():
            given = module(*self._made(batch.min if isinstance(batch, Dim) else 1))
        wanted = [spec.name for spec in self.signature.outputs]
        outputs = choose_outputs(given, wanted, [spec.name for spec in self.signature.inputs])
        return give_outputs(module, self.signature, outputs, given)

    def inputs(self, batch: int) -> Tensors:
        """Make the inputs of a batch size once; every process makes the same."""
        if batch not in self._inputs:
            self._inputs[batch] = self._made(batch)
            self._warm_up(batch)
        return self._inputs[batch]

    def _made(self, batch: int) -> Tensors:
        sizes = {name: dim.max for name, dim in self.signature.dims.items()}
        if isinstance(self.signature.batch, Dim):
            sizes[self.signature.batch.name] = batch
        made = make_inputs(self.signature, Probe("random", sizes), seed=_SEED)
        return tuple(tensor.to(self.device) for tensor in made)

    def _warm_up(self, batch: int) -> None:
        """Run the first calls, which compile and allocate, and keep what they give."""
        with self._range("warm-up"):
            started = time.perf_counter()
            outputs = flatten(self._call(batch))
            if self.kind == "compile":
                self.compile_s += time.perf_counter() - started
            for _ in range(_WARM_CALLS - 1):
                self._call(batch)
        kept = [value.detach().cpu().clone() for value in outputs.values()]
        torch.save(kept, self.folder / f"{batch}.pt")

    def _call(self, batch: int) -> Any:
        with torch.inference_mode(), full_precision(self.device):
            output = self.run(*self._inputs[batch])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return output

    def time(self, batch: int, seconds: float) -> dict[str, Any]:
        """Call for `seconds`, once at least; return each call's milliseconds."""
        self.inputs(batch)
        latencies: list[float] = []
        before, joules = self._held(), read_joules(self.device)
        with self._range(f"run batch {batch}"):
            ends = time.perf_counter() + seconds
            while not latencies or time.perf_counter() < ends:
                started = time.perf_counter_ns()
                self._call(batch)
                latencies.append((time.perf_counter_ns() - started) / 1e6)
        used = None if joules is None else (read_joules(self.device) or 0.0) - joules
        return {
            "latencies_ms": latencies,
            "before_bytes": before,
            "after_bytes": self._held(),
            "joules": used if used is None or used >= 0 else None,  # the counter began anew
        }

    def moves(self, batch: int) -> dict[str, Any]:
        """Return the milliseconds that inputs take to the device, and outputs back."""
        inputs = [tensor.cpu() for tensor in self.inputs(batch)]
        outputs = [*flatten(self._call(batch)).values()]
        return {
            "to_device_ms": self._moved("inputs to device", inputs, self.device),
            "from_device_ms": self._moved("outputs from device", outputs, torch.device("cpu")),
        }

    def _moved(self, name: str, tensors: Sequence[Tensor], place: torch.device) -> float:
        taken = []
        for _ in range(_MOVES):
            with self._range(name):
                started = time.perf_counter_ns()
                for tensor in tensors:
                    tensor.to(place)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                taken.append((time.perf_counter_ns() - started) / 1e6)
        return statistics.median(taken)

    def _held(self) -> int:
        """Return the memory that is in use now: of the device, else of the process."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return _memory("VmRSS:")

    def profile(self, batch: int, path: str) -> dict[str, Any]:
        """Write a trace of a few calls, for Perfetto, and return its operators by their time."""
        self.inputs(batch)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
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
            "load_s": self.load_s,
            "peak_bytes": peak,
            "own_bytes": max(peak - self.before, 0),
            "compile_s": self.compile_s if self.kind == "compile" else None,
        }
        if self.device.type == "cuda":
            facts["cuda_peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        if self.module is not None:
            facts["parameters"] = sum(value.numel() for value in self.module.parameters())
        return {**facts, **self._flops()}

    def _flops(self) -> dict[str, Any]:
        if self.module is None or self.kind == "torchscript" or not self._inputs:
            return {"flops_note": "unknown: this format cannot be counted"}
        batch = min(self._inputs)
        module, inputs = self.module, self._inputs[batch]
        counted = count_flops(lambda: module(*inputs))
        if counted.total is None:
            return {"flops_note": f"unknown: no formula for {', '.join(counted.unknown)}"}
        return {"flops_per_item": round(counted.total / max(batch, 1))}

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        """Mark a stage for Nsight Systems, on CUDA only."""
        if self.device.type != "cuda":
            yield
            return
        title = f"modelyard {self.kind}: {name}"
        torch.cuda.nvtx.range_push(title)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def main() -> None:
    """Answer orders until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an author's code prints
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        methods: dict[str, Callable[..., dict[str, Any]]] = {}

        def open_session(**arguments: Any) -> dict[str, Any]:
            session = Session(stack, **arguments)
            methods.update(
                time=session.time,
                moves=session.moves,
                profile=session.profile,
                facts=session.facts,
            )
            return {}

        methods["open"] = open_session
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            method, arguments = json.loads(line)
            try:
                answer = methods[method](**arguments)
            # Every backend fails in its own ways, and the author's code in any.
            except Exception as error:
                answer = {"error": cause(error)}
            print(json.dumps(answer), file=answers, flush=True)


def _memory(line_of: str = "VmHWM:") -> int:
    """Return the most memory that this process has had, in bytes, or what it has now (VmRSS).

    Not ru_maxrss: that starts with what the process had which started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith(line_of))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
