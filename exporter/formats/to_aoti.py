"""The exported program → native code for this CPU (an AOTInductor package, `.aoti.pt2`)."""

import json
import shutil
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import torch
from torch.export import ExportedProgram

from modelyard.archiver.signature import Signature
from modelyard.exporter.errors import ConversionError
from modelyard.exporter.formats.diagnose import explain
from modelyard.exporter.formats.to_exported_program import quiet

METADATA = "modelyard"
"""The package's metadata key that holds the signature: the code itself checks no input."""

_TIED = (
    "native code: it runs with this torch version, on this platform and instruction set only, and "
    "loading it runs what it holds"
)


def write(program: ExportedProgram, signature: Signature, path: Path) -> dict[str, object]:
    """Compile with g++ and package; return what the package is tied to.

    Raises:
        ConversionError: no compiler, or the model has no native form.
    """
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise ConversionError(
            "--format aoti compiles C++, and neither g++ nor clang++ is on the PATH; install g++, "
            "or export --format onnx, which needs no compiler"
        )
    raw = path.with_name("raw.pt2")
    metadata = {METADATA: json.dumps({"torch": torch.__version__, **signature.to_json()})}
    try:
        with quiet("torch._inductor"):
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(raw),
                inductor_configs={"aot_inductor.metadata": metadata},
            )
    # The compiler lowers every operator by a function of its own, and then runs g++.
    except Exception as error:
        raise explain(error, "AOTInductor", signature) from error
    tied = _write_without_sources(raw, path)
    raw.unlink()
    return {
        "native_code": _TIED,
        "torch": torch.__version__,
        "platform": f"{tied.get('AOTI_PLATFORM', '?')} {tied.get('AOTI_MACHINE', '?')}",
        "cpu_isa": tied.get("AOTI_CPU_ISA", "?"),
    }


def _write_without_sources(raw: Path, path: Path) -> dict[str, str]:
    """Keep what runs; leave out the C++, which names the folders of this machine."""
    tied: dict[str, str] = {}
    with ZipFile(raw) as source, ZipFile(path, "w") as target:
        for entry in source.infolist():
            if entry.filename.endswith(".cpp"):
                continue
            if entry.filename.endswith("metadata.json"):
                tied.update(json.loads(source.read(entry)))
            kept = ZipInfo(entry.filename)
            kept.file_size = entry.file_size  # decides whether it needs the large form
            with source.open(entry) as content, target.open(kept, "w") as copy:
                shutil.copyfileobj(content, copy)
    return tied
