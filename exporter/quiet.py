"""What torch's converters say about themselves on every run, kept from the user's terminal."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_KNOWN: tuple[tuple[str, type[Warning]], ...] = (
    # TorchScript is deprecated, and still what many deployments run; torch's compiler defines some.
    (r"`torch\.jit\.\w+` is", DeprecationWarning),
    # Raised inside torch.export, torch.onnx and the compiler, which copy programs of this torch.
    (r".*treespec, LeafSpec", FutureWarning),
    # Recurrent layers of torch set their list of weights anew in every call.
    (r"The tensor attributes? (self\.\S*_flat_weights\[\d+\](, )?)+ w", UserWarning),
    # One name that stands in two inputs is one size: what the signature means.
    ("# The axis name: .* will not be used", UserWarning),
)


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Silence the warnings that are known, and these loggers: the error that is raised says it."""
    levels = {logger: logger.level for logger in map(logging.getLogger, loggers)}
    try:
        for logger in levels:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            for message, category in _KNOWN:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
