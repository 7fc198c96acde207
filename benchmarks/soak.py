"""`scripts/soak`: a server under everything at once: nothing grows, is lost, or answers wrongly."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import procfs
from benchmarks.archives import DIGITS, ECHO, ROOT, build_echo, modelyard, modelyard_json
from benchmarks.soak_load import Account, Clients
from benchmarks.soak_report import Sample, Soak, draw, table
from modelyard.base.quantile import nearest_rank

LOCAL_RESULTS = ROOT / "benchmarks" / "results" / "local"
MODEL = "digits"
VERSIONS = ("1.0", "2.0")
CHANGE_TIMEOUT_S = 120
ROLL_OUT_WITHIN_S = 90
FREE = ("default", "aborted")
"""States of a roll-out that decides over no version any more."""
ENDED = ("default", "returned", "failed", "aborted")

out = Console(highlight=False)
TEXT_WIDTH = 100
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Plan:
    """How long, and how often what happens; seconds."""

    length_s: float
    warm_up_s: float
    sample_s: float
    reload_s: float
    kill_s: float
    guest_s: float
    roll_out_s: float


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.2, help="Length.")] = 20,
    quick: Annotated[
        bool, typer.Option("--quick", help="Twenty seconds, to see that everything runs.")
    ] = False,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the .json, .txt and .png.")
    ] = LOCAL_RESULTS,
    name: Annotated[
        str | None, typer.Option(help="Name of the files; default: date and time.")
    ] = None,
) -> None:
    """Predict, explain, hang up, flood, register, roll out, kill workers; watch what grows.

    Ends with code 1 when a request got no answer, an error or another answer than the first one,
    or when a slope is over its limit.

    Example: scripts/soak --minutes 60
    """
    length_s = 60 * minutes
    plan = (
        Plan(20, 5, 1, 6, 7, 3, 9)
        if quick
        else Plan(length_s, min(300, length_s / 4), 5, 30, 75, 20, 150)
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must be stopped too
    with tempfile.TemporaryDirectory(prefix="modelyard-soak-") as folder:
        found = _soak(plan, Path(folder))
    output.mkdir(parents=True, exist_ok=True)
    _keep(found, output / (name or f"soak-{time.strftime('%Y-%m-%dT%H%M%S')}"))
    if found.faults():
        raise typer.Exit(1)


class Server:
    """The running server, as its operator sees it."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.pid = int(about["pid"])
        address = urlsplit(about["inference"])
        self.address = str(address.hostname), int(address.port or 0)
        self._management = about["management"]
        self._token = json.loads(Path(about["key_file"]).read_text())["management"]

    def manage(self, method: str, path: str) -> Any:
        """Call the management API and return its answer."""
        headers = {"Authorization": f"Bearer {self._token}"}
        request = Request(f"{self._management}{path}", method=method, headers=headers)
        try:
            with urlopen(request, timeout=CHANGE_TIMEOUT_S) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise OSError(f"{method} {path} answered {error.code}: {error.read()!r}") from error

    def worker_pids(self, model: str) -> list[int]:
        """Return the process ids of the workers that are ready, of the default version."""
        (described,) = self.manage("GET", f"/models/{model}")
        return [w["pid"] for w in described["workers"] if w["status"] == "READY"]


@contextmanager
def _serving(folder: Path) -> Iterator[Server]:
    state = folder / "state"
    models = "--models", ECHO, "--models", f"{MODEL}={_file(VERSIONS[0])}"
    ports = [f"--{name}=0" for name in ("port", "management-port", "metrics-port")]
    try:
        yield Server(
            modelyard_json(
                "serve", "start", "--model-store", folder / "store", *models, *ports,
                "--workers", "1", "--state-dir", state, "--device", "cpu",
            )
        )  # fmt: skip
    finally:
        modelyard("serve", "stop", "--state-dir", state)


def _file(version: str) -> str:
    return f"{MODEL}-{version[0]}.mar"


def _build(folder: Path) -> tuple[Path, ...]:
    """Archive the digits model as two versions, and echo; return the requests."""
    artifacts, store = folder / "artifacts", folder / "store"
    modelyard("export", DIGITS / "digits.pt", "--model", f"{DIGITS / 'net.py'}:DigitsNet",
              "--input", "image:float32[batch,1,8,8]", "--output", "logits",
              "--format", "onnx", "--format", "pt2", "-o", artifacts)  # fmt: skip
    for version in VERSIONS:
        modelyard("archive", MODEL,
                  "--artifact", artifacts / "digits.onnx", "--handler", "image_classifier",
                  "--version", version, "--extra-files", DIGITS / "index_to_name.json",
                  "--config-file", DIGITS / "model-config.yaml",
                  "-o", folder)  # fmt: skip
        store.mkdir(exist_ok=True)
        (folder / f"{MODEL}.mar").replace(store / _file(version))
    return build_echo(folder).requests


def _soak(plan: Plan, folder: Path) -> Soak:
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("exporting and archiving", total=None)
        scans = _build(folder)
        bar.update(task, description="starting")
        with _serving(folder) as server:
            predictions, echoes, explanations = Account(), Account(), Account()
            clients = Clients(server.address)
            clients.ask(f"/predictions/{MODEL}", scans, predictions, 4)
            clients.ask(f"/predictions/{ECHO}", scans[:1], echoes, 2)
            clients.ask(f"/explanations/{MODEL}", scans, explanations, 1)
            clients.leave(f"/predictions/{MODEL}", scans[0])
            clients.leave(f"/explanations/{MODEL}", scans[0])
            clients.flood()
            watch = Watch(server, predictions)
            bar.update(task, total=plan.length_s, description="soaking")
            with clients:
                watch.run(plan, lambda at_s: bar.update(task, completed=at_s))
        kinds = {"predictions": predictions, "echoes": echoes, "explanations": explanations}
    return Soak(
        {**_describe(plan), "disconnects": clients.disconnects, "floods": clients.floods},
        plan.warm_up_s,
        watch.samples,
        watch.events,
        {kind: _counts(account) for kind, account in kinds.items()},
        sum(log.read_text().count("Traceback") for log in (folder / "state/logs").glob("server*")),
    )


def _counts(account: Account) -> dict[str, Any]:
    names = ("sent", "answered", "failed", "lost")
    counts: dict[str, Any] = {name: getattr(account, name) for name in names}
    return {**counts, "errors": dict(account.errors)}


class Watch:
    """Samples the processes while it reloads versions and kills workers."""

    def __init__(self, server: Server, predictions: Account) -> None:
        self._server = server
        self._predictions = predictions
        self._chosen = random.Random(0)
        self._served = 0
        """Index of the version that is served."""
        (self._worker,) = server.worker_pids(ECHO)
        self._began = time.monotonic()
        self._sampled_at = self._began
        self.samples: list[Sample] = []
        self.events: list[tuple[float, str]] = []

    @property
    def _at_s(self) -> float:
        return time.monotonic() - self._began

    def run(self, plan: Plan, progress: Callable[[float], None]) -> None:
        """Sample until the time is over, while an operator reloads and kills."""
        with ThreadPoolExecutor(1) as threads:
            operator = threads.submit(self._operate, plan)
            while self._at_s < plan.length_s and not operator.done():
                time.sleep(plan.sample_s)
                self._sample()
                progress(min(self._at_s, plan.length_s))
            operator.result()

    def _operate(self, plan: Plan) -> None:
        """Do each when it is due; it takes as long as it takes."""
        every = {
            self._reload: plan.reload_s,
            self._kill: plan.kill_s,
            self._have_guest: plan.guest_s,
            self._roll_out: plan.roll_out_s,
        }
        due = dict(every)
        while min(due.values()) < plan.length_s:
            first = min(due, key=lambda action: due[action])
            time.sleep(max(0.0, due[first] - self._at_s))
            first()
            due[first] = max(due[first] + every[first], self._at_s)

    def _sample(self) -> None:
        latencies, now = self._predictions.take_latencies_ms(), time.monotonic()
        elapsed, self._sampled_at = now - self._sampled_at, now
        pids = self._server.pid, self._worker
        server, worker = map(procfs.memory, pids)
        self.samples.append(
            Sample(
                round(self._at_s, 3),
                server.rss_mb, server.pss_mb, procfs.descriptors(pids[0]), procfs.threads(pids[0]),
                worker.rss_mb, worker.pss_mb, procfs.descriptors(pids[1]), procfs.threads(pids[1]),
                len(procfs.descendants(pids[0])), round(len(latencies) / elapsed, 1),
                *_quantiles(latencies),
            )
        )  # fmt: skip

    def _reload(self) -> None:
        """Serve the other version, and remove this one when it has answered what it holds."""
        old, new = VERSIONS[self._served], VERSIONS[1 - self._served]
        self.events.append((round(self._at_s, 3), "reload"))
        file = _file(new)
        self._server.manage("POST", f"/models?url={file}&model_name={MODEL}&initial_workers=1")
        self._server.manage("PUT", f"/models/{MODEL}/{new}/set-default")
        self._server.manage("DELETE", f"/models/{MODEL}/{old}")
        self._served = 1 - self._served

    def _have_guest(self) -> None:
        """Register a model more, and remove it."""
        self.events.append((round(self._at_s, 3), "guest"))
        self._server.manage(
            "POST", f"/models?url={ECHO}.mar&model_name=guest&initial_workers=1&synchronous=true"
        )
        self._server.manage("DELETE", "/models/guest")

    def _roll_out(self) -> None:
        """Roll the other version out; a worker is killed meanwhile. What loses is removed."""
        new = VERSIONS[1 - self._served]
        self.events.append((round(self._at_s, 3), "roll-out"))
        place = f"/models/{MODEL}/rollout"
        self._server.manage("POST", f"{place}?url={_file(new)}&shadow=50%25&canary=50&for=5s")
        ends = self._at_s + ROLL_OUT_WITHIN_S
        while (state := self._server.manage("GET", place)["state"]) not in ENDED:
            if self._at_s > ends:
                break
            time.sleep(1)
        if state not in FREE:
            self._server.manage("POST", f"{place}/abort")
        self.events.append((round(self._at_s, 3), f"rolled out: {state}"))
        if state == "default":
            self._served = 1 - self._served
        for described in self._server.manage("GET", f"/models/{MODEL}/all"):
            if (version := described["modelVersion"]) != VERSIONS[self._served]:
                self._server.manage("DELETE", f"/models/{MODEL}/{version}")

    def _kill(self) -> None:
        with suppress(OSError):
            if pids := self._server.worker_pids(MODEL):
                self.events.append((round(self._at_s, 3), "kill"))
                os.kill(self._chosen.choice(pids), signal.SIGKILL)


def _quantiles(latencies: Sequence[float]) -> tuple[float | None, float | None]:
    """Return p50 and p99 of sorted values."""
    if not latencies:
        return None, None
    return nearest_rank(latencies, 0.5), nearest_rank(latencies, 0.99)


def _describe(plan: Plan) -> dict[str, Any]:
    """Return on what, with what and how it was measured."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["scripts/soak", *sys.argv[1:]]),
        "machine": procfs.describe_machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("modelyard", "torch", "uvloop")},
        },
        "settings": vars(plan),
    }


def _keep(found: Soak, stem: Path) -> None:
    """Write the figures, print them, draw them."""
    data, text, picture = (stem.with_name(stem.name + end) for end in (".json", ".txt", ".png"))
    data.write_text(json.dumps(found.content(), indent=1) + "\n")
    draw(found, picture)
    with text.open("w") as file:
        for console in (out, Console(file=file, width=TEXT_WIDTH)):
            console.print(table(found))
    for written in (data, text, picture):
        shown = written.relative_to(ROOT) if written.is_relative_to(ROOT) else written
        out.print(f"wrote {shown}", soft_wrap=True)


if __name__ == "__main__":
    app()
