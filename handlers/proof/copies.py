"""Two runs that came of one checkpoint, judged on the inputs of its export by its rule.

They are artifact and twin on one machine, or one artifact on two versions or runtimes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from modelyard.archiver.report import Parity, Report
from modelyard.handlers.errors import LoadError
from modelyard.handlers.proof import agree
from modelyard.handlers.proof.plan import choose_probes
from modelyard.handlers.proof.probes import KINDS, Probe


def repeated_probes(report: Report) -> tuple[Probe, ...]:
    """Return the inputs that an export tried, without its samples.

    Raises:
        LoadError: the report names none that are ordinary, but says that inputs were made up.
    """
    parity = report.parity
    assert parity is not None, "the archiver asks for what is proven only"
    probes = choose_probes(
        report.signature, parity.extent, among=parity.kinds or KINDS, left_out=parity.left_out
    )
    if any(probe.kind in agree.ORDINARY_KINDS for probe in probes):
        return probes
    if parity.extent == "none":
        return ()
    raise LoadError("the report names no ordinary inputs to compare on")


def learn(
    one: Parity, other: Parity, cases: Sequence[Probe], outputs: Iterable[Sequence[Tensor]]
) -> tuple[dict[str, agree.Rule], agree.OutputScales]:
    """Return the rule of each output of two runs, and what its numbers are measured by.

    Args:
        one: what the report of the first says.
        other: the same of the second, which the first is compared with.
        cases: what both were given.
        outputs: outputs of the second, case by case.
    """
    rules = {
        name: agree.within_reason(rule, cases)
        for name, rule in agree.joint_rules(one, other).items()
    }
    # Learnt anew: a report that somebody altered may state any scale.
    scales = agree.OutputScales()
    for case, each in zip(cases, outputs, strict=True):
        scales.see(case.kind, each)
    return rules, scales


def judge(
    one: Parity,
    other: Parity,
    cases: Sequence[Probe],
    found: Iterable[Sequence[Tensor]],
    wanted: Callable[[], Iterable[Sequence[Tensor]]],
) -> tuple[dict[str, agree.Rule], dict[str, list[dict[str, Any]]]]:
    """Return the rule of each output, and what `agree.compare` says of it in each case.

    Args:
        one, other, cases: as `learn` takes them.
        found: outputs of the first, case by case.
        wanted: yields those of the second; called twice.
    """
    rules, scales = learn(one, other, cases, wanted())
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in rules}
    for case, expected, actual in zip(cases, wanted(), found, strict=True):
        of_all = zip(rules.items(), expected, actual, scales.of(case.kind), strict=True)
        for (name, rule), a, b, scale in of_all:
            measured[name].append(agree.compare(a, b, rule.tolerance, scale))
    return rules, measured
