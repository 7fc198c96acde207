"""Count the operators that exports of real models call, of which `handlers/judge/operators.txt` is made.

    python -m tests.breadth.operators [-k NAME] [--resume] [--files FOLDER …] [--calls FILE] [--write | --add]

Traced are every architecture of the table, the networks of `operator_networks` and every module of torch.nn
that torch tests, each in a process of its own, as it is and decomposed (`run_decompositions`); `--files` adds the programs below
a folder, and `tests.breadth.recorded` those that tests make. Counts are kept below `--output`, one file each.
`--calls` keeps a call of each operator, with sizes and constants but no weights, for the fuzzer.
`--write` writes the list anew; `--add` keeps what it holds, and the calls that are kept.
"""  # noqa: E501 - a command is not broken

import argparse
import collections
import importlib
import json
import logging
import multiprocessing
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor, nn

from modelyard.handlers.judge.grammar import operator_problem
from modelyard.handlers.judge.operators import ALLOWED
from tests.breadth.bare import choose_sizes, make_inputs
from tests.breadth.operator_networks import NETWORKS, network
from tests.breadth.operator_rules import write_list
from tests.fuzz.calls import as_call

OUTPUT = Path("build/breadth/operators")
LIMIT_S = 300
LARGEST_CALL = 1 << 14  # elements of all tensors of a call that is kept

Found = dict[str, Any]
Trace = Callable[[], Iterator[torch.export.ExportedProgram]]


def main() -> None:
    """Count what is asked for, and print the sum of all that has been counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="run names that this regular expression finds")
    parser.add_argument("--resume", action="store_true", help="leave out what has a count")
    parser.add_argument("--files", type=Path, nargs="*", default=[])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--calls", type=Path, help="write a call of each operator into this file")
    parser.add_argument("--write", action="store_true", help="write the list of operators anew")
    parser.add_argument("--add", action="store_true", help="add what is counted to the list")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    # What tracing imports is imported once, before the forks.
    count([torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))])
    for name, trace in sources():
        file = options.output / f"{name}.json"
        if re.search(options.k, name) and not (options.resume and file.exists()):
            print(f"{name:32} {count_apart(trace, file)}", flush=True)
    for folder in options.files:
        count_files(folder, options.output)
    found = {file.stem: json.loads(file.read_text()) for file in options.output.glob("*.json")}
    counted: collections.Counter[str] = collections.Counter()
    calls: dict[str, list[Any]] = {}
    passed = dict.fromkeys(("operators", "decomposed"), 0)
    for _, each in sorted(found.items()):
        counted.update(dict.fromkeys({**each["operators"], **each.get("decomposed", {})}, 1))
        for form in passed:
            passed[form] += bool(each.get(form)) and not any(map(operator_problem, each[form]))
        for operator, call in each.get("calls", {}).items():
            known = calls.setdefault(operator, [])
            if len(known) < 2 and call not in known and len(str(call)) < 400:
                known.append(call)
    traced = [each for each in found.values() if each["operators"]]
    programs = sum(each.get("programs", 1) for each in traced)
    print(f"{programs} programs call {len(counted)} operators of torch {torch.__version__}")
    print(f"of {len(traced)} models, {passed['operators']} call listed operators only")
    print(f"and {passed['decomposed']} when they are decomposed")
    for operator, times in counted.most_common():
        print(f"{times:5} {operator}")
    if options.write or options.add:
        write_list(set(counted), ALLOWED if options.add else frozenset())
    if options.calls:
        if options.add and options.calls.exists():
            calls |= json.loads(options.calls.read_text(encoding="utf-8"))
        kept = sorted(name for name in calls if operator_problem(name) is None)
        lines = [f"{json.dumps(name)}: {json.dumps(calls[name])}" for name in kept]
        options.calls.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def sources() -> Iterator[tuple[str, Trace]]:
    """Yield every name with what traces it; no library is imported until then."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        name = info.name.replace(".", "_")
        yield f"torch_{name}", partial(trace_module, info)
    for name in NETWORKS:
        yield "network_" + re.sub(r"\W", "_", name), partial(trace_network, name)
    from tests.breadth.table import CASES

    for library in ("transformers", "timm"):
        importlib.import_module(library)
    for name, case in CASES.items():
        yield name, partial(trace_case, case)


def trace_case(case: Any) -> Iterator[torch.export.ExportedProgram]:
    """Trace an architecture of the table, at one size: that costs least, and calls no less."""
    from tests.breadth.__main__ import bare_of, made

    bare = bare_of(case, made(case))
    example = make_inputs(bare.signature, choose_sizes(bare.signature)[0], 0)
    args, kwargs = bare.arguments(example)
    yield torch.export.export(bare.model, args, kwargs)


def trace_network(name: str) -> Iterator[torch.export.ExportedProgram]:
    """Trace a network of one line."""
    yield torch.export.export(network(name), (torch.rand(2, 6),))


def trace_module(info: Any) -> Iterator[torch.export.ExportedProgram]:
    """Trace a module of torch.nn with the first arguments that torch tests it with."""
    traced = 0
    for given in info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=False
    ):
        made, call = given.constructor_input, given.forward_input
        if call is None:
            continue
        with suppress(Exception):
            module = info.module_cls(*made.args, **made.kwargs).eval()
            yield torch.export.export(module, tuple(call.args), dict(call.kwargs))
            traced += 1
        if traced == 3:
            return


def count_apart(trace: Trace, file: Path) -> str:
    """Count in a process of its own, within a limit of time; return what came of it."""
    file.unlink(missing_ok=True)

    def run() -> None:
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            found = count(list(trace()))
        except BaseException as error:
            found = {"operators": {}, "programs": 0, "failed": f"{type(error).__name__}: {error}"}
        file.write_text(json.dumps(found), encoding="utf-8")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    if not file.exists():
        return f"ended with {process.exitcode}"
    found = json.loads(file.read_text())
    return str(found.get("failed", f"{len(found['operators'])} operators"))[:120]


def count(programs: list[torch.export.ExportedProgram]) -> Found:
    """Count the operators of programs, as they are and decomposed, and keep a call of each."""
    counted: dict[str, collections.Counter[str]] = {
        "operators": collections.Counter(),
        "decomposed": collections.Counter(),
    }
    calls: dict[str, Any] = {}
    for program in programs:
        forms = {"operators": program}
        with suppress(Exception):
            forms["decomposed"] = program.run_decompositions()
        for form, each in forms.items():
            for node in nodes(each.graph_module):
                counted[form][operator_name(node.target)] += 1
                if isinstance(node.target, torch._ops.OpOverload):
                    keep_call(calls, node)
    return {**counted, "programs": len(programs), "calls": calls}


def nodes(module: nn.Module) -> Iterator[torch.fx.Node]:
    """Yield every call of a program, those of its branches and loops too."""
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            yield from (node for node in part.graph.nodes if node.op == "call_function")


def operator_name(target: Any) -> str:
    """Return an operator's name as it stands in a `.pt2`."""
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{str(target).replace('::', '.')}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target}"
    return f"{target.__module__}.{target.__name__}"


def keep_call(calls: dict[str, Any], node: torch.fx.Node) -> None:
    """Keep the call if it is the smallest yet that says something."""
    with suppress(Exception):
        call = as_call(node)
        size = sum(each.numel() for each in tensors(node))
        name = operator_name(node.target)
        if size <= LARGEST_CALL and name not in calls:
            calls[name] = call


def tensors(node: torch.fx.Node) -> list[Tensor]:
    """Return the tensors that a call takes, as far as they are known."""
    values = [each.meta.get("val") for each in node.all_input_nodes]
    return [value for value in values if isinstance(value, Tensor)]


def count_files(folder: Path, output: Path) -> None:
    """Count in every program below a folder; equal programs count once."""
    operators: collections.Counter[bytes] = collections.Counter()
    seen: set[bytes] = set()
    for file in sorted(folder.rglob("*.pt2")):
        with suppress(OSError, BadZipFile, KeyError), ZipFile(file) as package:
            for name in filter(_is_graph, package.namelist()):
                text = package.read(name)
                if text not in seen:
                    seen.add(text)
                    operators.update(re.findall(rb'"target": ?"([\w.]+)"', text))
    name = re.sub(r"\W+", "_", str(folder)).strip("_")
    found = {
        "operators": {name.decode(): count for name, count in operators.items()},
        "programs": len(seen),
    }
    (output / f"files_{name}.json").write_text(json.dumps(found), encoding="utf-8")


def _is_graph(name: str) -> bool:
    return bool(re.search(r"/models/\w+\.json$", name))


if __name__ == "__main__":
    main()
