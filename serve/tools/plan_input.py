"""What `modelyard plan` is given: a mix, measurements, arrivals, and what goes wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelyard.archiver import open_archive
from modelyard.archiver.extras import what_is_missing
from modelyard.archiver.untrusted.yaml import parse_yaml
from modelyard.serve.control.model_config import ModelConfig, load_model_config
from modelyard.serve.control.store import find_archive
from modelyard.serve.errors import ServeError, WrongUsage
from modelyard.serve.settings import Settings
from modelyard.serve.simulation.arrivals import Arrivals, Bursty, Poisson, read_recorded
from modelyard.serve.simulation.costs import KEY, BadCosts, parse_costs
from modelyard.serve.simulation.router import RULES
from modelyard.serve.simulation.run import Failure, Hot, Scenario
from modelyard.serve.tools.plan import KnownModel, Plan
from modelyard.serve.tools.tune import UNITS_S, Slo

LEAST_CELLS, LEAST_S = 100, 1.0
"""Simulated, where there are more: with more cells a router's choice hardly changes."""


@dataclass(frozen=True)
class Trouble:
    """What goes wrong in a simulation."""

    fail: str | None
    slow: str | None
    hot: str | None
    repeats: bool


def parse_mix(text: str) -> dict[str, float]:
    """Read `a=0.9,b=0.1`; one name alone has all.

    Raises:
        WrongUsage: it cannot be read, or is not of 1.
    """
    shares: dict[str, float] = {}
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        name, equals, number = part.partition("=")
        try:
            share = float(number) if equals or len(parts) > 1 else 1.0
        except ValueError:
            share = math.nan
        if not name or not 0 < share <= 1:
            raise WrongUsage(
                f"--mix: {part!r}: expected NAME=SHARE with a share above 0 and up to 1, such as "
                "digits=0.9,resnet=0.1"
            )
        if name in shares:
            raise WrongUsage(f"--mix: {name} is named twice")
        shares[name] = share
    if abs((total := sum(shares.values())) - 1) > 1e-3:
        raise WrongUsage(f"--mix: the shares add up to {total:g}; they are parts of 1")
    return {name: share / total for name, share in shares.items()}


def parse_time(option: str, text: str) -> float:
    """Read `200ms`, in seconds.

    Raises:
        WrongUsage: it is something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-zµ]+)", text.strip())
    if not match or match[2] not in UNITS_S:
        units = ", ".join(UNITS_S)
        raise WrongUsage(f"{option} {text!r}: expected a number with one of {units}, as 200ms")
    return float(match[1]) * UNITS_S[match[2]]


def check_router(router: str) -> str:
    """Return a rule of routers.

    Raises:
        WrongUsage: it is none.
    """
    if router not in RULES:
        raise WrongUsage(f"--router {router!r}: expected {' or '.join(RULES)}")
    return router


def check_picture(file: Path | None) -> None:
    """Refuse a file that cannot become a picture.

    Raises:
        WrongUsage: its name, its folder, or matplotlib.
    """
    if file is None:
        return
    if file.suffix not in (".svg", ".png", ".pdf"):
        raise WrongUsage(f"--output {file}: expected a name that ends with .svg, .png or .pdf")
    if not file.parent.is_dir():
        raise WrongUsage(f"--output {file}: there is no folder {file.parent}")
    if missing := what_is_missing("matplotlib"):
        raise WrongUsage(f"--output: {missing}")


def read_arrivals(text: str, burst: str) -> Arrivals:
    """Return what `--arrivals` names.

    Raises:
        BadArrivals, WrongUsage: there is no such thing, or it says no times.
    """
    if text == "poisson":
        return Poisson()
    if text != "bursty":
        if not Path(text).exists():
            raise WrongUsage(f"--arrivals {text!r}: expected poisson, bursty or a file that exists")
        return read_recorded(Path(text))
    factor, _, rest = burst.partition(":")
    share, _, mean = rest.partition(":")
    try:
        numbers = float(factor), float(share)
    except ValueError:
        raise WrongUsage(f"--burst {burst!r}: expected FACTOR:SHARE:TIME, as 2:0.1:1s") from None
    return Bursty(*numbers, parse_time("--burst", mean))


def read_models(
    shares: Mapping[str, float], given: Sequence[str], settings: Settings
) -> list[KnownModel]:
    """Return the models of the mix with what was measured of them.

    Raises:
        ArchiveError, ServeError: one is not there, or was not measured.
    """
    files: dict[str, Path] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not equals or name not in shares:
            raise WrongUsage(
                f"--costs {text!r}: expected NAME=FILE with a name of the mix: {', '.join(shares)}"
            )
        files[name] = Path(file)
    return [_read_model(name, share, files.get(name), settings) for name, share in shares.items()]


def _read_model(name: str, share: float, file: Path | None, settings: Settings) -> KnownModel:

    text, where = "", str(file)
    config: ModelConfig | None = None
    archived = None
    try:
        archived = find_archive(settings.model_store, name)
    except ServeError:
        if file is None:
            raise
    if archived is not None:
        with open_archive(archived) as archive:
            config = load_model_config(archive, settings, name=name)
            if file is None and archive.manifest.config_file:
                text = archive.read(archive.manifest.config_file).decode()
                where = f"{archived.name}: {archive.manifest.config_file}"
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise BadCosts(f"--costs {name}={file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise BadCosts(f"--costs {name}={file}: not text in UTF-8") from error
    try:
        values = parse_yaml(text) or {}
    except ValueError as error:
        raise BadCosts(f"{where} is not valid YAML: {error}") from error
    if not isinstance(values, dict) or KEY not in values:
        raise BadCosts(
            f"{name}: nothing was measured ({where if file else archived} has no {KEY}); run "
            f"modelyard tune {name} --model-store {settings.model_store} --output {name}.yaml, "
            f"then plan with --costs {name}={name}.yaml, or put that file into the archive"
        )
    found = parse_costs(values[KEY], where)
    return KnownModel(
        name=name,
        share=share,
        costs=found,
        batch_size=found.batch_size,
        threads=found.threads,
        queue_size=config.queue_size if config else settings.queue_size,
        request_timeout_s=config.request_timeout_s if config else settings.request_timeout_s,
        refuses_late=config.refuses_late if config else True,
        batch_delay_s=config.batch_delay_ms / 1e3 if config else 0.0,
        gathers_bursts=config.gathers_bursts if config else False,
        needs_ticket=config.needs_ticket if config else False,
    )


def make_scenario(
    planned: Plan,
    models: Sequence[KnownModel],
    rps: float,
    limit: Slo,
    arrivals: Arrivals,
    seconds: float,
    requests: int,
    router: str,
    trouble: Trouble,
) -> Scenario:
    """Return what is simulated: all cells, or as many as the number of requests allows.

    Raises:
        WrongUsage: an option names more cells than are simulated, or no model.
    """
    part = min(1.0, requests / (rps * seconds))
    part = max(part, min(1.0, LEAST_CELLS / planned.cells))
    shapes = planned.shapes()
    counts = [max(1, round(number * part)) for number, _ in shapes]
    rates: dict[str, float] = {}
    for (number, cell), count in zip(planned.groups, counts, strict=True):
        for each in cell.models:
            rates[each.model.name] = rates.get(each.model.name, 0.0) + each.rate * count
        assert number >= count
    total, rate = sum(counts), sum(rates.values())
    seconds = min(seconds, max(LEAST_S, requests / rate))
    load_s = max(model.costs.load_s for model in models)
    failures, slow = [], {}
    if trouble.fail:
        count, rest = _cells_of("--fail", trouble.fail, total, "CELLS:TIME, as 1:10s")
        back = parse_time("--fail", rest) + load_s
        failures = [Failure(at, seconds / 3, seconds / 3 + back) for at in range(count)]
    if trouble.slow:
        count, rest = _cells_of("--slow", trouble.slow, total, "CELLS:FACTOR, as 1:3")
        try:
            factor = float(rest)
        except ValueError:
            factor = 0.0
        if not 1 <= factor <= 1000:
            raise WrongUsage(f"--slow {trouble.slow!r}: expected a factor from 1 to 1000")
        slow = {total - 1 - at: factor for at in range(count)}
    heat = None
    if trouble.hot:
        name, _, text = trouble.hot.partition("=")
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if name not in rates or not 0 < share <= 1 or (share < 1 and len(rates) == 1):
            raise WrongUsage(
                f"--hot {trouble.hot!r}: expected NAME=SHARE with a name of the mix, of which "
                "there are two or more, and a share above 0 and up to 1"
            )
        heat = Hot(name, share, seconds / 3, 2 * seconds / 3)
    return Scenario(
        groups=[(count, cell) for count, (_, cell) in zip(counts, shapes, strict=True)],
        cores=planned.groups[0][1].cores,
        rate=rate,
        mix={name: own / rate for name, own in rates.items()},
        arrivals=arrivals,
        seconds=seconds,
        warm_s=seconds / 5,
        rule=router,
        limit_s=limit.limit_s,
        repeats=trouble.repeats,
        failures=failures,
        slow=slow,
        hot=heat,
    )


def _cells_of(option: str, text: str, cells: int, expected: str) -> tuple[int, str]:

    number, _, rest = text.partition(":")
    if not number.isdecimal() or not 1 <= int(number) <= cells:
        raise WrongUsage(f"{option} {text!r}: expected {expected}; {cells} cells are simulated")
    return int(number), rest
