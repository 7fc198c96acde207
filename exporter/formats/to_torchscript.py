"""The model → TorchScript: scripted where its Python allows that, else traced."""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from struct import Struct
from zipfile import ZIP64_LIMIT, ZipFile, ZipInfo

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from modelyard.archiver.signature import Signature
from modelyard.exporter.errors import cause
from modelyard.exporter.formats.diagnose import explain, find_place
from modelyard.exporter.formats.to_exported_program import quiet

_HEADER_BYTES, _LARGE_BYTES = 30, 20  # of a zip's entry, and more of one over 2 GB
_LIGHTNINGS_MARK = "_jit_is_scripting"
_PAD = Struct("<2H")
_PAD_ID = int.from_bytes(b"FB", "little")  # torch's own; a reader skips what it does not know

_TracerWarning: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]


DEPRECATION = (
    "PyTorch deprecates TorchScript in favour of torch.export; choose --format pt2 where it works"
)


def write(
    model: nn.Module, signature: Signature, example: tuple[Tensor, ...], path: Path
) -> dict[str, object]:
    """Save the model, and say whether it was scripted or traced, and why.

    A script keeps every branch of forward(). A trace keeps the one that the example took: it is
    used where scripting fails, with the tracer's warnings in the report.

    Raises:
        ConversionError: neither way works; holds both reasons.
    """
    details: dict[str, object]
    program: torch.jit.ScriptModule
    raw = path.with_suffix(".raw")
    with quiet(), _without_trainer(model), _not_compiled(model) as model:
        try:
            with warnings.catch_warnings():
                # Scripting reads every property of the author's classes, deprecated ones too.
                warnings.simplefilter("ignore", FutureWarning)
                program = torch.jit.script(model)
            with torch.no_grad():
                program(*example)  # parametrizations, say, compile to a refusal
            torch.jit.save(program, raw)
            details = {"torchscript": "script"}
        # Scripting compiles the author's Python, and refuses most of the language in many ways.
        except Exception as error:
            program, found = _trace(model, signature, example, error)
            torch.jit.save(program, raw)
            details = {"torchscript": "trace", "not_scripted": cause(error), "warnings": found}
    copy_without(".debug_pkl", raw, path)
    return {**details, "deprecated": DEPRECATION}


@contextmanager
def _without_trainer(model: nn.Module) -> Iterator[None]:
    """Let Lightning's modules be looked at from end to end, as their own `to_torchscript` does.

    Scripting and tracing read every property, and that of the trainer fails where there is none,
    unless the class says that this goes on.
    """
    bases = {base for part in model.modules() for base in type(part).__mro__}
    with ExitStack() as stack:
        for base in bases:
            if _LIGHTNINGS_MARK in vars(base):
                setattr(base, _LIGHTNINGS_MARK, True)
                stack.callback(setattr, base, _LIGHTNINGS_MARK, False)
        yield


@contextmanager
def _not_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model with the modules that torch.compile was given, in place of what it made."""
    with ExitStack() as stack:
        for parent in list(model.modules()):
            for name, part in list(parent.named_children()):
                if isinstance(part, OptimizedModule):
                    parent._modules[name] = part._orig_mod
                    stack.callback(parent._modules.__setitem__, name, part)
        yield model._orig_mod if isinstance(model, OptimizedModule) else model


def copy_without(suffix: str, raw: Path, path: Path) -> None:
    """Move a zip but for entries of a suffix, which name the folders of this machine."""
    with ZipFile(raw) as source, ZipFile(path, "w") as target:
        for entry in source.infolist():
            if entry.filename.endswith(suffix):
                continue
            kept = ZipInfo(entry.filename)
            kept.file_size = entry.file_size  # decides whether it needs the large form
            kept.extra = _padding(target.fp.tell(), kept)  # type: ignore[union-attr]
            with source.open(entry) as content, target.open(kept, "w") as copy:
                shutil.copyfileobj(content, copy)
    raw.unlink()


def _padding(offset: int, entry: ZipInfo) -> bytes:
    """Make an entry's content begin at a multiple of 64, as torch does: so it can be mapped.

    Args:
        offset: where the entry's header begins.
    """
    large = entry.file_size * 1.05 > ZIP64_LIMIT  # as zipfile decides
    header_bytes = _HEADER_BYTES + len(entry.filename.encode()) + large * _LARGE_BYTES
    fill = -(offset + header_bytes + _PAD.size) % 64
    return _PAD.pack(_PAD_ID, fill) + bytes(fill)


def _trace(
    model: nn.Module, signature: Signature, example: tuple[Tensor, ...], why_not_script: Exception
) -> tuple[torch.jit.ScriptModule, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", _TracerWarning)
        try:
            # Parity compares the saved file on far more than the tracer's own check would.
            program = torch.jit.trace(  # type: ignore[no-untyped-call]
                model, example, check_trace=False, strict=False
            )
        except Exception as error:
            place = find_place(why_not_script)
            elsewhere = "" if place == find_place(error) else place
            reason = (
                f"it can be neither scripted ({cause(why_not_script)}{elsewhere}) "
                f"nor traced ({cause(error)}); export --format pt2 instead"
            )
            raise explain(error, "TorchScript", signature, reason=reason) from why_not_script
    found = [
        f"{Path(warning.filename).name}:{warning.lineno}: {str(warning.message).splitlines()[0]}"
        for warning in caught
        if issubclass(warning.category, _TracerWarning)
    ]
    return program, found
