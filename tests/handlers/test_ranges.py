"""What a worker marks for Nsight Systems."""

import subprocess
import sys

import pytest

from modelyard.handlers.errors import LoadError
from modelyard.handlers.ranges import mark_ranges, span

MARKED = """
import torch
from modelyard.handlers import ranges
pushed = []
torch.cuda.nvtx.range_push = pushed.append
torch.cuda.nvtx.range_pop = lambda: pushed.append("end")
ranges.mark_ranges("cuda:0")
with ranges.span("forward"):
    pass
print(pushed)
"""


def test_nothing_is_marked_unless_it_is_asked_for() -> None:
    assert span("forward") is span("copy")


def test_without_cuda_a_worker_that_is_to_mark_ranges_does_not_start() -> None:
    with pytest.raises(
        LoadError, match=r"this model runs on cpu; expected CUDA: .* leave nvtx out"
    ):
        mark_ranges("cpu")


def test_a_span_is_a_range_around_what_runs_inside_it() -> None:
    """The marks themselves are CUDA's, which a build for CPUs lacks."""
    done = subprocess.run(
        [sys.executable, "-c", MARKED], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['modelyard: forward', 'end']"
