"""Counts that can be worked out by hand."""

import torch
from torch import nn

from modelyard.exporter.bench.child import count_flops


def test_a_linear_layer_takes_two_operations_per_weight_and_row() -> None:
    layer = nn.Linear(6, 4)
    assert count_flops(lambda: layer(torch.ones(3, 6)))[0] == 2 * 3 * 6 * 4


def test_a_convolution_takes_two_operations_per_weight_and_place() -> None:
    layer = nn.Conv2d(3, 8, 3, padding=1)
    assert count_flops(lambda: layer(torch.ones(2, 3, 5, 7)))[0] == 2 * 2 * 5 * 7 * 8 * 3 * 9


def test_an_lstm_is_counted_in_both_directions() -> None:
    layer = nn.LSTM(8, 6, batch_first=True, bidirectional=True).eval()
    per_step = 4 * 6 * (8 + 6)  # four gates, each from the input and from the state
    assert count_flops(lambda: layer(torch.ones(5, 7, 8)))[0] == 2 * 2 * 5 * 7 * per_step


def test_attention_is_counted() -> None:
    query = torch.ones(2, 4, 7, 16)  # rows, heads, length, width
    attend = nn.functional.scaled_dot_product_attention
    assert count_flops(lambda: attend(query, query, query))[0] == 2 * 2 * 4 * 7 * 7 * 16 * 2


def test_what_has_no_formula_is_unknown_and_named() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    found = count_flops(lambda: layer(torch.ones(2, 5, 16)))  # torch's fused operator
    assert found == (None, ["_transformer_encoder_layer_fwd"])
