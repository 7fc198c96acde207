"""What a server serves, in its state folder: read at the start, written at each change."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from modelyard.serve.control.model_config import ModelSpec
from modelyard.serve.control.state import StateDir, read_json, write_file, write_json
from modelyard.serve.errors import ServeError, StorageFull, is_disk_full
from modelyard.serve.settings import MOST_WORKERS

if TYPE_CHECKING:
    from modelyard.serve.control.registry import Registry

logger = logging.getLogger(__name__)

SCHEMA = 1


def read_models(state: StateDir, is_trial: bool = False) -> list[ModelSpec]:
    """Return what the last change left; before it, where that file is damaged.

    Args:
        is_trial: a damaged file stays where it is.
    """
    return _read(state, is_trial)[0]


def read_notes(state: StateDir) -> dict[str, Callable[[], Any]]:
    """Return what is remembered beside the models; of the file that `read_models` reads."""
    return as_notes(_read(state, is_trial=True)[1])


def as_notes(content: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return JSON in the form of a registry's `notes`; who wrote it does so again, or nobody."""
    return {name: partial(content.__getitem__, name) for name in content}


def _read(state: StateDir, is_trial: bool) -> tuple[list[ModelSpec], dict[str, Any]]:
    for file in (state.models_file, state.previous_models_file):
        try:
            content = read_json(file)
            models = content["models"]
            if (schema := content.get("schema", SCHEMA)) > SCHEMA:
                raise ValueError(f"its schema is {schema}, this version reads {SCHEMA}")
            known = [spec for entry in models if (spec := _parse(entry)) is not None]
            if len(known) < len(models):
                logger.error("%s: %d of %d entries make no sense and are left out", file,
                             len(models) - len(known), len(models))  # fmt: skip
            return known, {k: v for k, v in content.items() if k not in ("schema", "models")}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.error("cannot read %s (%s); nothing restored from it", file, error)
            if is_trial:
                continue
            with contextlib.suppress(OSError):  # the next change would write over it
                file.replace(file.with_suffix(".damaged.json"))
    return [], {}


def describe_models(registry: "Registry") -> dict[str, Any]:
    """Return what the file is to hold of a registry as it is now."""
    models = [
        {
            "name": model.name,
            "version": model.version,
            "file": model.file,
            "digest": model.digest,
            "workers": model.pool.least,
            "default": registry.is_default(model),
        }
        for model in registry
        if model.is_saved
    ]
    return {"schema": SCHEMA, "models": models, **registry.noted()}


def write_models(state: StateDir, content: Mapping[str, Any]) -> None:
    """Replace the file, and keep the one before it. Blocking.

    Raises:
        ServeError: it could not be written.
    """
    file, previous = state.models_file, state.previous_models_file
    try:
        with contextlib.suppress(OSError):
            previous.unlink(missing_ok=True)
            os.link(file, previous)
        write_file(file, json.dumps(content).encode())  # indented, it takes four times as long
    except OSError as error:
        kind = StorageFull if is_disk_full(error) else ServeError
        raise kind(f"the change could not be saved: {error.strerror}") from error


def write_specs(state: StateDir, specs: Iterable[ModelSpec]) -> None:
    """Write what a server's first start restores, each archive only if it has the digest."""
    models = [
        {
            "name": spec.name,
            "file": spec.location,
            "digest": spec.digest,
            "workers": spec.workers,
            "default": spec.is_default,
        }
        for spec in specs
    ]
    write_json(state.models_file, {"schema": SCHEMA, "models": models})


def _parse(entry: Any) -> ModelSpec | None:
    """Return what a line names; None where it cannot be restored."""
    if not (
        isinstance(entry, dict)
        and isinstance(file := entry.get("file"), str)
        and isinstance(name := entry.get("name"), str | None)
        and isinstance(digest := entry.get("digest"), str | None)
        and isinstance(workers := entry.get("workers"), int | None)
        and 0 <= (workers or 0) <= MOST_WORKERS
    ):
        return None
    return ModelSpec(file, name, workers, is_default=bool(entry.get("default")), digest=digest)
