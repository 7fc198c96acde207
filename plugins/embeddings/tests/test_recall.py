"""What the certificate says of an index: wrong artifacts exceed it, harmless changes do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from modelyard.base.scale import Scale
from modelyard.plugins.embeddings.recall import Recall, bounds, compare

TEXTS, WIDTH, TOLERANCE, K = 300, 24, 1e-4, 10
Vectors = np.ndarray


def unit(vectors: Vectors) -> Vectors:
    found: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found


class World:
    """Token vectors of a checkpoint, in a few clusters, and what a report says of its artifact."""

    def __init__(self, seed: int) -> None:
        self.chance = np.random.default_rng(seed)
        themes = self.chance.normal(size=(12, WIDTH))
        self.tokens = [
            themes[at % 12] + self.chance.normal(size=(self.chance.integers(1, 20), WIDTH))
            for at in range(TEXTS)
        ]
        every = np.concatenate(self.tokens)
        scale = Scale(every.mean(0)[None, None], every.std(0)[None, None])
        self.stated: dict[str, Any] = {"scale": scale.to_json(), "tolerance": TOLERANCE}
        self.units = [np.abs(each - every.mean(0)) for each in self.tokens]

    def within(self, share: float = 1.0) -> list[Vectors]:
        """Return token vectors of an artifact that is off by this share of what is allowed."""
        scale = Scale.from_json(self.stated["scale"])
        return [
            each + share * TOLERANCE * self.chance.choice((-1, 1), each.shape)
            * scale.units(each[None])[0]
            for each in self.tokens
        ]  # fmt: skip

    def compare(self, artifact: Vectors) -> Recall:
        own = unit(np.array([each.mean(0) for each in self.tokens]))
        return compare(own, artifact, bounds(self.tokens, self.stated), K)


def pooled(tokens: list[Vectors]) -> Vectors:
    return unit(np.array([each.mean(0) for each in tokens]))


def swapped(world: World) -> Vectors:
    found = pooled(world.tokens)
    found[:, [0, 1]] = found[:, [1, 0]]
    return found


def noisy(world: World) -> Vectors:
    found = pooled(world.tokens)
    return unit(found + 3 * bounds(world.tokens, world.stated).max() * unit(
        world.chance.normal(size=found.shape)))  # fmt: skip


def other_tokens(world: World) -> Vectors:
    return pooled([each[:-1] if len(each) > 5 else each for each in world.tokens])


def unnormalised(world: World) -> Vectors:
    return np.array([each.mean(0) for each in world.tokens])


def first_token(world: World) -> Vectors:
    return unit(np.array([each[0] for each in world.tokens]))


def one_wrong(world: World) -> Vectors:
    found = pooled(world.tokens)
    found[7] = found[8]
    return found


WRONGS = (swapped, noisy, other_tokens, unnormalised, first_token, one_wrong)


@pytest.mark.parametrize("wrong", WRONGS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_wrong_artifact_exceeds_its_certificate(
    wrong: Callable[[World], Vectors], seed: int
) -> None:
    world = World(seed)
    found = world.compare(wrong(world))
    assert not found.holds, f"{wrong.__name__} passed: {found}"
    assert found.beyond >= 1


def same(world: World) -> Vectors:
    return pooled(world.tokens)


def single(world: World) -> Vectors:
    return pooled([each.astype(np.float32) for each in world.tokens]).astype(np.float32)


def other_order(world: World) -> Vectors:
    return pooled([each[::-1].astype(np.float32) for each in world.tokens])


def as_allowed(world: World) -> Vectors:
    return pooled(world.within())


@pytest.mark.parametrize("harmless", [same, single, other_order, as_allowed])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_agrees_by_the_rule_keeps_what_is_promised(
    harmless: Callable[[World], Vectors], seed: int
) -> None:
    world = World(seed)
    found = world.compare(harmless(world))
    assert found.holds, f"{harmless.__name__}: {found}"
    assert 0.9 < found.promised <= found.recall <= 1
    assert found.error <= found.bound < 1e-3


def test_a_neighbour_is_decided_only_if_none_can_take_its_place() -> None:
    """Three texts on a line at known angles: two are a tie within the bound, one is not."""
    angles = np.array([0.0, 0.5, 0.5 + 1e-4, 0.9])
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
    close, apart = np.full(4, 1e-6), np.full(4, 1e-3)
    # Of text 0 the nearest is 1, closely before 2; the others' nearest are 2, 1 and 2, before 1.
    assert compare(vectors, vectors, close, 1).promised == 1
    found = compare(vectors, vectors, apart, 1)
    assert (found.recall, found.promised) == (1, 0.5)
    turned = np.stack([np.cos(angles[[0, 2, 1, 3]]), np.sin(angles[[0, 2, 1, 3]])], 1)
    found = compare(vectors, turned, apart, 1)
    assert found.holds and found.recall == 0.5
    assert not compare(vectors, turned, close, 1).holds
