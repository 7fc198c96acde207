"""The past of a series in, its future out."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from modelyard.archiver.handler_files import SCALER_FILE
from modelyard.archiver.signature import UNLIMITED, Dim, TensorSpec
from modelyard.handlers.base import BaseHandler
from modelyard.handlers.body import body_of, parse_json
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, HandlerError, LoadError
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.folder import read_json_file
from modelyard.handlers.models.rows import as_dtype, read_numbers, read_section


class Forecaster(BaseHandler):
    """Serve a model of windows (N, L) of one series, or (N, L, C) of C; see below for its outputs.

    A request's body is a JSON list of numbers, or of rows of C numbers, the latest last, or
    {"values": such a list}. Of more values than the model takes the latest count. `scaler.json` of
    the archive, {"mean": […], "std": […]} with a number per series (or one for all), is applied to
    what goes in and taken back from what comes out.

    The answer is {"forecast": …}, H numbers or H rows of C. With `handler.series.quantiles` of
    model-config.yaml, as [0.1, 0.5, 0.9], the last dimension of the output is of these, and the
    answer {"quantiles": {"0.1": …, "0.5": …, "0.9": …}}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.std = np.zeros(1), np.ones(1)
        """(1,) or (C,)"""
        self.quantiles: tuple[float, ...] = ()

    def initialize(self, context: Context) -> None:
        """Load the archive, its `scaler.json` and its `handler.series`."""
        super().initialize(context)
        takes = ", ".join(map(str, self.inputs))
        if len(self.inputs) != 1 or not self.inputs[0].is_float or self._rank not in (2, 3):
            raise LoadError(
                f"the artifact takes {takes}; expected one float input [batch, length] or "
                "[batch, length, series]"
            )
        scaler = read_json_file(Path(context.system_properties["model_dir"]) / SCALER_FILE)
        if scaler is not None:
            self.mean, self.std = self._read_scaler(scaler)
            self.made_by = SCALER_FILE
        found = read_section(self.handler_settings, "series", ("quantiles",)).get("quantiles", [])
        is_list = isinstance(found, list) and all(
            isinstance(each, int | float) and not isinstance(each, bool) and 0 < each < 1
            for each in found
        )
        if not is_list:
            raise LoadError(
                f"handler.series.quantiles is {found!r}; expected a list of numbers between 0 and 1"
            )
        self.quantiles = tuple(map(float, found))

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn (N, H), (N, H, C), or these with quantiles behind, into forecasts."""
        values = outputs if isinstance(outputs, Tensor) else outputs[0]
        if self.quantiles and values.shape[-1] != len(self.quantiles):
            raise HandlerError(
                f"the model gave {list(values.shape)}; expected {len(self.quantiles)} numbers in "
                "the last dimension, as handler.series.quantiles says"
            )
        dims = values.dim() - bool(self.quantiles)
        if dims not in (2, 3):
            raise HandlerError(f"the model gave {list(values.shape)}; expected (N, H) or (N, H, C)")
        numbers = values.double().cpu().numpy()
        if not self.quantiles:
            return [{"forecast": row.tolist()} for row in self._unscaled(numbers, dims)]
        parts = [self._unscaled(numbers[..., at], dims) for at in range(len(self.quantiles))]
        return [
            {
                "quantiles": {
                    f"{quantile:g}": part[row].tolist()
                    for quantile, part in zip(self.quantiles, parts, strict=True)
                }
            }
            for row in range(len(numbers))
        ]

    def score(self, outputs: Output) -> Tensor:
        """Return the outputs as places, which have no probability."""
        scores = super().score(outputs)
        return scores.unsqueeze(2) if scores.dim() == 2 else scores

    def scales(self, inputs: Tensor) -> Tensor:
        """Return the range of each series over its time."""
        return inputs.amax(1, keepdim=True) - inputs.amin(1, keepdim=True)

    def name_place(self, index: int, place: tuple[int, ...]) -> str:
        """Return which step ahead it is, and the rest of the place where there is one."""
        rest = ",".join(map(str, place[1:]))
        return f"step {place[0] + 1}" + (f" ({rest})" if any(place[1:]) else "")

    @property
    def _rank(self) -> int:
        return len(self.inputs[0].shape)

    def _read_row(self, row: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the latest values of one request, (L,) or (L, C), scaled."""
        body = parse_json(body_of(row))
        if isinstance(body, dict):
            if set(body) != {"values"}:
                raise BadInput(f'the body holds {", ".join(body) or "nothing"}; expected "values"')
            body = body["values"]
        spec = self.inputs[0]
        length = spec.shape[1]
        least, most = (length.min, length.max) if isinstance(length, Dim) else (length, length)
        if not isinstance(body, list) or len(body) < least:
            seen = f"{len(body)} values" if isinstance(body, list) else "no list"
            raise BadInput(f"the body holds {seen}; expected at least {least}, the latest last")
        rest = (spec.shape[0], Dim("length", least, UNLIMITED), *spec.shape[2:])
        values = read_numbers(TensorSpec(spec.name, spec.dtype, rest), body[-most:])
        return [as_dtype(spec, (values - self.mean) / self.std)]

    def _unscaled(self, values: np.ndarray, dims: int) -> np.ndarray:
        """Return (N, H) or (N, H, C) in the units of the request."""
        if dims == 3 and len(self.mean) not in (1, values.shape[2]):
            raise HandlerError(
                f"the model gave {list(values.shape)}, {SCALER_FILE} is of {len(self.mean)} series"
            )
        count = len(self.mean) if dims == 3 else 1
        return values * self.std[:count] + self.mean[:count]

    def _read_scaler(self, content: Any) -> tuple[np.ndarray, np.ndarray]:
        series = self.inputs[0].shape[2] if self._rank == 3 else 1
        pair = []
        for name in ("mean", "std"):
            value = content.get(name) if isinstance(content, dict) else None
            numbers = value if isinstance(value, list) else [value]
            is_fit = all(
                isinstance(each, int | float) and not isinstance(each, bool)
                and math.isfinite(each) and (name == "mean" or each > 0)
                for each in numbers
            )  # fmt: skip
            if not is_fit or len(numbers) not in (1, series):
                raise LoadError(
                    f"{SCALER_FILE}: {name} is {value!r}; expected {series} finite numbers"
                    + (" above 0" if name == "std" else "")
                )
            pair.append(np.array(numbers, dtype=np.float64))
        if len(pair[0]) != len(pair[1]):
            raise LoadError(f"{SCALER_FILE}: mean and std have different lengths")
        return pair[0], pair[1]
