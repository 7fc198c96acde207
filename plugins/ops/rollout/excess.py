"""Answers that differ more often than the live version's from its own, beside those to copies."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

ALPHA = 0.001
"""Chance that a look is wrong."""


@dataclass
class Excess:
    """What is counted of one kind of answers.

    Args:
        words: what it means where they differ.
    """

    words: str
    compared: int = 0
    differs: int = 0
    latest: str | None = None
    """Latest difference."""
    _next: int = 3
    """How many differ at the next look."""

    def add(self, agrees: bool, difference: str | None) -> None:
        """Count one."""
        self.compared += 1
        if not agrees:
            self.differs += 1
            self.latest = difference

    def reason(self, of_noise: int, noise: int, allowed: float) -> str | None:
        """Return that they differ more often than is allowed; None where it is not shown.

        By Fisher's exact test: so many would be among these by chance, were the live version's own
        answers as likely to differ, and as many more of them did as the rule allows. It is made
        when half as many differ again.

        Args:
            of_noise: answers of the live version that differ from its own.
            noise: how many it was asked for twice.
            allowed: share that may differ beyond that.
        """
        k, n = self.differs, self.compared
        if k < self._next or not noise:
            return None
        self._next = k + (k + 1) // 2
        both = k + min(noise, of_noise + round(allowed * noise))
        ways = sum(comb(n, more) * comb(noise, both - more) for more in range(k, min(n, both) + 1))
        if ways >= ALPHA * comb(n + noise, both):
            return None
        return (
            f"{self.words}: {k} of {n}, and the live version's own answers differ in {of_noise} of "
            f"{noise}; {self.latest}"
        )

    def to_json(self) -> dict[str, int]:
        """Return it as the management API has it."""
        return {"compared": self.compared, "differs": self.differs}
