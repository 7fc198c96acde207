"""Which differences are kept for a person to see, and how much of them."""

from __future__ import annotations

import math

from modelyard.plugins.ops.rollout.comparer import Comparison, Verdict
from modelyard.plugins.ops.rollout.trial import MOST_ANSWER_BYTES, MOST_INPUT_BYTES, Worst, shown
from modelyard.serve.dataplane.call import Reply

JSON = b"content-type\0application/json"
ANSWER = Reply(200, JSON, b'{"7":0.9}')


def differs(scaled: float, labels_agree: bool | None = True) -> Comparison:
    return Comparison(Verdict.DIFFERS, labels_agree, f"by {scaled}", scaled)


def test_the_worst_are_kept_and_other_labels_come_first() -> None:
    worst = Worst(most=3)
    for number, found in enumerate(
        [
            differs(0.1),
            differs(0.2, labels_agree=False),
            differs(0.9),
            Comparison(Verdict.CANDIDATE_FAILED, None, "status", math.inf),
            Comparison(Verdict.EQUAL, True),
            Comparison(Verdict.WITHIN_TOLERANCE, True, "little", 1e-6),
            differs(0.3),
            differs(0.2, labels_agree=False),
        ]
    ):
        worst.add(f"r{number}", found, ANSWER, ANSWER)
    assert [each["requestId"] for each in worst.to_json()] == ["r1", "r7", "r3"]


def test_of_equals_the_first_stay() -> None:
    worst = Worst(most=2)
    for number in range(5):
        worst.add(f"r{number}", differs(math.inf), ANSWER, ANSWER)
    assert [each["requestId"] for each in worst.to_json()] == ["r0", "r1"]


def test_a_request_has_one_place_for_the_worst_of_its_differences() -> None:
    worst = Worst(most=3)
    for id, scaled in (("r0", 0.5), ("r1", 0.4), ("r0", 0.3), ("r1", 0.9), ("r2", 0.1)):
        worst.add(id, differs(scaled), ANSWER, ANSWER)
    found = [(each["requestId"], each["difference"]) for each in worst.to_json()]
    assert found == [("r1", "by 0.9"), ("r0", "by 0.5"), ("r2", "by 0.1")]


def test_inputs_are_kept_only_when_asked() -> None:
    kept = []
    for keep in (False, True):
        worst = Worst(keep_inputs=keep)
        worst.add("r", differs(1), ANSWER, ANSWER, [b"secret ", memoryview(b"words")])
        kept += worst.to_json()
    assert "input" not in kept[0]
    assert kept[1]["input"] == {"text": "secret words", "bytes": 12}
    assert kept[1]["live"] == {
        "status": 200, "type": "application/json", "text": '{"7":0.9}', "bytes": 9
    }  # fmt: skip


def test_answers_and_inputs_are_cut() -> None:
    long = ("é" * MOST_ANSWER_BYTES).encode()
    found = shown(Reply(200, JSON, b"x" + long))
    assert len(found["text"].encode()) == MOST_ANSWER_BYTES - 1, "half a character is left out"
    assert found["bytes"] == 1 + len(long)
    assert shown(Reply(200, b"", b"\xff\x00"))["base64"] == "/wA="
    worst = Worst(keep_inputs=True)
    worst.add("r" * 1000, differs(1), ANSWER, ANSWER, [bytes(2 * MOST_INPUT_BYTES)])
    (kept,) = worst.to_json()
    assert len(kept["input"]["text"]) == MOST_INPUT_BYTES
    assert len(kept["requestId"]) == 200
