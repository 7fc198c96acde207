"""What is installed, what works here, and what to do about what does not."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from modelyard.base.exits import describe_exit
from modelyard.base.extras import EXTRAS
from modelyard.serve.control.sandbox import examine_machine
from modelyard.serve.control.sizing import (
    WORKER_BYTES,
    available_memory,
    memory_limits,
    this_machine,
)
from modelyard.serve.control.state import StateDir
from modelyard.serve.http.listener import find_listener
from modelyard.serve.settings import Address, Settings
from modelyard.serve.walls.measures import LACKING, OFF

OK, WARN, FAIL = "ok", "warn", "fail"

MODULES = {"pillow": "PIL", "protobuf": "google.protobuf", "pyyaml": "yaml"}
"""Distribution → what is imported, where the names differ by more than a hyphen."""
OPTIONAL = {
    "onnxscript": "to export to ONNX",
    "safetensors": "to export and inspect checkpoints",
    "transformers": "to export Hugging Face checkpoints",
    "captum": "for measures of explanations (quality=true), and those of TorchServe's handlers",
    "tokenizers": "for handlers of text",
    "soundfile": "for handlers of sounds",
    "soxr": "for handlers of sounds",
}
PROBE_S = 180.0
LEAST_FILES = 4096
"""Descriptors: one per connection, three per worker."""
LEAST_MEMORY_BYTES = 1 << 30
LEAST_SHM_BYTES = 64 << 20
LEAST_DISK_BYTES = 1 << 30
SHOWN = 300
"""Characters of what a program said that failed."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: str
    """ok; warn: something will not work, or not well; fail: serving does not work."""
    found: str
    advice: str = ""
    """What to do; empty where nothing needs to be done."""


def examine(settings: Settings) -> Iterator[Check]:
    """Yield the checks as they are made.

    Args:
        settings: settings whose ports and state folder are looked at.
    """
    yield check_python()
    yield from check_packages()
    yield check_compiler()
    yield check_cores()
    yield check_memory()
    yield check_open_files()
    yield check_shared_memory()
    yield check_kernel()
    yield from check_walls(settings)
    yield Check("tokens", WARN if settings.warnings else OK, settings.who_is_let_in)
    yield check_temporary_folder()
    yield check_state_folder(settings.state_dir)
    yield from check_ports(settings)


# -- what is installed -------------------------------------------------------------------------


def check_python() -> Check:
    """Compare the interpreter with what the package asks for."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.platform != "linux":
        return Check("python", FAIL, f"{found} on {sys.platform}", "Modelyard runs on Linux only")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        bound = importlib.metadata.metadata("modelyard")["Requires-Python"]
        if not SpecifierSet(bound).contains(platform.python_version(), prereleases=True):
            return Check("python", FAIL, f"{found}, expected {bound}", f"install Python {bound}")
    if platform.python_version() == "3.13.0":
        slow = f"{found}, with which torch's compiler checks its guards slowly"
        return Check("python", WARN, slow, "take a later 3.13 where models are exported")
    return Check("python", OK, found)


def check_packages() -> Iterator[Check]:
    """Compare every dependency with its bound, import it, and try what it is needed for."""
    try:
        lines = importlib.metadata.requires("modelyard") or []
    except importlib.metadata.PackageNotFoundError:
        advice = "install it: `pip install ./client .` in its folder"
        yield Check("modelyard", FAIL, "not installed as a package: bounds are unknown", advice)
        return
    yield Check("modelyard", OK, importlib.metadata.version("modelyard"))
    requirements = [Requirement(line) for line in lines]
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate()]
    bounds = {each.name: each for each in requirements}
    optional = [bounds.get(name, Requirement(name)) for name in OPTIONAL]
    tried = try_modules([_module(each) for each in (*needed, *optional) if _version(each.name)])
    for requirement in needed:
        yield _check_package(requirement, tried, needed_for="")
    for requirement in optional:
        yield _check_package(requirement, tried, needed_for=OPTIONAL[requirement.name])
    has_devices = any(file.name[6:].isdigit() for file in Path("/dev").glob("nvidia*"))
    yield check_cuda(tried.get("cuda", {}), _driver(), has_devices)


def _check_package(
    requirement: Requirement, tried: Mapping[str, dict[str, Any]], needed_for: str
) -> Check:
    name, bound = requirement.name, str(requirement.specifier)
    version = _version(name)
    bad = WARN if needed_for else FAIL
    install = f"pip install '{name}{bound}'"
    if version is None:
        if needed_for:
            extra = EXTRAS.get(_module(requirement))
            advised = f": pip install 'modelyard[{extra}]'" if extra else ""
            return Check(name, OK, f"not installed; only {needed_for}{advised}")
        return Check(name, FAIL, "not installed", install)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name, bad, f"{version}, expected {bound}", install)
    error = tried.get(_module(requirement), {}).get("error", "it was not reached")
    if error:
        advice = f"pip install --force-reinstall '{name}{bound}'"
        return Check(name, bad, f"{version} does not work: {error}", advice)
    return Check(name, OK, version)


def _module(requirement: Requirement) -> str:
    return MODULES.get(requirement.name, requirement.name.replace("-", "_"))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def try_modules(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return module → what the probe says: {"error": text or None, "found": …}.

    When a module ends the probe, the rest are tried in another one.
    """
    tried: dict[str, dict[str, Any]] = {}
    left = [*names, "cuda"]
    while left:
        command = [sys.executable, "-P", "-m", "modelyard.plugins.cluster.doctor.probe", *left]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S)
            ended, output = (
                f"it ended the process with {describe_exit(ran.returncode)}",
                ran.stdout,
            )
        except subprocess.TimeoutExpired as error:
            ended = f"no end after {PROBE_S:g} s"
            output = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else ""
        culprit = left[0]
        for line in output.splitlines():
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                culprit = said.get("begin", culprit)
                if "name" in said:
                    tried[said["name"]] = said
        if culprit not in tried:
            tried[culprit] = {"error": ended, "found": {}}
        left = [name for name in left if name not in tried]
    return tried


def check_cuda(tried: Mapping[str, Any], driver: str | None, has_devices: bool) -> Check:
    """Compare torch's view of CUDA with the driver and the devices that the kernel shows.

    Args:
        tried: the probe's answer.
        driver: version of the NVIDIA driver, or None.
        has_devices: whether there are device files.
    """
    found: Mapping[str, Any] = tried.get("found") or {}
    built_for, devices = found.get("built_for"), found.get("devices") or []
    shown = f"driver {driver}" if driver else "no driver"
    if error := tried.get("error"):
        advice = "run on the CPU with --device cpu, or see what `nvidia-smi` says"
        return Check("cuda", WARN, f"{shown}; torch says: {error}", advice)
    if devices:
        return Check("cuda", OK, f"{', '.join(devices)}; {shown}, torch for CUDA {built_for}")
    if not has_devices and driver is None:
        return Check("cuda", OK, "no device; models run on the CPU")
    if built_for is None:
        advice = "install torch for CUDA, see https://pytorch.org/get-started/locally"
        return Check("cuda", WARN, f"{shown}, but this torch is built for the CPU", advice)
    said = "; ".join(found.get("warnings", [])) or "it sees no device"
    if not has_devices:
        advice = "in a container, start it with `--gpus all`"
        return Check("cuda", WARN, f"{shown}, but no /dev/nvidia0: {said}", advice)
    advice = f"update the driver to one for CUDA {built_for}, or install torch for an older CUDA"
    return Check("cuda", WARN, f"{shown}, torch for CUDA {built_for} says: {said}", advice)


def _driver() -> str | None:
    """Return the NVIDIA driver's version, from the kernel."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None
    words = [word for word in line.split() if word[0].isdigit() and "." in word]
    return words[0] if words else line


def check_compiler() -> Check:
    """Build a shared library, as torch.compile and AOTInductor do."""
    name = os.environ.get("CXX", "g++")
    needed = "only for `export --format aoti` and torch.compile"
    advice = "sudo apt-get install g++"
    path = shutil.which(name)
    if path is None:
        return Check("compiler", WARN, f"no {name}; {needed}", advice)
    with tempfile.TemporaryDirectory() as folder:
        command = [path, "-x", "c++", "-", "-fPIC", "-shared", "-fopenmp", "-o", f"{folder}/a.so"]
        source = "#include <omp.h>\n#include <vector>\nint f() { return omp_get_max_threads(); }\n"
        ran = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60)
    if ran.returncode:
        end = " ".join(ran.stderr.split())[-SHOWN:]
        return Check("compiler", WARN, f"{path} does not build: {end}", advice)
    ran = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    return Check("compiler", OK, ran.stdout.partition("\n")[0] or path)


# -- the machine -------------------------------------------------------------------------------


def check_cores() -> Check:
    """Return how many cores workers share, and what limits them."""
    machine = this_machine()
    return Check("cores", OK, f"{machine.cores}, {machine.limit}")


def check_memory() -> Check:
    """Return how much memory workers may still take, by the machine and the control group."""
    memory = psutil.virtual_memory()
    found = f"{_size(memory.available)} of {_size(memory.total)} available"
    limit = min(memory_limits(), default=memory.total)
    if limit < memory.total:
        found += f", the control group may hold {_size(limit)}"
    if available_memory() < LEAST_MEMORY_BYTES:
        advice = f"a worker takes {_size(WORKER_BYTES)} and its model; start few, with --workers"
        return Check("memory", WARN, found, advice)
    return Check("memory", OK, found)


def check_open_files() -> Check:
    """Look at how many connections and workers the process limits allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        more = "no limit" if hard == resource.RLIM_INFINITY else hard
        advice = f"`ulimit -n {LEAST_FILES}` before the start (hard limit: {more})"
        return Check("open files", WARN, f"{found}: about as many connections", advice)
    return Check("open files", OK, found)


def check_shared_memory() -> Check:
    """Look at /dev/shm, which handlers that load data in processes of their own need."""
    try:
        size = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("/dev/shm", WARN, str(error.strerror), "mount a tmpfs there")
    if size.free < LEAST_SHM_BYTES:
        advice = "only for handlers that share tensors between processes: `--shm-size=1g` in Docker"
        return Check("/dev/shm", WARN, f"{_size(size.free)} free", advice)
    return Check("/dev/shm", OK, f"{_size(size.free)} free")


def check_kernel() -> Check:
    """Try what the server watches its workers with: a pidfd."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        advice = "a kernel from 5.3 on, and no filter of system calls that forbids pidfd_open"
        return Check("kernel", FAIL, f"{platform.release()}: pidfd: {error.strerror}", advice)
    return Check("kernel", OK, f"{platform.release()}, pidfd")


def check_walls(settings: Settings) -> Iterator[Check]:
    """Look for what the walls around workers are made of."""
    for each in examine_machine(settings):
        advice = "an archive reaches further here; `--require-sandbox` refuses to start so"
        is_lacking = each.status == LACKING
        found = each.found if each.status != OFF else f"none: {each.found}"
        yield Check(f"wall: {each.name}", WARN if is_lacking else OK, found, advice * is_lacking)


def check_temporary_folder() -> Check:
    """Write and run a file where artifacts are unpacked and compiled code is loaded from."""
    name = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "run"
            script.write_text("#!/bin/sh\n", encoding="utf-8")
            script.chmod(0o700)
            subprocess.run([script], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        advice = "set TMPDIR to a folder that is not mounted noexec; AOTInductor loads code there"
        return Check("temporary folder", WARN, f"{name}: {error}", advice)
    return Check("temporary folder", OK, f"{name}, {_size(shutil.disk_usage(name).free)} free")


# -- where the server would run ----------------------------------------------------------------


def check_state_folder(folder: Path) -> Check:
    """Write into the state folder, or where it would be made; nothing stays."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    advice = "give a folder of yours: --state-dir, or MODELYARD_STATE_DIR"
    try:
        with tempfile.NamedTemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check("state folder", FAIL, f"{folder}: {place}: {error.strerror}", advice)
    free = shutil.disk_usage(place).free
    made = "" if folder.exists() else ", made at the first start"
    if free < LEAST_DISK_BYTES:
        advice = "archives are unpacked there; free some space, or give another --state-dir"
        return Check("state folder", WARN, f"{folder}: {_size(free)} free", advice)
    return Check("state folder", OK, f"{folder}{made}, {_size(free)} free")


def check_ports(settings: Settings) -> Iterator[Check]:
    """Bind each address for a moment."""
    server = StateDir(settings.state_dir).running() if settings.state_dir.exists() else None
    for api, address in zip(
        ("inference", "management", "metrics"), settings.addresses, strict=True
    ):
        yield _check_port(f"{api} port", address, server)


def _check_port(name: str, address: Address, server: Mapping[str, Any] | None) -> Check:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    option = address.option
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            advice = "give another --host" if error.errno != errno.EACCES else f"give {option}"
            return Check(name, WARN, f"{address}: {error.strerror}", advice)
        owner = find_listener(address.port)
        if server and owner and owner[0] == server.get("pid"):
            return Check(name, OK, f"{address}: the server of this state folder, pid {owner[0]}")
        by = f"pid {owner[0]} ({owner[1]})" if owner else "a process of another user"
        advice = f"stop it, or start with {option} N; 0 takes a free one"
        return Check(name, WARN, f"{address}: taken by {by}", advice)
    return Check(name, OK, f"{address} is free")


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"
