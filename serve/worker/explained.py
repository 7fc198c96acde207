"""Have a plug-in measure the explanations that an archive gives, by requests that it holds."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from modelyard.archiver.explanations import Asked, to_json
from modelyard.base.plugins import registered
from modelyard.handlers.errors import BadInput, NotMeasured
from modelyard.handlers.explain.attribute.attribution import Tensors
from modelyard.handlers.explain.attribute.method import AskedRequest
from modelyard.handlers.explain.explainer import as_tuple
from modelyard.serve.dataplane import wire
from modelyard.serve.worker import codec
from modelyard.serve.worker.golden import value_of
from modelyard.serve.worker.load import Service, describe
from modelyard.serve.worker.loop import answer_batch


def measure(service: Service, task: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return what was measured, or why nothing was.

    Args:
        service: archive, loaded; it is the working folder.
        task: {"requests": [{"file": …, "content_type": …}, …], "budget_s": …}.
    """
    certify = registered("certifiers").get("explanations")
    if certify is None or service.handler is None:
        return (
            "no plug-in is installed that measures explanations"
            if certify is None
            else "the handler does not inherit from one of ours"
        )
    requests = [_request(service, Asked(**each)) for each in task["requests"]]
    try:
        return to_json(certify.load()(service.handler, requests, task["budget_s"] or math.inf))
    except NotMeasured as error:
        return str(error)
    # Handlers, methods and formats fail in their own ways; none is a reason to write no archive.
    except Exception as error:
        return describe(error, Path(service.context.system_properties["model_dir"]))


def _request(service: Service, asked: Asked) -> AskedRequest:
    body = Path(asked.file).read_bytes()
    return AskedRequest(
        asked, partial(_explain, service, asked, body), partial(_inputs, service, asked, body)
    )


def _explain(service: Service, asked: Asked, body: bytes, query: Mapping[str, str]) -> Any:
    answer = answer_batch(service, [_item(asked, body, query)])[0]
    value = value_of(answer)
    if answer.status != 200:
        raise BadInput(str(value.get("message") if isinstance(value, dict) else value))
    return value


def _inputs(service: Service, asked: Asked, body: bytes) -> Tensors:
    request = codec.Request(_item(asked, body, {}))
    request.decode(body, service.rules.read_json)
    service.context.reset([request.request_id], [request.headers], [request.query])
    return as_tuple(service.handler.preprocess([request.row]))


def _item(asked: Asked, body: bytes, query: Mapping[str, str]) -> wire.Item:
    meta = [b"", urlencode(query).encode(), b"explained"]
    if asked.content_type:
        meta += [b"content-type", asked.content_type.encode()]
    return wire.Item(1, 0, wire.EXPLAIN, wire.pack_meta(meta), body)
