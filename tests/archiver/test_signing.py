import base64
import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.cli import archive_app, keygen_app, verify_app
from modelyard.archiver.errors import NotTrusted
from modelyard.archiver.keys import generate_keys, key_id
from modelyard.archiver.signing import (
    find_signer,
    parse_date,
    read_signing_key,
    read_trusted_keys,
)
from modelyard.archiver.untrusted.names import MANIFEST_NAME, SIGNING_NAME


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Make two key pairs: release and other."""
    folder = tmp_path / "keys"
    folder.mkdir()
    for name in ("release", "other"):
        private, public = generate_keys()
        (folder / f"{name}.key").write_bytes(private)
        (folder / f"{name}.pub").write_bytes(public)
    return folder


@pytest.fixture
def signed(inputs: Path, keys: Path, tmp_path: Path) -> Path:
    return write(inputs, tmp_path / "signed", keys / "release.key")


def write(
    inputs: Path,
    store: Path,
    key: Path | None,
    archive_format: str = "zip-store",
    expires: str | None = None,
) -> Path:
    return write_archive(
        "digits",
        version="1.0",
        expires=parse_date(expires) if expires else None,
        artifact=inputs / "digits.onnx",
        handler="image_classifier",
        output_dir=store,
        archive_format=archive_format,
        key=read_signing_key(key),
    )


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    with zipfile.ZipFile(path) as zipped:
        content = {name: zipped.read(name) for name in zipped.namelist()}
    change(content)
    with zipfile.ZipFile(path, "w") as zipped:
        for name, data in content.items():
            zipped.writestr(name, data)


def refusal(path: Path, trusted: Path) -> str:
    with open_archive(path) as archive, pytest.raises(NotTrusted) as caught:
        find_signer(archive, read_trusted_keys(trusted))
    return str(caught.value)


@pytest.mark.parametrize("archive_format", ["zip-store", "tgz", "no-archive"])
def test_the_key_that_signed_is_found_among_the_trusted_ones(
    inputs: Path, keys: Path, tmp_path: Path, archive_format: str
) -> None:
    path = write(inputs, tmp_path, keys / "release.key", archive_format)
    trusted = keys / "trusted"
    trusted.write_bytes((keys / "other.pub").read_bytes() + (keys / "release.pub").read_bytes())

    with open_archive(path) as archive:
        signer = find_signer(archive, read_trusted_keys(trusted))

    assert {signer.id} == set(read_trusted_keys(keys / "release.pub").keys)


def test_the_signature_changes_neither_the_digest_nor_the_manifest(
    inputs: Path, signed: Path, tmp_path: Path
) -> None:
    unsigned = write(inputs, tmp_path / "unsigned", None)

    with open_archive(signed) as one, open_archive(unsigned) as other:
        assert one.digest == other.digest
        assert one.read(MANIFEST_NAME) == other.read(MANIFEST_NAME)
        assert set(one.names) - set(other.names) == {SIGNING_NAME}


def test_the_same_key_signs_to_the_same_bytes(
    inputs: Path, signed: Path, keys: Path, tmp_path: Path
) -> None:
    again = write(inputs, tmp_path / "again", keys / "release.key")

    assert again.read_bytes() == signed.read_bytes()


def test_the_signature_is_what_openssf_model_signing_reads(signed: Path, keys: Path) -> None:
    """Compare with the format's own words, which `model_signing verify key` was run on, too."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    pem = (keys / "release.pub").read_bytes()
    public = load_pem_public_key(pem)
    with open_archive(signed) as archive:
        bundle = json.loads(archive.read(SIGNING_NAME))
        digests = {file.name: file.sha256 for file in archive.files}
    envelope = bundle["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])

    assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    hint = bundle["verificationMaterial"]["publicKey"]["hint"]
    assert hint == hashlib.sha256(pem).hexdigest()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    head = f"DSSEv1 28 application/vnd.in-toto+json {len(payload)} ".encode()
    signature = base64.b64decode(envelope["signatures"][0]["sig"])
    public.verify(signature, head + payload, ec.ECDSA(SHA256()))  # or it raises
    statement = json.loads(payload)
    resources = statement["predicate"]["resources"]
    del digests[SIGNING_NAME]
    assert {each["name"]: each["digest"] for each in resources} == digests
    together = b"".join(bytes.fromhex(each["digest"]) for each in resources)
    assert statement["subject"][0]["digest"]["sha256"] == hashlib.sha256(together).hexdigest()


def test_a_signature_by_ed25519_holds(inputs: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (tmp_path / "ed.key").write_bytes(pem)
    (tmp_path / "ed.pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    trust = read_trusted_keys(tmp_path / "ed.pub")
    path = write(inputs, tmp_path / "store", tmp_path / "ed.key")
    with open_archive(path) as archive:
        assert find_signer(archive, trust).id in trust.keys


def test_a_signature_that_has_expired_is_refused(inputs: Path, keys: Path, tmp_path: Path) -> None:
    path = write(inputs, tmp_path, keys / "release.key", expires="2031-05-01")
    trust = read_trusted_keys(keys / "release.pub")
    with open_archive(path) as archive:
        find_signer(archive, trust, parse_date("2031-04-30"))
        with pytest.raises(NotTrusted, match="its signature expired on 2031-05-01; sign the archi"):
            find_signer(archive, trust, parse_date("2031-05-01"))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (
            "name release team\nexpires 2021-01-01",
            r"the key release team \(\w{12}\) expired on 2021",
        ),
        ("lowest digits 1.0\nlowest other 9", None),
        (
            "lowest digits 1.0.1",
            "version 1.0 of digits is below 1.0.1, the lowest that is accepted",
        ),
        ("lowest digits 1.0-final", "version 1.0 cannot be compared with 1.0-final"),
        ("lowst digits 2.0", r"trusted, line 1: expected a key in PEM, `name WHO`"),
        ("expires soon", '"soon" is not a date'),
        ("# a remark\n\n", None),
    ],
    ids=["key expired", "version at the lowest", "rollback", "no number", "typo", "no date", "#"],
)
def test_the_file_of_trusted_keys_says_who_until_when_and_from_which_version(
    signed: Path, keys: Path, said: str, problem: str | None
) -> None:
    trusted = keys / "trusted"
    trusted.write_text(said + "\n" + (keys / "release.pub").read_text())
    with open_archive(signed) as archive:
        if problem is None:
            find_signer(archive, read_trusted_keys(trusted))
        else:
            with pytest.raises(NotTrusted, match=problem):
                find_signer(archive, read_trusted_keys(trusted))


def test_an_unsigned_archive_is_refused(inputs: Path, keys: Path, tmp_path: Path) -> None:
    path = write(inputs, tmp_path, None)

    assert refusal(path, keys / "release.pub").startswith("digits.mar is not signed; write it")


def test_an_unknown_key_is_named(signed: Path, keys: Path) -> None:
    text = refusal(signed, keys / "other.pub")

    assert text.startswith("digits.mar is signed by the key ")
    (other,) = read_trusted_keys(keys / "other.pub").keys
    assert text.endswith(f", which is not trusted; trusted: {other[:12]}")


def test_a_manifest_changed_after_signing_is_refused(signed: Path, keys: Path) -> None:
    def change(content: dict[str, bytes]) -> None:
        content[MANIFEST_NAME] = content[MANIFEST_NAME].replace(b'"1.0"', b'"1.1"')

    rewrite(signed, change)

    assert f"signed other files: {MANIFEST_NAME} changed" in refusal(signed, keys / "release.pub")


def test_a_statement_changed_after_signing_is_refused(signed: Path, keys: Path) -> None:
    def change(content: dict[str, bytes]) -> None:
        bundle = json.loads(content[SIGNING_NAME])
        payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
        changed = payload.replace(b'"allow_symlinks":false', b'"allow_symlinks":true')
        assert changed != payload
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
        content[SIGNING_NAME] = json.dumps(bundle).encode()

    rewrite(signed, change)

    assert "is wrong: what was signed was changed after it" in refusal(signed, keys / "release.pub")


def test_a_key_cannot_be_claimed(inputs: Path, signed: Path, keys: Path, tmp_path: Path) -> None:
    """Signed by `other`, but named as `release`."""
    with zipfile.ZipFile(write(inputs, tmp_path / "other", keys / "other.key")) as zipped:
        forged = json.loads(zipped.read(SIGNING_NAME))

    def claim(content: dict[str, bytes]) -> None:
        forged["verificationMaterial"] = json.loads(content[SIGNING_NAME])["verificationMaterial"]
        content[SIGNING_NAME] = json.dumps(forged).encode()

    rewrite(signed, claim)

    assert "is wrong" in refusal(signed, keys / "release.pub")


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (b"not json", "not JSON"),
        (b"[]", "expected an object, found a list"),
        (b"{}", "mediaType: expected"),
        (b'{"mediaType": "x"}', "mediaType: expected application/vnd.dev.sigstore"),
        (b"x" * 9_000_000, "at most 8388608 are read"),
    ],
)
def test_a_broken_signature_says_what_is_wrong(
    signed: Path, keys: Path, document: bytes, problem: str
) -> None:
    rewrite(signed, lambda content: content.update({SIGNING_NAME: document}))

    assert problem in refusal(signed, keys / "release.pub")


def test_the_environment_names_the_key_or_holds_it(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELYARD_SIGNING_KEY", raising=False)
    assert read_signing_key(None) is None
    expected = read_signing_key(keys / "release.key")
    for value in (str(keys / "release.key"), (keys / "release.key").read_text()):
        monkeypatch.setenv("MODELYARD_SIGNING_KEY", value)
        found = read_signing_key(None)
        assert found is not None and expected is not None
        assert key_id(found.public_key()) == key_id(expected.public_key())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no private key in PEM"),
        (b"-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n", "holds no private key"),
    ],
)
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "k").write_bytes(content)

    with pytest.raises(NotTrusted, match=problem):
        read_signing_key(tmp_path / "k")
    with pytest.raises(NotTrusted, match=r"holds no public key|is not a public key in PEM"):
        read_trusted_keys(tmp_path / "k")
    with pytest.raises(NotTrusted, match="cannot read the key file"):
        read_trusted_keys(tmp_path / "lost")


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.generate()
    (tmp_path / "x.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (tmp_path / "x.pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )

    with pytest.raises(NotTrusted, match="Ed25519 or ECDSA on the curve P-256"):
        read_signing_key(tmp_path / "x.key")
    with pytest.raises(NotTrusted, match="Ed25519 or ECDSA on the curve P-256"):
        read_trusted_keys(tmp_path / "x.pub")


# -- command line --------------------------------------------------------------------------------


def test_keygen_archive_and_verify_go_together(inputs: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    release = tmp_path / "release"
    assert run(keygen_app, [str(release)]).exit_code == 0
    assert os.stat(f"{release}.key").st_mode & 0o777 == 0o600  # noqa: PTH116
    again = run(keygen_app, [str(release)])
    assert (again.exit_code, "release.key: File exists" in again.stderr) == (1, True)

    arguments = ["digits", f"--artifact={inputs}/digits.onnx", "--handler=image_classifier"]
    arguments += ["--version=1.0", "--no-dry-run", f"--output-dir={tmp_path}/store"]
    assert run(archive_app, [*arguments, f"--sign={release}.key"]).exit_code == 0

    verify = [str(tmp_path / "store" / "digits.mar"), "--no-run"]
    good = run(verify_app, [*verify, f"--public-key={release}.pub"])
    assert (good.exit_code, "signature  by the trusted key " in good.stdout) == (0, True)
    assert "not checked without --public-key" in run(verify_app, verify).stdout
    assert run(keygen_app, [str(tmp_path / "other")]).exit_code == 0
    bad = run(verify_app, [*verify, f"--public-key={tmp_path}/other.pub"])
    assert (bad.exit_code, "which is not trusted" in bad.stderr) == (1, True)
