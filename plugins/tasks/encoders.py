"""Texts or pictures in, one vector each out: what search and comparison need."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import normalize

from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, HandlerError, LoadError
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.rows import read_flag, read_section
from modelyard.handlers.tasks.text_handler import TextHandler
from modelyard.handlers.tasks.vision_handler import VisionHandler

DECIMALS = 8
"""Decimals of a number in an answer: a component of a unit vector in float32 has no more."""

POOLINGS = ("first", "mean")


class Vectors:
    """A handler whose answers are vectors, beside the class that reads its requests."""

    normalizes = True
    """Whether a vector is given the length 1."""

    def answer(self, vectors: Tensor) -> list[list[float]]:
        """Turn vectors (N, E) into a list of E numbers per request."""
        if self.normalizes:
            vectors = normalize(vectors, dim=1)
        return vectors.double().round(decimals=DECIMALS).tolist()

    def explain(self, data: Sequence[Mapping[str, Any]], context: Context) -> NoReturn:
        """Refuse: a vector has no label that could be explained."""
        raise BadInput(
            "this model gives a vector, whose numbers mean nothing one by one; explain a classifier"
        )

    shares = explain


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


class TextEncoder(Vectors, TextHandler):
    """Serve an encoder of token ids, such as a sentence-transformers model; see `TextHandler`.

    The model's first output is one vector per token (N, L, E), of which the mean over the text's
    own tokens is taken as sentence-transformers does, or the texts' vectors (N, E) themselves.
    `handler.text.normalize` of model-config.yaml: whether a vector is given the length 1; true
    without it. `dimensions`: to how many numbers it may be cut (docs/embeddings.md).
    """

    label_dim: ClassVar[int | None] = None
    section_keys: ClassVar[tuple[str, ...]] = (
        *TextHandler.section_keys, "normalize", "dimensions",
    )  # fmt: skip

    def initialize(self, context: Context) -> None:
        """Load the archive and its tokenizer; errors as of `TextHandler`."""
        super().initialize(context)
        self.normalizes = read_flag("handler.text.normalize", self.section.get("normalize", True))

    def postprocess(self, outputs: Output) -> list[list[float]]:
        """Turn vectors of tokens (N, L, E) or of texts (N, E) into a list of E numbers per text."""
        return self.answer(self.vectors(outputs))

    def vectors(self, outputs: Output) -> Tensor:
        """Return the texts' vectors (N, E), of any length, given those of tokens or of texts."""
        vectors = (outputs if isinstance(outputs, Tensor) else outputs[0]).float()
        return self._mean(vectors) if vectors.dim() == 3 else vectors

    def _mean(self, vectors: Tensor) -> Tensor:
        """Average (N, L, E) over each text's own tokens; what fills the rows does not count."""
        length = vectors.shape[1]
        rows = [each.attention_mask for each in self.encodings]
        mask = [[*row, *[0] * (length - len(row))] for row in rows]
        weights = torch.tensor(mask, dtype=vectors.dtype, device=vectors.device)
        weights = weights.unsqueeze(2)
        return (vectors * weights).sum(1) / weights.sum(1).clamp(min=1)
