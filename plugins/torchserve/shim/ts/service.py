"""A handler with its context, run without a server."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelyard.handlers.context import Context, RequestProcessor
from modelyard.handlers.errors import PredictionException as PredictionException
from ts.utils.util import get_yaml_config
from ts.version import __version__

logger = logging.getLogger(__name__)

PREDICTION_METRIC = "PredictionTime"


class Service:
    """A loaded handler; `ts.model_loader` makes them."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        entry_point: Callable[[Any, Any], Any],
        gpu: int | None,
        batch_size: int,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> None:
        config_file = (manifest or {}).get("model", {}).get("configFile")
        self.context = Context(
            model_name,
            model_dir,
            manifest,
            batch_size,
            gpu,
            __version__,
            limit_max_image_pixels,
            metrics_cache,
            get_yaml_config(str(Path(model_dir) / config_file)) if config_file else None,
        )
        self._entry_point = entry_point

    @staticmethod
    def retrieve_data_for_inference(
        batch: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[list[RequestProcessor], list[dict[str, Any]], dict[int, str]]:
        """Return the headers, the rows and the request ids of a batch.

        Raises:
            ValueError: there is no batch.
        """
        if batch is None:
            raise ValueError("Received invalid inputs")
        headers, rows, ids = [], [], {}
        for index, request in enumerate(batch):
            ids[index] = request["requestId"].decode()
            rows.append({part["name"]: part["value"] for part in request["parameters"]})
            fields: dict[str, Any] = {
                part["name"]: {"content-type": part["contentType"]}
                for part in request["parameters"]
            }
            for header in request.get("headers") or ():
                fields[header["name"].decode()] = header["value"].decode()
            headers.append(RequestProcessor(fields))
        return headers, rows, ids

    def predict(self, batch: Sequence[Mapping[str, Any]]) -> Any:
        """Return the handler's answers to a batch; what it raises is raised.

        Args:
            batch: per request {"requestId": bytes, "parameters": [{"name", "value",
                "contentType"}, …], "headers": [{"name": bytes, "value": bytes}, …]}; headers may
                be left out.
        """
        headers, rows, ids = self.retrieve_data_for_inference(batch)
        self.context.reset(list(ids.values()))
        self.context.request_processor = headers
        metrics = self.context.metrics
        if metrics is not None:
            metrics.request_ids = ids
        begin = time.perf_counter()
        answers = self._entry_point(rows, self.context)
        if metrics is not None:
            metrics.add_time(PREDICTION_METRIC, round((time.perf_counter() - begin) * 1000, 2))
        return answers


def emit_metrics(metrics: Iterable[Any]) -> None:
    """Write each metric to the log."""
    for metric in metrics or ():
        logger.info("[METRICS]%s", metric)
