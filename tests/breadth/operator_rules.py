"""Which operators go on the list of `handlers/judge/operators.txt`, and which never do."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from modelyard.handlers.judge.checked import REPLACED

LIST = Path(__file__).parents[2] / "handlers" / "judge" / "operators.txt"

REFUSED = {
    "as_strided": "reaches wherever its sizes and strides say, inside the storage of a tensor",
    "segment_reduce": "takes offsets that it does not check",
    "embedding_bag": "takes offsets that it does not check",
    "_embedding_bag": "takes offsets that it does not check",
    "_embedding_bag_forward_only": "takes offsets that it does not check",
    "from_file": "reads a file",
    "_assert_async": "ends all work of a GPU; its form with a message stands behind a check",
    # What `python -m tests.fuzz` found in torch 2.13:
    "_fft_r2c": "reads and writes where its dims say, which it does not check",
    "_fft_c2r": "reads and writes where its dims say, which it does not check",
    "_fft_c2c": "reads and writes where its dims say, which it does not check",
    "_native_batch_norm_legit": "reads statistics and weights as long as the input has channels",
    "_native_batch_norm_legit_no_training": "as above; replaced by batch_norm at loading",
    "native_batch_norm": "as above",
    "_weight_norm": "reads as many lengths as the weight has rows; replaced at loading",
    "_pdist_forward": "divides by sizes of nothing",
    "linalg_eigvals": "ends the process at a NaN",
    "_linalg_eigvals": "ends the process at a NaN",
    # LAPACK swaps the rows that they name:
    "linalg_lu_solve": "takes pivots that it does not check",
    "lu_solve": "takes pivots that it does not check",
    "lu_unpack": "takes pivots that it does not check",
    "linalg_ldl_solve": "takes pivots that it does not check",
}
"""Operator → why, beside what `problem` finds in its schema."""

_MEMORY = re.compile(r"unsafe|(^|_)(empty|resize|set_$|as_strided|nested|sparse|coo|cs[rc]|bs[rc])")
_INSIDE = re.compile(
    r"backward|loss|cross_entropy|kl_div|_out$|mkldnn|cudnn|miopen|quantized|fbgemm|nested|storage|pickle"
)
_OUTSIDE = {"_print", "warn", "save", "manual_seed", "from_file", "record_stream"}
_TYPES = {"Storage", "Stream", "Generator?", "Generator"}


def problem(operator: torch._ops.OpOverload) -> str | None:
    """Return why an operator may not be called by a stranger's program."""
    name = operator._schema.name.partition("::")[2]
    if operator._overloadname == "data" or name.endswith("_cell"):
        return "takes sizes that it does not check"
    if str(operator) in REPLACED:
        return "stands behind a check"
    if not torch._C._dispatch_has_kernel(operator.name()):  # type: ignore[no-untyped-call]
        return "is TorchScript's alone"
    if name in REFUSED:
        return REFUSED[name]
    if _MEMORY.search(name):
        return "makes or reads memory that nobody wrote, or that is laid out in another way"
    if _INSIDE.search(name) or name in _OUTSIDE:
        return "is not called by programs, or reaches outside"
    for argument in operator._schema.arguments:
        if "unsafe" in argument.name:
            return "has an unsafe way"
        if argument.alias_info is not None and argument.alias_info.is_write and argument.kwarg_only:
            return "resizes what it writes to"
    return None


def family(counted: set[str]) -> Iterator[str]:
    """Yield every operator of the list: counted ones, their overloads, and what torch marks."""
    packets = {name.rpartition(".")[0] for name in counted if name.startswith("torch.ops.aten.")}
    for packet in dir(torch.ops.aten) + sorted(each.rpartition(".")[2] for each in packets):
        found: Any = getattr(torch.ops.aten, packet, None)
        if not isinstance(found, torch._ops.OpOverloadPacket):
            continue
        for overload in found.overloads():  # type: ignore[no-untyped-call]
            operator = getattr(found, overload)
            name = f"aten.{packet}.{overload}"
            is_known = f"torch.ops.aten.{packet}" in packets or _is_plain(operator, packet)
            if is_known and problem(operator) is None:
                yield name


def _is_plain(operator: torch._ops.OpOverload, packet: str) -> bool:
    tags = operator.tags
    is_tagged = torch.Tag.pointwise in tags or torch.Tag.core in tags
    return is_tagged and not packet.startswith(("special_", "_"))


def write_list(counted: set[str], known: frozenset[str] = frozenset()) -> None:
    """Write the operators into the list, with the torch that they were counted with.

    Args:
        counted: what programs call.
        known: what stays on the list beside that.
    """
    version = torch.__version__.partition("+")[0]
    lines = "".join(f"{name}\n" for name in sorted(known | set(family(counted))))
    LIST.write_text(f"# made with torch {version}\n{lines}", encoding="utf-8")
