"""Reports altered and sealed anew: what `serve start --require-proven` and `verify` make of them.

Where the weights are wrong as well, the report names the digest that they have now.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive
from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.proven import find_unproven
from modelyard.archiver.verify import verify_archive
from tests.adversary.gallery import Row, judge
from tests.adversary.test_archives import (
    MANIFEST,
    Change,
    Files,
    allowed,
    both,
    noise,
    on_json,
    on_reports,
    seal,
    verify,
    widened,
    without_goldens,
)

OWN, TWIN = "digits.onnx.report.json", "digits.pt2.report.json"


def on_own(change: Callable[[Any], None]) -> Change:
    return on_json(OWN, change)


def on_both(change: Callable[[Any], None]) -> Change:
    return both(on_json(OWN, change), on_json(TWIN, change))


def fitted(files: Files) -> None:
    """Have the report name the artifact that is there."""
    digest = hashlib.sha256(files["digits.onnx"]).hexdigest()
    on_own(lambda report: report.update(artifact_sha256=digest))(files)


def wrong(*changes: Change) -> Change:
    """Make weights wrong that no golden request looks at, and say so in the report."""
    return both(without_goldens, noise(1e-2), fitted, *changes)


def outputs(change: Callable[[Any], None]) -> Change:
    def apply(parity: Any) -> None:
        for output in parity["outputs"].values():
            change(output)

    return on_reports(apply)


def on_edges(parity: Any) -> None:
    allowed(parity)
    cases = parity["ill_conditioned"]["cases"]
    parity["ill_conditioned"]["cases"] = [each for each in cases if "random" not in each["case"]]


def left_out(parity: Any, but: int) -> None:
    sizes = [f"batch={size}" for size in range(1, 9)]
    parity["plan"].update(left_out=sizes[but:], reduced=True)


def one_batch(report: Any) -> None:
    for spec in (*report["signature"]["inputs"], *report["signature"]["outputs"]):
        spec["shape"][0] = 1
    report["signature"].pop("batching", None)
    report["parity"].update(batches=[1], sizes={})


def in_bfloat16(report: Any) -> None:
    for spec in report["signature"]["outputs"]:
        spec["dtype"] = "bfloat16"
    for each in (report["parity"], *report["parity"]["outputs"].values()):
        each["tolerance"] = 0.3


def tolerance(value: Any) -> Change:
    return outputs(lambda output: output.update(tolerance=value))


def without_report(files: Files) -> None:
    del files[OWN]
    on_json(MANIFEST, lambda manifest: manifest["modelyard"].pop("report"))(files)


def exchanged(files: Files) -> None:
    files[OWN], files[TWIN] = files[TWIN], files[OWN]


ANOTHER = "0" * 64
WRONG: dict[str, Change] = {
    "proven by another onnxruntime": on_own(
        lambda report: report["versions"].update(onnxruntime="1.13.1")),
    "proven by no version": on_own(lambda report: report["versions"].pop("onnxruntime")),
    "the twin proven by another torch": on_json(
        TWIN, lambda report: report["versions"].update(torch="2.2.0")),
    "another artifact's": on_own(lambda report: report.update(artifact_sha256=ANOTHER)),
    "another twin's": on_json(TWIN, lambda report: report.update(artifact_sha256=ANOTHER)),
    "the artifact exchanged": noise(1e-9),
    "of two checkpoints": on_own(lambda report: report["checkpoint"].update(sha256=ANOTHER)),
    "the twin's own": exchanged,
    "no comparison": on_own(lambda report: report.pop("parity")),
    "no report": without_report,
    "half a report": lambda files: files.update({OWN: files[OWN][:200]}),
    "the verdict differs": on_own(lambda report: report["parity"].update(verdict="differs")),
    "the verdict is null": on_own(lambda report: report["parity"].update(verdict=None)),
    "an output differs": outputs(lambda output: output.update(verdict="differs")),
    "a tolerance of 10": on_reports(widened),
    "a tolerance of infinity": both(tolerance(1e308), on_reports(widened)),
    "a tolerance as a text": tolerance("1e-4"),
    "a tolerance of NaN": tolerance(float("nan")),
    "weights alone": wrong(),
    "edges ill-conditioned": wrong(on_reports(on_edges)),
    "every case ill-conditioned": wrong(on_reports(allowed)),
    "every size left out": wrong(on_reports(lambda parity: left_out(parity, 0))),
    "every size but one left out": wrong(on_reports(lambda parity: left_out(parity, 1))),
    "one batch": wrong(on_both(one_batch)),
    "random values alone": wrong(on_reports(lambda parity: parity.update(kinds=["random"]))),
    "tiny values alone": wrong(on_reports(lambda parity: parity.update(kinds=["tiny"]))),
    "no kind that there is": wrong(on_reports(lambda parity: parity.update(kinds=["usual"]))),
    "called quantised": both(
        wrong(), noise(0.3), fitted, on_own(lambda report: report["details"].update(quantize="x"))),
    "called quantised, with errors": wrong(
        on_both(lambda report: report["details"].update(quantize="x")),
        outputs(lambda output: output.update(error=0.15))),
    "called bfloat16": wrong(on_both(in_bfloat16)),
}  # fmt: skip
HARMLESS: dict[str, Change] = {
    "as it is": lambda files: None,
    "another build of onnxruntime": on_own(
        lambda report: report["versions"].update(
            onnxruntime=report["versions"]["onnxruntime"] + "+cu130")),
    "another Python": on_own(lambda report: report["versions"].update(python="3.9.1")),
    "another torch, which ran nothing": on_own(
        lambda report: report["versions"].update(torch="2.2.0")),
    "a field that nobody knows": on_own(lambda report: report.update(note="by hand")),
    "no verdict, as older reports": on_own(lambda report: report["parity"].pop("verdict")),
    "no scale, as older reports": outputs(lambda output: output.pop("scale")),
}  # fmt: skip


def _try(files: Files, name: str, change: Change, folder: Path, is_wrong: bool) -> Row:
    changed = dict(files)
    change(changed)
    path = seal(changed, folder / "x.mar", zipfile.ZIP_STORED)
    try:
        with open_archive(path) as opened:
            unproven = find_unproven(opened.manifest, opened.read)
            problems = [check.problem for check in verify_archive(opened, run=False)]
            said = [each for each in (unproven and unproven.text, *problems) if each]
    except ArchiveError as error:
        said = [str(error)]
    if not said:
        code, said = verify(path)
        said += [] if code in (0, 1) else [str(code)]
    return Row("certificate", name if is_wrong else f"{name}: {said}", is_wrong, bool(said))


PARTS = len(HARMLESS)
"""A harmless row in each, and some wrong ones: a gallery has both."""


def tried(files: Files, folder: Path, part: int) -> list[Row]:
    return [
        _try(files, name, change, folder, is_wrong)
        for is_wrong, changes in ((True, WRONG), (False, HARMLESS))
        for name, change in list(changes.items())[part::PARTS]
    ]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_altered_certificate_is_seen(digits: Files, tmp_path: Path, part: int) -> None:
    judge(tried(digits, tmp_path, part))
