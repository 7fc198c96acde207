"""Run an unpacked archive once, without a server: its golden requests and its parity.

The archiver starts `python -P -m modelyard.serve.worker --check FOLDER`, for a dry run before an
archive is written and to verify one that is. Both sides meet in files of FOLDER only:

    task.json    {"load": what a worker's LOAD message holds, without device number and batch size,
                  "proven_batch": largest batch that the report proved, or null,
                  "golden": the manifest's; an entry whose "expected" is null is recorded,
                  "parity": {"artifact": file, "twin": file, "report": file, "twin_report": file}
                            or null}
    result.json  {"device": …, "golden": [{"answer": …, "difference": text or null}, …],
                  "parity": {"cases": count, "summary": text, "differences": [text, …]} or null}
                 or {"error": why the archive does not load}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelyard.archiver.report import Report, parse_report
from modelyard.handlers import agree
from modelyard.handlers.backends import Artifact, open_artifact
from modelyard.handlers.plan import choose_probes
from modelyard.handlers.probes import KINDS, make_case
from modelyard.serve.worker import load
from modelyard.serve.worker.golden import answer_golden, compare_golden, value_of

DEFAULT_BATCH_SIZE = 8


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Load the handler as a worker does; replay the golden requests; compare the two artifacts.

    The archive is the working folder and its modules are the first that imports find.

    Raises:
        Exception: whatever loading raises.
    """
    message = {**task["load"], "worker": 1, "batch_size": _batch_size(task)}
    service = load.load_service(message)
    golden = [_replay(service, example, i) for i, example in enumerate(task["golden"])]
    result: dict[str, Any] = {"device": service.device, "golden": golden, "parity": None}
    if task["parity"]:
        result["parity"] = _compare(Path(message["folder"]), task["parity"], service.device)
    return result


def _batch_size(task: dict[str, Any]) -> int:
    """Return the batch size that the server would choose."""
    message = task["load"]
    config = load.read_config(Path(message["folder"]), message["config_file"])
    stated = config.get("batchSize", DEFAULT_BATCH_SIZE)
    size = stated if isinstance(stated, int) and stated > 0 else DEFAULT_BATCH_SIZE
    return min(size, task["proven_batch"] or size)


def _replay(service: load.Service, example: dict[str, Any], number: int) -> dict[str, Any]:
    answer = answer_golden(service, example, number)
    if example["expected"] is None:
        text = answer.body.decode("utf-8", "replace")
        refusal = None if answer.status == 200 else f"status {answer.status}: {text}"
        return {"answer": value_of(answer), "difference": refusal}
    expected = json.loads(Path(example["expected"]).read_bytes())
    difference = compare_golden(answer, expected, example["tolerance"])
    return {"answer": value_of(answer), "difference": difference}


def _compare(folder: Path, pair: dict[str, str], device: str) -> dict[str, Any]:
    """Run artifact and twin on the inputs of their export; judge them by its rule."""
    try:
        reports = [
            parse_report((folder / pair[name]).read_bytes(), folder / pair[name])
            for name in ("report", "twin_report")
        ]
        artifact, twin = (
            open_artifact(folder / pair[name], report.format, device)
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
