"""The only place where a file's own code runs: when a person has said `--trust`."""

import sys
from pathlib import Path
from typing import Any

import torch

from modelyard.exporter.ingest.source import Source


def unpickle(source: Source) -> Any:
    """Unpickle a file of torch.save without limits, on the CPU.

    Modules beside the file and in the current folder can be imported meanwhile.

    Raises:
        Exception: whatever the file's code raises.
    """
    before = list(sys.path)
    folders = [Path.cwd(), *([source.path.absolute().parent] if source.path else [])]
    sys.path[:0] = [str(folder) for folder in dict.fromkeys(folders)]
    try:
        return torch.load(source.open(), map_location="cpu", weights_only=False)
    finally:
        sys.path[:] = before
