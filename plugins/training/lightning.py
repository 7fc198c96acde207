"""`Trainer(callbacks=[ExportCallback()])` of Lightning: artifacts beside the checkpoints."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.plugins.training.keep import Keeper

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    # The package that the trainer is of; without one there is no trainer to be given this.
    names = ("pytorch_lightning", "lightning.pytorch")
    found = (getattr(sys.modules.get(each), "Callback", None) for each in names)
    if (Callback := next(filter(None, found), None)) is None:
        try:
            Callback = import_module("lightning.pytorch").Callback
        except ImportError:
            Callback = object


class ExportCallback(Callback):
    """Export what the trainer saves: the best checkpoint at the end, or each when it is there.

    Args:
        each: export every checkpoint, at the first batch behind it.
        strict: end the training with the error of an export, in place of a warning.
        options: arguments of `modelyard.export`; `model` where a copy of the module will not do.
    """

    def __init__(self, *, each: bool = False, strict: bool = False, **options: Any) -> None:
        if Callback is object:
            raise ImportError("lightning is not installed; pip install lightning")
        self._keeper, self._each, self._is_new = Keeper(strict, options), each, False

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take note: the file is written after this."""
        self._is_new = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Export what was saved since the last batch."""
        if self._each:
            self._keep(trainer, pl_module, "_last_checkpoint_saved")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Export the best checkpoint, or the last one."""
        self._keep(trainer, pl_module, "best_model_path")

    def _keep(self, trainer: Any, pl_module: Any, name: str) -> None:
        saver = trainer.checkpoint_callback
        path = getattr(saver, name, "") or getattr(saver, "_last_checkpoint_saved", "")
        if self._is_new and path and trainer.is_global_zero:
            self._keeper.keep(Path(path), pl_module, trainer)
        self._is_new = False
