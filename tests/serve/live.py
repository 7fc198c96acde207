"""A real server process, started and stopped as a user does, and the tiny archives it serves."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from modelyard.archiver import write_archive
from modelyard.base.plugins import registered

SOURCES = Path(__file__).parent.parent / "archives"
PR_SET_CHILD_SUBREAPER = 36
TIMEOUT_S = 60.0
NOTES = Path(tempfile.mkdtemp(prefix="modelyard-notes-"))
NOTES.chmod(0o777)
atexit.register(shutil.rmtree, NOTES, ignore_errors=True)


def modelyard(*arguments: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "modelyard", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """Return this process's environment without what would decide over a server's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MODELYARD_")}
    return {**kept, "MODELYARD_WRITE_PATHS": str(NOTES), "COLUMNS": "200", "NO_COLOR": "1"}


def make_notes_folder() -> Path:
    """Return a new folder in which handlers may write down what happened to them."""
    folder = Path(tempfile.mkdtemp(dir=NOTES))
    folder.chmod(0o777)  # workers may have a user of their own
    return folder


def build_archive(
    store: Path,
    behaviour: str,
    *,
    name: str | None = None,
    version: str = "1.0",
    config: str = "",
    handler: str = "handler.py",
    examples: Sequence[str] = (),
    artifact: Path | None = None,
) -> Path:
    """Archive `tests/archives/<behaviour>/`: its handler, and every other file beside it.

    Args:
        config: text of model-config.yaml.
        handler: its file in that folder, with or without `:Class`.
        artifact: for handlers that open one; else a file of four bytes.
    """
    source = SOURCES / behaviour
    file = source / handler.partition(":")[0]
    build = store / ".build"
    build.mkdir(parents=True, exist_ok=True)
    weights = build / "weights.bin"
    weights.write_bytes(b"none")
    config_file = build / "model-config.yaml"
    config_file.write_text(config or "{}\n", encoding="utf-8")
    return write_archive(
        name or behaviour,
        version=version,
        artifact=artifact or weights,
        handler=str(source / handler),
        output_dir=store,
        extra_files=[other for other in source.iterdir() if other.is_file() and other != file],
        config_file=config_file,
        examples=examples,
        force=True,
    )


def poll(condition: Callable[[], Any], what: str, timeout_s: float = 20) -> Any:
    """Return the condition's value as soon as it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
    return value


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def descendants(pid: int) -> set[int]:
    """Return the process ids of everything that a process started and that still runs."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                parents[int(entry.name)] = int(stat[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return {child for child in found if is_alive(child)}


class LiveServer:
    """A server process that `modelyard serve start` reported ready."""

    def __init__(self, about: dict[str, Any], state_dir: Path, store: Path) -> None:
        self.about = about
        self.state_dir = state_dir
        self.store = store
        self.pid = int(about["pid"])
        keys = json.loads((state_dir / "keys.json").read_text(encoding="utf-8"))
        self.token: str = keys["management"]
        self.inference_token: str = keys["inference"]
        # Without TLS there are no authorities to read, which takes 24 ms for each client.
        self.client = httpx.Client(base_url=about["inference"], timeout=TIMEOUT_S, verify=False)
        self.management = httpx.Client(
            base_url=about["management"],
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=TIMEOUT_S,
            verify=False,
        )
        self.metrics = httpx.Client(base_url=about["metrics"], timeout=TIMEOUT_S, verify=False)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the inference API."""
        return self.client.base_url.host, self.client.base_url.port or 0

    @property
    def grpc(self) -> str:
        """Host and port of gRPC."""
        return str(self.about["faces"]["grpc"]).partition("//")[2]

    @property
    def log(self) -> str:
        """The server's own log."""
        return (self.state_dir / "logs" / "server.log").read_text(encoding="utf-8")

    def logs(self, text: str, since: int = 0) -> None:
        """Wait until a text stands in the log behind its first `since` letters.

        A thread writes the log, so a line may come after the answer to the request that caused it.
        """
        poll(lambda: text in self.log[since:], f"the log says {text!r}")

    def predict(self, model: str, body: bytes | str = b"", **options: Any) -> httpx.Response:
        """Post a body to a model."""
        return self.client.post(f"/predictions/{model}", content=body, **options)

    def register(self, file: str, **options: Any) -> httpx.Response:
        """Register an archive of the store."""
        return self.management.post("/models", params={"url": file, **options})

    def register_all(self, *files: str, **options: Any) -> None:
        """Register several archives at once, which takes a core for each."""
        with ThreadPoolExecutor() as threads:
            for answer in threads.map(lambda file: self.register(file, **options), files):
                assert answer.status_code == 200, answer.text

    def unregister_all(self) -> None:
        """Leave no model on the server."""
        while models := self.management.get("/models").json()["models"]:
            for model in models:
                answer = self.management.delete(f"/models/{model['modelName']}")
                assert answer.status_code == 200, answer.text

    def waiting(self, model: str) -> int:
        """Return how many requests wait in a model's queue."""
        return int(self.describe(model)["jobQueueStatus"]["pendingRequests"])

    def handed_over(self, model: str) -> float:
        """Return how many predictions of a model were given to its workers so far."""
        return self.metric("modelyard_queue_time_seconds_count", model=model, kind="predict")

    def describe(self, model: str) -> dict[str, Any]:
        """Return what the management API says of a model, or of `model/version`."""
        answer = self.management.get(f"/models/{model}")
        assert answer.status_code == 200, answer.text
        description: dict[str, Any] = answer.json()[0]
        return description

    def restarts(self, model: str) -> int:
        """Return how many of a model's workers have been replaced."""
        return sum(worker["restarts"] for worker in self.describe(model)["workers"])

    def worker_pids(self, model: str) -> list[int]:
        """Return the process ids of a model's workers that are ready."""
        workers = self.describe(model)["workers"]
        return [worker["pid"] for worker in workers if worker["status"] == "READY"]

    def metric(self, name: str, **labels: str) -> float:
        """Return one sample of the metrics API; 0 where it is not there."""
        for line in self.metrics.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            found, _, rest = sample.partition("{")
            pairs = rest.rstrip("}").split(",") if rest else []
            if found == name and all(f'{k}="{v}"' in pairs for k, v in labels.items()):
                return float(value)
        return 0.0

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the server process."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 60) -> int:
        """Wait for the server process to end, and return its exit code (negative: signal)."""
        poll(lambda: not is_alive(self.pid), "the server ends", timeout_s)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def close_clients(self) -> None:
        """Close the connections of this object."""
        for client in (self.client, self.management, self.metrics):
            client.close()

    def stop(self) -> None:
        """Stop the server and check what every stop leaves behind: nothing."""
        children = descendants(self.pid)
        self.close_clients()
        self.signal()
        assert self.wait() == 0
        poll(lambda: not any(map(is_alive, children)), "every child process ends", 3)
        assert not (self.state_dir / "server.json").exists()
        assert not any((self.state_dir / "unpacked").iterdir())
        assert "Traceback" not in self.log


def start_server(state_dir: Path, store: Path, *arguments: str) -> LiveServer:
    """Run `modelyard serve start` on free ports; it returns when the models are ready."""
    return launch(state_dir, store, *start_arguments(state_dir, store), *arguments)


def launch(state_dir: Path, store: Path, *arguments: str) -> LiveServer:
    """Run `modelyard` with arguments that start a server of these folders."""
    # A server outlives the command that starts it. As its new parent we learn its exit code, and
    # would see any process that it leaves behind.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    ran = modelyard(*arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    return LiveServer(json.loads(ran.stdout), state_dir, store)


def start_arguments(state_dir: Path, store: Path) -> list[str]:
    """Return `serve start` with its folders and free ports."""
    names = ["--port", "--management-port", "--metrics-port"]
    names += [f"--{name}-port" for name in registered("faces") if name == "grpc"]
    ports = [f"{name}=0" for name in names]
    folders = [f"--state-dir={state_dir}", f"--model-store={store}"]
    return ["serve", "start", *ports, *folders, "--device=cpu"]


@contextlib.contextmanager
def running(state_dir: Path, store: Path, *arguments: str) -> Iterator[LiveServer]:
    """Start a server for a block, and check at its end that it stops without a trace."""
    server = start_server(state_dir, store, *arguments)
    try:
        yield server
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            server.signal(signal.SIGKILL)
        server.close_clients()
        raise
    server.stop()
