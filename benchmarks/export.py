"""Time the export of five architectures, certificate included: format x model.

    python benchmarks/export.py [--large] [--format pt2] [MODEL ...]

Prints seconds, MB and the largest difference per artifact. Weights are random, from a fixed seed.
"""

import argparse
import importlib.util
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # as the command does, before torch is loaded

import torch

from modelyard.exporter import ExportError, export

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Export what was named, one format at a time, and print a row for each."""
    architectures = _architectures()
    known = {**architectures.SMALL, **architectures.LARGE}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=", ".join(known))
    parser.add_argument("--large", action="store_true", help="ResNet-50 and BERT base too")
    parser.add_argument("--format", action="append", help="default: all; a+b exports both at once")
    given = parser.parse_args()
    names = given.models or (known if given.large else architectures.SMALL)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores,", end=" ")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'model':12} {'format':12} {'seconds':>8} {'MB':>8} {'max_abs':>9} {'cases':>6}")
    for name in names:
        for formats in given.format or architectures.FORMATS:
            print(_row(architectures, known[name], name, formats), flush=True)


def _row(architectures: ModuleType, architecture: object, name: str, formats: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = architectures.save_checkpoint(architecture, Path(folder))
        started = time.perf_counter()
        try:
            reports = export(
                checkpoint,
                architecture.model,  # type: ignore[attr-defined]
                architecture.inputs,  # type: ignore[attr-defined]
                output_dir=Path(folder) / "out",
                formats=formats.split("+"),
                model_args=architecture.args,  # type: ignore[attr-defined]
                output_names=architecture.outputs,  # type: ignore[attr-defined]
            )
        except ExportError as error:
            return f"{name:12} {formats:12} not written: {error}"
        seconds = time.perf_counter() - started
    size_mb = sum(report.artifact_bytes for report in reports) / 1e6
    apart = max(report.parity.max_abs for report in reports)
    cases = reports[0].parity.cases
    return f"{name:12} {formats:12} {seconds:8.1f} {size_mb:8.1f} {apart:9.1e} {cases:6}"


def _architectures() -> ModuleType:
    file = ROOT / "tests" / "exporter" / "architectures.py"
    spec = importlib.util.spec_from_file_location("architectures", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
