"""Every checkpoint that a trainer left gives, bit for bit, what a trusted load gives."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modelyard.exporter.ingest import read_checkpoint
from tests.exporter.ingest.honest import WRITERS


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of the values, so that NaN and -0.0 count too."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8)


@pytest.mark.parametrize("name", WRITERS)
def test_an_honest_checkpoint_is_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    written = WRITERS[name](tmp_path)
    found = read_checkpoint(written.path, **written.options)
    assert list(found.tensors) == list(written.expected) or set(found.tensors) == set(
        written.expected
    )
    for key, expected in written.expected.items():
        tensor = found.tensors[key]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), key
        assert tensor.layout == expected.layout
        assert torch.equal(_bits(tensor), _bits(expected)), key
    assert found.kind == written.kind
    assert found.loader == written.loader
    assert dict(found.hyper_parameters) == {
        **found.hyper_parameters,
        **written.hyper_parameters,
    }
    assert dict(found.training) == {**found.training, **written.training}
    if found.loader == "weights_only" and written.path.suffix in (".pt", ".pth"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(written.path, "cpu", weights_only=True)
    assert set(found.refused) >= set(written.refused)
    assert bool(found.refused) == bool(written.refused)


def test_there_are_at_least_thirty_honest_checkpoints() -> None:
    assert len(WRITERS) >= 30
