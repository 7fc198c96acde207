"""Samples in batches of other sizes."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from modelyard.archiver.signature import Signature, parse_inputs
from modelyard.exporter.errors import UsageError
from modelyard.exporter.inputs.samples import Sample, choose_example, hold_out, regroup, rows_of

WORDS = parse_inputs(["ids:int64[batch,length=2..9]", "lengths:int64[batch]=1..length"])
GRAPH = parse_inputs(["x:float32[nodes=1..99,2]", "edges:int64[2,edges=1..99]<nodes"])


def _words(rows: int, length: int, first: int = 0) -> Sample:
    ids = torch.arange(first, first + rows).unsqueeze(1).expand(rows, length)
    lengths = torch.full((rows,), length)
    return Sample(f"{rows}.npz", (ids, lengths), {"batch": rows, "length": length})


def _shapes(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    return [tuple(sample.inputs[0].shape) for sample in samples]


def _first_column(tensor: Tensor) -> list[int]:
    return [int(value) for value in tensor[:, 0]]


def test_rows_come_back_in_batches_of_1_2_a_prime_all_and_the_largest() -> None:
    cases = regroup([_words(4, 3)], WORDS)
    assert _shapes(cases) == [(4, 3), (1, 3), (2, 3), (7, 3), (8, 3)]
    assert _first_column(cases[3].inputs[0]) == [0, 1, 2, 3, 0, 1, 2]
    assert all(case.sizes == {"batch": len(case.inputs[0]), "length": 3} for case in cases)


def test_rows_of_files_share_a_batch_where_their_other_sizes_are_equal() -> None:
    cases = regroup([_words(1, 3), _words(2, 3, first=5), _words(1, 4)], WORDS)
    assert _shapes(cases) == [
        *[(1, 3), (2, 3), (1, 4)],  # as they are
        *[(2, 3), (3, 3), (7, 3), (8, 3)],
        *[(2, 4), (7, 4), (8, 4)],
    ]
    assert _first_column(cases[4].inputs[0]) == [0, 5, 6]
    assert _first_column(cases[3].inputs[0]) == [0, 5]


def test_what_is_not_made_of_rows_stays_as_it_is() -> None:
    sample = Sample(
        "a.npz", (torch.ones(7, 2), torch.zeros(2, 5, dtype=torch.int64)), {"nodes": 7, "edges": 5}
    )
    assert regroup([sample], GRAPH) == (sample,)
    assert choose_example([sample], GRAPH) is sample
    assert rows_of([sample], GRAPH) is None
    offsets = parse_inputs(["offsets:int64[rows]=0..9,rising"])
    sorted_rows = Sample("a.npz", (torch.tensor([0, 4, 5]),), {"rows": 3})
    assert regroup([sorted_rows], offsets) == (sorted_rows,)


def test_the_example_has_no_size_of_1_and_none_twice() -> None:
    assert choose_example([_words(1, 5)], WORDS).sizes == {"batch": 3, "length": 5}
    one = Sample("a.npz", (torch.ones(1, 2), torch.zeros(2, 1)), {"nodes": 1, "edges": 1})
    other = Sample("a.npz", (torch.ones(4, 2), torch.zeros(2, 6)), {"nodes": 4, "edges": 6})
    assert choose_example([one, other], GRAPH) is other


def test_rows_of_one_kind_only_say_nothing_of_a_batch() -> None:
    found = rows_of([_words(2, 3)], WORDS)
    assert found is not None
    assert _first_column(found.inputs[0]) == [0, 1]
    assert rows_of([_words(1, 3)], WORDS) is None


def test_every_fourth_row_is_held_out_of_calibration() -> None:
    split = hold_out([_words(30, 3), _words(6, 4, first=30)], WORDS)
    assert (split.rows, split.held_out_rows) == (27, 9)
    assert _shapes(split.held_out) == [(8, 3), (1, 4)]
    assert _shapes(split.calibration) == [(8, 3), (8, 3), (6, 3), (5, 4)]
    held, kept = (
        [row for part in parts for row in _first_column(part.inputs[0])]
        for parts in (split.held_out, split.calibration)
    )
    assert held == list(range(0, 36, 4))
    assert sorted(held + kept) == list(range(36))
    assert {sample.file for sample in split.held_out} == {"2 files"}


def test_a_file_is_held_out_whole_where_inputs_have_no_rows() -> None:
    graphs = [
        Sample(f"{nodes}.npz", (torch.ones(nodes, 2), torch.zeros(2, 3).long()), {"nodes": nodes})
        for nodes in range(1, 41)
    ]
    split = hold_out(graphs, GRAPH)
    assert (split.rows, split.held_out_rows) == (30, 10)
    assert [sample.sizes["nodes"] for sample in split.held_out] == list(range(1, 41, 4))
    assert not {sample.file for sample in split.held_out} & {
        sample.file for sample in split.calibration
    }


@pytest.mark.parametrize(
    ("samples", "signature", "seen"),
    [([_words(20, 3), _words(11, 4)], WORDS, "31 rows"), ([], GRAPH, "0 files")],
    ids=["rows", "files"],
)
def test_too_few_rows_to_calibrate_with_are_refused(
    samples: list[Sample], signature: Signature, seen: str
) -> None:
    with pytest.raises(UsageError, match=f"--sample gives {seen}.*expected 32 or more"):
        hold_out(samples, signature)
