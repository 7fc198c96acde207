"""Load handlers, as a worker does, or by hand to try one without a server.

PYTHONPATH=<plugins/torchserve/shim>:<folder of the handler's files> python
>>> from ts.model_loader import ModelLoaderFactory
>>> service = ModelLoaderFactory.get_model_loader().load("m", FOLDER, "handler.py", None, 1)
>>> service.predict([{"requestId": b"1", "parameters": [
...     {"name": "body", "value": b"…", "contentType": ""}]}])
"""

import json
from pathlib import Path
from typing import Any

from modelyard.handlers.entry_point import find_handler, import_class
from modelyard.handlers.errors import LoadError
from ts.metrics.metric_cache_yaml_impl import WorkerMetrics
from ts.service import Service
from ts.torch_handler.request_envelope.base import BaseEnvelope

BUILT_IN = {
    place.partition(":")[0]: f"ts.torch_handler.{place}"
    for place in (
        *("base_handler:BaseHandler", "text_handler:TextHandler", "text_classifier:TextClassifier"),
        *("vision_handler:VisionHandler", "image_classifier:ImageClassifier"),
        *("image_segmenter:ImageSegmenter", "object_detector:ObjectDetector"),
        *("dali_handler:DALIHandler", "dali_image_classifier:DALIImageClassifier"),
        *("trt_llm_handler:TRTLLMHandler", "vllm_handler:VLLMHandler"),
    )
}
"""The handlers that an archive may name instead of holding one: module and class of each."""

ENVELOPES = {
    name: f"ts.torch_handler.request_envelope.{name}:{kind}"
    for name, kind in {
        "body": "BodyEnvelope",
        "json": "JSONEnvelope",
        "kserve": "KServeEnvelope",
        "kservev2": "KServev2Envelope",
    }.items()
}


def find_envelope(name: str) -> type[BaseEnvelope]:
    """Return an envelope by the name that `service_envelope` has.

    Raises:
        LoadError: there is none.
    """
    if name not in ENVELOPES:
        raise LoadError(f"service_envelope is {name!r}; expected one of {', '.join(ENVELOPES)}")
    return import_class(ENVELOPES[name])


class TsModelLoader:
    """Loads a handler into this process."""

    def load(
        self,
        model_name: str,
        model_dir: str,
        handler: str,
        gpu_id: int | None = None,
        batch_size: int | None = None,
        envelope: str | None = None,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> Service:
        """Import the handler, which must be on the path, and initialise it.

        Args:
            model_name: the context's.
            model_dir: an unpacked archive.
            handler: handler as in the manifest.
            gpu_id: the device's number, None for the CPU.
            batch_size: the context's.
            envelope: one of `ENVELOPES`.
            limit_max_image_pixels: the context's.
            metrics_cache: takes the metrics; without one the context has one of its own.

        Raises:
            LoadError: no such handler, or none in the file.
        """
        file = Path(model_dir) / "MAR-INF" / "MANIFEST.json"
        manifest = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        loaded = find_handler(handler, BUILT_IN)
        service = Service(
            model_name,
            model_dir,
            manifest,
            loaded.handle,
            gpu_id,
            batch_size or 1,
            limit_max_image_pixels,
            metrics_cache,
        )
        if metrics_cache is None:
            service.context.metrics = WorkerMetrics(service.context, None)
        loaded.initialize(service.context)
        service._entry_point = loaded.handle
        if envelope:
            service._entry_point = find_envelope(envelope)(loaded.handle).handle
        return service


class ModelLoaderFactory:
    """Makes the one kind of model loader."""

    @staticmethod
    def get_model_loader() -> TsModelLoader:
        """Return a loader of handlers."""
        return TsModelLoader()
