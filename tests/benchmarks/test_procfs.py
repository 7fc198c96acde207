import os
from pathlib import Path

import pytest

from benchmarks import procfs


@pytest.mark.parametrize("name", ["python", "a ) R 1 2"], ids=["plain name", "hostile name"])
def test_cpu_time_is_user_and_system_time(name: str) -> None:
    before = "S 1 1 1 0 -1 4194560 10 0 0 0"
    stat = f"77 ({name}) {before} 150 50 7 7 20 0 1 0 100 1000 10"
    assert procfs.parse_cpu_s(stat) == 200 / procfs.TICKS_PER_S


def test_memory_is_in_millions_of_bytes() -> None:
    rollup = "00400000-7fff [rollup]\nRss:    1000 kB\nPss:     500 kB\nPss_Dirty: 7 kB\n"
    rollup += "Anonymous: 250 kB\n"
    assert procfs.parse_memory(rollup) == procfs.Memory(rss_mb=1.024, pss_mb=0.512, own_mb=0.256)


def test_only_mappings_of_a_folders_files_are_added_up() -> None:
    kinds = "Rss: 1000 kB\nPss: 500 kB\nShared_Clean: 4 kB\nAnonymous: 250 kB\nVmFlags: rd wr\n"
    smaps = "".join(
        f"7f00-7f01 rw-p 00000000 fe:00 12 {file}\n{kinds}"
        for file in ("/state/unpacked/a b", "/state/unpacked/c (deleted)", "/state/other", "[heap]")
    )
    smaps += f"7f00-7f01 rw-p 00000000 00:00 0\n{kinds}"
    found = procfs.parse_mapped(smaps, Path("/state/unpacked"))
    assert found == procfs.Mapped(resident_mb=2.048, pss_mb=1.024, own_mb=0.512)


def test_busy_time_leaves_out_idle_waiting_and_stolen_time() -> None:
    stat = "cpu  100 20 30 5000 400 5 6 9999 0 0\ncpu0 1 2 3 4\n"
    assert procfs.parse_busy_s(stat) == 161 / procfs.TICKS_PER_S


def test_this_process_can_be_looked_at() -> None:
    assert procfs.cpu_s(os.getpid()) > 0
    assert 0 < procfs.memory(os.getpid()).pss_mb <= procfs.memory(os.getpid()).rss_mb
    assert procfs.busy_s() > 0


def test_the_machine_is_described_without_its_name() -> None:
    assert set(procfs.describe_machine()) == {"cpu", "cores", "memory_gb", "kernel"}
