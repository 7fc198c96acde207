"""Compare the two artifacts of an archive on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from modelyard.archiver.report import Report, parse_report
from modelyard.handlers.models.backends import Artifact, dtype_name, open_artifact
from modelyard.handlers.proof import agree
from modelyard.handlers.proof.plan import choose_probes
from modelyard.handlers.proof.probes import KINDS, make_case
from modelyard.serve.worker import load

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
    parity = report.parity
    probes = choose_probes(
        report.signature,
        parity.extent,
        among=parity.kinds or KINDS,
        left_out=parity.left_out,
    )
    if not any(probe.kind in agree.ORDINARY_KINDS for probe in probes):
        none = "the report names no ordinary inputs to compare on"
        differences = [] if parity.extent == "none" else [none]
        return {"cases": 0, "summary": "", "differences": differences}
    rules = {
        name: agree.within_reason(rule, probes)
        for name, rule in agree.joint_rules(parity, other.parity).items()
    }
    # Learnt anew: a report that somebody altered may state any scale.
    scales = agree.OutputScales()
    kept: dict[int, list[Tensor]] = {}
    free_bytes = KEPT_BYTES
    for place, probe in enumerate(probes):
        outputs = agree.run(twin, make_case(report.tried, probe))
        scales.see(probe.kind, outputs)
        free_bytes -= sum(output.nbytes for output in outputs)
        if free_bytes >= 0:
            kept[place] = outputs
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in rules}
    for place, probe in enumerate(probes):
        inputs = make_case(report.tried, probe)
        wanted, found = kept.get(place) or agree.run(twin, inputs), agree.run(artifact, inputs)
        of_all = zip(rules.items(), wanted, found, scales.of(probe.kind), strict=True)
        for (name, rule), expected, actual, scale in of_all:
            measured[name].append(agree.compare(expected, actual, rule.tolerance, scale))
    apart = [agree.disagreement(name, rule, measured[name], probes) for name, rule in rules.items()]
    stated = [spec.dtype for spec in report.signature.outputs]
    if (given := [dtype_name(each.dtype) for each in found]) != stated:
        apart.append(f"the artifact gives {given}; its report says {stated}")
    few = "; few inputs were tried, as by `modelyard export --quick`"
    return {
        "cases": len(probes),
        "summary": agree.summary(rules, measured, probes)
        + (few if parity.extent == "quick" else ""),
        "differences": [text for text in apart if text],
    }
