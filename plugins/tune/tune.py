"""Measure settings of one model through the real server, and find the best that is fast enough.

First workers, threads and artifacts at the batch size of the plan, then batch sizes for the three
that led, one turn each; then those that could win, and the plan, have more turns, and only these
decide. Settings have their turns beside each other: their servers are up together and answer in
short parts, in alternating order, so that what disturbs the machine for a while disturbs all.
Servers are started afresh for each turn.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from operator import truediv
from pathlib import Path
from statistics import median, pstdev
from typing import Any

import psutil
import typer
import yaml

from modelyard.archiver import Archive
from modelyard.archiver.report import ARTIFACT_KEY
from modelyard.base.terminal import OnStep, err
from modelyard.plugins.tune.load import Load, make_request, run_load
from modelyard.serve.cli import known_errors
from modelyard.serve.control.state import StateDir
from modelyard.serve.errors import ServeError, StartError, WrongUsage
from modelyard.serve.settings import Settings
from modelyard.serve.tools.handle import start_detached

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
WARM_S = 0.5
PART_S = 0.5
"""Time of a part of a turn, where several settings have their turns beside each other."""
TIE = 0.03
"""Rates that are closer count as equal."""
CONTENDS = 0.75
"""Share of the best rate below which rates are not measured again after one turn."""
LEADERS = 3
"""Numbers of workers and threads, each with its artifact, with which batch sizes are tried."""
FINALISTS = 4
STOP_S = 30.0

CHILD = (
    "-c",
    "import ctypes, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "from modelyard.serve.server import main; sys.exit(main())",
)
"""The server, told to end when this process does."""


@contextmanager
def stoppable(text: str) -> Iterator[None]:
    """Turn a known error, or Ctrl-C, into a line and an exit code."""
    with known_errors():
        try:
            yield
        except KeyboardInterrupt as error:
            err.print(text)
            raise typer.Exit(1) from error


@dataclass(frozen=True)
class Slo:
    """A limit on one quantile of the latency."""

    quantile: str
    limit_s: float

    def __str__(self) -> str:
        """Return it as it is given, in milliseconds."""
        return f"{self.quantile}={self.limit_s * 1e3:g}ms"


def parse_slo(text: str) -> Slo:
    """Read `p99=50ms`.

    Raises:
        WrongUsage: the message says what is taken.
    """
    match = re.fullmatch(r"([^=]+)=(\d+(?:\.\d+)?)([a-zµ]*)", text.strip())
    if not match or match[1] not in QUANTILES or match[3] not in UNITS_S:
        raise WrongUsage(
            f"--slo {text!r}: expected such as p99=50ms: one of {', '.join(QUANTILES)}, and a "
            f"number with one of {', '.join(UNITS_S)}"
        )
    if not float(match[2]):
        raise WrongUsage(f"--slo {text!r}: no answer takes no time; give a limit above 0")
    return Slo(match[1], float(match[2]) * UNITS_S[match[3]])


@dataclass(frozen=True)
class Setting:
    """What is tried."""

    workers: int
    threads: int
    batch_size: int
    artifact: str = ""
    """Another artifact of the archive than the one that its manifest names."""

    @property
    def cost(self) -> tuple[str, int, int, int]:
        """What decides between equals: the artifact, threads in all, their teams, the batch."""
        return self.artifact, self.workers * self.threads, self.threads, self.batch_size

    @property
    def keys(self) -> dict[str, int | float | str]:
        """The keys of model-config.yaml, and of `model_settings`, that ask for it."""
        keys: dict[str, int | float | str] = {
            "minWorkers": self.workers,
            "workerThreads": self.threads,
            "batchSize": self.batch_size,
        }
        return keys | ({ARTIFACT_KEY: self.artifact} if self.artifact else {})

    def __str__(self) -> str:
        """Return it in words."""
        text = f"workers {self.workers}, threads {self.threads}, batch {self.batch_size}"
        return f"{text}, {self.artifact}" if self.artifact else text


@dataclass(frozen=True)
class Turn:
    """One run of one setting."""

    rate: float
    """Answers per second."""
    quantiles_s: Mapping[str, float]
    load_share: float = 0.0
    """Share of one core that the load itself takes."""
    parts: Sequence[float] = ()
    """Answers per second in each part of it."""
    failure: str = ""
    """Why it does not count."""


@dataclass
class Result:
    """The turns of one setting that may be compared; a quantile is the median of its turns'."""

    setting: Setting
    turns: list[Turn] = field(default_factory=list)

    @property
    def failure(self) -> str:
        """The first turn's that failed."""
        return next((turn.failure for turn in self.turns if turn.failure), "")

    @property
    def rates(self) -> list[float]:
        """Answers per second in each part of each turn."""
        return [rate for turn in self.turns for rate in turn.parts or [turn.rate]]

    @property
    def rate(self) -> float:
        """Their median."""
        return median(self.rates)

    @property
    def spread(self) -> float:
        """Standard deviation of the rates, as a share of their median."""
        return pstdev(self.rates) / self.rate if self.rate else 0.0

    def quantile_s(self, name: str) -> float:
        """Return a quantile of the latency."""
        return median(turn.quantiles_s[name] for turn in self.turns)

    def to_json(self, slo: Slo | None) -> dict[str, Any]:
        """Return it for JSON; what was not measured is null."""
        found: dict[str, float | None] = {"rate": self.rate, "spread": self.spread}
        found |= {f"{name}_ms": self.quantile_s(name) * 1e3 for name in self.turns[0].quantiles_s}
        return {
            **vars(self.setting),
            **(dict.fromkeys(found) if self.failure else found),
            "turns": [turn.rate for turn in self.turns],
            "meets": self.meets(slo),
            "failure": self.failure or None,
        }

    def meets(self, slo: Slo | None, slack: float = 1.0) -> bool:
        """Return whether its answers are fast enough."""
        if self.failure:
            return False
        return slo is None or self.quantile_s(slo.quantile) <= slo.limit_s * slack


@dataclass(frozen=True)
class Outcome:
    """What a search found."""

    finals: Sequence[Result]
    """Comparable with each other; the simplest first."""
    others: Sequence[Result]
    """Tried once; comparable with others of that time only."""
    best: Result | None
    """None: no setting meets the limit."""
    nearest: Result | None
    """The lowest latency, where none is best."""


def search(
    plan: Setting,
    *,
    cores: int,
    gpus: int,
    largest_batch: int,
    slo: Slo | None,
    rounds: int,
    measure: Callable[[Sequence[Setting]], Sequence[Turn]],
    artifacts: Sequence[str] = (),
    on_turn: OnStep = lambda text, done, expected: None,
) -> Outcome:
    """Find the setting with the highest rate that meets the limit.

    Args:
        plan: what the chooser would start.
        gpus: devices that the model runs on; 0 for a CPU.
        largest_batch: a batch cannot become larger: proven by the export, or all connections.
        rounds: turns in the finals.
        measure: measures settings beside each other: a turn of each.
        artifacts: others of the archive.
        on_turn: called before a turn with what has it, and how many were and will be.

    Raises:
        ServeError: what `measure` raises.
    """
    done = count()

    def run(results: Sequence[Result]) -> None:
        on_turn(f"{len(results)} settings", next(done), rounds + 2)
        # Not beside each other on a device, whose memory they would share.
        for group in [[result] for result in results] if gpus else [results]:
            for result, turn in zip(group, measure([r.setting for r in group]), strict=True):
                result.turns.append(turn)

    every = shapes(plan, cores, gpus)
    first = [Result(replace(each, artifact=name)) for name in ("", *artifacts) for each in every]
    run(first)
    leaders = _finalists(first, slo)[:LEADERS]
    sizes = {plan.batch_size, *(size for size in BATCH_SIZES if size <= largest_batch)}
    second = [Result(replace(each, batch_size=size)) for each in leaders for size in sorted(sizes)]
    run(second)
    finalists = _finalists(second, slo)
    if not first[0].failure and plan not in finalists:
        finalists.append(plan)
    finals = [Result(setting) for setting in finalists]
    for turn in range(rounds if finals else 0):
        run(finals[:: -1 if turn % 2 else 1])
    in_order = sorted(finals, key=lambda result: result.setting.cost)
    scanned = {result.setting: result for result in (*first, *second)}
    rest = [result for setting, result in scanned.items() if setting not in finalists]
    top = next(iter(_rank(finals, slo)), None)
    best = top if top and top.meets(slo) else None
    return Outcome(in_order, rest, best, None if best else top)


def shapes(plan: Setting, cores: int, gpus: int) -> list[Setting]:
    """Return the plan and other numbers of workers and threads, never more threads than cores.

    One core less than there are, because the server needs one for small models; and teams, to be
    sure of what the chooser takes for granted.
    """
    if gpus:
        pairs = {(gpus, 1), (2 * gpus, 1)}
    else:
        pairs = {(workers, 1) for workers in (1, cores // 2, cores - 1, cores)}
        pairs |= {(cores // 2, 2), (1, min(cores, 8))}
    pairs.discard((plan.workers, plan.threads))
    others = sorted(pair for pair in pairs if pair[0] >= 1)
    return [plan, *(Setting(workers, threads, plan.batch_size) for workers, threads in others)]


def _rank(results: Sequence[Result], slo: Slo | None, slack: float = 1.0) -> list[Result]:
    """Return what meets the limit, by rate; where nothing does, all that was measured, by latency.

    Of rates that tie with the highest, the simplest setting's comes first.
    """
    able = [each for each in results if each.meets(slo, slack)]
    if not able:
        name = slo.quantile if slo else "p50"
        return sorted((r for r in results if not r.failure), key=lambda each: each.quantile_s(name))
    top = max(able, key=lambda each: each.rate)
    # Part by part, since those of one part were beside each other.
    tied = [each for each in able if median(map(truediv, each.rates, top.rates)) >= 1 - TIE]
    first = min(tied, key=lambda each: each.setting.cost)
    return sorted(able, key=lambda each: (each is not first, -each.rate))


def _finalists(results: Sequence[Result], slo: Slo | None) -> list[Setting]:
    """Return the settings that more turns could make the chosen one."""
    slack = 1 / CONTENDS
    ranked = _rank(results, slo, slack)
    near = [
        each
        for each in ranked
        if each.rate >= CONTENDS * ranked[0].rate or not each.meets(slo, slack)
    ]
    return [each.setting for each in near[:FINALISTS]]


# -- one turn ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """How a setting of one model is measured."""

    settings: Settings
    """Settings of the server that is started; the state folder is this trial's own."""
    name: str
    path: str
    bodies: Sequence[tuple[bytes, str]]
    """Bodies and content types of the requests, sent in turn."""
    connections: int
    seconds: float

    def measure(self, settings: Sequence[Setting]) -> list[Turn]:
        """Start a server for each setting, load them in turns, part by part, and stop them.

        Where memory would not do for all of them together, the last follow alone.

        Raises:
            StartError: the model answers nothing but errors, so no setting is worth a try.
        """
        parts = max(1, round(self.seconds / PART_S)) if len(settings) > 1 else 1
        up: list[tuple[Load, str]] = []
        taken = 0
        with ExitStack() as stack:
            for setting in settings:
                free = psutil.virtual_memory().available
                if free < 2 * taken:
                    break
                load, url = Load(), ""
                try:
                    url, _ = stack.enter_context(running(self.settings_for(setting, str(len(up)))))
                except ServeError as error:
                    load.broken = str(error)
                up.append((load, url))
                taken = max(taken, free - psutil.virtual_memory().available)
            for part in range(parts):
                for load, url in up[:: -1 if part % 2 else 1]:
                    if not load.broken:
                        self._ask(url, load, self.seconds / parts, 0.0 if part else WARM_S)
        turns = [self._turn(load) for load, _ in up]
        return turns + (self.measure(rest) if (rest := settings[len(up) :]) else [])

    def _ask(self, url: str, load: Load, seconds: float, warm_s: float) -> None:
        requests = [make_request(url, self.path, *each) for each in self.bodies]
        try:
            load.add(run_load(url, requests, self.connections, seconds, warm_s))
        except ServeError as error:
            load.broken = str(error)

    def _turn(self, load: Load) -> Turn:
        if load.broken:
            return Turn(0.0, dict.fromkeys(QUANTILES, math.inf), failure=load.broken)
        if not load.latencies_s:
            raise StartError(f"{self.name} answers {load.first_failure}; see --input")
        failure = ""
        if load.failed:
            total = load.failed + len(load.latencies_s)
            failure = (
                f"{load.failed} of {total} answers were errors, the first {load.first_failure}"
            )
        quantiles = {name: load.quantile_s(q) for name, q in QUANTILES.items()}
        return Turn(load.rate, quantiles, load.cpu_s / load.seconds, load.parts, failure)

    def settings_for(self, setting: Setting, beside: str = "") -> Settings:
        """Return the settings of a server with this setting.

        Args:
            setting: what it serves the model with.
            beside: a name among others that are up with it, which have state folders of their own.
        """
        own = {**self.settings.model_settings.get(self.name, {}), **setting.keys}
        state_dir = self.settings.state_dir / beside
        own["maxBatchDelay"] = 0
        changes = {"model_settings": {self.name: own}, "state_dir": state_dir}
        return self.settings.model_copy(update=changes)


@contextmanager
def running(settings: Settings) -> Iterator[tuple[str, int]]:
    """Yield the base URL and the process id of a server that runs for the block."""
    process, about = start_detached(
        settings, StateDir(settings.state_dir), lambda model, text: None, CHILD
    )
    try:
        yield str(about["inference"]), process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def golden_bodies(archive: Archive) -> list[tuple[bytes, str]]:
    """Return the bodies of an archive's golden requests, with their content types."""
    seal = archive.manifest.modelyard
    return [(archive.read(each.request), each.content_type) for each in seal.golden] if seal else []


def on_own_ports(settings: Settings, models: tuple[str, ...], state_dir: Path) -> Settings:
    """Return settings for a server of these models that only this machine reaches."""
    return settings.model_copy(
        update={
            "models": models,
            "state_dir": state_dir,
            "host": "127.0.0.1",
            "port": 0,
            "management_port": 0,
            "metrics_port": 0,
            "auth": "auto",
            "tokens": (),
            "token_file": None,
            "tls_cert": None,
            "tls_key": None,
            "access_log": False,
            "workers": 0,
        }
    )


# -- the file ----------------------------------------------------------------------------------


def merge_config(text: str, changes: Mapping[str, Any]) -> str:
    """Return a model-config.yaml with these keys, and everything else as it was, comments too."""
    lines = text.splitlines()
    for key, value in changes.items():
        line = f"{key}: {value}"
        places = [at for at, old in enumerate(lines) if re.match(rf"{key}\s*:", old)]
        if places:
            lines[places[0]] = line
        else:
            lines.append(line)
    merged = "\n".join(lines) + "\n"
    expected = {**(yaml.safe_load(text) or {}), **changes}
    try:
        if yaml.safe_load(merged) == expected:
            return merged
    except yaml.YAMLError:
        pass
    # Written in a way that lines cannot follow, as one mapping in braces.
    return yaml.safe_dump(expected, sort_keys=False, allow_unicode=True)


def config_changes(
    old: Mapping[str, Any], setting: Setting, rate: float = 0.0
) -> dict[str, int | float | str]:
    """Return the keys that make a server start this setting, and expose the rate that it reached.

    TorchServe takes minWorkers only with a maxWorkers that is no less.
    """
    most = old.get("maxWorkers")
    most = max(setting.workers, most if isinstance(most, int) else 0)
    changes = setting.keys | {"maxWorkers": most}
    if rate:
        changes["tunedRate"] = float(f"{rate:.3g}")
    return changes | ({"maxBatchDelay": 0} if "maxBatchDelay" in old else {})
