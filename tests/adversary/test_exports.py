"""Networks converted wrong on purpose, and otherwise but right: what export's parity makes of them.

Every copy is written as TorchScript and compared in the process that export uses, by its own rule.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter.errors import ParityError
from modelyard.exporter.formats import to_torchscript
from modelyard.exporter.prove.checker import Checker
from modelyard.exporter.prove.parity import check
from modelyard.exporter.prove.reference import Reference, observe
from tests.adversary.gallery import Row, judge
from tests.adversary.networks import (
    NETWORKS,
    Change,
    Network,
    copy_of,
    harmless,
    on_each,
    then,
    wrongs,
)

GAINS = (1.0, 1e-12, 1e12)
OFFSETS = (0.0, 1000.0)
BY_DAY = 12
"""One row of so many is tried by day."""


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    with Checker(tmp_path_factory.mktemp("exchange")) as running:
        yield running


def spread_of(net: nn.Module, network: Network) -> Tensor:
    """Return by how much each number of the first output varies."""
    cases = look(net, network).cases
    rows = [case.outputs[0].double() for case in cases if case.probe.kind == "random"]
    return torch.cat(rows).std(0)


def look(net: nn.Module, network: Network) -> Reference:
    signature = parse_inputs(network.inputs.split("; "))
    return observe(
        net, signature, list(network.outputs), torch.device("cpu"), dtype=network.dtype, quick=False
    )


def caught(reference: Reference, copied: nn.Module, network: Network, checker: Checker) -> str:
    """Return why export refuses a copy; empty where it does not."""
    artifact = checker._child.folder / "copy.pt"
    to_torchscript.write(copied, reference.signature, reference.example, artifact)
    try:
        check(artifact, "torchscript", reference, checker, is_quantized=network.is_quantized)
    except ParityError as error:
        assert "does not run" not in str(error), error
        return str(error)
    return ""


def tried(name: str, gain: float, offset: float, checker: Checker, step: int = 1) -> Iterator[Row]:
    network = NETWORKS[name]
    torch.manual_seed(0)
    net = network.build().eval()
    outer: Change = lambda changed: changed  # noqa: E731
    if (gain, offset) != (1.0, 0.0):
        moved = offset * spread_of(net, network)
        outer = then(on_each(lambda y: ((y + moved) * gain).to(y.dtype)))
    checkpoint = outer(net).eval()
    reference = look(checkpoint, network)
    both = ((True, wrongs(network, offset)), (False, harmless(network)))
    for is_wrong, changes in both:
        for at, (change, make) in enumerate(changes):
            if (at + len(name)) % step:
                continue
            copied = copy_of(net, make, network, outer)
            why = caught(reference, copied, network, checker)
            said = change if is_wrong else f"{change}: {why}"
            yield Row(f"{name}, gain {gain:g}, offset {offset:g}", said, is_wrong, bool(why))


def test_some_wrong_copies_are_refused(checker: Checker) -> None:
    judge(row for name in NETWORKS for row in tried(name, 1.0, 0.0, checker, BY_DAY))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_wrong_copy_is_refused(
    checker: Checker, name: str, gain: float, offset: float
) -> None:
    if (gain, offset) != (1.0, 0.0) and not NETWORKS[name].has_gain:
        return
    rows = list(tried(name, gain, offset, checker))
    known = [row for row in rows if row.is_wrong and NETWORKS[name].is_quantized and offset]
    # A quantised output is measured by its size: docs/archive.md, "What no check sees".
    judge(rows, frozenset(f"{row.check}: {row.change}" for row in known))
