"""Named features in, labels or numbers out."""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.handler_files import FEATURES_FILE
from modelyard.archiver.signature import TensorSpec, fits
from modelyard.handlers.base import BaseHandler, Classifier, Inputs
from modelyard.handlers.body import body_of, decode_text, parse_json
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.explain.attribute.attribution import Tensors
from modelyard.handlers.explain.attribute.method import Choice
from modelyard.handlers.explain.draw.bars import Bar
from modelyard.handlers.explain.explanation import Explanation, as_lists
from modelyard.handlers.models.backends import Output
from modelyard.handlers.models.rows import as_dtype, read_numbers
from modelyard.handlers.proof.mutation import Mutation
from modelyard.handlers.tasks.lists import Lists

_LIST_OF_ROWS = re.compile(r"\s*\[\s*[\[{]")
_PEEKED = 64
"""Bytes of a body in which a list of rows shows; JSON is read once where it holds one row."""
MOST_DIGITS = 8
"""Characters of a number that are drawn; of a longer one six digits."""
_KEYS = ("name", "mean", "std", "values", "other", "one_hot", "group")


@dataclass(frozen=True)
class Feature:
    """One value of a row: how it becomes the number, or the numbers, that the model takes."""

    name: str
    mean: float = 0.0
    """Subtracted; also the value that stands for "no information"."""
    std: float = 1.0
    """Divides the difference."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Text → number, for a feature of texts."""
    other: float | None = None
    """The number of every other text; None where there is none."""
    one_hot: tuple[str, ...] = ()
    """Texts with a column each, 1 in that of the text and 0 in the others."""
    is_centred: bool = False
    """Whether a mean is said, which a 0 of the model then stands for."""
    group: str | None = None
    """What explanations take several features of this group for: one of this name."""

    @property
    def columns(self) -> int:
        """How many it has."""
        return len(self.one_hot) or 1

    @property
    def texts(self) -> tuple[str, ...]:
        """What it can be, where that is text."""
        return self.one_hot or tuple(self.values)

    @property
    def part(self) -> str:
        """The name that its attribution has."""
        return self.group or self.name

    @property
    def scale(self) -> float:
        """Range that the model sees it vary by: 1 where `std` is said, of texts their range."""
        numbers = self.values.values()
        return (max(numbers) - min(numbers)) / self.std if numbers else 1.0


class TabularHandler(Lists, Classifier):
    """Serve a model of rows; `features.json` in the archive names the values of one.

    They go into one input (N, F) of floats, or into several (N, …) in their order.

    A request's body is a JSON object with a value for each feature, {"age": 41, "smoker": "no"},
    or a list of the values in order; a list of such rows, and a table as CSV whose first line
    names the features, is answered with the list of their answers. The answer is
    {"label": probability, …} where the archive has labels, else the model's numbers; where the file
    says under "classes" which outputs are of classes, all outputs by name, with the classes. The
    columns of a category, and the features of a group, are one feature to explanations.
    """

    thing: ClassVar[str] = "feature"

    def __init__(self) -> None:
        super().__init__()
        self.features: tuple[Feature, ...] = ()
        self.classes: Mapping[str, Sequence[str]] = {}
        """Output → the classes that its whole numbers, or its columns, stand for."""
        self.rows: list[dict[str, Any]] = []
        """Rows of the current batch: feature name → the value that was sent, in the features'
        order."""

    def initialize(self, context: Context) -> None:
        """Load the archive and its `features.json`; refuse what does not fit the model."""
        super().initialize(context)
        folder = Path(context.system_properties["model_dir"])
        self.features, self.classes = read_features(folder / FEATURES_FILE)
        if self.mapping is None and self.stated_kind is None:
            self.output_kind = "values"
        self.made_by = FEATURES_FILE
        takes = ", ".join(map(str, self.inputs))
        count = sum(feature.columns for feature in self.features)
        specs = self.inputs
        if len(specs) == 1:
            is_table = specs[0].is_float and len(specs[0].shape) == 2
            fitting = not specs[0].dtype or (is_table and fits(count, specs[0].shape[1]))
        else:
            widths = [_width(spec) for spec in specs]
            fitting = all(widths) and sum(widths) == count
        if not fitting:
            raise LoadError(
                f"the artifact takes {takes}, {FEATURES_FILE} names {len(self.features)} features; "
                f"expected a model of one float input [batch, {count}], or of several that have as "
                "many columns"
            )

    def read_list(self, row: Mapping[str, Any]) -> list[Any] | None:
        """Return the rows of a request that holds a list of them."""
        body = body_of(row)
        if isinstance(body, bytes | bytearray | str):
            text = body if isinstance(body, str) else body[:_PEEKED].decode("latin-1")
            if text.lstrip()[:1] not in ("{", "[", "", "\0", "\xef", "\xfe", "\xff"):
                return self._read_csv(body if isinstance(body, str) else decode_text(body))
            body = parse_json(body) if _LIST_OF_ROWS.match(text) else None
        is_list = isinstance(body, list) and bool(body) and isinstance(body[0], dict | list)
        return body if is_list else None

    def _read_csv(self, text: str) -> list[Any] | None:
        """Return the rows of a table whose first line names the features."""
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
        head, names = rows[0], [feature.name for feature in self.features]
        if len(rows) < 2 or len(set(head)) < len(head) or all(map(_read_cell, head)):
            return None  # what says why it is not JSON
        # Of columns that nobody named, a table names its own.
        if names == [f"x{at}" for at in range(len(names))] and len(head) == len(names):
            head = names
        texts = {feature.name for feature in self.features if feature.texts}
        found = []
        for at, row in enumerate(rows[1:], 2):
            if len(row) != len(head):
                raise BadInput(
                    f"line {at} of the table has {len(row)} values; expected {len(head)}, as its "
                    "first line has names"
                )
            found.append({
                name: cell if name in texts or (number := _read_cell(cell)) is None else number
                for name, cell in zip(head, row, strict=True)
            })  # fmt: skip
        return found

    def check_listed(self, body: Any) -> None:
        """Refuse what is not a row."""
        self._numbers_of(self._row_of(body))

    def mutations(self) -> Iterator[Mutation]:
        """Yield other scales, and two features in each other's place."""
        if not self.classes:
            yield from super().mutations()
        scaled = tuple(
            each if each.one_hot else replace(each, std=each.std * 0.99) for each in self.features
        )
        yield Mutation("std", {"features": scaled}, "whose features are not at their means")
        one, two = ([at for at, each in enumerate(self.features) if not each.one_hot] + [0, 0])[:2]
        swapped = list(self.features)
        swapped[one], swapped[two] = swapped[two], swapped[one]
        if one != two:
            names = f"{self.features[one].name} and {self.features[two].name}"
            yield Mutation("order", {"features": tuple(swapped)}, f"whose {names} differ")

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Inputs:
        """Turn rows into the model's input (N, F)."""
        self.rows = []
        return super().preprocess(data)

    def postprocess(self, outputs: Output) -> list[Any]:
        """Name the outputs where the archive has labels, else give them as numbers."""
        if self.classes:
            rows = BaseHandler.postprocess(self, outputs)
            (name, *others) = self.output_names
            return [self._name(row if others else {name: row}) for row in rows]
        if self.mapping is None:
            return BaseHandler.postprocess(self, outputs)
        return super().postprocess(outputs)

    def _name(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of a row with the classes that they stand for."""
        return {
            name: value
            if (classes := self.classes.get(name)) is None
            else classes[value]
            if isinstance(value, int)
            else dict(zip(classes, value, strict=True))
            for name, value in row.items()
        }

    def explain(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """Answer a batch of explanations, of models of one input."""
        if len(self.inputs) > 1:
            raise BadInput(
                f"explanations of a table need a model of one input of numbers; this one takes "
                f"{len(self.inputs)}, columns of texts among them"
            )
        return super().explain(data, context)

    def baseline(self, name: str, inputs: Tensor, seed: int = 0) -> Tensor:
        """Return the `mean` of every feature, which the model sees as zeros."""
        if name not in ("mean", "zero"):
            raise BadInput(
                f'baseline is "{name}"; expected mean, zero or file:NAME for a table (mean and '
                "zero are one: the mean is subtracted)"
            )
        return torch.zeros_like(inputs)

    def baseline_means(self, name: str) -> str | None:
        """Return what the model's zeros are, by the means that `features.json` says."""
        if name not in ("mean", "zero"):
            return None
        numbers = [each for each in self.features if not each.one_hot]
        none = ", without a category" if len(numbers) < len(self.features) else ""
        zeros = ", ".join(each.name for each in numbers if not each.is_centred)
        if not any(each.is_centred for each in numbers):
            return f"0 for every number{none}"
        return f"the average row{zeros and f', but 0 for {zeros}'}{none}"

    def scales(self, inputs: Tensor) -> Tensor:
        """Return the standard deviation of each feature, as the model sees it (N, F)."""
        scales = torch.tensor(
            [feature.scale for feature in self.features for _ in range(feature.columns)]
        )
        return scales.to(inputs).expand_as(inputs)

    def describe(self, index: int, explanation: Explanation) -> dict[str, Any]:
        """Return the attribution of each feature by its name."""
        (attributions,) = explanation.attributions
        if explanation.options.layer is not None:
            return {}
        errors = {}
        if explanation.options.errors and explanation.errors is not None:
            errors["feature_errors"] = self.by_part(explanation.errors[0])
        return {"features": self.by_part(attributions), **errors, "values": self.rows[index]}

    def bars(self, index: int, inputs: Tensors, explanation: Explanation) -> list[Bar]:
        """Return the features and groups by name, with the values that were sent."""
        if explanation.options.layer is not None:
            return super().bars(index, inputs, explanation)
        row = self.rows[index]
        sent: dict[str, list[str]] = {}
        for feature in self.features:
            value = str(row[feature.name])
            if isinstance(row[feature.name], float) and len(value) > MOST_DIGITS:
                value = f"{row[feature.name]:.6g}"
            said = value if feature.part == feature.name else f"{feature.name} {value}"
            sent.setdefault(feature.part, []).append(said)
        errors = {} if explanation.errors is None else self.by_part(explanation.errors[0])
        return [
            Bar(part, value, ", ".join(sent[part]), errors.get(part))
            for part, value in self.by_part(explanation.attributions[0]).items()
        ]

    def numbers(self, row: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the numbers of a row by the features' names."""
        sent = self._row_of(parse_json(body_of(row)))
        return {each.name: sent[each.name] for each in self.features if not each.texts}

    def choices(self, index: int) -> list[Choice]:
        """Return what the features of request `index` could be."""
        ranges = self.reference.ranges if self.reference else {}
        found, end = [], 0
        for each in self.features:
            start, end = end, end + each.columns
            value, texts, encode = self.rows[index][each.name], each.texts, partial(_scaled, each)
            limits = ranges.get(each.name)
            found.append(Choice(each.name, start, end, value, texts, limits, encode))
        return found

    def by_part(self, values: Tensor) -> dict[str, float]:
        """Add values of the columns (F,) up by feature or group."""
        found: dict[str, float] = {}
        for name, value in zip(self._parts, as_lists(values), strict=True):
            found[name] = found.get(name, 0.0) + value
        return found

    def groups(self, index: int, sizes: torch.Size) -> Tensor | None:
        """Return the feature or group that each column is of, where one has several columns."""
        names = list(dict.fromkeys(self._parts))
        if len(names) == len(self._parts) or sizes != (len(self._parts),):
            return None
        return torch.tensor([names.index(name) for name in self._parts])

    @property
    def _parts(self) -> list[str]:
        """The name that each column's attribution goes to."""
        return [feature.part for feature in self.features for _ in range(feature.columns)]

    def name_parts(self, index: int, explanation: Explanation) -> Mapping[str, float]:
        """Return the attribution of each feature by its name."""
        features: Mapping[str, float] = self.describe(index, explanation)["features"]
        return features

    def _read_row(self, row: Mapping[str, Any]) -> list[np.ndarray]:
        """Return one request's features (F,), scaled as `features.json` says."""
        value = self._row_of(parse_json(body_of(row)))
        numbers = self._numbers_of(value)
        self.rows.append(value)
        if len(self.inputs) == 1:
            return [as_dtype(self.inputs[0], np.array(numbers))]
        left = iter(int(number) if number.is_integer() else number for number in numbers)
        return [read_numbers(spec, list(islice(left, _width(spec)))) for spec in self.inputs]

    def _numbers_of(self, row: Mapping[str, Any]) -> list[float]:
        return [n for each in self.features for n in _scaled(each, row[each.name])]

    def _row_of(self, value: Any) -> dict[str, Any]:
        """Return the value of each feature by its name, in the features' order."""
        names = [feature.name for feature in self.features]
        if isinstance(value, list):
            if value and isinstance(value[0], dict | list):
                raise BadInput(
                    f"the body is a list of {len(value)} rows; expected one row, which is explained"
                )
            if len(value) != len(names):
                raise BadInput(
                    f"the row has {len(value)} values; expected {len(names)}: {', '.join(names)}"
                )
            value = dict(zip(names, value, strict=True))
        if not isinstance(value, dict):
            raise BadInput(
                "the body is not a JSON object; expected one with a value for each feature"
            )
        wrong = [f"{each} is missing" for each in names if each not in value]
        wrong += [f"{each} is unknown" for each in value if each not in names]
        if wrong:
            raise BadInput(f"{', '.join(wrong)}; expected exactly {', '.join(names)}")
        return {name: value[name] for name in names}


def _width(spec: TensorSpec) -> int:
    """Return how many values of a row go into an input of several; 0 where none of them can."""
    size = spec.shape[1] if len(spec.shape) == 2 else 0
    return size if isinstance(size, int) else 0


def _read_cell(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_SAID = '{"features": [{"name": "age", "mean": 0.0, "std": 1.0}, …]}'


def read_features(path: Path) -> tuple[tuple[Feature, ...], Mapping[str, Sequence[str]]]:
    """Read features.json: {"features": [{"name": "age", "mean": 41.5, "std": 12.0}, …]}.

    Returns:
        The features, and under "classes" what outputs stand for: {"label": ["no", "yes"]}.

    Raises:
        LoadError: no such file, or entries that cannot be meant; the message names them.
    """
    if not path.is_file():
        raise LoadError(
            f"the archive holds no {path.name}; tabular needs one: --extra-files, {_SAID}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries, classes = content["features"], dict(content.get("classes", {}))
        features = tuple(_read_feature(path.name, at, entry) for at, entry in enumerate(entries))
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{path.name} cannot be read ({error!r}); expected {_SAID}") from error
    names = [feature.name for feature in features]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise LoadError(f"{path.name} names {', '.join(twice)} twice")
    alone = {feature.name for feature in features if feature.group is None}
    if both := sorted(alone & {feature.group for feature in features if feature.group}):
        raise LoadError(f"{path.name} has {', '.join(both)} as a feature and as a group")
    for name, each in classes.items():
        if not isinstance(each, list) or not all(isinstance(text, str) for text in each):
            raise LoadError(f'{path.name} says {each!r} of "{name}"; expected a list of classes')
    return features, classes


def _read_feature(file: str, at: int, entry: Any) -> Feature:
    place = f"{file}: features[{at}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise LoadError(f'{place} is {entry!r}; expected an object with a "name"')
    if unknown := sorted(set(entry) - set(_KEYS)):
        raise LoadError(f"{place} has {', '.join(unknown)}; expected some of {', '.join(_KEYS)}")
    one_hot, group = entry.get("one_hot", []), entry.get("group")
    if (
        not isinstance(one_hot, list)
        or not all(isinstance(each, str) for each in one_hot)
        or (len(set(one_hot)) < len(one_hot) or ("one_hot" in entry and len(one_hot) < 2))
    ):
        raise LoadError(f'{place} has "one_hot": {one_hot!r}; expected two different texts or more')
    if one_hot and (others := sorted({"mean", "std", "values"} & set(entry))):
        raise LoadError(f"{place} has one_hot and {', '.join(others)}; expected one_hot alone")
    if group is not None and (not isinstance(group, str) or not group):
        raise LoadError(f'{place} has "group": {group!r}; expected a name')
    feature = Feature(**{**entry, "one_hot": tuple(one_hot), "is_centred": "mean" in entry})
    numbers = (feature.mean, feature.std, feature.other or 0.0, *feature.values.values())
    if not all(map(_is_number, numbers)) or feature.std <= 0:
        raise LoadError(f"{place} is {entry!r}; expected finite numbers, and std above 0")
    return feature


def _scaled(feature: Feature, value: Any) -> list[float]:
    if texts := feature.texts:
        if isinstance(value, str) and value not in texts and feature.other is not None:
            return [float(feature.other)]
        if not isinstance(value, str) or value not in texts:
            raise BadInput(
                f"{feature.name} is {json.dumps(value)}; expected one of {', '.join(texts)}"
            )
        if feature.one_hot:
            return [float(value == each) for each in feature.one_hot]
        value = feature.values[value]
    if not _is_number(value):
        raise BadInput(f"{feature.name} is {json.dumps(value)}; expected a finite number")
    return [float((value - feature.mean) / feature.std)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
