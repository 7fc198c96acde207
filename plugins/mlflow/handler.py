"""Requests and answers of MLflow's scoring protocol, around a model of tensors.

https://mlflow.org/docs/latest/ml/deployment/deploy-model-locally
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from modelyard.archiver.handler_files import FEATURES_FILE
from modelyard.archiver.signature import OIP_DATATYPES, Dim, TensorSpec
from modelyard.handlers.base import BaseHandler
from modelyard.handlers.body import body_of, parse_json
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput
from modelyard.handlers.models.rows import read_numbers, whole
from modelyard.handlers.tasks.tabular_handler import read_features
from modelyard.handlers.tensors import TensorRequest

FORMS = ("dataframe_records", "dataframe_split", "inputs", "instances")


class MlflowHandler(BaseHandler):
    """Answer `{"predictions": …}` to what `mlflow models serve` takes, as it would.

    A body has several rows: an object with one of `FORMS`, or a table as CSV. Any other body is one
    row, as BaseHandler takes it, and is answered so; one that is explained is of that kind.
    `features.json` names the columns of a table.
    """

    def __init__(self) -> None:
        super().__init__()
        self.columns: tuple[str, ...] = ()
        self.is_named = False
        """Whether outputs are answered by name: those of ONNX, and several."""
        self._read_as: tuple[TensorSpec, ...] = ()
        """The inputs, of any number of rows."""

    def initialize(self, context: Context) -> None:
        """Load the archive, and the names of its columns."""
        super().initialize(context)
        features = Path(context.system_properties["model_dir"]) / FEATURES_FILE
        if features.is_file() and len(self.inputs) == 1:
            self.columns = tuple(each.name for each in read_features(features)[0])
        is_onnx = self.report is not None and self.report.checkpoint_kind == "ONNX"
        self.is_named = is_onnx or len(self.output_names) > 1
        self.read_any_number_of_rows()

    def read_any_number_of_rows(self) -> None:
        """Have a request hold more rows than a call of the model."""
        specs = self.inputs
        if not self.is_whole:
            specs = tuple(replace(s, shape=(Dim("rows"), *s.shape[1:])) for s in self.inputs)
        self._read_as = tuple(map(whole, specs))

    def _run_steps(self, data: Sequence[Mapping[str, Any]]) -> list[Any]:
        read = [self._each(at, self._read, row) for at, row in enumerate(data)]
        if not any(read):
            return super()._run_steps(data)
        parts = [self._requests(tensors) if tensors else [] for tensors in read]
        found = iter(self.infer([request for each in parts for request in each]))
        return [
            {"predictions": self._write([next(found) for _ in requests])}
            if requests
            else super(MlflowHandler, self)._run_steps([row])[0]
            for row, requests in zip(data, parts, strict=True)
        ]

    def _read(self, row: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        """Return the inputs that a request has; None where it is not of this protocol."""
        body = body_of(row)
        if isinstance(body, str) and body.lstrip()[:1] not in ("{", "["):
            return self._tensors(_read_csv(body))
        content = parse_json(body)
        given = [form for form in FORMS if form in as_object(content)]
        if len(given) > 1:
            raise BadInput(f"the body has {' and '.join(given)}; expected exactly one of them")
        if not given:
            return None
        if content.get("params"):
            raise BadInput("the body has params; expected none: the artifact takes no parameters")
        return self._tensors(self._values(given[0], content[given[0]]))

    def _values(self, form: str, given: Any) -> Any:
        """Return the rows of a form: numbers, or lists of them by name."""
        if form == "dataframe_split":
            rows, names = (as_object(given).get(key) for key in ("data", "columns"))
            if not isinstance(rows, list):
                raise BadInput("dataframe_split has no data; expected a list of rows")
            return rows if names in (None, [*self.columns]) else _by_name(names, rows)
        records: list[Any] = given if isinstance(given, list) and given else [None]
        if form == "dataframe_records" or isinstance(records[0], dict):
            keys = as_object(records[0]).keys()
            if not keys or any(as_object(each).keys() != keys for each in records):
                raise BadInput(f"{form} has no records; expected objects with the same columns")
            return {key: [each[key] for each in records] for key in keys}
        return given

    def _tensors(self, values: Any) -> dict[str, np.ndarray]:
        """Return the model's inputs, of rows or of columns by name."""
        names = [spec.name for spec in self.inputs]
        if not isinstance(values, dict):
            if len(names) > 1:
                raise BadInput(f"the rows are of one input; expected {', '.join(names)} by name")
            values = {names[0]: values}
        elif self.columns or (len(names) == 1 and names[0] not in values):
            columns = [values[name] for name in self._named(values, self.columns or [*values])]
            try:
                values = {names[0]: np.stack(np.atleast_1d(*columns, [])[:-1], axis=1)}
            except ValueError as error:
                raise BadInput(f"the columns are not a table: {error}") from error
        self._named(values, names)
        return {spec.name: read_numbers(spec, values[spec.name]) for spec in self._read_as}

    @staticmethod
    def _named(values: Mapping[str, Any], names: Sequence[str]) -> Sequence[str]:
        """Return the names, all of which have values; others are left alone, as MLflow does."""
        if missing := [name for name in names if name not in values]:
            raise BadInput(f"Model is missing inputs {missing}.")
        return names

    def _requests(self, tensors: Mapping[str, np.ndarray]) -> list[TensorRequest]:
        """Return a request in as many as the model takes in one call."""
        datatypes = {spec.name: OIP_DATATYPES.get(spec.dtype, "") for spec in self.inputs}
        if not self.has_rows:
            return [TensorRequest(tensors, datatypes)]
        rows, count = self.inputs[0].shape[0], len(next(iter(tensors.values())))
        most = rows.max if isinstance(rows, Dim) else rows
        return [
            TensorRequest({name: each[at : at + most] for name, each in tensors.items()}, datatypes)
            for at in range(0, max(count, 1), most)
        ]

    def _write(self, found: Sequence[Mapping[str, np.ndarray]]) -> Any:
        """Return the predictions: lists, by output or not, or records of a table."""
        outputs = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        if not self.columns:
            lists = {name: array.tolist() for name, array in outputs.items()}
            return lists if self.is_named else lists[self.output_names[0]]
        if not self.is_named:  # pandas numbers what has no names
            (array,) = outputs.values()
            outputs = {str(at): each for at, each in enumerate(array.reshape(len(array), -1).T)}
        columns = [array.reshape(-1).tolist() for array in outputs.values()]
        return [dict(zip(outputs, row, strict=True)) for row in zip(*columns, strict=True)]


def as_object(value: Any) -> dict[str, Any]:
    """Return a JSON object; an empty one of anything else."""
    return value if isinstance(value, dict) else {}


def _read_csv(text: str) -> dict[str, list[Any]]:
    """Return the columns of a table whose first line names them."""
    names, *rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row] or [[]]
    try:
        return _by_name(names, [[float(each) for each in row] for row in rows])
    except ValueError as error:
        raise BadInput(f"the table has other values than numbers: {error}") from error


def _by_name(names: Any, rows: Any) -> dict[str, list[Any]]:
    """Return the columns of rows, by the names of the columns."""
    try:
        if any(len(row) != len(names) for row in rows):
            raise BadInput(f"a row has not {len(names)} values; expected one for each column")
        return {str(name): [row[at] for row in rows] for at, name in enumerate(names)}
    except TypeError as error:
        raise BadInput(f"the table cannot be read: {error}; expected lists of values") from error
