"""A file of scikit-learn, XGBoost or LightGBM → which class it holds, and how it becomes ONNX.

Nothing of it is loaded: of a pickle, the first opcodes are read.
"""

import pickletools
import zlib
from pathlib import Path

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.source import Source
from modelyard.exporter.tables import read_table

_PEEKED_BYTES = 1 << 16
_TABLE = read_table(__package__, "kinds")["estimators"]


def estimator_refusal(source: Source) -> CheckpointError | None:
    """Return the error of a file of an estimator, with the command that writes an .onnx of it.

    None of a file that holds no class that is known.
    """
    head = bytes(source.data[:_PEEKED_BYTES])
    seen = _class_in(_inflated(head)) or _saved_in(head)
    if seen is None:
        return None
    name, load = seen
    package = name.partition(".")[0]
    known = _TABLE[package]
    file = str(source.path or source.name)
    command = known["convert"].format(
        load=load.format(file=file), onnx=str(Path(file).with_suffix(".onnx"))
    )
    return CheckpointError(
        f'"{source.name}" holds a {name}, of which nothing was loaded; expected an .onnx. '
        f"Where you trust the file, in an environment with {known['needs']}{known['more']}:"
        f"\n\n    python -c '{command}'"
    )


def _inflated(head: bytes) -> bytes:
    """Return the start of what is packed with gzip or zlib, as joblib does."""
    if head[:1] == b"\x78" or head[:2] == b"\x1f\x8b":
        try:
            return zlib.decompressobj(47).decompress(head, _PEEKED_BYTES)
        except zlib.error:
            return head
    return head


def _class_in(head: bytes) -> tuple[str, str] | None:
    """Return the first class of a known package in a pickle, and how to load it."""
    texts: list[str] = []
    first = ""
    load = 'joblib.load("{file}")'
    try:
        for opcode, value, _ in pickletools.genops(head):
            if opcode.name not in ("PROTO", "FRAME", "MARK"):
                first = first or opcode.name
            found = value if opcode.name == "GLOBAL" else None
            if isinstance(value, str) and found is None:
                texts.append(value)
            if opcode.name == "STACK_GLOBAL" and len(texts) > 1:
                found = f"{texts.pop(-2)} {texts.pop()}"
            if found and found.partition(".")[0] in _TABLE:
                if first in ("EMPTY_DICT", "DICT") and texts:
                    load += f"[{texts[-1]!r}]".replace("'", '"')
                return found.replace(" ", "."), load
    # Of what is cut, or is not a pickle.
    except Exception:
        return None
    return None


def _saved_in(head: bytes) -> tuple[str, str] | None:
    """Return what a package's own `save_model` wrote, and how to load it."""
    if b'"learner"' in head[:64] or b"learner{" in head[:64]:
        kind = "XGBRegressor" if b"regressor" in head or b"reg:" in head else "XGBClassifier"
        return f"xgboost.{kind}", f'xgboost.{kind}(); model.load_model("{{file}}")'
    if head.startswith(b"tree\nversion="):
        return "lightgbm.Booster", 'lightgbm.Booster(model_file="{file}")'
    return None
