"""Text in, one vector out: what search and comparison of texts need."""

from typing import ClassVar

import torch
from torch import Tensor

from modelyard.handlers.context import Context
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.rows import read_flag
from modelyard.handlers.tasks.text_handler import TextHandler
from modelyard.handlers.tasks.vectors import Vectors


class TextEncoder(Vectors, TextHandler):
    """Serve an encoder of token ids, such as a sentence-transformers model; see `TextHandler`.

    The model's first output is one vector per token (N, L, E), of which the mean over the text's
    own tokens is taken as sentence-transformers does, or the texts' vectors (N, E) themselves.
    `handler.text.normalize` of model-config.yaml: whether a vector is given the length 1; true
    without it.
    """

    label_dim: ClassVar[int | None] = None
    section_keys: ClassVar[tuple[str, ...]] = (*TextHandler.section_keys, "normalize")

    def initialize(self, context: Context) -> None:
        """Load the archive and its tokenizer; errors as of `TextHandler`."""
        super().initialize(context)
        self.normalizes = read_flag("handler.text.normalize", self.section.get("normalize", True))

    def postprocess(self, outputs: Output) -> list[list[float]]:
        """Turn vectors of tokens (N, L, E) or of texts (N, E) into a list of E numbers per text."""
        vectors = outputs if isinstance(outputs, Tensor) else outputs[0]
        vectors = vectors.float()
        if vectors.dim() == 3:
            vectors = self._mean(vectors)
        return self.answer(vectors)

    def _mean(self, vectors: Tensor) -> Tensor:
        """Average (N, L, E) over each text's own tokens; what fills the rows does not count."""
        length = vectors.shape[1]
        rows = [each.attention_mask for each in self.encodings]
        mask = [[*row, *[0] * (length - len(row))] for row in rows]
        weights = torch.tensor(mask, dtype=vectors.dtype, device=vectors.device)
        weights = weights.unsqueeze(2)
        return (vectors * weights).sum(1) / weights.sum(1).clamp(min=1)
