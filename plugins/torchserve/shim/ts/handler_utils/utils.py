"""Classes by name, and answers in parts."""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from modelyard.handlers.context import Context


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """Return the class of a dotted name, as `package.module.Class`.

    Args:
        class_name: the name; without a module only where `module_prefix` names one.
        module_prefix: a package in front of it.

    Raises:
        ImportError: no name, no such module, or no such class in it.
    """
    module_name, _, name = (class_name or "").rpartition(".")
    full = ".".join(filter(None, (module_prefix, module_name)))
    if not name or not full:
        raise ImportError(f"{class_name!r} names no class; expected a name as package.module.Class")
    imported = getattr(importlib.import_module(full), name, None)
    if imported is None:
        raise ImportError(f"the module {full} has no class {name}")
    return imported


def send_intermediate_predict_response(
    ret: Sequence[Any],
    req_id_map: Mapping[int, str],
    message: str,
    code: int,
    context: Context,
) -> None:
    """Send each client the next part of its answer; what `handle` returns is the last part.

    Of several processes that compute one answer together, the first one (LOCAL_RANK 0) sends.

    Args:
        ret: one part per request of the batch.
        req_id_map: `context.request_ids`.
        message: not sent.
        code: not sent; the status is that of `context`.
        context: what `handle` was given.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        context.send_intermediate(list(ret))
