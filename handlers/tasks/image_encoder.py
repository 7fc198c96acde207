"""Pictures in, one vector each out: what search and comparison of pictures need."""

import torch
from torch import Tensor

from modelyard.handlers.context import Context
from modelyard.handlers.errors import HandlerError, LoadError
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.rows import read_flag, read_section
from modelyard.handlers.tasks.vectors import Vectors
from modelyard.handlers.tasks.vision_handler import VisionHandler

POOLINGS = ("first", "mean")


class ImageEncoder(Vectors, VisionHandler):
    """Serve an encoder of pictures; the answer is a list of numbers, of length 1 as a vector.

    An output (N, E) is taken as it is, the first of these where there are several. Of vectors for
    each place (N, L, E) the first counts, as of a vision transformer, or their mean; of maps
    (N, E, h, w) the mean. `handler.encoder` of model-config.yaml: `output` (its name), `pooling`
    (`first` or `mean`, of (N, L, E)), `normalize` (true without it).
    """

    def __init__(self) -> None:
        super().__init__()
        self.output: str | None = None
        self.pooling = POOLINGS[0]

    def initialize(self, context: Context) -> None:
        """Load the archive, its `handler.image` and its `handler.encoder`."""
        super().initialize(context)
        section = read_section(self.handler_settings, "encoder", ("output", "pooling", "normalize"))
        self.output = section.get("output")
        if self.output is not None and self.output not in self.output_names:
            known = ", ".join(self.output_names) or "without names"
            raise LoadError(f"handler.encoder.output is {self.output!r}; the outputs are {known}")
        self.pooling = section.get("pooling", POOLINGS[0])
        if self.pooling not in POOLINGS:
            raise LoadError(
                f"handler.encoder.pooling is {self.pooling!r}; expected {' or '.join(POOLINGS)}"
            )
        self.normalizes = read_flag("handler.encoder.normalize", section.get("normalize", True))

    def postprocess(self, outputs: Output) -> list[list[float]]:
        """Turn the chosen output into a list of E numbers per picture."""
        return self.answer(self._pooled(self._chosen(outputs).float()))

    def _chosen(self, outputs: Output) -> Tensor:
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
        if self.output is not None:
            return tensors[self.output_names.index(self.output)]
        return next((each for each in tensors if each.dim() == 2), tensors[0])

    def _pooled(self, values: Tensor) -> Tensor:
        if values.dim() == 2:
            return values
        if values.dim() == 3:
            return values.mean(1) if self.pooling == "mean" else values[:, 0]
        if values.dim() == 4:
            return torch.mean(values, (2, 3))
        raise HandlerError(
            f"the model gave {list(values.shape)}; expected vectors (N, E), (N, L, E) or maps "
            "(N, E, h, w)"
        )
