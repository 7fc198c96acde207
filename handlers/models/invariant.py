"""Batches in which the bits of a row's outputs are those of the row alone, whatever is beside it.

A library's kernels add up in another order for one row than for several, and for the last rows of
some batches. Mostly there are sizes at which every place gives the same bits, as all from 4 up. The
export finds them and its report states them; a worker that is asked to (`batchInvariant`) finds
them again on its own machine, and fills batches up to the next one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from modelyard.archiver.model_config import BATCH_INVARIANT as KEY
from modelyard.archiver.report import Report
from modelyard.archiver.signature import Dim, Signature, TensorSpec
from modelyard.handlers.errors import LoadError
from modelyard.handlers.models.backends import Artifact, Output, as_output, as_tuple
from modelyard.handlers.proof.probes import Probe, example_sizes, make_inputs

OWN_ROWS = 8
"""Rows that are looked for at every place of every batch."""
STRANGERS = ((1000.0,), (1.0, 1000.0, 10.0, 100.0))
"""Factors of the floats of what else is in a batch, one row after the other."""

Tensors = tuple[Tensor, ...]


def candidates(batch: Dim, most: int) -> list[int]:
    """Return the sizes to try, in order: 1, 2, 3, 4, 6, 8, 12 … and the largest."""
    found = {each << power for power in range(most.bit_length()) for each in (1, 3)} | {most}
    return sorted(size for size in found if size <= most and size in batch)


def enlarged(specs: Sequence[TensorSpec], rows: Tensors, factors: Sequence[float]) -> Tensors:
    """Return rows whose floats are as many times as large, one factor after the other."""

    def along(tensor: Tensor) -> Tensor:
        own = torch.tensor(factors).repeat(len(tensor))[: len(tensor)].to(tensor.dtype)
        return own.reshape(-1, *[1] * (tensor.ndim - 1))

    return tuple(
        tensor * along(tensor) if spec.is_float and spec.values is None else tensor
        for spec, tensor in zip(specs, rows, strict=True)
    )


def find_sizes(
    run: Callable[[Tensors], Sequence[Tensor]],
    own: Tensors,
    others: Sequence[Tensors],
    sizes: Sequence[int],
) -> tuple[int, ...]:
    """Return the most sizes that give the same bits, at every place and beside all others.

    Args:
        run: what is to be served.
        own: the rows whose bits are compared.
        others: what stands beside them.
        sizes: those to try.
    """
    alike: dict[tuple[bytes, ...], list[int]] = {}
    for size in sizes:
        if bits := _bits(run, own, others, size):
            alike.setdefault(bits, []).append(size)
    most: list[int] = max(alike.values(), key=lambda each: (len(each), each[-1]), default=[])
    return tuple(most)


def _bits(
    run: Callable[[Tensors], Sequence[Tensor]],
    own: Tensors,
    others: Sequence[Tensors],
    size: int,
) -> tuple[bytes, ...]:
    """Return the bits of each own row in batches of a size; nothing where they are not the same."""
    found: dict[int, bytes] = {}
    for inputs, rows in mixes(own, others, size):
        try:
            outputs = run(inputs)
        # Each format's library fails in its own ways: at this size nothing is promised.
        except Exception:
            return ()
        for place, row in rows:
            parts = (each[place : place + 1].cpu().reshape(-1) for each in outputs)
            bits = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
            if found.setdefault(row, bits) != bits:
                return ()
    return tuple(found[row] for row in range(len(own[0])))


def mixes(
    own: Tensors, others: Sequence[Tensors], size: int
) -> Iterator[tuple[Tensors, list[tuple[int, int]]]]:
    """Yield batches, and the places of own rows: each everywhere, copies, then among strangers."""
    count, line = len(own[0]), torch.arange(size)
    copies = (0 * line + row for row in range(2 if count > 2 else 0))
    for at in (*((line + first) % count for first in range(count)), *copies):
        yield tuple(tensor[at] for tensor in own), list(enumerate(at.tolist()))
    generator = torch.Generator().manual_seed(size)
    together = max(1, size // 2)
    for rows in others:
        beside = tuple(tensor[line % len(tensor)] for tensor in rows)
        for first in range(0, count, together):
            at = torch.arange(first, min(count, first + together))
            places = torch.randperm(size, generator=generator)[: len(at)]
            inputs = (
                other.index_copy(0, places, tensor[at])
                for other, tensor in zip(beside, own, strict=True)
            )
            yield tuple(inputs), list(zip(places.tolist(), at.tolist(), strict=True))


def keep_bits(artifact: Artifact, report: Report | None, batch_size: int) -> "Invariant":
    """Return an artifact as its export's report promises it, in batches of at most a worker's size.

    Raises:
        LoadError: the report promises nothing, or this machine does not keep it.
    """
    batching = report.signature.batching if report else None
    if report is None or batching is None or not batching.sizes:
        why = "export it again"
        if batching:
            why = "no size was found" if batching.batchable else batching.reason
        raise LoadError(
            f"{KEY} in model-config.yaml: no report promises that a row of {artifact.file} keeps "
            f"its bits in a batch: {why}; or leave {KEY} out"
        )
    most = next((size for size in batching.sizes if size >= batch_size), batching.sizes[-1])
    sizes = [size for size in batching.sizes if size <= most]
    return Invariant(artifact, report.tried, sizes)


class Invariant(Artifact):
    """An artifact that runs batches of sizes alone at which no row's bits depend on others.

    Rows of other shapes than those that were tried run one at a time.

    Args:
        artifact: what runs.
        signature: inputs, to make some of.
        sizes: sizes of batches to try, in order; the report's.

    Raises:
        LoadError: a row keeps its bits at none of them.
    """

    def __init__(self, artifact: Artifact, signature: Signature, sizes: Sequence[int]) -> None:
        super().__init__(
            artifact.format, self._in_parts, artifact.inputs, artifact.device, artifact.module
        )
        self.file, self.path, self._artifact = artifact.file, artifact.path, artifact
        self._signature, self._stated = signature, sizes
        self._alone = (signature.batch.min if isinstance(signature.batch, Dim) else 1,)
        self.sizes: dict[tuple[torch.Size, ...], tuple[int, ...]] = {}
        """Sizes of batches, by the shapes of a row."""
        self.learn({})

    def learn(self, dims: Mapping[str, int]) -> None:
        """Find the sizes for rows of these dims on this machine, with this process's threads.

        Raises:
            LoadError: there are none.
        """
        batch = self._signature.batch
        assert isinstance(batch, Dim), "a fixed batch has no sizes"
        sizes = {**example_sizes(self._signature), **dims}
        own, rows = (
            make_inputs(self._signature, Probe("random", {**sizes, batch.name: size}), seed=seed)
            for seed, size in enumerate((max(batch.min, OWN_ROWS), self._stated[-1]))
        )
        others = [enlarged(self._signature.inputs, rows, factors) for factors in STRANGERS]
        with torch.inference_mode():
            found = find_sizes(self._run_whole, own, others, self._stated)
        if not found:
            raise LoadError(
                f"{KEY} in model-config.yaml: a row of {self.file} does not keep its bits in "
                f"batches of {', '.join(map(str, self._stated))} on this machine; leave {KEY} out"
            )
        self.sizes[tuple(tensor.shape[1:] for tensor in own)] = found

    def _run_whole(self, inputs: Tensors) -> Sequence[Tensor]:
        return as_tuple(self._artifact(*(tensor.to(self.device) for tensor in inputs)))

    def _in_parts(self, *tensors: Tensor) -> Output:
        """Run rows in batches of the next size, filled up with copies of one of them."""
        sizes = self.sizes.get(tuple(tensor.shape[1:] for tensor in tensors), ())
        most = sizes[-1] if sizes else 1
        parts = []
        for first in range(0, len(tensors[0]), most):
            own = [tensor[first : first + most] for tensor in tensors]
            count = len(own[0])
            size = next(size for size in sizes or self._alone if size >= count)
            # In memory of its own: kernels may sum in another order where rows begin elsewhere.
            filled = tuple(tensor.new_empty((size, *tensor.shape[1:])) for tensor in own)
            for whole, rows in zip(filled, own, strict=True):
                whole[:count], whole[count:] = rows, rows[:1]
            parts.append([output[:count] for output in self._run_whole(filled)])
        columns = zip(*parts, strict=True)
        return as_output([each[0] if len(each) == 1 else torch.cat(each) for each in columns])
