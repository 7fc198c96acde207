"""What an archive says of itself, honest and hostile."""

import json
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.keys import generate_keys
from modelyard.archiver.signing import read_signing_key, read_trusted_keys
from modelyard.archiver.untrusted.names import (
    EXPLANATIONS_NAME,
    MANIFEST_NAME,
    SBOM_NAME,
    SIGNING_NAME,
)
from modelyard.plugins.ops.console import certificate
from modelyard.plugins.ops.console.certificate import Certificate, read_certificate


def write(inputs: Path, store: Path, key: Path | None = None) -> Path:
    return write_archive(
        "digits",
        version="1.0",
        artifact=inputs / "digits.onnx",
        explain_artifact=inputs / "digits.pt2",
        handler="image_classifier",
        examples=[f"{inputs / '0.png'}=0", f"{inputs / '7.png'}=7"],
        output_dir=store,
        key=read_signing_key(key),
    )


def read(path: Path, trusted: Path | None = None) -> Certificate:
    with open_archive(path) as archive:
        return read_certificate(archive, read_trusted_keys(trusted) if trusted else None)


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """Change an archive's files as an author can who then seals it anew."""
    with zipfile.ZipFile(path) as zipped:
        content = {name: zipped.read(name) for name in zipped.namelist()}
    change(content)
    manifest = json.loads(content[MANIFEST_NAME])
    digests = manifest["modelyard"]["digests"]
    digests.update({name: sha256(content[name]).hexdigest() for name in digests})
    content[MANIFEST_NAME] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as zipped:
        for name, data in content.items():
            zipped.writestr(name, data)
    return path


@pytest.fixture
def archive(inputs: Path, tmp_path: Path) -> Path:
    return write(inputs, tmp_path / "store")


def test_it_says_where_the_archive_comes_from_and_what_was_proven(archive: Path) -> None:
    found = read(archive)
    assert found.is_sealed and found.problems == ()
    assert found.report and (found.report.format, found.report.checkpoint) == ("onnx", "digits.pt")
    assert found.report.parity
    assert (found.report.parity.tolerances, found.report.parity.cases) == ({"logits": 1e-4}, 24)
    assert found.twin and found.twin.format == "pt2"
    assert [(case.request, json.loads(case.expected)) for case in found.golden] == [
        (b"\x89PNG zero", {"label": "0"}),
        (b"\x89PNG seven", {"label": "7"}),
    ]
    names = {each.name: each for each in found.components}
    assert names["digits.onnx"].kind == "file" and len(names["digits.onnx"].sha256) == 64
    assert found.component_count == len(found.components)


def test_what_was_measured_beside_the_tolerance_is_read(inputs: Path, tmp_path: Path) -> None:
    file = inputs / "digits.onnx.report.json"
    stated = json.loads(file.read_text())
    stated["parity"]["outputs"] = {"logits": {"tolerance": 1e-4, "scaled": 8e-7}}
    file.write_text(json.dumps(stated))
    found = read(write(inputs, tmp_path / "store"))
    assert found.report and found.report.parity
    assert found.report.parity.largest == {"logits": 8e-7}


def test_a_signature_counts_by_the_keys_that_are_trusted_here(inputs: Path, tmp_path: Path) -> None:
    for name in ("release", "other"):
        private, public = generate_keys()
        (tmp_path / f"{name}.key").write_bytes(private)
        (tmp_path / f"{name}.pub").write_bytes(public)
    path = write(inputs, tmp_path / "store", tmp_path / "release.key")
    trusted, other = tmp_path / "release.pub", tmp_path / "other.pub"
    states = [read(path, keys).signer.state for keys in (None, trusted, other)]
    assert states == ["unchecked", "trusted", "refused"]
    assert "is not trusted" in read(path, other).signer.text

    def damage(content: dict[str, bytes]) -> None:
        content[SIGNING_NAME] = b'{"mediaType": 1}'

    rewrite(path, damage)
    assert [read(path, keys).signer.state for keys in (None, trusted)] == ["refused", "refused"]


def test_an_archive_that_is_not_signed_says_so(archive: Path) -> None:
    assert read(archive).signer.state == "none"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(b"{", "not JSON", id="not JSON"),
        pytest.param(b'{"components": 3}', "expected a list, found 3", id="no list"),
        pytest.param(b'{"components": [[]]}', "components[0]: expected an object", id="a list"),
        pytest.param(b'{"components": [{"type": "x"}]}', "components[0].name", id="no name"),
        pytest.param(
            b'{"components": [{"type": "file", "name": "a", "hashes": [1, {"content": 2}]}]}',
            "",
            id="hashes of another kind",
        ),
    ],
)
def test_a_bill_of_materials_of_any_shape_is_read_without_harm(
    archive: Path, content: bytes, problem: str
) -> None:
    def change(files: dict[str, bytes]) -> None:
        files[SBOM_NAME] = content

    found = read(rewrite(archive, change))
    assert problem in "; ".join(found.problems) and found.report is not None


def test_a_report_that_cannot_be_read_is_named(archive: Path) -> None:
    def change(files: dict[str, bytes]) -> None:
        files["digits.onnx.report.json"] = b"[]"

    found = read(rewrite(archive, change))
    assert found.report is None and found.twin is not None
    assert "digits.onnx.report.json" in found.problems[0]


@pytest.mark.parametrize(
    ("limit", "value", "seen"),
    [
        ("MOST_GOLDEN", 1, lambda found: (len(found.golden), found.golden_count) == (1, 2)),
        ("MOST_GOLDEN_BYTES", 9, lambda found: [each.request for each in found.golden]
         == [b"\x89PNG zero", None]),
        ("MOST_EXPECTED_BYTES", 3, lambda found: {each.expected for each in found.golden} == {""}),
        ("MAX_SBOM_BYTES", 9, lambda found: "at most 9" in found.problems[0]),
        ("MAX_REPORT_BYTES", 9, lambda found: found.report is None and len(found.problems) == 2),
        ("MOST_COMPONENTS", 2, lambda found: len(found.components) == 2 < found.component_count),
    ],
)  # fmt: skip
def test_no_more_is_kept_than_can_be_shown(
    archive: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, seen: Any
) -> None:
    monkeypatch.setattr(certificate, limit, value)
    assert seen(read(archive))


STATED = {
    "method": "integrated_gradients",
    "requests": [{"file": f"MAR-INF/golden/{n}.request", "content_type": "a/b"} for n in range(4)],
    "measured": [{"name": "error", "text": "4 of 4", "value": 1, "limit": 0.75, "is_most": False}],
    "not_measured": {"randomised layer": "<b>no gradients"},
}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (json.dumps(STATED), None),
        ("{}", "measured: expected a list, found nothing"),
        ("[" * 9, "not JSON"),
    ],
)
def test_the_certificate_of_explanations_is_read(
    archive: Path, content: str, problem: str | None
) -> None:
    def change(files: dict[str, bytes]) -> None:
        files[EXPLANATIONS_NAME] = content.encode()
        manifest = json.loads(files[MANIFEST_NAME])
        manifest["modelyard"]["digests"][EXPLANATIONS_NAME] = ""
        files[MANIFEST_NAME] = json.dumps(manifest).encode()

    found = read(rewrite(archive, change))
    if problem is None:
        assert found.problems == () and found.explanations is not None
        assert found.explanations.measured[0].needed == "at least 0.75"
    else:
        assert found.explanations is None and problem in "; ".join(found.problems)
