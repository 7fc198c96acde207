"""Import and try libraries in a process of its own.

Started as `python -P -m modelyard.plugins.cluster.doctor.probe NAME…`.

A library that is broken may end the process that imports it. One JSON line comes before each import
and one after, so whoever reads them knows the culprit. `cuda` is tried like a library.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any


def _numpy(numpy: Any) -> None:
    numpy.ones((2, 2)) @ numpy.ones((2, 2))


def _torch(torch: Any) -> None:
    product = torch.ones(2, 3) @ torch.ones(3, 2)
    # Fails where torch was built for another numpy.
    if product.numpy().tolist() != [[3.0, 3.0], [3.0, 3.0]]:
        raise ArithmeticError(f"ones times ones is {product.tolist()}")


def _pillow(image: Any) -> None:
    from io import BytesIO

    for kind in ("PNG", "JPEG"):
        file = BytesIO()
        importlib.import_module("PIL.Image").new("RGB", (8, 8)).save(file, kind)
        importlib.import_module("PIL.Image").open(file).load()


def _onnxruntime(runtime: Any) -> None:
    providers = runtime.get_available_providers()
    if "CPUExecutionProvider" not in providers:
        raise RuntimeError(f"it has no provider for the CPU, only {providers}")


def _uvloop(uvloop: Any) -> None:
    async def nothing() -> None:
        pass

    uvloop.run(nothing())


TRIALS: dict[str, Callable[[Any], None]] = {
    "numpy": _numpy,
    "torch": _torch,
    "PIL": _pillow,
    "onnxruntime": _onnxruntime,
    "uvloop": _uvloop,
}


def _cuda() -> dict[str, Any]:
    """Return what torch makes of CUDA, after one product on every device."""
    import torch

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = []
    for at in range(count):
        ones = torch.ones(2, 2, device=f"cuda:{at}")
        (ones @ ones).cpu()
        names.append(torch.cuda.get_device_name(at))
    return {
        "built_for": torch.version.cuda,
        "devices": names,
        "warnings": [str(each.message).strip().splitlines()[0] for each in warned],
    }


def main(names: list[str]) -> None:
    """Try each and print what happened."""
    for name in names:
        print(json.dumps({"begin": name}), flush=True)  # noqa: T201 - the answer to the caller
        result: dict[str, Any] = {"name": name, "error": None, "found": {}}
        try:
            if name == "cuda":
                result["found"] = _cuda()
            else:
                module = importlib.import_module(name)
                TRIALS.get(name, lambda module: None)(module)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
