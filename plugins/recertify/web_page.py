"""An archive → one static page that verifies its model in a browser, and only then predicts.

What the page needs of the archive's rule is computed here: what each case gives on this machine,
and the unit of each of its numbers (`base.scale`), beside the tolerance of the report. The page
divides, and compares.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.manifest import Manifest
from modelyard.archiver.read import open_archive
from modelyard.archiver.replay import UNPACKED
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.base.scale import Scale, one_place
from modelyard.handlers import BUILT_IN
from modelyard.handlers.proof.copies import rules_of
from modelyard.handlers.proof.witness import INPUT_TOLERANCE
from modelyard.handlers.tasks.vision_handler import VisionHandler
from modelyard.plugins.recertify.certify import GoldenCase, Subject, read_subject
from modelyard.plugins.recertify.environments import plan_other
from modelyard.plugins.recertify.runs import Runners
from modelyard.serve.worker.load import load_service

HERE_FOLDER = Path(__file__).parent
MOST_BYTES = 8 << 20
"""Size of all cases in a page: what is beyond stays out, the largest first."""
KINDS = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Dtypes that a page's arrays have."""
SHOWN = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
"""What a browser opens as a picture."""
RULE = (
    "Every number of every output is compared with what the archive gives where this page was "
    "written. A difference counts beside what its number varies by over all cases, and must stay "
    "within the tolerance of the archive's certificate."
)


def format_web_page(path: Path) -> tuple[str, int]:
    """Return the page of an archive, and how many cases it verifies.

    onnxruntime-web is installed from npm where it is not yet.

    Args:
        path: an archive with an ONNX file and its report.

    Raises:
        ArchiveError: there is nothing that a page could verify.
        HandlerError: the archive does not load here.
    """
    environment = plan_other("onnxruntime-web")
    environment.build()
    with ExitStack() as stack:
        runners = stack.enter_context(Runners())
        folder = Path(stack.enter_context(runners.folder()))
        archive = stack.enter_context(open_archive(path, staging=folder))
        subject = read_subject(archive, folder, "onnx")
        cases = list(_cases(subject, runners))
        kept = _small_enough(cases)
        manifest, unpacked = archive.manifest, folder / UNPACKED
        handler = _handler(unpacked, manifest)
        report, signature = subject.report, subject.report.signature
        data = {
            "summary": " → ".join(
                ", ".join(map(str, specs)) for specs in (signature.inputs, signature.outputs)
            ),
            "rule": RULE,
            "cases": kept,
            "takes": {spec.name: spec.dtype for spec in signature.inputs},
            "main": signature.main and signature.main.name,
            "labels": _labels(handler, subject),
            "pictures": _pictures(handler, subject, manifest, unpacked),
            "facts": {
                "Model": f"{manifest.model_name} {manifest.model_version}",
                "Archive": f"SHA-256 {archive.digest}",
                "Artifact": f"{subject.program.path.name}, SHA-256 {report.artifact_sha256}",
                "Proven with": ", ".join(f"{key} {text}" for key, text in report.versions.items()),
                "Runs on": f"{environment.requirements[0]}, WebAssembly, one thread",
                "Cases": f"{len(kept)} of {len(cases)}"
                + (", the larger ones left out" if len(kept) < len(cases) else ""),
            },
        }
        model = subject.program.path.read_bytes()
    dist = environment.python.parents[1] / "node_modules" / "onnxruntime-web" / "dist"
    style, script, page = (
        (HERE_FOLDER / f"web_page.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js", "html")
    )
    parts = {
        "title": escape(f"{manifest.model_name} {manifest.model_version}"),
        "style": style,
        "script": script,
        # A name may hold anything, the end of a script too.
        "data": json.dumps(data).replace("<", "\\u003c"),
        "library": _packed((dist / "ort.wasm.bundle.min.mjs").read_bytes()),
        "machine": _packed((dist / "ort-wasm-simd-threaded.wasm").read_bytes()),
        "model": _packed(model),
    }
    return re.sub(r"{{ (\w+) }}", lambda found: parts[found[1]], page), len(kept)


def _packed(data: bytes) -> str:
    return b64encode(gzip.compress(data, mtime=0)).decode()


def _kept(values: Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return a tensor as the page holds it."""
    array = np.ascontiguousarray(values)
    if array.dtype.name not in KINDS:
        raise ArchiveError(f"a page has no {array.dtype.name} numbers; expected {', '.join(KINDS)}")
    text = b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "values": text}


def _judged(values: Tensor, scale: Scale, allowed: float) -> dict[str, Any]:
    """Return what is expected, what its differences are divided by, and how far that may be."""
    numbers = values.double().numpy()
    if not scale.fits(numbers.shape):
        scale = one_place(numbers)
    finite = np.where(np.isfinite(numbers), numbers, 0.0)
    units = np.broadcast_to(scale.units(finite), numbers.shape).astype(np.float32)
    return {**_kept(values), "units": _kept(units), "allowed": allowed}


def _cases(subject: Subject, runners: Runners) -> Iterator[dict[str, Any]]:
    """Yield the cases, golden requests first, with what is expected of each output."""
    parity, program = subject.parity, subject.program
    if parity.is_quantized:
        raise ArchiveError(
            f"{program.path.name} is quantised, and a page's rule has no place for approximations"
        )
    found = runners.run(program.here, program, subject.cases())
    if not subject.is_as_recorded(found):
        raise ArchiveError(
            f"{program.path.name} gives something else here than its golden requests record; "
            "modelyard verify says what"
        )
    outputs = list(subject.outputs(found))
    found.discard()
    rules, scales = rules_of(parity, parity, subject.probes, outputs)
    pairs = zip(subject.probes, outputs, strict=True)
    for probe, given in sorted(pairs, key=lambda pair: not isinstance(pair[0], GoldenCase)):
        of_all = zip(rules.items(), given, scales.of(probe.kind), strict=True)
        yield {
            "name": _name(probe.request) if isinstance(probe, GoldenCase) else str(probe),
            "inputs": {
                name: _kept(each) for name, each in subject.named(subject.inputs(probe)).items()
            },
            "outputs": {
                name: _judged(value, scale, rule.allowed.get(str(probe), rule.tolerance))
                for (name, rule), value, scale in of_all
            },
        }


def _name(request: str) -> str:
    return f"golden request {Path(request).stem}"


def _small_enough(cases: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return so many of the cases, the smallest, as a page should hold; in their order."""
    sizes = [len(json.dumps(case)) for case in cases]
    chosen, held = set[int](), 0
    for place in sorted(range(len(cases)), key=sizes.__getitem__):
        held += sizes[place]
        if held <= MOST_BYTES or not chosen:
            chosen.add(place)
    return [case for place, case in enumerate(cases) if place in chosen]


def _handler(folder: Path, manifest: Manifest) -> Any:
    """Return the archive's handler where it is one of ours; None where it is an author's code."""
    if manifest.handler not in BUILT_IN:
        return None
    return load_service({
        "name": manifest.model_name, "folder": str(folder), "handler": manifest.handler,
        "manifest": json.loads((folder / MANIFEST_NAME).read_bytes()),
        "config_file": manifest.config_file, "device": "cpu", "worker": 0, "batch_size": 1,
    }).handler  # fmt: skip


def _labels(handler: Any, subject: Subject) -> dict[str, Any] | None:
    """Return the names of a classifier's outputs, and what makes probabilities of them."""
    main = subject.report.signature.main
    if main is None or len(main.shape) != 2 or not isinstance(main.shape[1], int):
        return None
    count, kind = main.shape[1], getattr(handler, "output_kind", "values")
    if count < 2 or kind == "values":
        return None
    function = {"probabilities": "none", "multilabel": "sigmoid"}.get(kind, "softmax")
    return {"names": [handler.label(index) for index in range(count)], "function": function}


def _pictures(
    handler: Any, subject: Subject, manifest: Manifest, folder: Path
) -> dict[str, Any] | None:
    """Return how a picture becomes an input, and the golden requests that are pictures."""
    if not isinstance(handler, VisionHandler):
        return None
    assert manifest.modelyard is not None, "it has a report"
    types = {golden.request: golden.content_type for golden in manifest.modelyard.golden}
    examples = []
    for read in subject.golden:
        if types[read.request] in SHOWN:
            (given,) = read.values
            picture = b64encode((folder / read.request).read_bytes()).decode()
            examples.append({
                "name": _name(read.request), "type": types[read.request], "picture": picture,
                "input": _judged(given, one_place(given.double().numpy()), INPUT_TOLERANCE),
            })  # fmt: skip
    return {
        "settings": asdict(handler.image),
        "table": _kept(torch.from_numpy(handler.table)),
        "examples": examples,
    }
