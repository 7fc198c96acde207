"""The answer of an encoder: one vector for each request."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.nn.functional import normalize

from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput

DECIMALS = 8
"""Of a number in an answer: a component of a unit vector in float32 has no more."""


class Vectors:
    """A handler whose answers are vectors, beside the class that reads its requests."""

    normalizes = True
    """Whether a vector is given the length 1."""

    def answer(self, vectors: Tensor) -> list[list[float]]:
        """Turn vectors (N, E) into a list of E numbers per request."""
        if self.normalizes:
            vectors = normalize(vectors, dim=1)
        rows: list[list[float]] = vectors.double().round(decimals=DECIMALS).tolist()
        return rows

    def explain(self, data: Sequence[Mapping[str, Any]], context: Context) -> NoReturn:
        """Refuse: a vector has no label that could be explained."""
        raise BadInput(
            "this model gives a vector, whose numbers mean nothing one by one; explain a classifier"
        )

    shares = explain
