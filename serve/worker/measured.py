"""What a dry run measures with torch: how far an archive's two artifacts are apart on this machine.

And, by a plug-in, how good the explanations are that it gives, by requests that it holds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from torch import Tensor

from modelyard.archiver.explanations import Asked, to_json
from modelyard.archiver.report import Report, parse_report
from modelyard.base.plugins import registered
from modelyard.handlers.errors import BadInput, NotMeasured
from modelyard.handlers.explain.attribute.attribution import Tensors
from modelyard.handlers.explain.attribute.method import AskedRequest
from modelyard.handlers.models.backends import Artifact, as_tuple, dtype_name, open_artifact
from modelyard.handlers.proof import agree
from modelyard.handlers.proof.copies import judge, repeated_probes
from modelyard.handlers.proof.probes import make_case
from modelyard.serve.dataplane import wire
from modelyard.serve.worker import codec, load
from modelyard.serve.worker.golden import value_of
from modelyard.serve.worker.loop import answer_batch

KEPT_BYTES = 64 << 20
"""Outputs of the twin that are kept, of all cases together; of others it runs twice."""


def compare(folder: Path, pair: dict[str, str], device: str) -> dict[str, Any]:
    """Run artifact and twin on the inputs of their export; judge them by its rule."""
    try:
        reports = [
            parse_report((folder / pair[name]).read_bytes(), folder / pair[name])
            for name in ("report", "twin_report")
        ]
        artifact, twin = (
            open_artifact(
                folder / pair[name],
                report.format,
                device,
                trusted=report.trusted_operators,
                tf32=reports[0].tf32,
            )
            for name, report in zip(("artifact", "twin"), reports, strict=True)
        )
        return _judge(artifact, twin, *reports)
    # Each format's library fails in its own ways; all mean that the two cannot be compared.
    except Exception as error:
        return {"cases": 0, "summary": "", "differences": [load.describe(error, folder)]}


def _judge(artifact: Artifact, twin: Artifact, report: Report, other: Report) -> dict[str, Any]:
    assert report.parity is not None, "the archiver asks for what is proven only"
    assert other.parity is not None
    probes = repeated_probes(report)
    if not probes:
        return {"cases": 0, "summary": "", "differences": []}
    kept: dict[int, Sequence[Tensor]] = {}
    free_bytes = KEPT_BYTES

    def of_twin() -> Iterator[Sequence[Tensor]]:
        nonlocal free_bytes
        for place, probe in enumerate(probes):
            outputs = kept.get(place) or agree.run(twin, make_case(report.tried, probe))
            if place not in kept:
                free_bytes -= sum(output.nbytes for output in outputs)
            if free_bytes >= 0:
                kept[place] = outputs
            yield outputs

    dtypes: list[str] = []

    def of_artifact() -> Iterator[Sequence[Tensor]]:
        for probe in probes:
            outputs = agree.run(artifact, make_case(report.tried, probe))
            dtypes[:] = [dtype_name(each.dtype) for each in outputs]
            yield outputs

    rules, measured = judge(report.parity, other.parity, probes, of_artifact(), of_twin)
    apart = [agree.disagreement(name, rule, measured[name], probes) for name, rule in rules.items()]
    stated = [spec.dtype for spec in report.signature.outputs]
    if dtypes != stated:
        apart.append(f"the artifact gives {dtypes}; its report says {stated}")
    few = "; few inputs were tried, as by `modelyard export --quick`"
    return {
        "cases": len(probes),
        "summary": agree.summary(rules, measured, probes)
        + (few if report.parity.extent == "quick" else ""),
        "differences": [text for text in apart if text],
    }


# -- explanations --------------------------------------------------------------------------------


def measure_explanations(service: load.Service, task: Mapping[str, Any]) -> dict[str, Any] | str:
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
        return load.describe(error, Path(service.context.system_properties["model_dir"]))


def _request(service: load.Service, asked: Asked) -> AskedRequest:
    body = Path(asked.file).read_bytes()
    return AskedRequest(
        asked, partial(_explain, service, asked, body), partial(_inputs, service, asked, body)
    )


def _explain(service: load.Service, asked: Asked, body: bytes, query: Mapping[str, str]) -> Any:
    answer = answer_batch(service, [_item(asked, body, query)])[0]
    value = value_of(answer)
    if answer.status != 200:
        raise BadInput(str(value.get("message") if isinstance(value, dict) else value))
    return value


def _inputs(service: load.Service, asked: Asked, body: bytes) -> Tensors:
    request = codec.Request(_item(asked, body, {}))
    request.decode(body, service.rules.read_json)
    service.context.reset([request.request_id], [request.headers], [request.query])
    return as_tuple(service.handler.preprocess([request.row]))


def _item(asked: Asked, body: bytes, query: Mapping[str, str]) -> wire.Item:
    meta = [b"", urlencode(query).encode(), b"explained"]
    if asked.content_type:
        meta += [b"content-type", asked.content_type.encode()]
    return wire.Item(1, 0, wire.EXPLAIN, wire.pack_meta(meta), body)
