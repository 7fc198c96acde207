"""`Trainer(callbacks=[ExportCallback()])` of transformers: artifacts beside the checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.plugins.training.keep import Keeper

if TYPE_CHECKING:

    class TrainerCallback:
        """The base class of transformers."""
else:
    try:
        from transformers import TrainerCallback
    except ImportError:
        TrainerCallback = object


class ExportCallback(TrainerCallback):
    """Export each folder `checkpoint-STEP` when it is saved: `checkpoint-STEP.onnx` beside it.

    Args:
        strict: end the training with the error of an export, in place of a warning.
        options: arguments of `modelyard.export`, as `formats=["onnx"]`, `task` or `quick`.
    """

    def __init__(self, *, strict: bool = False, **options: Any) -> None:
        if TrainerCallback is object:
            raise ImportError("transformers is not installed; pip install 'modelyard[huggingface]'")
        self._keeper = Keeper(strict, options)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Export the folder that was just written."""
        if state.is_world_process_zero:
            self._keeper.keep(Path(args.output_dir) / f"checkpoint-{state.global_step}")
