"""Answers changed in one leaf: what a golden request makes of them."""

import random

import pytest

from modelyard.base.answers import json_difference
from tests.adversary.answers import MODELS, harmless, wrongs
from tests.adversary.gallery import Row, judge


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_leaf_is_seen_by_a_golden_request(name: str) -> None:
    draw, model = random.Random(name), MODELS[name]
    rows = []
    for _ in range(3):
        answer, other = model(draw), model(draw)
        for is_wrong, changes in ((True, wrongs(answer, other)), (False, harmless(answer))):
            for change, changed in changes:
                is_caught = json_difference(changed, answer, 1e-3) is not None
                rows.append(Row(name, change, is_wrong, is_caught))
    judge(rows)
