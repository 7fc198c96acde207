"""The exported program → native code for this CPU (an AOTInductor package, `.aoti.pt2`)."""

import json
import shutil
from pathlib import Path
from zipfile import ZipFile

import torch
from torch.export import ExportedProgram

from modelyard.archiver.signature import Signature
from modelyard.exporter.errors import ConversionError
from modelyard.exporter.formats.diagnose import explain
from modelyard.exporter.formats.to_exported_program import quiet
from modelyard.exporter.formats.to_torchscript import copy_without

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
                program, package_path=str(raw), inductor_configs={"aot_inductor.metadata": metadata}
            )
    # The compiler lowers every operator by a function of its own, and then runs g++.
    except Exception as error:
        raise explain(error, "AOTInductor", signature) from error
    copy_without(".cpp", raw, path)
    with ZipFile(path) as package:
        names = [name for name in package.namelist() if name.endswith("metadata.json")]
        tied = {key: text for n in names for key, text in json.loads(package.read(n)).items()}
    return {
        "native_code": _TIED,
        "torch": torch.__version__,
        "platform": f"{tied.get('AOTI_PLATFORM', '?')} {tied.get('AOTI_MACHINE', '?')}",
        "cpu_isa": tied.get("AOTI_CPU_ISA", "?"),
    }
