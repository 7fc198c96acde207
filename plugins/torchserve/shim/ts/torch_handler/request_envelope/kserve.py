"""The envelope `kserve`: KServe's first protocol."""

from collections.abc import Mapping, Sequence
from typing import Any

from ts.torch_handler.request_envelope.base import BaseEnvelope, document, split


class KServeEnvelope(BaseEnvelope):
    """The handler gets the instances; the answer is {"predictions": …} or {"explanations": …}.

    The answer to a request alone is all that the handler gave; several requests share it by their
    numbers of instances.
    """

    _lengths: Sequence[int] = ()

    def parse_input(self, data: Sequence[Mapping[str, Any]]) -> Any:
        """Return the instances of all requests in one list."""
        instances = [document(row).get("instances") for row in data]
        if len(instances) == 1:
            return instances[0]
        self._lengths = [len(rows) for rows in instances]
        return [row for rows in instances for row in rows]

    def format_output(self, data: Any) -> list[dict[str, Any]]:
        """Return each request its own."""
        is_explained = self.context and self.context.get_request_header(0, "explain") == "True"
        key = "explanations" if is_explained else "predictions"
        if len(self.context.request_ids or ()) > 1:
            return [{key: rows} for rows in split(data, self._lengths)]
        return [{key: data}]
