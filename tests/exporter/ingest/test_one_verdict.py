"""A stranger's file gets one verdict, whoever reads it: verify, inspect, export, the worker."""

import io
import json
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from modelyard.archiver import ArchiveError, open_archive, write_archive
from modelyard.archiver.cli import verify_app
from modelyard.exporter.cli import app as export_app
from modelyard.exporter.cli import inspect_app
from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest import read_checkpoint
from modelyard.exporter.inspection import describe
from modelyard.handlers.errors import UnsafeProgram
from modelyard.handlers.judge.check import load_program

NET = """
from torch import nn
class Net(nn.Linear):
    def __init__(self): super().__init__(30, 20)
"""
MANIFEST = "MAR-INF/MANIFEST.json"
Files = dict[str, bytes]


def weights(seed: int) -> bytes:
    torch.manual_seed(seed)
    stream = io.BytesIO()
    torch.save(nn.Linear(30, 20).state_dict(), stream)
    return stream.getvalue()


def sealed(folder: Path) -> Path:
    (folder / "w.pt").write_bytes(weights(0))
    archive = write_archive(
        "net", version="1.0", artifact=folder / "w.pt", handler="base_handler", output_dir=folder
    )
    (folder / "w.pt").unlink()
    return archive


def rewritten(archive: Path, change: Callable[[Files], object], comment: bytes = b"") -> Path:
    """Write an archive's files again, with sound checksums, after a change."""
    with zipfile.ZipFile(archive) as old:
        files = {name: old.read(name) for name in old.namelist()}
    change(files)
    with zipfile.ZipFile(archive, "w") as new:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            kind = stat.S_IFLNK if name == "link" else stat.S_IFREG
            info.external_attr = (kind | 0o644) << 16
            new.writestr(info, content)
        new.comment = comment
    return archive


def flip_a_bit(path: Path, content: bytes, at: int = 0) -> Path:
    """Change one bit of what a file holds, uncompressed, and nothing else."""
    data = bytearray(path.read_bytes())
    data[data.index(content) + at] ^= 0x10
    path.write_bytes(data)
    return path


def verdicts(path: Path, tmp_path: Path) -> dict[str, bool]:
    """Return who takes an archive."""

    def takes(read: Callable[[], object]) -> bool:
        try:
            read()
        except (ArchiveError, CheckpointError):
            return False
        return True

    def unpack() -> None:
        with open_archive(path) as archive:
            archive.unpack(tmp_path / "worker")

    return {
        "verify": CliRunner().invoke(verify_app, [str(path), "--no-run"]).exit_code == 0,
        "inspect": takes(lambda: describe(path)),
        "export": takes(lambda: read_checkpoint(path)),
        "worker": takes(unpack),
    }


def exported(path: Path, folder: Path) -> tuple[int, str]:
    (folder / "net.py").write_text(NET, encoding="utf-8")
    arguments = [str(path), "--model", f"{folder}/net.py:Net", "--input", "x:float32[batch,30]"]
    result = CliRunner().invoke(export_app, [*arguments, "-o", str(folder / "out"), "--format=pt2"])
    return result.exit_code, result.output


def _manifest(change: Callable[[bytes], bytes]) -> Callable[[Files], object]:
    return lambda files: files.update({MANIFEST: change(files[MANIFEST])})


def _added(name: str, content: bytes = b"x") -> Callable[[Files], object]:
    return lambda files: files.update({name: content})


def _unsealed(files: Files) -> None:
    document = json.loads(files[MANIFEST])
    del document["modelyard"]
    files[MANIFEST] = json.dumps(document).encode()


def _both(*changes: Callable[[Files], object]) -> Callable[[Files], object]:
    return lambda files: [change(files) for change in changes]


CHANGES: dict[str, Callable[[Files], object]] = {
    "other weights under the seal": _added("w.pt", weights(1)),
    "a file that the seal does not list": _added("more.py"),
    "a missing file": lambda files: files.pop("w.pt"),
    "a symbolic link": _both(_unsealed, _added("link", b"/etc/passwd")),
    "names that differ in case": _both(_unsealed, _added("W.pt")),
    "a name that leaves the archive": _both(_unsealed, _added("../x")),
    "a byte order mark": _both(_unsealed, _manifest(lambda text: b"\xef\xbb\xbf" + text)),
    "NaN in the manifest": _both(_unsealed, _manifest(lambda text: text[:-1] + b', "x": NaN}')),
    "a key twice": _both(_unsealed, _manifest(lambda text: text[:-1] + b', "runtime": "python"}')),
    "a manifest of wrong types": _both(
        _unsealed, _manifest(lambda text: b'{"model": 5, "runtime": "python"}')
    ),
    "a manifest nested without end": _both(
        _unsealed, _manifest(lambda text: text[:-1] + b', "x": ' + b"[" * 900 + b"]" * 900 + b"}")
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_archive_is_refused_by_everybody(case: str, tmp_path: Path) -> None:
    archive = rewritten(sealed(tmp_path), CHANGES[case])
    assert set(verdicts(archive, tmp_path).items()) == {
        (reader, False) for reader in ("verify", "inspect", "export", "worker")
    }


def test_a_comment_is_refused_by_everybody(tmp_path: Path) -> None:
    archive = rewritten(sealed(tmp_path), lambda files: None, comment=b"for nobody")
    assert not any(verdicts(archive, tmp_path).values())


def test_a_sound_archive_is_taken_by_everybody(tmp_path: Path) -> None:
    assert all(verdicts(sealed(tmp_path), tmp_path).values())


def test_an_archive_without_a_seal_is_taken_but_not_verified(tmp_path: Path) -> None:
    found = verdicts(rewritten(sealed(tmp_path), _unsealed), tmp_path)
    assert found == {"verify": False, "inspect": True, "export": True, "worker": True}


@pytest.mark.nightly
def test_no_certificate_is_written_for_weights_that_the_seal_does_not_name(tmp_path: Path) -> None:
    archive = sealed(tmp_path)
    code, output = exported(archive, tmp_path)
    assert code == 0, output
    code, output = exported(rewritten(archive, CHANGES["other weights under the seal"]), tmp_path)
    assert code == 1
    assert "SHA-256 is" in output
    result = CliRunner().invoke(inspect_app, [str(archive)])
    assert result.exit_code == 1
    assert "the file is damaged or was changed" in " ".join(result.output.split())


@pytest.mark.parametrize("kind", ["sealed archive", "archive", "checkpoint"])
def test_a_flipped_bit_of_a_stored_weight_is_refused_by_everybody(
    kind: str, tmp_path: Path
) -> None:
    tensor = torch.load(io.BytesIO(weights(0)), weights_only=True)["weight"].numpy().tobytes()
    path = sealed(tmp_path)
    if kind == "archive":
        rewritten(path, _unsealed)
    if kind == "checkpoint":
        path = tmp_path / "w.pt"
        path.write_bytes(weights(0))
    flip_a_bit(path, tensor, at=1000)
    for read in (read_checkpoint, describe):
        with pytest.raises(CheckpointError, match=r"(CRC-32|SHA-256) is"):
            read(path)
    assert exported(path, tmp_path)[0] == 1
    if kind != "checkpoint":
        assert not any(verdicts(path, tmp_path).values())


def test_a_checkpoint_that_was_written_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(nn.Linear(30, 20).state_dict(), tmp_path / "w.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert set(read_checkpoint(tmp_path / "w.pt").tensors) == {"weight", "bias"}


def _program(folder: Path) -> Path:
    dims = ({0: torch.export.Dim("batch", min=1, max=8)},)
    net = nn.Linear(30, 20).eval()
    program = torch.export.export(net, (torch.zeros(2, 30),), dynamic_shapes=dims)
    torch.export.save(program, folder / "net.pt2")
    return folder / "net.pt2"


def _poisoned(path: Path, change: Callable[[bytes], bytes]) -> Path:
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in files.items():
            new.writestr(name, change(content) if "/models/" in name else content)
    return path


def _guarded(text: bytes) -> bytes:
    document = json.loads(text)
    document["guards_code"] = ["L['input'].size()[0] != __import__('os').system('echo PWNED')"]
    return json.dumps(document).encode()


def _targeted(text: bytes) -> bytes:
    document = json.loads(text)
    document["graph_module"]["graph"]["nodes"][0]["target"] = "torch.os.mknod"
    return json.dumps(document).encode()


POISONS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a shape expression": (
        lambda text: text.replace(
            b"Symbol('", b"__import__('os').system('echo PWNED') or Symbol('"
        ),
        "models/",
    ),
    "a guard": (_guarded, "guards_code"),
    "an operator": (_targeted, "torch.os.mknod"),
}


@pytest.mark.parametrize("poison", POISONS)
def test_inspect_says_of_a_program_what_a_worker_says(
    poison: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change, named = POISONS[poison]
    path = _poisoned(_program(tmp_path), change)
    with pytest.raises(UnsafeProgram) as caught:
        load_program(path)
    findings = [f"{part}: {problem}" for part, problem in caught.value.findings]
    notes = describe(path)["notes"]
    assert [f"not safe to load: {finding}" for finding in findings] == [
        note for note in notes if note.startswith("not safe to load")
    ]
    assert findings
    assert all(named in finding for finding in findings)
    with pytest.raises(CheckpointError, match="Loading this exported program could run code"):
        read_checkpoint(path)
    assert "PWNED" not in "".join(capfd.readouterr())


def test_a_flipped_bit_of_a_program_is_found(tmp_path: Path) -> None:
    path = _program(tmp_path)
    with zipfile.ZipFile(path) as container:
        name = next(name for name in container.namelist() if name.endswith("/weight_0"))
        content = container.read(name)
    flip_a_bit(path, content, at=7)
    with pytest.raises(UnsafeProgram, match="weight_0: its CRC-32 is"):
        load_program(path)
    with pytest.raises(CheckpointError, match="CRC-32 is"):
        describe(path)
