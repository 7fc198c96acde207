import mmap
import os
from pathlib import Path

import pytest

from benchmarks import procfs


def test_only_mappings_of_a_folders_files_are_added_up(tmp_path: Path) -> None:
    inside = tmp_path / "unpacked" / "a b"
    inside.parent.mkdir()
    inside.write_bytes(bytes(1_000_000))
    with inside.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        pages[:409_600] = b"x" * 409_600
        found = procfs.mapped(os.getpid(), tmp_path / "unpacked")
        assert procfs.mapped(os.getpid(), tmp_path / "other") == procfs.Mapped(0, 0, 0)
        assert found.own_mb == pytest.approx(0.4096)
        assert found.own_mb <= found.pss_mb <= found.resident_mb < 1.1


def test_this_process_can_be_looked_at() -> None:
    pid = os.getpid()
    assert procfs.cpu_s(pid) > 0
    memory = procfs.memory(pid)
    assert 0 < memory.own_mb < memory.rss_mb
    assert 0 < memory.pss_mb <= memory.rss_mb
    assert procfs.busy_s() > procfs.cpu_s(pid)
    assert procfs.descriptors(pid) > 2
    assert procfs.threads(pid) >= 1
    assert pid in procfs.descendants(os.getppid())


def test_the_machine_is_described_without_its_name() -> None:
    assert set(procfs.describe_machine()) == {"cpu", "cores", "memory_gb", "kernel"}
