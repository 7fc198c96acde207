"""What this machine is: the part of a measurement that the numbers do not hold."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_RAPL = Path("/sys/class/powercap")
"""A folder for each package of a CPU, `intel-rapl:0`; AMD's have the same name."""


@dataclass(frozen=True)
class Machine:
    """Hardware and versions that a measurement depends on."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    instructions: str
    """The vector instructions that torch uses here, such as AVX2."""
    devices: tuple[str, ...]
    """CUDA devices, by name."""
    system: str
    versions: dict[str, str]
    load: float
    """Mean number of busy processes over the last minute, before the measurement."""


def describe_machine() -> Machine:
    """Describe the machine that this process runs on."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        instructions=torch.backends.cpu.get_cpu_capability(),
        devices=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        system=f"{platform.system()} {platform.release()}",
        versions=_versions(),
        load=round(os.getloadavg()[0], 2),
    )


def read_joules(device: torch.device) -> float | None:
    """Return a counter of energy: of the CPUs' packages by RAPL, of a GPU by NVML.

    Returns:
        None where there is none, or it cannot be read; RAPL's are for root on most machines.
    """
    if device.type == "cuda":
        try:
            import pynvml  # type: ignore[import-not-found]

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(
                f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            )
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except Exception:  # not installed, an older GPU, or an error of the driver's
            return None
    try:
        counters = [(each / "energy_uj").read_text() for each in _RAPL.glob("intel-rapl:?")]
    except OSError:
        return None
    return sum(map(int, counters)) / 1e6 if counters else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "onnxruntime", "modelyard"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # the server's image may have one of the two backends only
            continue
    return found
