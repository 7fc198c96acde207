"""How many rows share a pass: by what an artifact takes, and by the memory that is free."""

import contextlib
import os
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from modelyard.archiver.signature import UNLIMITED, Dim
from modelyard.handlers.explain.attribute.attribution import ForwardFunction, Tensors, recording
from modelyard.handlers.models.backends import Artifact

FORWARD_ROWS = 32
"""Rows of a pass without gradients, where nothing is kept, so that memory decides little."""

MOST_ROWS = 64

PASS_BYTES = 1 << 30
"""Kept for one backward pass at most: more rows are not faster, as they miss the caches more."""

MEMORY_SHARE = 4
"""A pass may keep one part in so many of the memory that is free."""

Shapes = tuple[torch.Size, ...]

_row_bytes: WeakKeyDictionary[Artifact, dict[Shapes, int]] = WeakKeyDictionary()


def most_rows(artifact: Artifact) -> int:
    """Return how many rows an artifact takes at once, as far as it says."""
    sizes = (
        rows.max if isinstance(rows, Dim) else rows
        for spec in artifact.inputs
        for rows in spec.shape[:1]
    )
    return min(sizes, default=UNLIMITED)


def gradient_rows(artifact: Artifact, forward: ForwardFunction, inputs: Tensors) -> int:
    """Choose how many points share a pass with gradients.

    The tensors that autograd keeps for one more row are counted once per shape of the inputs.

    Args:
        artifact: what `forward` computes with.
        forward: pass of at least one row.
        inputs: (M, *S) each.
    """
    shapes = tuple(each.shape[1:] for each in inputs)
    known = _row_bytes.setdefault(artifact, {})
    if shapes not in known:
        first = _kept_bytes(forward, inputs, 1)
        more = _kept_bytes(forward, inputs, 2) - first if most_rows(artifact) > 1 else first
        known[shapes] = max(1, more)
    budget = min(PASS_BYTES, free_bytes(inputs[0].device) // MEMORY_SHARE)
    return max(1, min(MOST_ROWS, budget // known[shapes]))


def free_bytes(device: torch.device) -> int:
    """Return the memory that a computation on `device` can still get, at least.

    Of the machine's, what files fill is not counted. Asked of the kernel (sysinfo), for a file of
    procfs may be gone behind a worker's walls.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or its limit is "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text("ascii"))
                       for name in ("max", "current"))  # fmt: skip
        return min(available, max(0, limit - used))
    return available


def _kept_bytes(forward: ForwardFunction, inputs: Tensors, count: int) -> int:
    """Return the size of the storages that autograd keeps of so many rows."""
    rows = torch.zeros(count, dtype=torch.int64, device=inputs[0].device)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with recording(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward(tuple(each.detach()[rows].clone().requires_grad_() for each in inputs), rows)
    return sum(kept.values())
