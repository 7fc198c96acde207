"""What `modelyard plan` is given: a mix, and measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from modelyard.archiver import open_archive
from modelyard.archiver.untrusted.yaml import parse_yaml
from modelyard.plugins.ops.tune.costs import KEY, BadCosts, parse_costs
from modelyard.plugins.ops.tune.plan import KnownModel
from modelyard.serve.control.store import find_archive
from modelyard.serve.errors import ServeError, WrongUsage
from modelyard.serve.settings import Settings


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
    archived = None
    try:
        archived = find_archive(settings.model_store, name)
    except ServeError:
        if file is None:
            raise
    if archived is not None and file is None:
        with open_archive(archived) as archive:
            if archive.manifest.config_file:
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
    costs = parse_costs(values[KEY], where)
    return KnownModel(name, share, costs, costs.batch_size, costs.threads)
