"""LSTM, GRU and RNN stay one operator while a model is traced, with any sequence length.

torch keeps the operator in the program, but learns the shape of its output by running a
decomposition that loops over the sequence, which fixes the length to the example's. Here the shape
is stated instead, from the shapes that go in.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_Kernel = Callable[..., Any]


def _lstm(
    x: Tensor,
    hx: tuple[Tensor, Tensor],
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """State the shapes of aten.lstm: the hidden state's last size is the projection's, if any."""
    hidden, cell = hx
    return _sequence(x, hidden, bidirectional), torch.empty_like(hidden), torch.empty_like(cell)


def _rnn(
    x: Tensor,
    hx: Tensor,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """State the shapes of aten.gru and of both plain RNNs."""
    return _sequence(x, hx, bidirectional), torch.empty_like(hx)


def _sequence(x: Tensor, hidden: Tensor, bidirectional: bool) -> Tensor:
    # Batch and length keep their places, whichever comes first.
    return x.new_empty((*x.shape[:2], hidden.shape[-1] * (2 if bidirectional else 1)))


_KERNELS: dict[Any, _Kernel] = {
    torch.ops.aten.lstm.input: _lstm,
    torch.ops.aten.gru.input: _rnn,
    torch.ops.aten.rnn_tanh.input: _rnn,
    torch.ops.aten.rnn_relu.input: _rnn,
}
# Where torch's own decomposition is registered.
_KEYS = (
    torch._C.DispatchKey.CompositeImplicitAutograd,
    torch._C.DispatchKey.Autograd,
)


@contextmanager
def any_length() -> Iterator[None]:
    """Trace or convert recurrent layers of every length inside this context.

    It changes torch for the whole process meanwhile: no other thread may run a model.
    """
    saved = {
        (operator, key): operator.py_kernels[key]
        for operator in _KERNELS
        for key in _KEYS
        if key in operator.py_kernels
    }
    try:
        for operator, key in saved:
            operator.py_kernels[key] = _KERNELS[operator]
            operator._dispatch_cache.clear()
        yield
    finally:
        for (operator, key), kernel in saved.items():
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()
