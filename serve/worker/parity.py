"""Compare the two artifacts of an archive on this machine."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from modelyard.archiver.report import Report, parse_report
from modelyard.handlers.models.backends import Artifact, dtype_name, open_artifact
from modelyard.handlers.proof import agree
from modelyard.handlers.proof.copies import judge, repeated_probes
from modelyard.handlers.proof.probes import make_case
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
