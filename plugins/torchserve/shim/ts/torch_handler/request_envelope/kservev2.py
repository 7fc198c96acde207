"""The envelope `kservev2`: the Open Inference Protocol."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelyard.archiver.signature import OIP_DATATYPES
from ts.torch_handler.request_envelope.base import BaseEnvelope, document, split


class KServev2Envelope(BaseEnvelope):
    """The handler gets the inputs of all requests, as dicts, and gives one output for each.

    `data` of an input is nested by its `shape`; of BYTES the text, or the first of several, counts.
    An output has the name of its input, and flat data.
    """

    takes_tensors = True
    _requests: Sequence[Mapping[str, Any]] = ()

    def parse_input(self, data: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the inputs of all requests in one list."""
        self._requests = [document(row) for row in data]
        inputs = [_shaped(one) for request in self._requests for one in request["inputs"]]
        self.context.input_names = [one["name"] for one in inputs]
        return inputs

    def format_output(self, data: Sequence[Any]) -> list[dict[str, Any]]:
        """Return each request its outputs."""
        model = (self.context.manifest or {}).get("model", {})
        lengths = [len(request["inputs"]) for request in self._requests]
        return [
            {
                "id": _id_of(request) or self.context.get_request_id(index),
                "model_name": model.get("modelName"),
                "model_version": model.get("modelVersion"),
                "outputs": [
                    _output(one["name"], value)
                    for one, value in zip(request["inputs"], values, strict=True)
                ],
            }
            for index, (request, values) in enumerate(
                zip(self._requests, split(data, lengths), strict=True)
            )
        ]


def _id_of(request: Mapping[str, Any]) -> str | None:
    name = request.get("id")
    return name if isinstance(name, str) and name.strip() else None


def _shaped(one: Mapping[str, Any]) -> dict[str, Any]:
    data = one["data"]
    if one["datatype"] == "BYTES":
        return {**one, "data": data if isinstance(data, str) else data[0]}
    return {**one, "data": np.array(data).reshape(one["shape"]).tolist()}


def _output(name: str, value: Any) -> dict[str, Any]:
    flat = np.array(value).flatten()
    datatype = OIP_DATATYPES.get(str(flat.dtype), "BYTES")
    return {"name": name, "datatype": datatype, "data": flat.tolist(), "shape": list(flat.shape)}
