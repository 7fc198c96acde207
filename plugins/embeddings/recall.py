"""What a certificate says of an index: which neighbours the artifact can have changed.

A report says that each number a of the artifact is near the checkpoint's b:

    |a - b| <= tolerance * (max(spread, |b - centre|) + rounding |b|)

So the mean over a text's tokens is off by a vector of length e at most, and its direction by the
angle arcsin(e / |mean|). The product of two unit vectors that are off by r and s is off by r + s at
most. A neighbour is decided if fewer than k others can be as near, each product taken at its worst.
What is not decided is a tie within the bound, and may go either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.base.scale import Scale

Vectors = NDArray[np.float64]
ROUNDING = 2e-6
"""What a vector may be off besides: the sums of a mean and of a length, in float32."""


@dataclass(frozen=True)
class Recall:
    """What holds of an index of one artifact beside that of its checkpoint."""

    texts: int
    k: int
    recall: float
    """Share of the checkpoint's first k neighbours that are among the artifact's first k."""
    promised: float
    """Share that is decided by the certificate: no recall is below it."""
    bound: float
    """The largest distance that the certificate allows between two vectors of a text."""
    error: float
    """The largest that there is."""
    beyond: int
    """Texts whose vectors are further apart than the certificate allows."""

    @property
    def holds(self) -> bool:
        """Whether the artifact is what its certificate says."""
        return not self.beyond and self.recall >= self.promised


def bounds(tokens: Sequence[Vectors], stated: Mapping[str, Any]) -> Vectors:
    """Return how far a text's unit vector may be off (N), as a report's output states it.

    Args:
        tokens: the checkpoint's vectors of each text's own tokens, (L, E), or one for all (1, E).
        stated: `parity.outputs.NAME` of the report.
    """
    scale = Scale.from_json(stated["scale"])
    places = Scale(*(part.reshape(1, -1) for part in (scale.centre, scale.spread)))
    found = []
    for vectors in tokens:
        off = float(stated["tolerance"]) * places.units(vectors).mean(0)
        share = float(np.linalg.norm(off)) / max(float(np.linalg.norm(vectors.mean(0))), 1e-30)
        found.append(2 * np.sin(np.arcsin(min(1.0, share)) / 2) + ROUNDING)
    return np.array(found)


def compare(checkpoint: Vectors, artifact: Vectors, allowed: Vectors, k: int = 10) -> Recall:
    """Compare the index of an artifact with that of its checkpoint; each text is a query.

    Args:
        checkpoint: unit vectors (N, E); more than k.
        artifact: unit vectors (N, E), which its server gave.
        allowed: `bounds` of the texts.
        k: how many neighbours count, the text itself apart.
    """
    own, other = (each.astype(np.float64) for each in (checkpoint, artifact))
    apart = np.linalg.norm(own - other, axis=1)
    same = decided = 0
    for at in range(len(own)):
        scores, served = own @ own[at], other @ other[at]
        scores[at] = served[at] = -np.inf
        slack = allowed + allowed[at]
        first = np.argsort(-scores, kind="stable")[:k]
        same += len(np.intersect1d(first, np.argsort(-served, kind="stable")[:k]))
        highest = np.sort(scores + slack)
        # Those that may be as near, the neighbour itself among them.
        before = len(own) - np.searchsorted(highest, scores[first] - slack[first])
        decided += int((before <= k).sum())
    count = k * len(own)
    return Recall(
        len(own), k, same / count, decided / count, float(allowed.max()), float(apart.max()),
        int((apart > allowed).sum()),
    )  # fmt: skip
