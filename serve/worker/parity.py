"""Compare the two artifacts of an archive on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelyard.archiver.report import Report, parse_report
from modelyard.handlers.models.backends import Artifact, open_artifact
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
    rules = agree.joint_rules(parity, other.parity)
    probes = choose_probes(
        report.signature,
        parity.extent,
        among=parity.kinds or KINDS,
        left_out=parity.left_out,
    )
    if not probes:
        none = "the report names no inputs to compare on"
        differences = [] if parity.extent == "none" else [none]
        return {"cases": 0, "summary": "", "differences": differences}
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in rules}
    for probe in probes:
        inputs = make_case(report.tried, probe)
        pairs = zip(agree.run(twin, inputs), agree.run(artifact, inputs), strict=True)
        for (name, rule), (expected, actual) in zip(rules.items(), pairs, strict=True):
            measured[name].append(agree.compare(expected, actual, rule.tolerance))
    apart = (agree.disagreement(name, rule, measured[name], probes) for name, rule in rules.items())
    few = "; few inputs were tried, as by `modelyard export --quick`"
    return {
        "cases": len(probes),
        "summary": agree.summary(rules, measured, probes)
        + (few if parity.extent == "quick" else ""),
        "differences": [text for text in apart if text],
    }
