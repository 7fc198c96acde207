"""Archives altered and sealed anew: what `modelyard verify` makes of them.

Whoever alters an archive can seal it anew; only a signature stops that. What is left to compare
must still tell: the twin, what the model read and gave for golden requests, and their answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.adversary.gallery import Row, judge

MANIFEST = "MAR-INF/MANIFEST.json"
NOTHING_COMPARED = 3

Files = dict[str, bytes]
Change = Callable[[Files], None]
Weights = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def seal(files: Files, target: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    """Write files with the digests that they have now."""
    manifest = json.loads(files[MANIFEST])
    manifest["modelyard"]["digests"] = {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name != MANIFEST
    }
    files[MANIFEST] = json.dumps(manifest).encode()
    with zipfile.ZipFile(target, "w", compression) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return target


def verify(path: Path, environment: Mapping[str, str] | None = None) -> tuple[int, list[str]]:
    """Return the exit code of the real command, and the problems that it names."""
    ended = subprocess.run(
        [sys.executable, "-m", "modelyard", "verify", str(path), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout).get("problems", [])


# -- what is changed -----------------------------------------------------------------------------


def on_weights(change: Weights, only: str = "") -> Change:
    """Change the weights of the artifact, or those of one name."""

    def apply(files: Files) -> None:
        model, draw = onnx.load_from_string(files["digits.onnx"]), np.random.default_rng(0)
        for weight in model.graph.initializer:
            values = numpy_helper.to_array(weight)
            if values.dtype == np.float32 and only in weight.name:
                changed = np.asarray(change(values, draw), np.float32)
                weight.CopyFrom(numpy_helper.from_array(changed, weight.name))
        files["digits.onnx"] = model.SerializeToString()

    return apply


def noise(size: float) -> Change:
    return on_weights(lambda values, draw: values + size * draw.standard_normal(values.shape))


def on_json(name: str, change: Callable[[Any], None]) -> Change:
    def apply(files: Files) -> None:
        value = json.loads(files[name])
        change(value)
        files[name] = json.dumps(value).encode()

    return apply


def on_config(old: str, new: str) -> Change:
    def apply(files: Files) -> None:
        text = files["model-config.yaml"].decode()
        assert old in text
        files["model-config.yaml"] = text.replace(old, new).encode()

    return apply


def fitted(files: Files) -> None:
    """Have the reports name the artifacts that are there."""
    for name in ("digits.onnx", "digits.pt2"):
        if f"{name}.report.json" in files:
            digest = hashlib.sha256(files[name]).hexdigest()
            change = methodcaller("update", artifact_sha256=digest)
            on_json(f"{name}.report.json", change)(files)


def labels(one: str, two: str) -> Change:
    def exchange(names: dict[str, str]) -> None:
        names[one], names[two] = names[two], names[one]

    return on_json("index_to_name.json", exchange)


def on_reports(change: Callable[[Any], None]) -> Change:
    reports = [f"digits.{kind}.report.json" for kind in ("onnx", "pt2")]
    return both(*(on_json(name, lambda report: change(report["parity"])) for name in reports))


def widened(parity: Any) -> None:
    parity["tolerance"] = 10
    for output in parity["outputs"].values():
        output["tolerance"] = 10


def scaled(parity: Any) -> None:
    for output in parity["outputs"].values():
        output["scale"]["spread"] = [1e9] * 10


def allowed(parity: Any) -> None:
    cases = [
        {"output": "logits", "case": f"batch={n} ({kind} values)", "moved": 1e9, "allowed": 1e9,
         "found": 0.0}
        for n in range(1, 9)
        for kind in ("random", "zeros", "large", "tiny", "negative")
    ]  # fmt: skip
    parity["ill_conditioned"] = {"rule": "", "cases": cases}


def only_tiny(parity: Any) -> None:
    parity["kinds"] = ["tiny"]


def trusting(manifest: Any) -> None:
    for golden in manifest["modelyard"]["golden"]:
        golden["tolerance"] = 1.0


def only_samples(parity: Any) -> None:
    parity["plan"]["extent"] = "none"


def on_goldens(change: Callable[[Any], None]) -> Change:
    def apply(files: Files) -> None:
        for name in [name for name in files if name.endswith(".expected.json")]:
            on_json(name, change)(files)

    return apply


def without_twin(files: Files) -> None:
    del files["digits.pt2"], files["digits.pt2.report.json"]
    on_json(MANIFEST, lambda manifest: manifest["modelyard"].pop("explain"))(files)


def without_goldens(files: Files) -> None:
    for name in [name for name in files if "/golden/" in name]:
        del files[name]
    on_json(MANIFEST, lambda manifest: manifest["modelyard"].update(golden=[]))(files)


def without_models(files: Files) -> None:
    """Take out what the model read and gave, as an archive of an older archiver has none."""
    on_goldens(lambda expected: expected.pop("model"))(files)


def both(*changes: Change) -> Change:
    def apply(files: Files) -> None:
        for change in changes:
            change(files)

    return apply


def zeroed(values: np.ndarray, _: np.random.Generator) -> np.ndarray:
    return values * 0


def turned(values: np.ndarray, _: np.random.Generator) -> np.ndarray:
    return np.flip(values, 0).copy()


def more(values: np.ndarray, _: np.random.Generator) -> np.ndarray:
    return values * 1.01


ALONE = {"": lambda files: None, " without a twin": without_twin}

WRONG: dict[str, Change] = {
    **{f"noise {size:g}{alone}": both(take, noise(size))
       for size in (0.1, 1e-2, 1e-3) for alone, take in ALONE.items()},
    **{f"noise {size:g} without golden requests": both(without_goldens, noise(size))
       for size in (0.1, 1e-2, 1e-3)},
    **{f"every weight {how}{alone}": both(take, on_weights(change))
       for how, change in (("zero", zeroed), ("1 % more", more), ("turned", turned))
       for alone, take in ALONE.items()},
    **{f"{layer} {how} without a twin": both(without_twin, on_weights(change, layer))
       for layer in ("features.0.weight", "features.3.weight", "features.7.weight", "logits.weight",
                     "logits.bias")
       for how, change in (("zero", zeroed), ("1 % more", more), ("turned", turned))},
    **{f"labels {one} and {two} exchanged": labels(one, two)
       for one, two in ("01", "12", "37", "45", "58", "69", "89", "04")},
    **{f"mean {mean}": on_config("mean: [0.0]", f"mean: [{mean}]")
       for mean in (0.1, 0.01, 0.001, -0.01)},
    **{f"std {std}": on_config("std: [1.0]", f"std: [{std}]") for std in (0.9, 0.99, 1.001, 2.0)},
    "another size": on_config("size: [8, 8]", "size: [7, 8]"),
    "three channels": on_config("mode: L", "mode: RGB"),
    "probabilities": on_config("  top_k: 10", "  top_k: 10\n  output_kind: probabilities"),
    "several labels": on_config("  top_k: 10", "  top_k: 10\n  output_kind: multilabel"),
    "fewer labels": on_config("top_k: 10", "top_k: 3"),
    "the twin's weights": lambda files: files.update({"digits.pt2": _moved_twin(files)}),
    "tolerances of 10": both(on_reports(widened), noise(1e-2)),
    "a spread of 1e9": both(on_reports(scaled), without_goldens, noise(1e-2)),
    "every case ill-conditioned": both(on_reports(allowed), without_goldens, noise(1e-2)),
    "compared on samples alone": both(on_reports(only_samples), without_goldens, noise(1e-2)),
    "compared on tiny values alone": both(on_reports(only_tiny), without_goldens, noise(1e-2)),
    "nothing left to compare": both(without_goldens, without_twin, noise(0.1)),
    "golden tolerances of 1": both(
        on_json(MANIFEST, trusting),
        noise(0.1)),
    "an answer edited": on_goldens(lambda expected: expected["answer"].update({"4": 0.5})),
    "moves of 1": both(
        on_goldens(lambda expected: expected["moves"].update({"{}": [1.0] * 10})),
        without_twin, noise(1e-2)),
    "noise 0.1 without a twin and what the model read": both(
        without_twin, without_models, noise(0.1)),
    "mean 0.1 without what the model read": both(
        without_models, on_config("mean: [0.0]", "mean: [0.1]")),
    "logits 1 more without a twin": both(
        without_twin,
        on_weights(lambda values, _: values + 1 if values.shape == (10,) else values)),
}  # fmt: skip


def _moved_twin(files: Files) -> bytes:
    """Return the twin's program with one weight multiplied, as its archive of tensors has it."""
    import io

    import torch

    program = torch.export.load(io.BytesIO(files["digits.pt2"]))
    with torch.no_grad():
        next(iter(program.state_dict.values())).mul_(1.05)
    written = io.BytesIO()
    torch.export.save(program, written)
    return written.getvalue()


HARMLESS: dict[str, tuple[Change, int, Mapping[str, str]]] = {
    "as it is": (lambda files: None, zipfile.ZIP_STORED, {}),
    "compressed": (lambda files: None, zipfile.ZIP_DEFLATED, {}),
    "files in another order": (
        lambda files: files.update({name: files.pop(name) for name in sorted(files, reverse=True)}),
        zipfile.ZIP_STORED, {}),
    "negative zeros": (
        on_weights(lambda values, _: np.where(values == 0, -0.0, values)), zipfile.ZIP_STORED, {}),
    "a last place of every weight": (
        on_weights(lambda values, _: np.nextafter(values, np.float32(9))), zipfile.ZIP_STORED, {}),
    "without a twin": (without_twin, zipfile.ZIP_STORED, {}),
    "without golden requests": (without_goldens, zipfile.ZIP_STORED, {}),
    **{f"{name}={value}": (lambda files: None, zipfile.ZIP_STORED, {name: value})
       for name, value in (
           ("ATEN_CPU_CAPABILITY", "default"), ("ATEN_CPU_CAPABILITY", "avx2"),
           ("ONEDNN_MAX_CPU_ISA", "SSE41"), ("ONEDNN_MAX_CPU_ISA", "AVX2"),
           ("MKL_CBWR", "COMPATIBLE"), ("OMP_NUM_THREADS", "1"), ("OMP_NUM_THREADS", "4"),
           ("LC_ALL", "tr_TR.UTF-8"), ("TZ", "Pacific/Kiritimati"), ("PYTHONOPTIMIZE", "1"),
       )},
}  # fmt: skip

PARTS = len(HARMLESS)
"""A harmless row in each, and some wrong ones: a gallery has both."""


KNOWN = {"verify: logits.bias 1 % more without a twin"}
"""Misses: it moves answers by less than golden requests allow."""


def _changed(files: Files, change: Change) -> Files:
    """Return files after a change, of which the reports say that they were proven."""
    changed = dict(files)
    change(changed)
    if any(changed.get(name) != files[name] for name in ("digits.onnx", "digits.pt2")):
        fitted(changed)
    return changed


def _try(files: Files, name: str, folder: Path) -> Row:
    if name in WRONG:
        code, problems = verify(seal(_changed(files, WRONG[name]), folder / "x.mar"))
        assert code in (0, 1, NOTHING_COMPARED), problems
        return Row("verify", name, True, code != 0)
    change, compression, environment = HARMLESS[name]
    path = seal(_changed(files, change), folder / "x.mar", compression)
    code, problems = verify(path, environment)
    return Row("verify", "; ".join([name, *problems]), False, code != 0)


def test_an_altered_archive_is_caught(digits_store: Path, tmp_path: Path) -> None:
    """One that holds labels alone; one as it is passes in tests/archiver/test_proven.py."""
    with zipfile.ZipFile(digits_store / "onnx.mar") as file:
        files = {name: file.read(name) for name in file.namelist()}
    WRONG["noise 0.1"](files)
    code, problems = verify(seal(files, tmp_path / "x.mar"))
    assert code == 1
    assert any(problem.startswith("parity: digits.onnx and digits.pt2: ") for problem in problems)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_altered_archive_is_caught(digits: Files, tmp_path: Path, part: int) -> None:
    names = [*list(WRONG)[part::PARTS], *list(HARMLESS)[part::PARTS]]
    known = KNOWN & {f"verify: {name}" for name in names}
    judge((_try(digits, name, tmp_path) for name in names), frozenset(known))
