"""Rows of any library: its networks that build without weights, beside torch's own calls.

    python -m tests.breadth --new PACKAGE [PACKAGE ...]

Each package of PyPI gets an environment beside the present torch. Its public classes are built
from small values, chosen by the names and types of their arguments; inputs are tried as the
exporter tries them. Each row is a line of `tests/breadth/new/PACKAGE.jsonl`, and what has a line is
not run again, unless `-k` names it. `--table FILE` writes all rows that were recorded.
"""

import argparse
import collections
import dataclasses
import importlib
import importlib.metadata
import inspect
import itertools
import json
import multiprocessing
import os
import pkgutil
import re
import resource
import signal
import site
import subprocess
import sys
import tempfile
import time
import traceback
import venv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelyard.archiver.signature import Signature, parse_inputs, parse_signature
from modelyard.exporter.arguments import needed_arguments
from modelyard.exporter.inputs.tried import first_layers, runs
from tests.breadth import bare as bare_calls
from tests.breadth.report import table, write_between

START = "<!-- table: tests.breadth --new -->"
ROWS = Path(__file__).parent / "new"
KINDS = {"pt2": ("pt2", "pt2 dynamic"), "onnx": ("onnx", "onnx dynamic")}
KINDS["torchscript"] = ("script", "trace")
MOST, MOST_FOUND, MOST_PARAMETERS = 20, 300, 12_000_000
STEP_S, SEARCH_S, MEMORY = 60, 2, 12 << 30
"""Of the processor, so that a busy machine changes nothing; of the clock, five times as much."""

Row = dict[str, Any]

_NUMBERS = (  # of a name, the likeliest value first
    ("head", 2, 4, 1),
    ("patch|window|stride|factor|scale|ratio|reduction|expan|group|order|degree|grid|r$", 4, 2, 1),
    ("kernel|ksize", 3, 5),
    ("^(n_|num_|n)dims?$", 1, 2, 3),
    ("class|out_dim|n_outputs|num_out", 5, 16),
    ("depth|layer|block|stage|iter|recurr|expert|flow", 2, 1, 3),
    ("vocab|token|num_emb|n_words|ntoken", 100),
    ("im(g|age)_?size|resolution|height|width$|spatial", 32, 64, 224),
    ("times|samples", 512, 256, 1000),
    ("sfreq|sample_rate|sampling", 128),
    ("len|time|seq|steps|sample|horizon|nodes", 32, 16, 100),
    ("dilation|padding", 1),
    ("", 16, 64, 3, 8),
)
_FRACTIONS = "prob|drop|rate|^p$|eps|alpha|beta|gamma|lambda|sigma|temp|tau|slope|momentum"
_COUNTS = "^(n|num|in|out)_|sfreq|dim|channel|size|classes|features"
_OBJECTS = (
    ("bool|^(is|use|with|has)_|bias", "False"),
    ("dropouts", "[0.5, 0.5]"),
    ("act|nonlin", "torch.nn.ReLU()", "torch.nn.ReLU", "'relu'"),
    ("norm", "torch.nn.BatchNorm2d", "torch.nn.LayerNorm", "torch.nn.BatchNorm2d(16)"),
    ("(^|_)(mode|type|padding)$", "'same'", "'zeros'", "'bilinear'"),
    ("field_dims|sizes|dims|hidden|widths|channels_list|layers$", "[16, 16]", "[16, 8, 4]"),
    ("module|net|fn|model|layer|encoder|backbone", "torch.nn.Linear(16, 16)"),
)


def run(packages: list[str], options: argparse.Namespace) -> int:
    """Run packages, each in its environment; 1 if a row is a traceback or wrong."""
    for package in packages:
        python = options.python or environment(package)
        words = [python, "-m", "tests.breadth.new", package, options.k, "again" * options.again]
        subprocess.run(words, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    recorded = [row for file in sorted(ROWS.glob("*.jsonl")) for row in rows(file.stem)]
    if options.table:
        write_between(options.table, START, page(recorded))
    print(totals(recorded))
    chosen = [row for row in built(recorded) if row["package"] in packages]
    return int(any(row["traceback"] or wrong(row) for row in chosen))


def environment(package: str) -> str:
    """Install a package beside the libraries of this environment; return its Python."""
    folder = Path("build/breadth/new", package).resolve()
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=False)
        beside = next(folder.glob("lib/python*/site-packages"))
        lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
        (beside / "beside.pth").write_text("".join(lines), encoding="utf-8")
        present = folder / "present.txt"
        names = ("torch", "numpy", "onnx", "onnxruntime", "onnxscript")
        pins = [f"{name}=={importlib.metadata.version(name)}\n" for name in names]
        present.write_text("".join(pins), encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", package]
        pip.append("--disable-pip-version-check")
        if subprocess.run([*pip, "--constraint", str(present)], check=False).returncode:
            subprocess.run([*pip, "--no-deps"], check=True)
        subprocess.run([str(python), "-m", "tests.breadth.without_operators"], check=True)
        (folder / "installed").touch()
    return str(python)


def rows(package: str) -> list[Row]:
    """Return what was recorded of a package."""
    file = ROWS / f"{package}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


# -- in the package's environment -----------------------------------------------------------------


def main(package: str, pattern: str, again: bool) -> None:
    """Run the classes of a package that have no row, or those that a pattern finds."""
    torch.set_num_threads(1)
    importlib.import_module("modelyard.exporter.trip")
    first = bare_calls.Bare(nn.Linear(2, 2), parse_inputs(["input:float32[batch,2]"]), {})
    with tempfile.TemporaryDirectory() as scratch:  # what each fork would import, and look up
        for kind in itertools.chain(*KINDS.values()):
            bare_calls.call(first, Path(scratch), kind)
    version = importlib.metadata.version(package)
    recorded = {row["class"]: row for row in rows(package)}
    ROWS.mkdir(exist_ok=True)
    for name, made in itertools.islice(classes(package), MOST_FOUND):
        known = recorded.get(name)
        if known and not (pattern and re.search(pattern, name)):
            continue
        if pattern and not re.search(pattern, name):
            continue
        if not known and len(built(list(recorded.values()))) >= MOST:
            break
        row = {"package": package, "version": version, "class": name} | one(
            made, known or {}, again
        )
        recorded[name] = row
        text = "".join(json.dumps(each) + "\n" for each in recorded.values())
        (ROWS / f"{package}.jsonl").write_text(text, encoding="utf-8")
        print(summary(row), flush=True)


def classes(package: str) -> Iterator[tuple[str, type[nn.Module]]]:
    """Yield the public networks of a package, the larger parts first."""
    files = importlib.metadata.files(package) or []
    tops = {file.parts[0].removesuffix(".py") for file in files if file.suffix == ".py"}
    found: dict[str, type[nn.Module]] = {}
    for top in sorted(tops - {"tests", "test", "examples", "setup", "docs"}):
        for module in [top, *_below(top)]:
            try:
                names = vars(importlib.import_module(module))
            # A package may lack what some of its modules need, or end the process.
            except (Exception, SystemExit):
                continue
            for each in list(names.values()):
                if not (inspect.isclass(each) and issubclass(each, nn.Module)):
                    continue
                own = each.__module__.partition(".")[0] == top and each.__name__[0] != "_"
                if own and each.forward is not nn.Module.forward and not inspect.isabstract(each):
                    found.setdefault(f"{each.__module__}:{each.__name__}", each)
    parts = collections.Counter(name for each in found.values() for name in _named(each, found))
    yield from sorted(found.items(), key=lambda item: (parts[item[0]] > 0, item[0]))


def _below(top: str) -> list[str]:
    try:
        path = importlib.import_module(top).__path__
    except (Exception, SystemExit):
        return []
    walked = pkgutil.walk_packages(path, f"{top}.", onerror=lambda _: None)
    return [
        each.name for each in walked if not re.search(r"\b(tests?|examples?|__main__)\b", each.name)
    ]


def _named(cls: type, found: dict[str, type[nn.Module]]) -> list[str]:
    """Return the classes of its own file that a class builds in its constructor."""
    try:
        used = set(inspect.getclosurevars(vars(cls)["__init__"]).globals.values())
    except (KeyError, TypeError, ValueError):
        return []
    return [name for name, each in found.items() if each in used and each is not cls]


def one(cls: type[nn.Module], known: Row, again: bool) -> Row:
    """Return the row of a class, each of its steps a fork with limits."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        kept: tuple[str, ...] = ("call", "inputs", "parameters")
        row: Row = {key: known[key] for key in kept if key in known}
        if not row.get("inputs"):
            row = limited(lambda: search(cls), folder, 3 * SEARCH_S)
            row = {key: each for key, each in row.items() if key not in ("cpu_s", "peak_mb")}
        if not row.get("inputs"):
            return row
        (folder / "net.py").write_text(factory(cls, row["call"]), encoding="utf-8")
        ours = limited(lambda: ours_of(row, folder), folder)
        cpu, peak = {"ours": ours.pop("cpu_s", 0)}, {"ours": ours.pop("peak_mb", 0)}
        row |= {"traceback": False, "message": ours.pop("broken", "")} | ours
        found = limited(lambda: check(row, folder), folder)
        row |= {"ours": found.get("ours", {}), "narrowed": found.get("narrowed", False)}
        if "broken" in found:
            row["message"] = found["broken"]
        row["bare"] = {}
        for format, kinds in KINDS.items():
            for kind in kinds:
                if row["ours"].get(format) == "ok" and not again:
                    row["bare"][format] = ""  # it cannot be lost
                    break
                result = limited(partial(bare_of, row, folder, kind), folder)
                row["bare"][format] = result.get("verdict", f"FAIL {result.get('broken', '')}")
                cpu[format] = round(cpu.get(format, 0) + result.get("cpu_s", 0), 1)
                peak[format] = max(peak.get(format, 0), result.get("peak_mb", 0))
                if row["bare"][format] == "ok":
                    break
        return row | {"cpu_s": cpu, "peak_mb": peak}


def limited(step: Callable[[], Row], folder: Path, seconds: int = STEP_S) -> Row:
    """Run a step in a fork, in a process group of its own, and end that at its limits."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)

    def run() -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        with (folder / "log").open("w", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            found = step()
        except BaseException:
            found = {"broken": traceback.format_exc()[-800:]}
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        found["cpu_s"] = round(sum(each.ru_utime + each.ru_stime for each in used), 1)
        found["peak_mb"] = max(each.ru_maxrss for each in used) >> 10
        answer.write_text(json.dumps(found), encoding="utf-8")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(5 * seconds)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    if answer.exists():
        found: Row = json.loads(answer.read_text(encoding="utf-8"))
        return found
    return {"broken": f"ended by signal {-(process.exitcode or 0)}, or after {seconds} s"}


# -- how a class is built, and what it takes ------------------------------------------------------


def search(cls: type[nn.Module]) -> Row:
    """Return a call that builds a class, and inputs that what it builds runs with."""
    ends, error, last = time.process_time() + SEARCH_S, "", {}
    for call in dict.fromkeys(calls(cls)):
        try:
            model = make(cls, call)
        except Exception as problem:
            error = error or f"does not build: {call}: {type(problem).__name__}: {problem}"[:300]
            continue
        parameters = sum(each.numel() for each in model.parameters())
        if not 0 < parameters < MOST_PARAMETERS:
            error = error or f"has {parameters} parameters"
            continue
        last = {"call": call, "parameters": parameters}
        for texts in inputs(model, call):
            if time.process_time() > ends:
                return last | {"skipped": "no inputs found in time"}
            if runs(model, texts) and takes(model, parse_inputs(texts)):
                return last | {"inputs": texts}
    return last | {"skipped": "no inputs found" if last else error}


def takes(model: nn.Module, signature: Signature) -> bool:
    """Return whether a model runs at every size that will be asked for."""
    called, ends = bare_calls.Bare(model, signature, {}), bare_calls.choose_sizes(signature)
    dims = signature.dims.items()  # what runs at some sizes by luck is not what a model takes
    between = [ends[1] | {name: size} for name, dim in dims for size in dim.sizes()]
    try:
        for seed, sizes in enumerate([*ends, *between]):
            outputs = called(bare_calls.make_inputs(signature, sizes, seed))
            if not all(each.isfinite().all() for each in outputs):
                return False
    except Exception:
        return False
    return bool(outputs)


def factory(cls: type[nn.Module], call: str) -> str:
    """Return the file that a user would write to build a class."""
    used = sorted({cls, *_configs(cls)}, key=lambda each: each.__name__)
    lines = [f"from {each.__module__} import {each.__name__}" for each in used]
    return "\n".join(["import torch", *lines, "", "def net():", f"    return {call}", ""])


def make(cls: type[nn.Module], call: str) -> nn.Module:
    """Build a class, each time with the same weights."""
    names: dict[str, Any] = {}
    exec(compile(factory(cls, call), "net.py", "exec"), names)
    torch.manual_seed(1)
    model = names["net"]()
    assert isinstance(model, nn.Module), f"is a {type(model).__name__}"
    return model.eval()


def _parameters(cls: type) -> list[inspect.Parameter]:
    try:
        found = list(inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each for each in found if each.kind not in variable]


def _configs(cls: type) -> list[type]:
    """Return the classes of a constructor's arguments that hold nothing but values."""
    try:
        hints = inspect.get_annotations(vars(cls)["__init__"], eval_str=True).values()
    except Exception:
        return []
    return [
        each
        for each in hints
        if inspect.isclass(each)
        and (dataclasses.is_dataclass(each) or each.__name__.endswith(("Config", "Args")))
    ]


def calls(cls: type) -> Iterator[str]:
    """Yield ways to build a class: what it needs; also what is None otherwise; and small values."""
    for mode, place in itertools.product(("needed", "none", "small"), range(4)):
        words = []
        for each in _parameters(cls):
            if each.default is inspect.Parameter.empty:
                words.append(f"{each.name}={_value(each, place, cls)}")
            elif mode == "none" and each.default is None and re.search(_COUNTS, each.name):
                words.append(f"{each.name}={_number(each.name, place)}")
            elif mode == "small" and type(each.default) is int and each.default > 8:
                words.append(f"{each.name}={min(_number(each.name, place), each.default)}")
        yield f"{cls.__name__}({', '.join(words)})"


def _value(parameter: inspect.Parameter, place: int, cls: type) -> str:
    name, hint = parameter.name.lower(), parameter.annotation
    shown = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    config = next((each for each in _configs(cls) if each.__name__ == shown), None)
    if config is not None:
        return next(itertools.islice(calls(config), place, None))
    if shown == "bool":
        return "False"
    if shown == "float" or (re.search(_FRACTIONS, name) and not name.endswith("s")):
        return "0.5"
    if re.search(r"list|tuple|sequence|iterable", f"{shown} {hint}".lower()):
        return ("[16, 16]", "[16, 8, 4]", "[3, 3]", "[2, 2]")[place]
    if shown != "int":
        for pattern, *values in _OBJECTS:
            if re.search(pattern, name):
                choices = [*values, str(_number(name, place))]
                return choices[min(place, len(choices) - 1)]
    return str(_number(name, place))


def _number(name: str, place: int) -> int:
    values = next(rest for pattern, *rest in _NUMBERS if re.search(pattern, name.lower()))
    return int(values[min(place, len(values) - 1)])


def inputs(model: nn.Module, call: str) -> Iterator[list[str]]:
    """Yield what a model may take, as `--input` is written, the likeliest first."""
    names, taken = needed_arguments(model), first_layers(model)
    layer = taken[names[0]].layer if names[0] in taken else None
    said = [int(each) for each in re.findall(r"=(\d+)", call)]
    said += [each.count(",") + 1 for each in re.findall(r"\[(.*?)\]", call)]
    widths = [getattr(layer, key) for key in ("in_features", "in_channels") if hasattr(layer, key)]
    for part in itertools.islice(model.modules(), 40):
        for key in ("in_features", "in_channels", "num_features", "input_size", "embedding_dim"):
            widths += [value] if isinstance(value := getattr(part, key, None), int) else []
    widths = [each for each in dict.fromkeys([*widths[:2], *said, *widths, 3]) if each > 1][:6]
    tables = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    shapes = [*_shapes(layer, widths, said)]
    if tables:
        ids = [
            f"int64[batch,length=2..16]<{min(tables)}",
            *(f"int64[batch,{n}]<{min(tables)}" for n in said),
        ]
        shapes = [*ids, *shapes] if isinstance(layer, nn.Embedding | None) else [*shapes, *ids]
    shapes += [shape.replace("float32", "complex64") for shape in shapes[:12]]
    for shape in shapes:
        first = shape.replace("batch", "batch=1..3")
        others = [_others(name, first, tables) for name in names[1:]]
        for rest in itertools.islice(itertools.product(*others), 12):
            yield [f"{name}:{each}" for name, each in zip(names, (first, *rest), strict=True)]


def _others(name: str, first: str, tables: list[int]) -> list[str]:
    rows = first.split("[")[1].split(",")
    if "mask" in name:
        return [f"bool[{','.join(rows[:2]).rstrip(']')}]", first]
    if re.search(r"^t$|time|step|sigma", name):
        return ["float32[batch=1..3]", "int64[batch=1..3]<10", first]
    return [
        first,
        "float32[batch=1..3,16]",
        "float32[batch=1..3,more=2..12,16]",
        "int64[batch=1..3]<5",
    ]


def _shapes(layer: nn.Module | None, widths: list[int], said: list[int]) -> list[str]:
    sizes = [*dict.fromkeys([32, 64, *[each for each in said if 4 <= each <= 256], 8, 128, 224])]
    pictures = [f"float32[batch,{c},height=16..32/8,width=16..32/8]" for c in widths]
    pictures += [f"float32[batch,{c},{s},{s}]" for s in sizes[:4] for c in widths]
    sequences = [f"float32[batch,length=2..16,{c}]" for c in widths]
    signals = [f"float32[batch,{c},length=16..64/4]" for c in widths]
    signals += [f"float32[batch,{c},{s}]" for s in [*sizes, 512, 1000] for c in widths]
    lists = [f"float32[batch,{c}]" for c in widths]
    lists += ["float32[batch,length=8..32/4]", "float32[batch,4000]"]
    volumes = [f"float32[batch,{c},{s},{s},{s}]" for s in (16, 32) for c in widths[:3]]
    blocks = [f"float32[batch,length=2..16,{c},{d}]" for c in widths[:3] for d in widths[:3]]
    ids = [f"int64[batch,{c}]<16" for c in (2, *widths)]
    order = [lists, sequences, signals, pictures, volumes, blocks, ids]
    if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.ConvTranspose2d):
        order = [pictures, signals, sequences, lists]
    elif isinstance(layer, nn.Conv1d | nn.BatchNorm1d):
        order = [signals, sequences, lists, pictures]
    elif isinstance(layer, nn.Conv3d | nn.BatchNorm3d):
        order = [volumes]
    elif isinstance(layer, nn.Linear | nn.LayerNorm | nn.RNNBase):
        order = [sequences, lists, pictures, signals, blocks]
    return list(itertools.chain.from_iterable(order))


# -- the steps of a row ---------------------------------------------------------------------------


def signature_of(row: Row) -> Signature:
    """Return what a row's network takes."""
    return parse_inputs(row["inputs"])


def loaded(folder: Path) -> nn.Module:
    """Return the network that a user's file builds."""
    names: dict[str, Any] = {}
    exec(compile((folder / "net.py").read_text(encoding="utf-8"), "net.py", "exec"), names)
    torch.manual_seed(1)
    model: nn.Module = names["net"]()
    return model.eval()


def ours_of(row: Row, folder: Path) -> Row:
    """Save the network and run the command that a user would write."""
    from modelyard.cli import main as command_line

    torch.save(loaded(folder).state_dict(), folder / "net.pt")
    words = ["export", str(folder / "net.pt"), "--model", f"{folder / 'net.py'}:net", "--quick"]
    words += [word for text in row["inputs"] for word in ("--input", text)]
    words += [word for format in KINDS for word in ("--format", format)]
    code = 0
    try:
        command_line([*words, "-o", str(folder / "out")])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    text = (folder / "log").read_text(encoding="utf-8", errors="replace")
    text = text.replace(f"{folder}/", "")
    found = text[text.find("error:") :] if "error:" in text else text[-1500:]
    is_traceback = "Traceback (most recent call last)" in text
    return {"exit": code, "traceback": is_traceback, "message": found[:3000] if code else ""}


def check(row: Row, folder: Path) -> Row:
    """Compare what was written with the network, as a worker opens it."""
    from modelyard.handlers.models.backends import open_artifact

    model, verdicts, narrowed = loaded(folder), {}, False
    for file in (folder / "out").glob("*.report.json"):
        report = json.loads(file.read_text(encoding="utf-8"))
        stated, asked = parse_signature(report["signature"]), signature_of(row)
        narrowed |= stated.dims != asked.dims
        artifact = open_artifact(
            file.with_name(file.name.removesuffix(".report.json")), report["format"]
        )

        def run(inputs: bare_calls.Values, artifact: Any = artifact) -> list[torch.Tensor]:
            with torch.no_grad():
                found = artifact(*inputs)
            return [found] if isinstance(found, torch.Tensor) else list(found)

        taken = dataclasses.replace(asked, inputs=stated.inputs) if narrowed else asked
        verdicts[report["format"]] = bare_calls.judge(bare_calls.Bare(model, taken, {}), run)
    return {"ours": verdicts, "narrowed": narrowed}


def bare_of(row: Row, folder: Path, kind: str) -> Row:
    """Let one of torch's own calls have the network."""
    called = bare_calls.Bare(loaded(folder), signature_of(row), {})
    return {"verdict": bare_calls.call(called, folder, kind)}


# -- what is printed and written ------------------------------------------------------------------


def built(recorded: list[Row]) -> list[Row]:
    """Return the rows of networks that were built and run."""
    return [row for row in recorded if row.get("inputs")]


def lost(row: Row) -> list[str]:
    """Return the formats that a bare call gets right, and ours does not."""
    return [kind for kind in KINDS if row["bare"].get(kind) == "ok" != row["ours"].get(kind)]


def wrong(row: Row) -> list[str]:
    """Return the formats that were written as proven, and answer otherwise."""
    return [kind for kind, verdict in row["ours"].items() if verdict != "ok"]


def right(row: Row, side: str) -> str:
    """Return the formats that one side gets right."""
    return ", ".join(kind for kind in KINDS if row[side].get(kind) == "ok")


def summary(row: Row) -> str:
    """Return a line of a row."""
    name = f"{row['package']} {row['class'].partition(':')[2]}"
    if not row.get("inputs"):
        return f"{name:60} {row.get('skipped') or row.get('broken', '')[-200:]}"
    flags = f"{'TRACEBACK ' * row['traceback']}{'WRONG ' * bool(wrong(row))}"
    flags += f"LOST {'+'.join(lost(row))}" if lost(row) else ""
    used = f"{row['cpu_s']['ours']:5.1f} s {sum(row['cpu_s'].values()):5.1f} s"
    return f"{name:60} ours {right(row, 'ours'):24} bare {right(row, 'bare'):24} {used} {flags}"


def totals(recorded: list[Row]) -> str:
    """Return the counts of rows."""
    part = built(recorded)
    lines = [
        f"- {len(part)} networks of {len({row['package'] for row in part})} libraries. "
        f"{len(recorded) - len(part)} further classes were not built, or no inputs were found."
    ]
    for kind in KINDS:
        ours = sum(row["ours"].get(kind) == "ok" for row in part)
        missing = sum(kind in lost(row) for row in part)
        share = f"{100 * ours / max(1, ours + missing):.1f} %"
        lines.append(
            f"- {kind}: right in {ours}. Of the others a bare call is right in {missing}: of what "
            f"either gets right, the command writes {share}."
        )
    used = sorted(row["cpu_s"]["ours"] for row in part) or [0]
    lines.append(
        f"- Written as proven and wrong: {sum(len(wrong(row)) for row in part)} files. "
        f"Tracebacks: {sum(row['traceback'] for row in part)}. CPU seconds of the command: "
        f"{used[len(used) // 2]:.1f} in the middle, {used[-1]:.0f} at most; peak memory "
        f"{max((row['peak_mb']['ours'] for row in part), default=0)} MB at most."
    )
    return "\n".join(lines)


def page(recorded: list[Row]) -> str:
    """Return what the page says: counts, a row for each library, and every row that is lost."""
    libraries = [("library", "networks", *KINDS, "lost", "narrowed", "tracebacks", "CPU s")]
    part = built(recorded)
    for name in sorted({row["package"] for row in part}):
        of = [row for row in part if row["package"] == name]
        counts = [sum(row["ours"].get(kind) == "ok" for row in of) for kind in KINDS]
        counts += [sum(len(lost(row)) for row in of), sum(row["narrowed"] for row in of)]
        counts += [sum(row["traceback"] for row in of), sum(row["cpu_s"]["ours"] for row in of)]
        shown = [f"{name} {of[0]['version']}", str(len(of)), *(f"{each:.0f}" for each in counts)]
        libraries.append(tuple(shown))
    losses = [("network", "inputs", "lost", "why")]
    losses += [
        (
            f"{row['package']} `{row['call']}`",
            f"`{' '.join(row['inputs'])}`",
            ", ".join(lost(row)),
            _cell(row.get("why") or row["message"]),
        )
        for row in part
        if lost(row)
    ]
    return f"{totals(recorded)}\n\n{table(libraries)}\n\n{table(losses)}"


def _cell(text: str) -> str:
    return " ".join(text.split("; full report")[0].replace("|", "\\|").split())[:400]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:] == ["again"])
