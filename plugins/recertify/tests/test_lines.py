"""Lines of an archive about further versions: which of them prove something, and who may write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import pytest

from modelyard.archiver import open_archive
from modelyard.archiver.collect import Part
from modelyard.archiver.errors import ArchiveError, NotTrusted
from modelyard.archiver.proven import find_unproven
from modelyard.archiver.signing import (
    find_signer,
    parse_date,
    read_signing_key,
    read_trusted_keys,
)
from modelyard.archiver.untrusted.names import PROVEN_NAME, SIGNING_NAME
from modelyard.archiver.write import put
from modelyard.plugins.recertify import lines
from modelyard.plugins.recertify.certify import Row
from tests.adversary import gallery
from tests.archiver.test_proven import age
from tests.archiver.test_replay import rewrite
from tests.archiver.test_signing import keys
from tests.serve.live import modelyard, running, start_arguments

__all__ = ["keys"]
"""A fixture."""

HERE = version("onnxruntime")
REPORT = "digits.onnx.report.json"


@pytest.fixture
def aged(digits_store: Path, tmp_path: Path) -> Path:
    """Copy an archive of an ONNX file that onnxruntime 1.13.1 is said to have proven."""
    path = Path(shutil.copy(digits_store / "onnx.mar", tmp_path / "onnx.mar"))
    rewrite(path, lambda content: content.update({REPORT: age(content[REPORT])}))
    return path


def row(path: Path, **other: Any) -> Row:
    """Return what a run on this onnxruntime would say."""
    with open_archive(path) as opened:
        seal = opened.manifest.modelyard
        assert seal is not None
        found: dict[str, Any] = {
            "archive": path, "digest": opened.digest, "environment": "any", "verdict": "within",
            "artifact": "digits.onnx", "artifact_sha256": seal.digests["digits.onnx"],
            "runtime": "onnxruntime", "there": HERE, "here": "onnxruntime 1.13.1", "cases": 40,
            "share": 0.25,
        }  # fmt: skip
    return Row(**found | other)


def unproven(path: Path) -> str:
    with open_archive(path) as opened:
        found = find_unproven(opened.manifest, opened.read)
    return found.text if found else ""


Change = Callable[[list[dict[str, Any]]], Any]


def change(**fields: Any) -> Change:
    return lambda stated: stated[0].update(fields)


WRONG: dict[str, Change] = {
    "about another artifact": change(artifact_sha256="0" * 64),
    "about another file": change(artifact="digits.pt2"),
    "about another version": change(version="1.13.2"),
    "about another runtime": change(runtime="onnxruntime-web"),
    "the answers differ": change(verdict="differs"),
    "within, by more than is allowed": change(share=1.01),
    "the same bits, and a difference": change(verdict="same bits"),
    "a verdict that there is not": change(verdict="agrees"),
    "no verdict": lambda stated: stated[0].pop("verdict"),
    "no share": lambda stated: stated[0].pop("share"),
    "a share below zero": change(share=-1),
    "a share as a text": change(share="0"),
    "of no case": change(cases=0),
    "a second one that differs": lambda stated: stated.append(stated[0] | {"verdict": "differs"}),
    "a second one that is broken": lambda stated: stated.append({}),
    "none": lambda stated: stated.clear(),
    "not an object": lambda stated: cast("list[object]", stated).insert(0, "yes"),
}
HARMLESS: dict[str, Change] = {
    "as it is": lambda stated: None,
    "another build": change(version=f"{HERE}+cu130"),
    "the same bits": change(verdict="same bits", share=0),
    "all that is allowed": change(share=1),
    "what nobody knows": change(note="by hand"),
    "one about another version, too": lambda stated: stated.append(
        stated[0] | {"version": "1.99.0", "verdict": "differs"}),
}  # fmt: skip


def test_only_a_line_about_this_artifact_and_version_proves_it(aged: Path, tmp_path: Path) -> None:
    assert "was proven with onnxruntime 1.13.1" in unproven(aged)
    lines.write(aged, row(aged).digest, [row(aged)], None, None)
    tried = []
    for is_wrong, changes in ((True, WRONG), (False, HARMLESS)):
        for name, how in changes.items():
            path = Path(shutil.copy(aged, tmp_path / "changed.mar"))

            def altered(content: dict[str, bytes], how: Change = how) -> None:
                stated = json.loads(content[PROVEN_NAME])["lines"]
                how(stated)
                content[PROVEN_NAME] = json.dumps({"lines": stated}).encode()

            rewrite(path, altered)
            tried.append(gallery.Row("line", name, is_wrong, bool(unproven(path))))

    gallery.judge(tried)


def test_a_line_changes_nothing_else_and_replaces_its_own(aged: Path) -> None:
    with open_archive(aged) as opened:
        before = {name: opened.read(name) for name in opened.names}

    lines.write(aged, row(aged).digest, [row(aged)], None, None)
    again = [row(aged, verdict="differs", share=3.0), row(aged, there="1.99.0")]
    digest = lines.write(aged, again[0].digest, again, None, None)

    with open_archive(aged) as opened:
        assert opened.digest == digest
        after = {name: opened.read(name) for name in opened.names}
    stated = json.loads(after.pop(PROVEN_NAME))["lines"]
    assert [(line["version"], line["verdict"]) for line in stated] == [
        (HERE, "differs"),
        ("1.99.0", "within"),
    ]
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed == {"MAR-INF/MANIFEST.json", "MAR-INF/sbom.cdx.json"}
    assert after.keys() == before.keys()
    assert "where a line says that answers differ" in unproven(aged)
    assert [path.name for path in aged.parent.iterdir()] == ["onnx.mar"]


def test_an_archive_that_was_changed_meanwhile_gets_no_line(aged: Path) -> None:
    with pytest.raises(ArchiveError, match="was changed while it was run"):
        lines.write(aged, "0" * 64, [row(aged)], None, None)


def test_what_did_not_run_or_beside_other_versions_gives_no_line(aged: Path) -> None:
    rows = [row(aged, verdict="not run"), row(aged, verdict="untouched"), row(aged, note="other")]

    assert not list(lines.writable(rows))


@pytest.fixture
def signed(aged: Path, keys: Path, tmp_path: Path) -> Path:
    """Sign the archive until 2099."""
    key = read_signing_key(keys / "release.key")
    with open_archive(aged) as opened:
        opened.unpack(tmp_path / "own")
        part = Part("x.txt", b"", "file")
        put(opened, tmp_path / "own", part, key, parse_date("2099-01-01"))
    shutil.rmtree(tmp_path / "own")
    return aged


def test_a_signed_archive_is_signed_again_by_whoever_vouches_for_it(
    signed: Path, keys: Path
) -> None:
    found = row(signed)
    release, other = (read_signing_key(keys / f"{name}.key") for name in ("release", "other"))
    with pytest.raises(NotTrusted, match="give --sign KEY"):
        lines.write(signed, found.digest, [found], None, None)
    with pytest.raises(NotTrusted, match="is not trusted"):
        lines.write(signed, found.digest, [found], other, None)
    assert found.digest == row(signed).digest

    lines.write(signed, found.digest, [found], release, None)

    trust = read_trusted_keys(keys / "release.pub")
    with open_archive(signed) as opened:
        assert find_signer(opened, trust).id in trust.keys
        assert lines.signed_until(opened, release, None) == parse_date("2099-01-01")
    assert not unproven(signed)

    lines.write(signed, row(signed).digest, [found], other, trust)
    with open_archive(signed) as opened, pytest.raises(NotTrusted):
        find_signer(opened, trust)


def test_a_line_that_was_altered_after_it_was_signed_is_not_believed(
    signed: Path, keys: Path
) -> None:
    key = read_signing_key(keys / "release.key")
    lines.write(signed, row(signed).digest, [row(signed, verdict="differs")], key, None)

    def altered(content: dict[str, bytes]) -> None:
        content[PROVEN_NAME] = content[PROVEN_NAME].replace(b'"differs"', b'"within"')

    signature: dict[str, bytes] = {}
    rewrite(signed, altered)
    rewrite(signed, lambda content: signature.update({SIGNING_NAME: content[SIGNING_NAME]}))
    _leave_the_signature_out_of_the_digests(signed)

    with open_archive(signed) as opened:
        with pytest.raises(NotTrusted, match=r"proven\.json"):
            find_signer(opened, read_trusted_keys(keys / "release.pub"))
        with pytest.raises(NotTrusted, match=r"proven\.json"):
            lines.signed_until(opened, key, None)


def _leave_the_signature_out_of_the_digests(path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(path) as zipped:
        content = {name: zipped.read(name) for name in zipped.namelist()}
    manifest = json.loads(content["MAR-INF/MANIFEST.json"])
    manifest["modelyard"]["digests"].pop(SIGNING_NAME, None)
    content["MAR-INF/MANIFEST.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as zipped:
        for name, data in content.items():
            zipped.writestr(name, data)


@pytest.mark.nightly
def test_a_server_that_requires_proof_believes_a_line(aged: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    path = Path(shutil.copy(aged, store / "onnx.mar"))
    refused = modelyard(
        *start_arguments(tmp_path / "state", store), "--require-proven", "--models=onnx"
    )
    assert refused.returncode == 1

    lines.write(path, row(path).digest, [row(path)], None, None)

    options = ("--require-proven", "--models=onnx", "--workers=1")
    with running(tmp_path / "state", store, *options) as server:
        assert not server.about["warnings"]
