"""The time that a handler's steps take, as metrics."""

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def timed(func: Method) -> Method:
    """Report each call of a handler's method as the metric `ts_handler_<its name>`, in ms.

    Only where model-config.yaml says `handler: {profile: true}`.
    """

    @functools.wraps(func)
    def wrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = self.context
        section = context.model_yaml_config.get("handler") if context else None
        if not (isinstance(section, dict) and section.get("profile")):
            return func(self, *args, **kwargs)
        begin = _now()
        result = func(self, *args, **kwargs)
        context.metrics.add_time(f"ts_handler_{func.__name__}", (_now() - begin) * 1000)
        return result

    return cast("Method", wrap)


def _now() -> float:
    """Read the clock, in seconds, when the device has done what it was given so far."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
