"""A checkpoint that was just saved → proven artifacts beside it, while the training goes on."""

import copy
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from modelyard.exporter import export

_log = logging.getLogger("modelyard.training")
_PLACE = "modelyard_trained"


class Keeper:
    """Exports checkpoints; a failure is said, and ends the training only where that is asked for.

    Args:
        is_strict: raise what goes wrong, in place of a line in the log.
        options: arguments of `modelyard.exporter.export`.
    """

    def __init__(self, is_strict: bool, options: dict[str, Any]) -> None:
        self.is_strict = is_strict
        self.options = options

    def keep(
        self, checkpoint: Path, module: nn.Module | None = None, trainer: object = None
    ) -> None:
        """Export a checkpoint, of a class that cannot be named by a copy of its module."""
        options = {"output_dir": checkpoint.parent, "name": checkpoint.stem, **self.options}
        try:
            if module is not None and "model" not in options:
                place = sys.modules[_PLACE] = ModuleType(_PLACE)
                made = copy.deepcopy(module, {id(trainer): None}).cpu()
                setattr(place, type(module).__name__, lambda **_: made)
                options["model"] = f"{_PLACE}:{type(module).__name__}"
            with torch.random.fork_rng(), torch.enable_grad():
                reports = export(checkpoint, **options)
            for report in reports:
                _log.info("%s agrees with %s", report.artifact, checkpoint.name)
        except Exception as error:  # whatever it is, the training is worth more
            if self.is_strict:
                raise
            _log.warning("%s was not exported: %s", checkpoint, error)
        finally:
            sys.modules.pop(_PLACE, None)
