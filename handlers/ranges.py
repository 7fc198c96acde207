"""NVTX ranges of a worker's work, which Nsight Systems draws; nothing unless they are asked for."""

from contextlib import AbstractContextManager, nullcontext

from modelyard.handlers.errors import LoadError

_NOTHING: AbstractContextManager[object] = nullcontext()
_marks = False


def mark_ranges(device: str) -> None:
    """Mark ranges in this process from now on.

    Args:
        device: device that the model runs on.

    Raises:
        LoadError: it is not CUDA, whose profiler alone reads them.
    """
    if not device.startswith("cuda"):
        raise LoadError(
            f"the setting nvtx marks ranges for Nsight Systems, and this model runs on {device}; "
            "expected CUDA: start with --device cuda, or leave nvtx out"
        )
    global _marks
    _marks = True


def span(name: str) -> AbstractContextManager[object]:
    """Return a context that marks what runs inside it."""
    if not _marks:
        return _NOTHING
    import torch

    return torch.cuda.nvtx.range(f"modelyard: {name}")
