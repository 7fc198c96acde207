"""What an archive was proven to do, stated for others: by our own check, and by theirs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from typer.testing import CliRunner

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.collect import Part
from modelyard.archiver.errors import ArchiveError, NotProven, NotTrusted, WrongUsage
from modelyard.archiver.keys import generate_keys
from modelyard.archiver.signing import (
    read_signing_key,
    read_trusted_keys,
    sign_payload,
)
from modelyard.archiver.untrusted.names import PROVEN_NAME, SBOM_NAME
from modelyard.archiver.write import put
from modelyard.plugins.provenance.cli import provenance_app
from modelyard.plugins.provenance.parity import PREDICATE_TYPE, attest, check_attested
from modelyard.plugins.provenance.spdx import format_spdx

HERE = Path(__file__).parent
PEER = HERE.parents[2] / ".peers" / "provenance"
needs_peers = pytest.mark.skipif(
    not (PEER / ".installed").exists(), reason="scripts/peers provenance has not run"
)
Statement = dict[str, Any]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("release", "other"):
        for end, pem in zip(("key", "pub"), generate_keys(), strict=True):
            (folder / f"{name}.{end}").write_bytes(pem)
    return folder


@pytest.fixture(scope="module")
def archive(digits_store: Path) -> Path:
    return digits_store / "onnx.mar"


def attested(archive: Path, keys: Path, expires: datetime | None = None) -> bytes:
    key = read_signing_key(keys / "release.key")
    assert key is not None
    with open_archive(archive) as opened:
        return attest(opened, key, expires)


def check(archive: Path, bundle: bytes, key: Path) -> None:
    with open_archive(archive) as opened:
        check_attested(opened, bundle, read_trusted_keys(key))


def statement_of(bundle: bytes) -> Statement:
    found: Statement = json.loads(base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
    return found


def with_lines(archive: Path, folder: Path, data: bytes) -> Path:
    """Write an archive anew with what `modelyard recertify --write` adds."""
    copy = Path(shutil.copy(archive, folder / "copy.mar"))
    with open_archive(copy) as opened:
        opened.unpack(folder / "unpacked")
        put(opened, folder / "unpacked", Part(PROVEN_NAME, data, "file"), None, None)
    return copy


def test_further_versions_on_which_it_was_proven_are_stated(
    archive: Path, keys: Path, tmp_path: Path
) -> None:
    assert statement_of(attested(archive, keys))["predicate"]["recertified"] == []
    line = {"runtime": "onnxruntime", "version": "1.99.0", "artifact": "digits.onnx", "cases": 42,
            "artifact_sha256": "0" * 64, "verdict": "within", "share": 0.5}  # fmt: skip
    proven = with_lines(archive, tmp_path, json.dumps({"lines": [line]}).encode())
    bundle = attested(proven, keys)
    assert statement_of(bundle)["predicate"]["recertified"] == [line]
    check(proven, bundle, keys / "release.pub")
    with pytest.raises(NotTrusted, match="another file"):
        check(archive, bundle, keys / "release.pub")


def test_lines_that_cannot_be_read_are_not_stated(
    archive: Path, keys: Path, tmp_path: Path
) -> None:
    with pytest.raises(NotProven, match=r"cannot be read: MAR-INF/proven\.json\.lines"):
        attested(with_lines(archive, tmp_path, b'{"lines": [{}]}'), keys)


def test_the_statement_is_a_dsse_envelope_about_the_file(archive: Path, keys: Path) -> None:
    bundle = json.loads(attested(archive, keys))
    envelope = bundle["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    public = load_pem_public_key((keys / "release.pub").read_bytes())
    assert isinstance(public, ec.EllipticCurvePublicKey)
    signed = f"DSSEv1 28 application/vnd.in-toto+json {len(payload)} ".encode() + payload
    signature = base64.b64decode(envelope["signatures"][0]["sig"])
    public.verify(signature, signed, ec.ECDSA(SHA256()))  # or it raises
    statement = json.loads(payload)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"name": "onnx.mar", "digest": {"sha256": digest}}]
    assert statement["predicateType"] == "https://modelyard.dev/parity/v1"
    predicate = statement["predicate"]
    with open_archive(archive) as opened:
        report = json.loads(opened.read("digits.onnx.report.json"))
        assert predicate["archiveDigest"] == opened.digest
    own = predicate["artifacts"][0]
    assert own["digest"]["sha256"] == report["artifact_sha256"]
    assert own["checkpoint"]["digest"]["sha256"] == report["checkpoint"]["sha256"]
    logits = report["parity"]["outputs"]["logits"]
    expected = {"tolerance": logits["tolerance"], "worst": logits["scaled"]}
    assert own["outputs"] == {"logits": expected}
    assert (own["cases"], own["versions"]) == (report["parity"]["cases"], report["versions"])
    assert predicate["goldenRequests"] == 2


def forged(archive: Path, keys: Path, change: Callable[[Statement], object]) -> bytes:
    """Return a statement that the release key signed, with something else in it."""
    statement = statement_of(attested(archive, keys))
    change(statement)
    key = read_signing_key(keys / "release.key")
    assert key is not None
    return sign_payload(json.dumps(statement).encode(), key)


def unsigned(archive: Path, keys: Path, change: Callable[[Statement], object]) -> bytes:
    """Return a statement that was changed after it was signed."""
    bundle = json.loads(attested(archive, keys))
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    change(statement)
    payload = base64.b64encode(json.dumps(statement).encode()).decode()
    bundle["dsseEnvelope"]["payload"] = payload
    return json.dumps(bundle).encode()


def widen(statement: Statement) -> None:
    statement["predicate"]["artifacts"][0]["outputs"]["logits"]["worst"] = 0.0


def rename(statement: Statement) -> None:
    statement["predicate"]["artifacts"][0]["digest"]["sha256"] = "0" * 64


def expire(statement: Statement) -> None:
    statement["predicate"]["expires"] = (datetime.now(UTC) - timedelta(days=1)).isoformat()


def other_signature(archive: Path, keys: Path) -> bytes:
    """Return a statement with the signature of another one by the same key."""
    bundle, other = (json.loads(attested(archive, keys)) for _ in range(2))
    expired = json.loads(forged(archive, keys, expire))
    bundle["dsseEnvelope"]["signatures"] = expired["dsseEnvelope"]["signatures"]
    assert bundle != other
    return json.dumps(bundle).encode()


REFUSED: dict[str, Callable[[Path, Path], bytes]] = {
    "a predicate that was changed": lambda a, k: unsigned(a, k, widen),
    "a subject that was changed": lambda a, k: unsigned(
        a, k, lambda each: each["subject"][0]["digest"].update(sha256="0" * 64)
    ),
    "the signature of another statement": other_signature,
    "a signed statement of another file": lambda a, k: forged(
        a, k, lambda each: each["subject"][0]["digest"].update(sha256="0" * 64)
    ),
    "a signed predicate of another type": lambda a, k: forged(
        a, k, lambda each: each.update(predicateType="https://model_signing/signature/v1.0")
    ),
    "a signed predicate that claims another digest": lambda a, k: forged(a, k, rename),
    "a signed predicate that claims another difference": lambda a, k: forged(a, k, widen),
    "a signed predicate with a line more": lambda a, k: forged(
        a, k, lambda each: each["predicate"].update(recertified=[{"torch": "9"}])
    ),
    "one that has expired": lambda a, k: forged(a, k, expire),
    "no bundle": lambda a, k: b"{}",
    "not JSON": lambda a, k: b"{",
}
SIGNED_LIES = [name for name in REFUSED if name.startswith(("a signed predicate that", "one that"))]
"""What only who reads the archive, or the predicate, can notice: our own `verify`."""
UNREAD = ["no bundle", "not JSON", "a signed predicate with a line more"]


def test_what_is_not_true_of_the_archive_is_refused(archive: Path, keys: Path) -> None:
    missed = []
    for name, make in REFUSED.items():
        try:
            check(archive, make(archive, keys), keys / "release.pub")
        except NotTrusted:
            continue
        missed.append(name)
    assert missed == []
    bundle = attested(archive, keys, datetime.now(UTC) + timedelta(days=1))
    check(archive, bundle, keys / "release.pub")
    check(archive, json.dumps(json.loads(bundle)).encode(), keys / "release.pub")  # other spaces
    with pytest.raises(NotTrusted, match="not trusted"):
        check(archive, bundle, keys / "other.pub")


def test_a_statement_is_of_one_archive(
    archive: Path, digits_store: Path, keys: Path, tmp_path: Path
) -> None:
    bundle = attested(archive, keys)
    with pytest.raises(NotTrusted, match="of another file"):
        check(digits_store / "pt2.mar", bundle, keys / "release.pub")
    again = tmp_path / "renamed.mar"
    shutil.copy(archive, again)
    check(again, bundle, keys / "release.pub")  # the bytes are the same, whatever they are called
    with zipfile.ZipFile(again, "a") as file:
        file.comment = b"changed"
    with pytest.raises(ArchiveError):
        check(again, bundle, keys / "release.pub")


def test_nothing_is_stated_of_what_was_not_proven(keys: Path, tmp_path: Path) -> None:
    handler = tmp_path / "own.py"
    handler.write_text("def handle(data, context):\n    return [1] * len(data or ())\n")
    bare = write_archive("own", handler=str(handler), output_dir=tmp_path)
    with pytest.raises(NotProven, match="nothing was proven"):
        attested(bare, keys)


def test_a_folder_is_no_subject(
    digits_artifacts: dict[str, Path], keys: Path, tmp_path: Path
) -> None:
    folder = write_archive(
        "digits", artifact=digits_artifacts["pt2"], handler="image_classifier",
        output_dir=tmp_path, archive_format="no-archive", dry_run=False,
    )  # fmt: skip
    with pytest.raises(WrongUsage, match="is a folder"):
        attested(folder, keys)


def test_the_commands_state_and_verify(archive: Path, keys: Path, tmp_path: Path) -> None:
    def run(*words: str | Path, code: int = 0) -> str:
        ran = CliRunner().invoke(provenance_app, list(map(str, words)))
        assert ran.exit_code == code, ran.output
        return ran.output

    file = tmp_path / "parity.json"
    run("attest", archive, "--sign", keys / "release.key", "-o", file)
    assert "stated by the trusted key" in run(
        "verify", file, archive, "--public-key", keys / "release.pub"
    )
    run("verify", file, archive, "--public-key", keys / "other.pub", code=1)
    run("verify", tmp_path / "none", archive, "--public-key", keys / "release.pub", code=1)
    run("attest", archive, "-o", file, code=2)
    bill = tmp_path / "bill.json"
    run("sbom", archive, "-o", bill)
    assert json.loads(bill.read_bytes())["@context"].endswith("/3.0.1/spdx-context.jsonld")
    run("sbom", archive, "-o", bill, "--format", "cyclonedx")
    with open_archive(archive) as opened:
        assert bill.read_bytes() == opened.read(SBOM_NAME)


def test_the_spdx_document_has_what_the_cyclonedx_one_has(archive: Path) -> None:
    moment = datetime(2026, 11, 27, tzinfo=UTC)
    with open_archive(archive) as opened:
        text, again = (format_spdx(opened, moment) for _ in range(2))
        bill = json.loads(opened.read(SBOM_NAME))
    assert text == again
    graph = json.loads(text)["@graph"]
    named = {each["spdxId"] for each in graph if "spdxId" in each}
    assert len(named) == len([each for each in graph if "spdxId" in each])
    for each in graph:
        pointed = [*each.get("to", ()), *each.get("element", ()), *each.get("rootElement", ())]
        assert set(pointed) <= named
    model, checkpoint = (each for each in graph if each["type"] == "ai_AIPackage")
    assert (model["name"], checkpoint["name"]) == ("onnx", "digits.pt")
    metrics = {each["key"]: each["value"] for each in model["ai_metric"]}
    assert 0 < float(metrics["parity of digits.onnx, logits"]) < 1e-4
    hashes = {each["name"]: each["verifiedUsing"][0]["hashValue"] for each in graph
              if each["type"] == "software_File"}  # fmt: skip
    assert hashes == {each["name"]: each["hashes"][0]["content"] for each in bill["components"]
                      if each["type"] == "file"}  # fmt: skip
    packages = {each.get("software_packageUrl") for each in graph}
    assert {each["purl"] for each in bill["components"] if "purl" in each} <= packages


# -- others' own verifiers -------------------------------------------------------------------------


def peer(*words: str | Path, code: int | None = 0) -> str:
    ran = subprocess.run(
        [str(PEER / "bin" / words[0]), *map(str, words[1:])], capture_output=True, text=True
    )
    assert code is None or (ran.returncode == 0) == (code == 0), ran.stderr
    return ran.stdout


def sigstore(bundle: Path, key: Path, archive: Path) -> subprocess.CompletedProcess[str]:
    environment = {"NODE_PATH": str(PEER / "node_modules"), "PATH": os.environ["PATH"]}
    return subprocess.run(
        ["node", str(HERE / "verify.cjs"), *map(str, (bundle, key, archive)), PREDICATE_TYPE],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip


@pytest.mark.nightly
@needs_peers
def test_sigstore_and_in_toto_verify_the_statement(
    archive: Path, keys: Path, tmp_path: Path
) -> None:
    file, key = tmp_path / "parity.json", keys / "release.pub"
    file.write_bytes(attested(archive, keys))
    peer("python", HERE / "check.py", "dsse", file, key)
    peer("python", HERE / "check.py", "dsse", file, keys / "other.pub", code=1)
    assert sigstore(file, key, archive).returncode == 0, sigstore(file, key, archive).stderr
    assert sigstore(file, keys / "other.pub", archive).returncode != 0
    missed = []
    for name in REFUSED.keys() - {*SIGNED_LIES, *UNREAD}:
        file.write_bytes(REFUSED[name](archive, keys))
        if sigstore(file, key, archive).returncode == 0:
            missed.append(name)
    assert missed == []


@pytest.mark.nightly
@needs_peers
def test_model_signing_verifies_the_signature_inside(
    digits_artifacts: dict[str, Path], keys: Path, tmp_path: Path
) -> None:
    signed = write_archive(
        "digits", artifact=digits_artifacts["onnx"], handler="image_classifier",
        output_dir=tmp_path, key=read_signing_key(keys / "release.key"), dry_run=False,
    )  # fmt: skip
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(signed) as file:
        file.extractall(folder)
    words = ("model_signing", "verify", "key", "--signature", folder / "MAR-INF/MANIFEST.sig.json")
    peer(*words, "--public_key", keys / "release.pub", folder)
    peer(*words, "--public_key", keys / "other.pub", folder, code=1)
    (folder / "digits.onnx").write_bytes(b"another weight")
    peer(*words, "--public_key", keys / "release.pub", folder, code=1)


@pytest.mark.nightly
@needs_peers
def test_spdx_reads_the_document(archive: Path, tmp_path: Path) -> None:
    file = tmp_path / "bill.spdx.json"
    with open_archive(archive) as opened:
        file.write_bytes(format_spdx(opened))
    found = json.loads(peer("python", HERE / "check.py", "spdx", file))
    assert found["models"] == ["digits.pt", "onnx"]
    assert any(each.endswith("/ai") for each in found["profiles"])
    document = json.loads(file.read_bytes())
    document["@graph"][-1]["relationshipType"] = "knows"
    file.write_text(json.dumps(document))
    peer("python", HERE / "check.py", "spdx", file, code=1)
