"""Compare the two artifacts of an archive on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelyard.archiver.report import Report, parse_report
from modelyard.handlers.models.backends import Artifact, dtype_name, open_artifact
from modelyard.handlers.proof import agree
from modelyard.handlers.proof.plan import choose_probes
from modelyard.handlers.proof.probes import KINDS, make_case
from modelyard.serve.worker import load


def compare(folder: Path, pair: dict[str, str], device: str) -> dict[str, Any]:
    """Run artifact and twin on the inputs of their export; judge them by its rule."""
    try:
        reports = [
            parse_report((folder / pair[name]).read_bytes(), folder / pair[name])
            for name in ("report", "twin_report")
        ]
        artifact, twin = (
            open_artifact(
                folder / pair[name], report.format, device, trusted=report.trusted_operators
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
        nothing = [] if parity.extent == "none" else [none]
        return {"cases": 0, "summary": "", "differences": nothing}
    rules = {
        name: agree.within_reason(rule, probes)
        for name, rule in agree.joint_rules(parity, other.parity).items()
    }
    # Learnt anew: a report that somebody altered may state any scale.
    scales = agree.OutputScales()
    for probe in probes:
        scales.see(probe.kind, agree.run(twin, make_case(report.tried, probe)))
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in rules}
    differences = []
    for probe in probes:
        inputs = make_case(report.tried, probe)
        outputs = agree.run(twin, inputs), agree.run(artifact, inputs), scales.of(probe.kind)
        stated = [spec.dtype for spec in report.signature.outputs]
        if (given := [dtype_name(each.dtype) for each in outputs[1]]) != stated:
            differences = [f"the artifact gives {given}; its report says {stated}"]
        for (name, rule), expected, actual, scale in zip(rules.items(), *outputs, strict=True):
            measured[name].append(agree.compare(expected, actual, rule.tolerance, scale))
    apart = (agree.disagreement(name, rule, measured[name], probes) for name, rule in rules.items())
    few = "; few inputs were tried, as by `modelyard export --quick`"
    return {
        "cases": len(probes),
        "summary": agree.summary(rules, measured, probes)
        + (few if parity.extent == "quick" else ""),
        "differences": [*differences, *filter(None, apart)],
    }
