"""What a user says of the cells, and what every cell is given of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from modelyard.base.nearest import did_you_mean
from modelyard.plugins.cluster.ray.archives import CellArchive, find_archives, is_fetched
from modelyard.plugins.cluster.ray.versions import check_python, this_version
from modelyard.serve.errors import StartError
from modelyard.serve.http.tokens import read_token_file
from modelyard.serve.settings import Settings, describe_problems, load_settings, own_folder

OF_THE_CELL: Mapping[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "management_port": 0,
    "metrics_port": 0,
    "tls_cert": None,
    "tls_key": None,
    "insecure": False,
    "reload": (),
}
"""Settings of a cell's server that are not the user's: it is reached through Ray."""
BUSY = 0.7


class Arguments(BaseModel):
    """What is said of the cells; beside these, every setting of a server may be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cells: int = Field(default=2, ge=1)
    """How many, at least where there may be more; one of two answers while the other changes."""
    max_cells: int | None = Field(default=None, ge=1)
    """How many under load; Ray adds and removes them by what their servers measure."""
    cells_per_node: int | None = Field(default=None, ge=1)
    """How many on one machine; None lets Ray put them all on one."""
    busy: float = Field(default=BUSY, gt=0, le=1)
    """Share of the workers' time that is to be used; above it there are too few cells."""
    in_flight: float | None = Field(default=None, gt=0)
    """Requests in a cell, above which there are too few; None leaves them out."""
    upscale_delay_s: float = Field(default=30, ge=0)
    """Time for which there must have been too few before one is added."""
    downscale_delay_s: float = Field(default=600, ge=0)
    """Time for which there must have been too many before one goes."""
    cpus: float = Field(default=1, gt=0)
    """What Ray sets aside for a cell; its workers are by them, unless `workers` says otherwise."""
    gpus: float = Field(default=0, ge=0)
    python: Path | None = None
    """Interpreter of the servers, where Ray's environment is not that of Modelyard and torch."""
    config: Path | None = None
    """YAML file with settings of a server; read once, where the application is built."""

    @field_validator("max_cells")
    @classmethod
    def _is_more(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("cells", 1):
            raise ValueError(f"expected {info.data['cells']} or more, as cells says")
        return value

    @field_validator("python", "config")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value.expanduser().absolute() if value else None


class Plan(BaseModel):
    """What every cell is given. Another plan is another version of the application to Ray."""

    model_config = ConfigDict(frozen=True)

    version: str
    """Version of Modelyard; all cells run this one."""
    python: Path | None
    archives: tuple[CellArchive, ...]
    settings: Settings
    """Settings of the server; `state_dir` holds a folder for each cell of a machine."""


def make_plan(said: Mapping[str, Any]) -> tuple[Arguments, Plan]:
    """Check everything that is said, and all archives.

    Raises:
        ServeError, ArchiveError: what is wrong, in a line.
    """
    of_cells = {name: value for name, value in said.items() if name in Arguments.model_fields}
    of_server = {name: value for name, value in said.items() if name not in of_cells}
    for name in of_server:
        if name in OF_THE_CELL:
            raise StartError(f"{name} cannot be set: a cell is reached by the ports of Ray")
        if name not in Settings.model_fields:
            names = [*Arguments.model_fields, *(Settings.model_fields.keys() - OF_THE_CELL.keys())]
            raise StartError(f"there is no argument {name}{did_you_mean(name, names)}")
    try:
        arguments = Arguments(**of_cells)
    except ValidationError as error:
        raise StartError(f"wrong arguments: {describe_problems(error)}") from error
    if arguments.python is not None:
        check_python(arguments.python)
    settings = _settings(arguments, of_server)
    if settings.token_file is not None:
        read_token_file(settings.token_file)
    archives = find_archives(settings.models, settings.model_store, settings.cache_dir)
    if not settings.workers:
        workers = max(1, int(arguments.cpus) // len(archives))
        settings = settings.model_copy(update={"workers": workers})
    plan = Plan(
        version=this_version(),
        python=arguments.python,
        archives=tuple(archives),
        settings=settings.model_copy(update={"models": ()}),
    )
    return arguments, plan


def _settings(arguments: Arguments, said: Mapping[str, Any]) -> Settings:
    """Return the settings of the servers, by the sources and the order that a server has.

    Raises:
        StartError: one is wrong, or nobody said who may call.
    """
    settings = load_settings({**said, **OF_THE_CELL}, arguments.config)
    is_used = not settings.models or not all(map(is_fetched, settings.models))
    if is_used and "model_store" not in settings.model_fields_set:
        raise StartError(
            "model_store is missing: name the folder of the archives, which every node reaches, "
            "with model_store=FOLDER"
        )
    # The server's own tokens are of one start; behind one address all cells must know the same.
    if settings.auth in ("auto", "always") and not (settings.token_file or settings.tokens):
        raise StartError(
            "no token file: all cells must know the same tokens, and Ray is reached by every "
            "machine of the network; make one with `modelyard token new NAME --rights predict "
            "--file FILE` and give token_file=FILE, or auth=management where a gateway lets "
            "clients in"
        )
    # A worker that hangs is replaced while its requests can still be sent again.
    if "response_timeout_s" not in settings.model_fields_set:
        limit = {"response_timeout_s": settings.request_timeout_s / 2}
        settings = settings.model_copy(update=limit)
    if "state_dir" not in settings.model_fields_set:
        settings = settings.model_copy(update={"state_dir": own_folder("cells")})
    return settings
