"""The worst differences between a candidate's answers and the live version's, for a person to see.

What a client sent is kept only where the roll-out says so: it is not the operator's.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from modelyard.plugins.ops.rollout.compare import Answer, Comparison, Verdict
from modelyard.serve.dataplane.wire import Buffer

MOST_KEPT = 10
MOST_ANSWER_BYTES = 4 << 10
"""Of an answer, from its start."""
MOST_INPUT_BYTES = 64 << 10
"""Of a request."""


@dataclass(frozen=True)
class Difference:
    """A request that two versions answered differently."""

    request_id: str
    at: datetime
    comparison: Comparison
    live: dict[str, Any]
    """The answer as `shown` has it."""
    candidate: dict[str, Any]
    input: dict[str, Any] | None = None
    """The request's body; None where inputs are not kept."""

    @property
    def rank(self) -> tuple[bool, float]:
        """What is worse is larger: another label, then what no tolerance helps, then by size."""
        return self.comparison.labels_agree is False, self.comparison.scaled

    def to_json(self) -> dict[str, Any]:
        """Return it as the management API has it."""
        found = {
            "requestId": self.request_id,
            "at": self.at.isoformat(timespec="milliseconds"),
            "verdict": str(self.comparison.verdict),
            "difference": self.comparison.difference,
            "live": self.live,
            "candidate": self.candidate,
        }
        return found if self.input is None else found | {"input": self.input}


class Worst:
    """The worst differences of a roll-out, of bounded size.

    Args:
        keep_inputs: whether requests are kept with them.
        most: how many are kept.
    """

    def __init__(self, keep_inputs: bool = False, most: int = MOST_KEPT) -> None:
        self._keep_inputs = keep_inputs
        self._most = most
        self._kept: list[Difference] = []

    def add(
        self, request_id: str, found: Comparison, live: Answer, candidate: Answer,
        body: Sequence[Buffer] = (),
    ) -> None:  # fmt: skip
        """Keep two answers if they differ and are among the worst; of equals, the earlier ones.

        Args:
            request_id: as the client or the server named the request.
            found: what comparing the answers found.
            live: the live version's answer.
            candidate: the candidate's answer.
            body: of the request, as it arrived.
        """
        if found.verdict not in (Verdict.DIFFERS, Verdict.CANDIDATE_FAILED):
            return
        new = Difference(request_id[:200], datetime.now(UTC), found, {}, {})
        if len(self._kept) >= self._most and new.rank <= self._kept[-1].rank:
            return
        new = replace(new, live=shown(live), candidate=shown(candidate))
        if self._keep_inputs:
            new = replace(new, input=_cut(b"".join(body), MOST_INPUT_BYTES))
        self._kept.append(new)
        self._kept.sort(key=lambda each: each.rank, reverse=True)
        del self._kept[self._most :]

    def to_json(self) -> list[dict[str, Any]]:
        """Return what is kept, the worst first."""
        return [each.to_json() for each in self._kept]


def shown(answer: Answer) -> dict[str, Any]:
    """Return an answer for people: status, type, and its text or its bytes in base64."""
    kind = answer.headers.get("content-type", "")
    return {"status": answer.status, "type": kind[:200], **_cut(answer.body, MOST_ANSWER_BYTES)}


def _cut(body: Buffer, most: int) -> dict[str, Any]:
    """Return the beginning of a body as text, else in base64, and how many bytes it has."""
    head = bytes(memoryview(body)[:most])
    try:
        said = {"text": head.decode()}
    except UnicodeDecodeError as error:
        is_cut_short = len(body) > most and error.end == len(head) and error.start >= most - 3
        said = (
            {"text": head[: error.start].decode()}
            if is_cut_short
            else {"base64": b64encode(head).decode()}
        )
    return {**said, "bytes": len(body)}
