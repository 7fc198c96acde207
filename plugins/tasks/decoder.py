"""A decoder's artifact, and the cache of keys and values that its calls share.

`modelyard export --generate` writes one program that reads prompts and takes every step after them:

    input_ids       int64[batch,length]    new tokens; shorter rows are filled up in front
    attention_mask  int64[batch,length]    1 where a new token is
    past_mask       int64[batch,past]      1 where the cache holds a token of the row
    past_key_N      [batch,heads,past,width] and past_value_N, for each layer
    logits          [batch,vocabulary]     after each row's last token
    new_key_N       [batch,heads,length,width] and new_value_N: what the new tokens add to the cache

The masks say which places of the cache count, and how many tokens went before. So the cache is kept
in memory of a size that seldom changes: the program gets it whole, gives only what is new, and that
is written behind what each row has. Rows of different length need no filling between calls.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from modelyard.archiver.signature import PAST_MASK, UNLIMITED, Dim, TensorSpec
from modelyard.handlers.models.backends import torch_dtype

TOKENS = ("input_ids", "attention_mask", PAST_MASK)
"""The inputs before the cache, by whose names a decoder's artifact is known."""
BLOCK = 64
"""Places by which a cache grows and shrinks."""

Run = Callable[..., Tensor | Sequence[Tensor]]


def cache_names(layers: int) -> list[str]:
    """Return the names of a cache's tensors in their order, as inputs; outputs say new for past."""
    return [f"past_{part}_{layer}" for layer in range(layers) for part in ("key", "value")]


def is_decoder(inputs: Sequence[TensorSpec]) -> bool:
    """Return whether an artifact is one that `modelyard export --generate` wrote."""
    names = [spec.name for spec in inputs]
    layers, rest = divmod(len(names) - len(TOKENS), 2)
    return layers > 0 and not rest and names == [*TOKENS, *cache_names(layers)]


class Cache:
    """The keys and values of several texts, one row each, with room behind what they have.

    Attributes:
        tensors: (rows, heads, capacity, width) each, in the order of the artifact's inputs.
        counts: tokens of each row (rows,), which are the first of its places; on the CPU.
    """

    def __init__(self, tensors: list[Tensor], counts: Tensor) -> None:
        self.tensors = tensors
        self.counts = counts

    @property
    def capacity(self) -> int:
        """How many tokens a row has room for."""
        return self.tensors[0].shape[2]

    def mask(self) -> Tensor:
        """Return which places hold a token (rows, capacity), int64."""
        return (torch.arange(self.capacity) < self.counts[:, None]).long()

    def write(self, mask: Tensor, new: Sequence[Tensor]) -> None:
        """Write what new tokens add (rows, heads, length, width), where the mask has them."""
        rows, places = mask.nonzero(as_tuple=True)
        slots = (self.counts[:, None] + mask.cumsum(1) - 1)[rows, places]
        device = self.tensors[0].device
        rows, places, slots = rows.to(device), places.to(device), slots.to(device)
        for tensor, added in zip(self.tensors, new, strict=True):
            tensor[rows, :, slots] = added[rows, :, places]
        self.counts = self.counts + mask.sum(1)

    def resize(self, capacity: int) -> None:
        """Make room for so many tokens per row, which is at least what the rows have."""
        if capacity == self.capacity:
            return
        kept = min(capacity, self.capacity)
        resized = []
        for tensor in self.tensors:
            rows, heads, _, width = tensor.shape
            # Zeros, since what the mask leaves out is still multiplied, with 0.
            grown = tensor.new_zeros(rows, heads, capacity, width)
            grown[:, :, :kept] = tensor[:, :, :kept]
            resized.append(grown)
        self.tensors = resized

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        self.counts = self.counts[chosen]
        chosen = chosen.to(self.tensors[0].device)
        self.tensors = [tensor.index_select(0, chosen) for tensor in self.tensors]

    def extend(self, other: "Cache") -> None:
        """Add another cache's rows behind these."""
        capacity = max(self.capacity, other.capacity)
        self.resize(capacity)
        other.resize(capacity)
        pairs = zip(self.tensors, other.tensors, strict=True)
        self.tensors = [torch.cat(pair) for pair in pairs]
        self.counts = torch.cat([self.counts, other.counts])


class Decoder:
    """Runs prompts and steps through a decoder's artifact.

    Args:
        run: the artifact, or the module that it was made of: one tensor per input in, one per
            output out.
        inputs: inputs of its signature; the ranges of `length` and `past` are kept to.
        device: where its tensors must be.

    Attributes:
        positions: how many tokens the cache of one text may hold.
    """

    def __init__(
        self, run: Run, inputs: Sequence[TensorSpec], device: torch.device | str = "cpu"
    ) -> None:
        self._run = run
        self._device = torch.device(device)
        self._held = inputs[len(TOKENS) :]
        self._length = _largest(inputs[0].shape[1])
        self.positions = _largest(inputs[2].shape[1])

    def read(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Cache]:
        """Read prompts together, none empty: return the logits (N, V) after them, and their cache.

        The shorter ones are filled up in front, and long ones are read in parts.
        """
        longest = max(map(len, prompts))
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
        ids = torch.zeros_like(mask)
        for row, prompt in enumerate(prompts):
            mask[row, longest - len(prompt) :] = 1
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        cache = Cache(list(self._empty(len(prompts))), torch.zeros(len(prompts), dtype=torch.int64))
        for begin in range(0, longest, self._length):
            part = slice(begin, begin + self._length)
            logits = self._call(ids[:, part], mask[:, part], cache)
        return logits, cache

    def step(self, cache: Cache, tokens: Sequence[int]) -> Tensor:
        """Add a token to each row of the cache, and return the logits (N, V) after it."""
        ids = torch.tensor(tokens, dtype=torch.int64)[:, None]
        return self._call(ids, torch.ones_like(ids), cache)

    def fit(self, cache: Cache) -> None:
        """Give back the room that the rows of a cache do not need any more."""
        cache.resize(min(cache.capacity, self._room(int(cache.counts.max()) + 1)))

    def _call(self, ids: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        inputs = (ids, mask, cache.mask())
        with torch.inference_mode():
            logits, *new = self._run(*(each.to(self._device) for each in inputs), *cache.tensors)
            needed = int((cache.counts + mask.sum(1)).max())
            cache.resize(max(cache.capacity, self._room(needed)))
            cache.write(mask, new)
        return logits

    def _room(self, tokens: int) -> int:
        return min(self.positions, -(-tokens // BLOCK) * BLOCK)

    def _empty(self, rows: int) -> Iterator[Tensor]:
        for spec in self._held:
            sizes = (size for size in spec.shape if isinstance(size, int))
            heads, width = sizes  # the others are dynamic
            shape = (rows, heads, self._room(1), width)
            yield torch.zeros(shape, dtype=torch_dtype(spec.dtype), device=self._device)


def _largest(size: int | Dim) -> int:
    if isinstance(size, int):
        return size
    return size.max if size.max != UNLIMITED else BLOCK
