"""The envelope `json`: TensorFlow Serving's {"instances": […]} and {"predictions": […]}."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from modelyard.handlers.body import decode_instance
from ts.torch_handler.request_envelope.base import BaseEnvelope, document, split


class JSONEnvelope(BaseEnvelope):
    """The handler gets the instances of all requests; {"b64": …} of an instance becomes bytes."""

    _lengths: Sequence[int] = ()

    def parse_input(self, data: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return all instances in one list."""
        instances = [document(row)["instances"] for row in data]
        self._lengths = [len(rows) for rows in instances]
        return [decode_instance(row) for rows in instances for row in rows]

    def format_output(self, data: Sequence[Any]) -> list[str]:
        """Return each request the JSON text of its predictions."""
        return [json.dumps({"predictions": rows}) for rows in split(data, self._lengths)]
