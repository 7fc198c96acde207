import hashlib
import io
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from modelyard.archiver import ArchiveError, open_archive, write_archive
from modelyard.archiver.errors import ArchiveNotFound, RefusedArchive
from modelyard.archiver.untrusted.names import MANIFEST_NAME

TORCHSERVE_MANIFEST = {
    "createdOn": "17/08/2024 12:00:00",
    "runtime": "python",
    "model": {"modelName": "noop", "handler": "noop.py:handle", "modelVersion": "1.0"},
    "archiverVersion": "0.12.0",
}


@pytest.fixture
def archive(inputs: Path, tmp_path: Path) -> Path:
    return write_archive(
        "digits",
        version="1.0",
        artifact=inputs / "digits.onnx",
        handler=f"{inputs}/handler.py",
        output_dir=tmp_path / "store",
        extra_files=[inputs / "index_to_name.json"],
        examples=[f"{inputs}/7.png=7"],
    )


def problems(path: Path) -> tuple[str, ...]:
    with pytest.raises(RefusedArchive) as caught:
        open_archive(path)
    return caught.value.problems


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """Write the archive again with other content, as a zip without a flaw."""
    content = _content(path)
    change(content)
    write_zip(path, content)


def write_zip(path: Path, content: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", method) as zipped:
        for name, data in content.items():
            zipped.writestr(name, data)


def tree(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def test_what_was_packed_is_read_and_unpacked(archive: Path, inputs: Path, tmp_path: Path) -> None:
    with open_archive(archive) as opened:
        assert opened.path == archive
        assert opened.read("digits.pt2") == (inputs / "digits.pt2").read_bytes()
        assert opened.digest == hashlib.sha256(opened.read(MANIFEST_NAME)).hexdigest()
        opened.unpack(tmp_path / "out")

        unpacked = tree(tmp_path / "out")
        assert set(unpacked) == set(opened.names)
    assert unpacked["handler.py"] == (inputs / "handler.py").read_bytes()
    assert unpacked["MAR-INF/golden/0.request"] == (inputs / "7.png").read_bytes()


def test_file_that_is_not_there_is_a_key_error(archive: Path) -> None:
    with open_archive(archive) as opened, pytest.raises(KeyError):
        opened.read("lost")


def test_digest_names_the_content(archive: Path, inputs: Path, tmp_path: Path) -> None:
    (inputs / "index_to_name.json").write_text('{"0": "zero"}')
    other = write_archive(
        "digits",
        version="1.0",
        artifact=inputs / "digits.onnx",
        handler=f"{inputs}/handler.py",
        output_dir=tmp_path / "other",
        extra_files=[inputs / "index_to_name.json"],
    )

    with open_archive(archive) as a, open_archive(other) as b:
        assert a.digest != b.digest


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["store", "flate"]
)
def test_torchserves_archive_opens_without_digests(tmp_path: Path, method: int) -> None:
    content = {
        "noop.py": b"def handle(data, context):\n    return data\n" * 100,
        "sub/": b"",
        "sub/größe.txt": b"1",
        "weights.pt": os.urandom(3_000_000),
        "empty": b"",
        "two/folders/": b"",
        "late/file.txt": b"2",
        "late/": b"",
        MANIFEST_NAME: json.dumps(TORCHSERVE_MANIFEST).encode(),
    }
    write_zip(tmp_path / "noop.mar", content, method)

    with open_archive(tmp_path / "noop.mar") as opened:
        assert opened.manifest.modelyard is None
        assert opened.manifest.handler == "noop.py:handle"
        opened.unpack(tmp_path / "out")

    assert tree(tmp_path / "out") == {k: v for k, v in content.items() if not k.endswith("/")}
    assert (tmp_path / "out" / "two" / "folders").is_dir()


def test_digest_of_an_unsealed_archive_covers_every_file(tmp_path: Path) -> None:
    content = {"noop.py": b"1", MANIFEST_NAME: json.dumps(TORCHSERVE_MANIFEST).encode()}
    write_zip(tmp_path / "a.mar", content)
    write_zip(tmp_path / "b.mar", {**content, "noop.py": b"2"})

    with open_archive(tmp_path / "a.mar") as a, open_archive(tmp_path / "b.mar") as b:
        assert a.digest != b.digest


def test_streamed_zip_of_another_tool_opens(tmp_path: Path) -> None:
    path = tmp_path / "streamed.mar"

    class Unseekable(io.BytesIO):
        def tell(self) -> int:
            raise OSError("a pipe has no position")

    target = Unseekable()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("noop.py", "x = 1\n" * 50)
        zipped.writestr(MANIFEST_NAME, json.dumps(TORCHSERVE_MANIFEST))
    path.write_bytes(target.getvalue())

    with open_archive(path) as opened:
        assert opened.read("noop.py") == b"x = 1\n" * 50


def test_every_flipped_byte_is_found(archive: Path) -> None:
    data = archive.read_bytes()
    step = 97  # every 97th: all structures are hit, in a second
    for at in range(0, len(data), step):
        changed = bytearray(data)
        changed[at] ^= 0x20
        archive.write_bytes(changed)
        try:
            with open_archive(archive) as opened:
                content = {name: opened.read(name) for name in opened.names}
        except RefusedArchive:
            continue
        # What may change unseen means nothing: time stamps, permission bits, tool versions.
        archive.write_bytes(data)
        with open_archive(archive) as opened:
            assert content == {name: opened.read(name) for name in opened.names}, at


def test_flipped_byte_in_a_weight_is_named_by_its_digest(archive: Path) -> None:
    old = _content(archive)["digits.pt2"]
    new = old[:500] + bytes([old[500] ^ 1]) + old[501:]
    archive.write_bytes(archive.read_bytes().replace(old, new))

    was, found = (hashlib.sha256(each).hexdigest()[:12] for each in (old, new))
    assert problems(archive) == (
        f'"digits.pt2": SHA-256 is {found}…, the manifest says {was}…: the file is damaged or was '
        "changed",
    )


def test_flipped_byte_without_digests_is_found_by_its_checksum(tmp_path: Path) -> None:
    content = {"w.pt": b"weights" * 10, MANIFEST_NAME: json.dumps(TORCHSERVE_MANIFEST).encode()}
    write_zip(tmp_path / "a.mar", content, zipfile.ZIP_STORED)
    data = bytearray((tmp_path / "a.mar").read_bytes())
    data[data.index(b"weights")] ^= 1
    (tmp_path / "a.mar").write_bytes(data)

    (problem,) = problems(tmp_path / "a.mar")

    assert problem.startswith('"w.pt": its CRC-32 is ')


def test_replaced_added_and_removed_files_are_all_reported(archive: Path) -> None:
    def change(content: dict[str, bytes]) -> None:
        content["digits.onnx"] = b"other weights"
        content["sitecustomize.py"] = b"import os"
        del content["index_to_name.json"]

    rewrite(archive, change)
    found = problems(archive)

    assert len(found) == 3
    assert found[0].startswith('"digits.onnx": SHA-256 is ')
    assert found[1] == '"index_to_name.json" is missing'
    assert found[2].startswith('"sitecustomize.py" is not among the manifest\'s digests')


def test_problems_of_names_content_and_manifest_are_one_error(archive: Path) -> None:
    def change(content: dict[str, bytes]) -> None:
        manifest = json.loads(content[MANIFEST_NAME])
        manifest["model"]["configFile"] = "lost.yaml"
        content[MANIFEST_NAME] = json.dumps(manifest).encode()
        content["../x"] = b""
        content["HANDLER.py"] = b""
        content["digits.pt2"] = b""

    rewrite(archive, change)
    text = "\n".join(problems(archive))

    assert '"../x": the path holds the part ".."' in text
    assert '"handler.py" and "HANDLER.py" are one name where case does not count' in text
    assert '"digits.pt2": SHA-256 is ' in text
    assert 'model.configFile: "lost.yaml" is not in the archive' in text


def test_wrong_manifest_fields_are_named(archive: Path) -> None:
    def change(content: dict[str, bytes]) -> None:
        manifest = json.loads(content[MANIFEST_NAME])
        manifest["modelyard"]["golden"][0]["tolerance"] = "x"
        manifest["runtime"] = None
        content[MANIFEST_NAME] = json.dumps(manifest).encode()

    rewrite(archive, change)

    assert problems(archive) == (
        "MAR-INF/MANIFEST.json: runtime: expected a string that is not empty, found null",
        'MAR-INF/MANIFEST.json: modelyard.golden[0].tolerance: expected a number, found "x"',
    )


def test_a_handler_that_is_not_in_the_archive_is_named_without_its_function(archive: Path) -> None:
    def change(content: dict[str, bytes]) -> None:
        manifest = json.loads(content[MANIFEST_NAME])
        manifest["model"]["handler"] = "lost.py:handle"
        content[MANIFEST_NAME] = json.dumps(manifest).encode()

    rewrite(archive, change)

    assert problems(archive) == (
        'MAR-INF/MANIFEST.json: model.handler: "lost.py" is not in the archive',
    )


def test_zip_without_manifest_is_refused_unless_none_is_needed(tmp_path: Path) -> None:
    write_zip(tmp_path / "a.mar", {"noop.py": b""})

    assert problems(tmp_path / "a.mar") == (
        "MAR-INF/MANIFEST.json is missing: this zip is not a model archive",
    )
    with open_archive(tmp_path / "a.mar", needs_manifest=False) as opened:
        assert (opened.names, opened.manifest.model_name) == (("noop.py",), None)


def test_a_manifest_that_is_not_needed_is_read_where_there_is_one(tmp_path: Path) -> None:
    write_zip(tmp_path / "a.mar", {MANIFEST_NAME: json.dumps(TORCHSERVE_MANIFEST).encode()})

    with open_archive(tmp_path / "a.mar", needs_manifest=False) as opened:
        assert opened.manifest.model_name == "noop"


def test_manifest_over_the_limit_is_not_read(tmp_path: Path) -> None:
    data = json.dumps({**TORCHSERVE_MANIFEST, "x": os.urandom(500_000).hex()}).encode()
    write_zip(tmp_path / "most.mar", {MANIFEST_NAME: data.ljust(1 << 20)})
    write_zip(tmp_path / "more.mar", {MANIFEST_NAME: data.ljust((1 << 20) + 1)})

    open_archive(tmp_path / "most.mar").close()
    assert problems(tmp_path / "more.mar") == (
        "MAR-INF/MANIFEST.json has 1048577 bytes; at most 1048576 are read",
    )


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"hello, this is not a zip at all" * 10, b"\0" * 5000]
)
def test_what_is_no_zip_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.mar").write_bytes(data)

    assert problems(tmp_path / "a.mar")[0].startswith(("it has ", "it is not a zip"))


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.99, 0.9999])
def test_truncated_archive_is_refused(archive: Path, share: float) -> None:
    data = archive.read_bytes()
    archive.write_bytes(data[: int(len(data) * share)])

    assert problems(archive)


def test_missing_file_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(ArchiveNotFound, match="there is no archive"):
        open_archive(tmp_path / "lost.mar")


def test_pipe_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mar")

    with pytest.raises(ArchiveError, match="is neither a file nor a folder"):
        open_archive(tmp_path / "pipe.mar")


def test_archive_replaced_after_opening_changes_nothing(archive: Path, tmp_path: Path) -> None:
    with open_archive(archive) as opened:
        (tmp_path / "evil").write_bytes(b"evil")
        (tmp_path / "evil").replace(archive)
        opened.unpack(tmp_path / "out")

    assert (tmp_path / "out" / "handler.py").exists()


def test_archive_changed_in_place_after_opening_is_not_unpacked(
    archive: Path, tmp_path: Path
) -> None:
    with open_archive(archive) as opened:
        data = archive.read_bytes()
        with archive.open("r+b") as file:
            file.seek(data.index(b"class DigitsHandler"))
            file.write(b"evilx")

        with pytest.raises(RefusedArchive, match=r"handler.py was changed after the archive"):
            opened.unpack(tmp_path / "out" / "folder")
        with pytest.raises(RefusedArchive, match=r"handler.py was changed after the archive"):
            opened.read("handler.py")

    assert list((tmp_path / "out").iterdir()) == []


def test_what_was_written_while_it_was_checked_is_what_is_unpacked(
    archive: Path, tmp_path: Path
) -> None:
    (tmp_path / "staging").mkdir()
    with open_archive(archive, staging=tmp_path / "staging") as opened:
        archive.write_bytes(b"changed in place")
        opened.unpack(tmp_path / "out")
        assert list((tmp_path / "staging").iterdir()) == []
    assert b"class DigitsHandler" in (tmp_path / "out" / "handler.py").read_bytes()


def test_an_archive_that_cannot_be_written_while_it_is_checked_is_an_error(
    archive: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ArchiveError, match=r"^cannot unpack digits\.mar: No such file or directory"
    ):
        open_archive(archive, staging=tmp_path / "absent")


def test_an_archive_may_be_closed_twice(archive: Path, tmp_path: Path) -> None:
    with open_archive(archive, staging=tmp_path) as opened:
        opened.close()
    assert not list(tmp_path.glob(".*"))


def lengthen(content: dict[str, bytes]) -> None:
    content["digits.onnx"] += b"!"


def climb(content: dict[str, bytes]) -> None:
    content["../outside.py"] = b""


@pytest.mark.parametrize("change", [lengthen, climb])
def test_what_is_refused_leaves_nothing_where_it_was_to_be_written(
    archive: Path, tmp_path: Path, change: Callable[[dict[str, bytes]], None]
) -> None:
    staging = tmp_path / "below" / "staging"
    staging.mkdir(parents=True)
    rewrite(archive, change)
    with pytest.raises(RefusedArchive):
        open_archive(archive, staging=staging)
    assert tree(tmp_path / "below") == {} and list(staging.iterdir()) == []


def test_folder_that_holds_something_is_left_alone(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_bytes(b"")

    with open_archive(archive) as opened, pytest.raises(ArchiveError, match="not an empty folder"):
        opened.unpack(tmp_path / "out")

    assert set(tree(tmp_path / "out")) == {"mine"}


def test_empty_folder_is_filled_and_keeps_its_mode(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o700)

    with open_archive(archive) as opened:
        opened.unpack(tmp_path / "out")

    assert (tmp_path / "out" / "digits.onnx").exists()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_progress_ends_at_the_total(archive: Path) -> None:
    seen: list[tuple[int, int]] = []

    open_archive(archive, progress=lambda done, total: seen.append((done, total))).close()

    assert seen[-1][0] == seen[-1][1] == sum(map(len, _content(archive).values()))


def test_failed_opening_leaves_no_open_file(archive: Path) -> None:
    shutil.copy(archive, archive.with_suffix(".bad"))
    archive.with_suffix(".bad").write_bytes(archive.read_bytes()[:-1])
    before = len(list(Path("/proc/self/fd").iterdir()))

    problems(archive.with_suffix(".bad"))

    assert len(list(Path("/proc/self/fd").iterdir())) == before


def _content(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as zipped:
        return {name: zipped.read(name) for name in zipped.namelist()}


def with_checksum(content: bytes, checksum: int) -> bytes:
    """Return the content with its last four bytes such that its CRC-32 is `checksum`."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
        table.append(value)
    by_top = {entry >> 24: at for at, entry in enumerate(table)}
    state = ~checksum & 0xFFFFFFFF
    for _ in range(4):
        at = by_top[state >> 24]
        state = (state ^ table[at]) << 8 & 0xFFFFFFFF | at
    start = content[:-4]
    return start + (state ^ ~zlib.crc32(start) & 0xFFFFFFFF).to_bytes(4, "little")


def test_a_change_after_the_check_that_keeps_size_and_checksum_is_refused(
    archive: Path, tmp_path: Path
) -> None:
    content = _content(archive)
    write_zip(archive, content, zipfile.ZIP_STORED)
    old = content["digits.pt2"]
    new = with_checksum(b"x" + old[1:], zlib.crc32(old))
    assert zlib.crc32(new) == zlib.crc32(old) and len(new) == len(old) and new != old
    with open_archive(archive) as opened:
        data = bytearray(archive.read_bytes())
        at = data.index(old)
        with archive.open("r+b") as file:
            file.seek(at)
            file.write(new)
        with pytest.raises(RefusedArchive, match=r"digits\.pt2 was changed after .* was opened"):
            opened.unpack(tmp_path / "out")
        assert not (tmp_path / "out").exists()
        with pytest.raises(RefusedArchive, match=r"digits\.pt2 was changed after"):
            opened.read("digits.pt2")
