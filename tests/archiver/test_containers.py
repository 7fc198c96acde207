"""Zip, gzip'ed tar and folder: the same archive three times, and what each reader refuses."""

import gzip
import io
import os
import random
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from modelyard.archiver import Archive, open_archive, write_archive
from modelyard.archiver.errors import CannotArchive, RefusedArchive
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.archiver.writers import StoredGzip, shrinks

FORMATS = {"zip-store": "digits.mar", "tgz": "digits.tar.gz", "no-archive": "digits"}
MANIFEST = b"""{"runtime": "python", "model": {"modelName": "noop", "handler": "noop.py"}}"""


def write(inputs: Path, store: Path, archive_format: str, force: bool = False) -> Path:
    return write_archive(
        "digits",
        version="1.0",
        artifact=inputs / "digits.onnx",
        handler=f"{inputs}/handler.py",
        output_dir=store,
        extra_files=[inputs / "index_to_name.json"],
        examples=[f"{inputs}/7.png=7"],
        archive_format=archive_format,
        force=force,
    )


def tree(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def content(archive: Archive) -> dict[str, bytes]:
    return {name: archive.read(name) for name in archive.names}


def problems(path: Path) -> tuple[str, ...]:
    with pytest.raises(RefusedArchive) as caught:
        open_archive(path)
    return caught.value.problems


# -- all three -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("archive_format", "name"), FORMATS.items())
def test_each_container_holds_the_same_under_the_same_digest(
    inputs: Path, tmp_path: Path, archive_format: str, name: str
) -> None:
    zipped = write(inputs, tmp_path / "zip", "zip-store")
    path = write(inputs, tmp_path / "store", archive_format)

    assert path == tmp_path / "store" / name
    assert names_in(path.parent) == [name]
    with open_archive(zipped) as expected, open_archive(path) as opened:
        assert content(opened) == content(expected)
        assert opened.digest == expected.digest
        opened.unpack(tmp_path / "out")
    assert (tmp_path / "out" / "handler.py").read_bytes() == (inputs / "handler.py").read_bytes()
    assert (tmp_path / "out" / "MAR-INF" / "golden" / "0.request").is_file()
    with open_archive(path, staging=tmp_path / "zip") as opened:
        opened.unpack(tmp_path / "new" / "again")
        assert opened.read("handler.py") == (inputs / "handler.py").read_bytes()
    assert tree(tmp_path / "new" / "again") == tree(tmp_path / "out")
    with open_archive(path, staging=tmp_path / "zip") as opened:
        pass
    assert names_in(tmp_path / "zip") == ["digits.mar"]


@pytest.mark.parametrize("archive_format", FORMATS)
def test_an_archive_is_replaced_only_by_force(
    inputs: Path, tmp_path: Path, archive_format: str
) -> None:
    path = write(inputs, tmp_path, archive_format)
    (inputs / "handler.py").write_text("class Other:\n    pass\n")

    with pytest.raises(Exception, match="already exists"):
        write(inputs, tmp_path, archive_format)
    write(inputs, tmp_path, archive_format, force=True)

    with open_archive(path) as opened:
        assert opened.read("handler.py") == b"class Other:\n    pass\n"
    assert {each.name for each in tmp_path.iterdir()} == {"inputs", path.name}


@pytest.mark.parametrize("archive_format", FORMATS)
def test_what_fails_leaves_nothing_and_keeps_the_old(
    inputs: Path, tmp_path: Path, archive_format: str
) -> None:
    path = write(inputs, tmp_path / "store", archive_format)
    with open_archive(path) as opened:
        before = content(opened)
    (inputs / "digits.pt2").write_bytes(b"changed")

    with pytest.raises(CannotArchive, match=r"digits.pt2 is not the file that its report"):
        write(inputs, tmp_path / "store", archive_format, force=True)

    assert names_in(tmp_path / "store") == [path.name]
    with open_archive(path) as opened:
        assert content(opened) == before


# -- gzip'ed tar ---------------------------------------------------------------------------------


def test_a_tar_has_one_top_folder_and_nothing_of_this_machine(inputs: Path, tmp_path: Path) -> None:
    path = write(inputs, tmp_path, "tgz")

    with tarfile.open(path) as tar:
        members = tar.getmembers()
    assert {member.name.partition("/")[0] for member in members} == {"digits"}
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {
        (0, 0, 0, "", "", 0o644)
    }
    assert path.read_bytes()[:10] == b"\x1f\x8b\x08\0\0\0\0\0\0\xff"


@pytest.mark.parametrize("size", [0, 1, 65534, 65535, 65536, 200_000])
def test_a_stored_gzip_is_the_same_however_it_is_cut(size: int) -> None:
    data = random.Random(size).randbytes(size)
    streams = []
    for cut in (1000, 65535, 100_000):
        file = io.BytesIO()
        stream = StoredGzip(file)
        for at in range(0, size, cut):
            stream.write(data[at : at + cut])
        stream.close()
        streams.append(file.getvalue())

    assert gzip.decompress(streams[0]) == data
    assert len(set(streams)) == 1


def tar_of(path: Path, *entries: tarfile.TarInfo | tuple[str, bytes]) -> Path:
    """Write a gzip'ed tar as Python does, with the manifest at its end."""
    with tarfile.open(path, "w:gz") as tar:
        for entry in (*entries, ("noop/MAR-INF/MANIFEST.json", MANIFEST)):
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry, io.BytesIO(b"x" * entry.size))
                continue
            info = tarfile.TarInfo(entry[0])
            info.size = len(entry[1])
            info.mtime = 1.5  # a pax header, as files on disk get
            tar.addfile(info, io.BytesIO(entry[1]))
    return path


def kind(name: str, flag: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = flag, link
    return info


def test_a_tar_of_another_tool_opens(tmp_path: Path) -> None:
    long = "n" * 120
    path = tar_of(
        tmp_path / "noop.tar.gz",
        kind("noop/", tarfile.DIRTYPE),
        ("noop/noop.py", b"def handle(data, context): pass\n"),
        ("noop/größe.txt", b"1"),
        (f"noop/sub/{long}", b"2" * 700),
    )

    with open_archive(path) as opened:
        assert opened.manifest.modelyard is None
        assert set(opened.names) == {"noop.py", "größe.txt", f"sub/{long}", MANIFEST_NAME}
        assert opened.read(f"sub/{long}") == b"2" * 700
        assert opened.read("noop.py").startswith(b"def handle")  # a step back


def test_a_gnu_tar_with_a_dot_as_top_folder_opens(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "MAR-INF" / "MANIFEST.json").write_bytes(MANIFEST)
    (folder / ("n" * 150)).write_bytes(b"long")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=tarfile.GNU_FORMAT) as tar:
        tar.add(folder, ".")

    with open_archive(tmp_path / "a.tar.gz") as opened:
        assert opened.read("n" * 150) == b"long"


HOSTILE: dict[str, tuple[tuple[tarfile.TarInfo | tuple[str, bytes], ...], str]] = {
    "parent folder": ((("noop/../../x", b""),), 'the path holds the part ".."'),
    "parent as top": ((("../x", b""),), "its files do not lie in one folder"),
    "absolute": ((("/noop/x", b""),), "its files do not lie in one folder"),
    "backslash": ((("noop/a\\..\\x", b""),), "the name holds a backslash"),
    "device name": ((("noop/aux.txt", b""),), "is a device on Windows"),
    "two top folders": ((("other/x", b""),), '"noop", "other"'),
    "file without a folder": ((("noop.py", b""),), "its files do not lie in one folder"),
    "symbolic link": ((kind("noop/x", tarfile.SYMTYPE, "/etc/passwd"),), "it is a symbolic link"),
    "hard link": ((kind("noop/x", tarfile.LNKTYPE, "noop/y"),), "it is a hard link"),
    "character device": ((kind("noop/x", tarfile.CHRTYPE),), "it is a character device"),
    "pipe": ((kind("noop/x", tarfile.FIFOTYPE),), "it is a named pipe"),
    "unknown kind": ((kind("noop/x", b"Z"),), "neither a file nor a folder"),
    "same name twice": ((("noop/x", b"1"), ("noop/x", b"2")), '"x" is there twice'),
    "case": ((("noop/x", b"1"), ("noop/X", b"2")), "are one name where case does not count"),
    "file and folder": ((("noop/x", b"1"), ("noop/x/y", b"2")), "is a file, and a folder in"),
}


@pytest.mark.parametrize(("entries", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tar_is_refused_and_nothing_is_written(
    tmp_path: Path, entries: tuple[tarfile.TarInfo, ...], problem: str
) -> None:
    path = tar_of(tmp_path / "a.tar.gz", *entries)

    assert problem in "\n".join(problems(path))
    assert names_in(tmp_path) == ["a.tar.gz"]


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar.gz", ("noop/zeros", bytes(30_000_000)))

    (problem,) = problems(path)

    assert "it unpacks to over 200 times its" in problem


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar.gz", *((f"noop/{i}", b"") for i in range(10_001)))

    assert "it holds more than 10000 files" in problems(path)[0]


def tar_bytes(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda tar: tar[:1500], "it ends too early"),
    "no end": (lambda tar: tar.rstrip(b"\0") + b"\0" * 100, "it ends too early"),
    "something after the end": (lambda tar: tar + b"x", "bytes follow the end of the tar"),
    "header": (lambda tar: tar.replace(b"noop.py", b"evil.py", 1), "the checksum of a header"),
    "not a tar": (lambda tar: b"x" * 2000, "a number in a header is damaged"),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_tar_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], problem: str
) -> None:
    info = tarfile.TarInfo("noop/noop.py")
    info.size = 100
    path = tar_of(tmp_path / "a.tar.gz", info)
    path.write_bytes(gzip.compress(damage(tar_bytes(path))))

    assert problem in problems(path)[0]


def test_a_damaged_gzip_stream_is_refused(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar.gz", ("noop/noop.py", b"x" * 100))
    data = path.read_bytes()

    for changed, problem in (
        (data[:-4] + b"\0\0\0\0", "its compressed data is damaged"),
        (data[:-9], "its compressed data ends too early"),
        (data + b"more", "bytes follow the end of its compressed data"),
        (data + data, "bytes follow the end of its compressed data"),
    ):
        path.write_bytes(changed)
        assert problem in problems(path)[0]


def test_a_changed_weight_in_a_tar_is_named_by_its_digest(inputs: Path, tmp_path: Path) -> None:
    path = write(inputs, tmp_path, "tgz")
    tar = tar_bytes(path).replace(b"digits.pt2 digits.pt2 ", b"digits.pt2 digits.pt3 ", 1)
    path.write_bytes(gzip.compress(tar))

    (problem,) = problems(path)

    assert problem.startswith('"digits.pt2": SHA-256 is ')


def test_a_tar_changed_after_it_was_opened_is_not_unpacked(inputs: Path, tmp_path: Path) -> None:
    path = write(inputs, tmp_path, "tgz")

    with open_archive(path) as opened:
        with path.open("r+b") as file:
            file.seek(path.read_bytes().index(b"class DigitsHandler"))
            file.write(b"evilx")
        with pytest.raises(RefusedArchive, match="was changed after the archive was opened"):
            opened.unpack(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_readers_of_one_tar_do_not_disturb_each_other(inputs: Path, tmp_path: Path) -> None:
    with open_archive(write(inputs, tmp_path, "tgz")) as opened:
        one = opened._checked_chunks(opened._files["digits.onnx"])
        first = next(one)
        other = opened.read("digits.pt2")
        assert first + b"".join(one) == (inputs / "digits.onnx").read_bytes()
        assert other == (inputs / "digits.pt2").read_bytes()


# -- folder --------------------------------------------------------------------------------------


@pytest.fixture
def folder(inputs: Path, tmp_path: Path) -> Path:
    return write(inputs, tmp_path / "store", "no-archive")


def test_a_folder_inside_a_folder_is_the_archive(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outer").mkdir()
    folder.rename(tmp_path / "outer" / "inner")

    with open_archive(tmp_path / "outer") as opened:
        assert "handler.py" in opened.names


def test_files_added_to_a_folder_are_refused(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("import os\n")

    assert problems(folder)[0].startswith('"sitecustomize.py" is not among the manifest')


def test_a_link_in_a_folder_is_refused_wherever_it_leads(folder: Path) -> None:
    (folder / "handler.py").rename(folder.parent / "handler.py")
    (folder / "handler.py").symlink_to("../handler.py")
    (folder / "MAR-INF" / "golden" / "loop").symlink_to(".")

    text = "\n".join(problems(folder))

    assert '"handler.py": it is a symbolic link' in text
    assert '"MAR-INF/golden/loop": it is a symbolic link' in text


def test_a_pipe_in_a_folder_is_refused_instead_of_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe")

    assert problems(folder) == ('"pipe": it is neither a file nor a folder',)


def test_a_folder_without_a_manifest_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    assert problems(tmp_path / "a") == (
        "MAR-INF/MANIFEST.json is missing: this folder is not a model archive",
    )


def change_in_place(folder: Path) -> None:
    (folder / "handler.py").write_text("class EvilsHandler:\n    pass\n")


def put_a_link(folder: Path) -> None:
    (folder / "handler.py").rename(folder.parent / "away.py")
    (folder / "handler.py").symlink_to(folder.parent / "away.py")


def put_a_link_above(folder: Path) -> None:
    shutil.move(folder / "MAR-INF", folder.parent / "away")
    (folder / "MAR-INF").symlink_to(folder.parent / "away")


def remove(folder: Path) -> None:
    (folder / "handler.py").unlink()


@pytest.mark.parametrize("change", [change_in_place, put_a_link, put_a_link_above, remove])
def test_a_folder_changed_after_it_was_opened_is_not_unpacked(
    folder: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    with open_archive(folder) as opened:
        change(folder)
        with pytest.raises(RefusedArchive, match="was changed after the archive was opened"):
            opened.unpack(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_archive_is_not_replaced(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / "digits").mkdir(parents=True)
    (tmp_path / "store" / "digits" / "thesis.tex").write_text("precious")

    with pytest.raises(CannotArchive, match="is not an archive; it is not replaced"):
        write(inputs, tmp_path / "store", "no-archive", force=True)

    assert (tmp_path / "store" / "digits" / "thesis.tex").read_text() == "precious"
    assert names_in(tmp_path / "store") == ["digits"]


# -- compressed zip ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"text " * 100_000, False),  # 2.5 MB would shrink too much to be read again
        (b"".join(b"%d\n" % i for i in range(100_000)), True),
        (random.Random(0).randbytes(2_000_000), False),
        (bytes(10), True),
        (b"", True),
    ],
    ids=["bomb-like", "text", "weights", "small", "empty"],
)
def test_only_what_shrinks_and_may_be_read_again_is_compressed(data: bytes, expected: bool) -> None:
    assert shrinks(lambda: iter([data]), len(data)) is expected


def test_a_zip_named_like_a_tar_is_read_by_its_content(inputs: Path, tmp_path: Path) -> None:
    path = write(inputs, tmp_path, "zip-store").rename(tmp_path / "model.tar.gz")

    with open_archive(path) as opened:
        assert "handler.py" in opened.names
    assert zipfile.is_zipfile(path)
