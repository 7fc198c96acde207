"""Weights that the workers of a model version share: mapped from files, not copied into each.

All workers of a version see the same unpacked files. Pages that are mapped from a file are in
memory once, whoever maps them; what a process writes to them goes to a copy of its own (copy on
write) and never to the file. Removing the file while it is mapped is safe; cutting it short is not,
so only files in a folder of the version's own are mapped, which nobody changes.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelyard.archiver.untrusted.container import OpenFile
from modelyard.archiver.untrusted.names import SHARED_FOLDER
from modelyard.archiver.untrusted.zip import STORED, TORCH_RULES, ZipReader

_log = logging.getLogger(__name__)

MIN_STORAGE_BYTES = 1 << 14
"""Smaller weights stay copies: a page is 4 KiB, and looking for them costs more than they do."""
MIN_FILE_BYTES = 1 << 20
"""Least size of a model of which a further file is made."""

SHARED_ONNX_SCRIPT = Path(__file__).with_name("shared_onnx.py")
SHARED_ONNX = "optimized.onnx"
"""The file to open in the folder that `save_shared_onnx` fills."""

Examples = Callable[[], Iterable[Sequence[Tensor]]]

_ALIGNMENT = 64  # of what torch allocates, and of what it stores: kernels may choose by it
_HEAD_BYTES = 64
_TRIAL_S = 300
_libc = ctypes.CDLL(None)


def map_weights(tensors: Iterable[Tensor], path: Path) -> int:
    """Exchange the memory of tensors on the CPU for the same bytes, mapped from their file.

    Nothing changes but the place: a tensor is exchanged only where the file holds its whole
    storage, uncompressed, aligned, and equal byte for byte. Tensors that share memory still do,
    others do not begin to. Writing to one changes neither the file nor other processes.

    Args:
        tensors: just loaded from `path`; changed in place.
        path: what torch has written, in a folder that nobody changes; of a file that is not a zip,
            nothing is mapped.

    Returns:
        The number of bytes that are mapped now.
    """
    by_storage: defaultdict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes() >= MIN_STORAGE_BYTES and storage.data_ptr():
                by_storage[storage.data_ptr()].append(tensor)
    if not by_storage:
        return 0
    try:
        records = _records(path)
    except OSError as error:
        _log.info("each worker keeps a copy of the weights of %s: %s", path.name, error)
        return 0
    mapped_bytes = 0
    for address, sharing in by_storage.items():
        storage = sharing[0].untyped_storage()
        candidates = records[storage.nbytes(), ctypes.string_at(address, _HEAD_BYTES)]
        for place, record in enumerate(candidates):
            if _differ(record, storage):
                continue
            del candidates[place]  # another tensor of this content has memory of its own
            with torch.no_grad():
                for tensor in sharing:
                    tensor.set_(record, tensor.storage_offset(), tensor.shape, tensor.stride())
            mapped_bytes += record.nbytes()
            break
    release_freed_memory()
    return mapped_bytes


def make_once(source: Path, make: Callable[[Path], None]) -> Path | None:
    """Return the folder that `make` fills for a file, in which its workers find what they map.

    The first worker makes it while the others wait.

    Args:
        source: a file in the version's own folder.
        make: is given an empty folder, which is moved into place when it returns.

    Returns:
        None where the folder cannot be made, for want of space say: then nothing is shared.
    """
    shared = source.parent / SHARED_FOLDER
    folder = shared / source.name
    try:
        if shutil.disk_usage(source.parent).free < 4 * source.stat().st_size:
            raise OSError("the disk has too little space left")
        shared.mkdir(exist_ok=True)
        with (shared / f"{source.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, also by this process's end
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=shared) as draft:
                    filled = Path(draft, "filled")
                    filled.mkdir()
                    make(filled)
                    filled.rename(folder)
    # `make` may raise what torch or onnxruntime raise; copies are always possible.
    except Exception as error:
        _log.warning("each worker keeps a copy of the weights of %s: %s", source.name, error)
        return None
    return folder


def save_shared_onnx(model: Path, examples: Examples | None, folder: Path) -> None:
    """Save an ONNX model in a folder so that its weights are mapped, and prove that it computes.

    Both happen in a process of their own: onnxruntime has no check of the layout of mapped weights,
    and ends the process that computes with one it cannot read.

    Args:
        examples: inputs, in the model's order; None to make some up.

    Raises:
        OSError: the model does not compute from mapped weights what it computes without; says why.
    """
    command = [sys.executable, "-P", *map(os.fspath, (SHARED_ONNX_SCRIPT, model, folder))]
    with tempfile.TemporaryDirectory() as inputs:
        if examples is not None:
            arrays: dict[str, Any] = {
                f"{example}_{i}": tensor.numpy()
                for example, tensors in enumerate(examples())
                for i, tensor in enumerate(tensors)
            }
            np.savez(file := Path(inputs, "examples.npz"), **arrays)
            command.append(os.fspath(file))
        trial = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRIAL_S, check=False
        )
    if trial.returncode < 0:
        ended_by = signal.Signals(-trial.returncode).name
        raise OSError(f"the process that tried them mapped ended by {ended_by}")
    if trial.returncode:
        reason = trial.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise OSError(reason[-1])


def release_freed_memory() -> None:
    """Return to the system what was freed but is still held for further allocations."""
    if hasattr(_libc, "malloc_trim"):  # glibc's alone
        _libc.malloc_trim(0)


def _records(path: Path) -> defaultdict[tuple[int, bytes], list[torch.UntypedStorage]]:
    """Map a zip's entries that tensors can lie in, by their size and first bytes."""
    found: defaultdict[tuple[int, bytes], list[torch.UntypedStorage]] = defaultdict(list)
    with contextlib.closing(OpenFile(os.open(path, os.O_RDONLY))) as file:
        reader = ZipReader(file, TORCH_RULES)
        if problems := reader.check():
            raise OSError(problems[0])
        mapping = file.map(range(file.size))
    for member in reader.members:
        start, size = member.data.start, member.size_bytes
        if member.method != STORED or size < MIN_STORAGE_BYTES or start % _ALIGNMENT:
            continue
        record = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
        head = bytes(mapping[start : start + _HEAD_BYTES])
        found[size, head].append(record.untyped_storage())
    return found


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is its storage and nothing else: no subclass, lazy or quantised."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def _differ(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Compare two storages of one size; torch would take ten times as long for odd sizes."""
    addresses = map(ctypes.c_void_p, (one.data_ptr(), other.data_ptr()))
    return bool(_libc.memcmp(*addresses, ctypes.c_size_t(one.nbytes())))
