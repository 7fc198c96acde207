"""Other model servers, and our drop-in: how each is started, asked and ended (peers/README.md)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import procfs
from benchmarks.archives import MODELYARD, PEERS, ROOT, TINY, Subject
from benchmarks.bare import ONE_THREAD
from benchmarks.results import DROP_IN, Footprint
from benchmarks.server import Usage, ask

READY_TIMEOUT_S = 120
END_TIMEOUT_S = 20
POLL_S = 0.05
PORTS = 5
"""That a server may need: HTTP, management, metrics, and TorchServe two of gRPC."""
LOG_CHARACTERS = 3000
LOG_ERRORS = """\
<Configuration>
  <Appenders><Console name="console"><PatternLayout pattern="%d %p %c %m%n"/></Console></Appenders>
  <Loggers><Root level="error"><AppenderRef ref="console"/></Root></Loggers>
</Configuration>
"""
"""Log settings of TorchServe, which else writes a line per request."""
OCTETS, JSON = "application/octet-stream", "application/json"


@dataclass(frozen=True)
class Place:
    """Where one peer runs."""

    bin: Path
    """Programs of its environment."""
    work: Path
    """A folder of its own; it is the current one."""
    model: Path | None
    """A copy of the network in it; None where every answer is there at once."""
    port: int
    """The first of PORTS that are free."""
    workers: int
    batch: int


@dataclass(frozen=True)
class Peer:
    """How a server is started, and what its requests and answers look like."""

    name: str
    """Name of the package and of its environment; of the row in tables, without the setting."""
    command: Callable[[Place], list[str]]
    path: str
    content_type: str = OCTETS
    body: Callable[[bytes], bytes] = bytes
    read: Callable[[Any], Any] = lambda value: value
    """JSON value of an answer → the ten probabilities."""
    prepare: Callable[[Place], None] | None = None
    """Write files that the command needs."""
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    ports: dict[str, int] = field(default_factory=dict, hash=False)
    """Variables of the environment that name a port, each by its place among PORTS."""
    batch: int = 8
    """Most requests in one call of the model."""
    is_ours: bool = False
    """Installed beside this file; it needs no environment of its own."""

    @property
    def shown(self) -> str:
        """The name in tables: with the setting, as each has several."""
        return f"{self.name} b={self.batch}"

    def bin(self, envs: Path | None) -> Path:
        """Return the folder of its commands, whether it is there or not.

        Args:
            envs: folder of the other servers' environments.
        """
        return MODELYARD.parent if self.is_ours else (envs or Path()).absolute() / self.name / "bin"


class PeerServer:
    """A running peer; a context manager that ends it with everything that it started."""

    def __init__(
        self, peer: Peer, envs: Path | None, subject: Subject, workers: int, work: Path
    ) -> None:
        work.mkdir(parents=True)
        model = None
        if subject.artifact is not None:
            model = Path(shutil.copy(subject.artifact, work / f"{TINY}{subject.artifact.suffix}"))
        self._peer = peer
        self._place = Place(peer.bin(envs), work, model, _free_ports(PORTS), workers, peer.batch)
        self._log = work / "server.log"
        self.url = f"http://127.0.0.1:{self._place.port}{peer.path}"
        self.subject = replace(
            subject, content_type=peer.content_type, requests=_bodies(peer, subject, work)
        )
        """With requests as this server takes them."""
        self.start_s = 0.0
        """From the command's start to the first answer."""
        self.answer = b""
        """The first, to the subject's first request."""

    def __enter__(self) -> Self:
        """Start, and wait for the first answer."""
        peer, place = self._peer, self._place
        if peer.prepare is not None:
            peer.prepare(place)
        environment = {
            **os.environ, **ONE_THREAD, "BENCH_MODEL": str(place.model or ""),
            "BENCH_PORT": str(place.port), "BENCH_WORKERS": str(place.workers),
            "BENCH_BATCH": str(place.batch),
            "PATH": f"{place.bin}:{os.environ['PATH']}", 
            "PYTHONPATH": f"{PEERS}:{ROOT}" if peer.is_ours else str(PEERS),
            "TMPDIR": str(place.work), "TEMP": str(place.work),
            "LOG_LOCATION": str(place.work / "logs"), **peer.environment,
            **{name: str(place.port + at) for name, at in peer.ports.items()},
        }  # fmt: skip
        began = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                peer.command(place), cwd=place.work, env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            self.answer = self._wait_ready()
        except BaseException:
            self._end()
            raise
        self.start_s = time.perf_counter() - began
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it, by force what does not follow."""
        self._end()

    def usage(self) -> Usage:
        """Return what all its processes have used so far; which is the server, nobody can say."""
        return Usage(sum(map(_cpu_s, self._pids())), 0.0)

    def footprint(self, subject: str, round: int) -> Footprint:
        """Describe what the processes take now, and how long the start took."""
        pss = sum(procfs.memory(pid).pss_mb for pid in self._pids())
        return Footprint(subject, self._peer.shown, self._place.workers, round, self.start_s, pss)

    def _pids(self) -> list[int]:
        return [self._process.pid, *procfs.descendants(self._process.pid)]

    def _wait_ready(self) -> bytes:
        limit = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                return ask(self.url, self.subject)
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > limit:
                    tail = self._log.read_text(errors="replace")[-LOG_CHARACTERS:]
                    raise RuntimeError(
                        f"{self._peer.name} does not answer ({error}); its log: {tail}"
                    ) from error
            time.sleep(POLL_S)

    def _end(self) -> None:
        pids = self._pids()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        for pid in pids:  # what did not follow
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def peer_version(peer: Peer, envs: Path | None) -> str | None:
    """Return the version that is installed in a peer's environment, or None."""
    package = "modelyard" if peer.is_ours else peer.name
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    try:
        done = subprocess.run(
            [peer.bin(envs) / "python", "-c", code], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process, 0 when it has just ended."""
    with contextlib.suppress(OSError):
        return procfs.cpu_s(pid)
    return 0.0


def _bodies(peer: Peer, subject: Subject, work: Path) -> tuple[Path, ...]:
    bodies = []
    for request in subject.requests:
        file = work / f"{request.stem}.body"
        file.write_bytes(peer.body(request.read_bytes()))
        bodies.append(file)
    return tuple(bodies)


def _free_ports(count: int) -> int:
    """Return the first of `count` ports in a row that nothing listens on."""
    places = range(18300, 28300, count)
    # Not the same ones first as another benchmark beside this one.
    for at in range(len(places)):
        first = places[(at + os.getpid()) % len(places)]
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise RuntimeError(f"no {count} free ports in a row from 18300 to 28300")


def _json(make: Callable[[str], Any]) -> Callable[[bytes], bytes]:
    return lambda body: json.dumps(make(base64.b64encode(body).decode())).encode()


def _prepare_mlserver(place: Place) -> None:
    settings = {
        "http_port": place.port, "grpc_port": place.port + 1, "metrics_port": place.port + 2,
        "host": "127.0.0.1", "parallel_workers": 0 if place.workers == 1 else place.workers,
        "debug": False, "gzip_enabled": False, "metrics_endpoint": None,
    }  # fmt: skip
    model = {
        "name": "tiny", "implementation": "serve_mlserver.Tiny",
        "max_batch_size": place.batch if place.batch > 1 else 0, "max_batch_time": 0.001,
    }  # fmt: skip
    (place.work / "settings.json").write_text(json.dumps(settings))
    (place.work / "model-settings.json").write_text(json.dumps(model))


def _prepare_drop_in(place: Place) -> None:
    """Write what a user of TorchServe has: an archive and addresses, all else as it is."""
    _archive(place)
    _configure(place, _grpc_ports(place))


def _prepare_torchserve(place: Place) -> None:
    _archive(place)
    (place.work / "log4j2.xml").write_text(LOG_ERRORS)
    _configure(
        place,
        [
            "disable_token_authorization=true",
            "enable_metrics_api=false",
            "metrics_mode=prometheus",  # else each request writes lines to two files
            "disable_system_metrics=true",
            "async_logging=true",
            *_grpc_ports(place),
        ],
    )


def _grpc_ports(place: Place) -> list[str]:
    """Return lines of config.properties, for several run at a time."""
    return [f"grpc_inference_port={place.port + 3}", f"grpc_management_port={place.port + 4}"]


def _archive(place: Place) -> None:
    work, workers = place.work, place.workers
    (work / "config.yaml").write_text(
        f"minWorkers: {workers}\nmaxWorkers: {workers}\n"
        f"batchSize: {place.batch}\nmaxBatchDelay: 1\n"
    )
    (work / "store").mkdir()
    files = [PEERS / "work.py", *([place.model] if place.model else [])]
    done = subprocess.run(
        [place.bin / "torch-model-archiver", "--model-name", "tiny", "--version", "1.0",
         "--handler", PEERS / "modelyard_handler.py", "--extra-files", ",".join(map(str, files)),
         "--config-file", work / "config.yaml", "--export-path", work / "store"],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"torch-model-archiver failed: {done.stderr.strip()}")


def _configure(place: Place, more: list[str]) -> None:
    """Write config.properties: three addresses, and a queue that holds every client."""
    names = ("inference", "management", "metrics")
    properties = [f"{name}_address=http://127.0.0.1:{place.port + at}"
                  for at, name in enumerate(names)]  # fmt: skip
    lines = [*properties, "job_queue_size=1000", *more]
    (place.work / "config.properties").write_text("\n".join(lines) + "\n")


def _torchserve(at: Place) -> list[str]:
    return [
        f"{at.bin}/torchserve", "--start", "--foreground", "--ncs", "--model-store",
        f"{at.work}/store", "--models", "tiny=tiny.mar", "--ts-config",
        f"{at.work}/config.properties",
    ]  # fmt: skip


def _settings(sizes: tuple[int, ...], peer: Peer) -> list[Peer]:
    """Return one peer for each size of a batch."""
    return [replace(peer, batch=size) for size in sizes]


ALL = (
    *_settings(
        (8, 32),
        Peer(
            DROP_IN,
            lambda at: [*_torchserve(at), "--disable-token-auth"],
            "/predictions/tiny",
            prepare=_prepare_drop_in,
            is_ours=True,
        ),
    ),
    # Each of these is the fastest at another number of connections: 1, 8 and 64.
    *_settings(
        (1, 8, 32),
        Peer(
            "mosec", lambda at: [f"{at.bin}/python", f"{PEERS}/serve_mosec.py"], "/inference"
        ),
    ),
    *_settings(
        (1, 8, 32),
        Peer(
            "torchserve",
            lambda at: [*_torchserve(at), "--log-config", f"{at.work}/log4j2.xml"],
            "/predictions/tiny",
            prepare=_prepare_torchserve,
        ),
    ),
    *_settings(
        (1, 8),
        Peer(
            "litserve", lambda at: [f"{at.bin}/python", f"{PEERS}/serve_litserve.py"], "/predict"
        ),
    ),
    *_settings(
        (1, 32),
        Peer(
            "fastapi", lambda at: [f"{at.bin}/python", f"{PEERS}/serve_fastapi.py"], "/predict"
        ),
    ),
    *_settings(
        (1, 8),
        Peer(
            "bentoml",
            lambda at: [
                f"{at.bin}/bentoml", "serve", "serve_bentoml:Tiny", "--working-dir", str(PEERS),
                "--host", "127.0.0.1", "--port", str(at.port),
            ],
            "/predict",
            JSON,
            _json(lambda text: {"images": [text]}),
            read=lambda value: value[0],
            environment={"BENTOML_DO_NOT_TRACK": "true"},
        ),
    ),
    *_settings(
        (1, 8),
        Peer(
            "mlserver",
            lambda at: [f"{at.bin}/mlserver", "start", str(at.work)],
            "/v2/models/tiny/infer",
            JSON,
            _json(
                lambda text: {
                    "inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": [text]}]
                }
            ),
            read=lambda value: value["outputs"][0]["data"],
            prepare=_prepare_mlserver,
        ),
    ),
    *_settings(
        (1, 8),
        Peer(
            "ray",
            lambda at: [f"{at.bin}/python", f"{PEERS}/serve_ray.py"],
            "/",
            environment={
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
                "RAY_SERVE_ENABLE_HA_PROXY": "1",
            },
            ports={"RAY_SERVE_HAPROXY_STATS_PORT": 1, "RAY_SERVE_HAPROXY_METRICS_PORT": 2},
        ),
    ),
)  # fmt: skip
