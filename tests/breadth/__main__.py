"""Export, archive and serve every architecture of the table, beside torch's own calls.

    python -m tests.breadth [-k NAME] [--resume] [--jobs N] [--table FILE]

Each step of each architecture is a process of its own with a time limit; what one does, dying
included, is a row of the table. Results are kept below `--output`, one file each: `-k` runs only
what its pattern finds and prints them all. It exits with 1 if a command printed a traceback or a
worker died.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before the fork, once: each of these takes seconds to import.
import torch

from modelyard.archiver.signature import Dim, Signature, parse_inputs, parse_signature
from modelyard.archiver.values import End, Values
from tests.breadth import bare as bare_calls
from tests.breadth import new, weights
from tests.breadth.report import print_summary, write_table
from tests.breadth.table import CASES, FILES, HERE, Case, build
from tests.serve.live import LiveServer, running

STEP_S = 420
PR_SET_PDEATHSIG = 1
_AHEAD = (
    *("transformers", "onnxruntime", "onnxscript", "timm", "torch.export", "torch.onnx"),
    *("torch._dynamo", "modelyard.exporter.cli", "modelyard.archiver.cli", "modelyard.handlers"),
)

Result = dict[str, Any]


def main() -> int:
    """Run what is asked for and print all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="run names that this regular expression finds")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("build/breadth"))
    parser.add_argument("--table", type=Path, help="write the table into this markdown file")
    parser.add_argument("--again", action="store_true", help="repeat torch's own calls too")
    parser.add_argument("--resume", action="store_true", help="leave out what has a result")
    parser.add_argument("--only", choices=["bare", "export"], help="one side, and nothing served")
    parser.add_argument("--new", nargs="+", metavar="PACKAGE", help="rows of libraries of PyPI")
    parser.add_argument("--python", help="with --new: that of an environment that has them")
    options = parser.parse_args()
    if options.new:
        return new.run(options.new, options)
    results = options.output / "results"
    results.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in CASES.values() if re.search(options.k, case.name)]
    if options.resume:
        chosen = [case for case in chosen if not is_done(results / f"{case.name}.json", options)]
    for name in _AHEAD:
        importlib.import_module(name)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the server's own end
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch, "store")
        store.mkdir()
        with running(Path(scratch, "state"), store, "--workers=1") as server:
            work = Work(server, store, results, options)
            try:
                for name in work.all(chosen, options.jobs):
                    print(print_summary({name: read(results / f"{name}.json")}), flush=True)
            finally:
                for process in multiprocessing.active_children():
                    process.kill()
    found = {n: read(results / f"{n}.json") for n in CASES if (results / f"{n}.json").exists()}
    print(write_table(found, options.table))
    bad = [name for name, result in found.items() if result["traceback"] or result["dead"]]
    print(f"tracebacks and dead workers: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


def is_done(path: Path, options: argparse.Namespace) -> bool:
    """Return whether a result holds what these options would find out."""
    if not path.exists():
        return False
    found = read(path)
    has_bare, has_export = bool(found["bare"]), found["exit"] is not None
    if options.only:
        return has_bare if options.only == "bare" else has_export
    return has_bare and has_export and bool(found["served"] or not found["formats"])


def read(path: Path) -> Result:
    """Return a case's result."""
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


class Work:
    """The steps of a case, each in a fork of this process."""

    def __init__(
        self, server: LiveServer, store: Path, results: Path, options: argparse.Namespace
    ) -> None:
        self.server, self.store, self.results, self.options = server, store, results, options
        self.fork = multiprocessing.get_context("fork")

    def all(self, cases: list[Case], jobs: int) -> Iterator[str]:
        """Run cases, so many at once; yield the names of those that ended."""
        waiting = cases[::-1]
        running: dict[str, Any] = {}
        while waiting or running:
            while waiting and len(running) < jobs:
                case = waiting.pop()
                running[case.name] = process = self.fork.Process(target=self.one, args=(case,))
                process.start()
            for name, process in list(running.items()):
                process.join(0.1)
                if not process.is_alive():
                    del running[name]
                    yield name

    def one(self, case: Case) -> None:
        """Run one case and write its result."""
        end_with_parent()
        file = self.results / f"{case.name}.json"
        before = read(file) if file.exists() else {}
        bare = before.get("bare")
        steps = [self.save, self.call_bare, self.export, self.check, self.serve]
        result: Result = {"bare": bare, "exit": None, "traceback": False, "dead": False}
        result |= {"formats": {}, "served": ""}
        if self.options.only == "bare":
            result |= {key: value for key, value in before.items() if key != "broken"}
            steps = steps[:2]
        elif self.options.only == "export":
            steps = [self.save, self.export, self.check]
        if bare and not self.options.again:
            steps = [step for step in steps if step != self.call_bare]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            for step in steps:
                result |= self.limited(step, case, folder)
                if step == self.export and not result["formats"]:
                    break
                if result.get("broken"):
                    break
        file.write_text(json.dumps(result, indent=1), encoding="utf-8")

    def limited(self, step: Callable[[Case, Path], Result], case: Case, folder: Path) -> Result:
        """Run a step in a process group of its own, and end that at its limit."""
        answer = folder / f"{step.__name__}.json"

        def run() -> None:
            os.setsid()
            end_with_parent()
            try:
                found = step(case, folder)
            except BaseException:
                # The harness's own: what the product prints is looked at where it is called.
                found = {"broken": f"{step.__name__}: {traceback.format_exc()}"}
            answer.write_text(json.dumps(found), encoding="utf-8")

        process = self.fork.Process(target=run)
        process.start()
        process.join(STEP_S)
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        if answer.exists():
            return read(answer)
        ended = f"ended by signal {-(process.exitcode or 0)}, or after {STEP_S} s"
        if step == self.call_bare:
            return {"bare": {"pt2": f"FAIL {ended}", "onnx": f"FAIL {ended}"}}
        return {"message": f"{step.__name__} {ended}", "broken": f"{step.__name__} {ended}"}

    def save(self, case: Case, folder: Path) -> Result:
        """Build the model and save it as its users do."""
        model: Any = made(case)
        path = checkpoint(case, folder)
        if case.saved == "folder":
            model.save_pretrained(path)
        elif case.saved == "module":
            torch.save(model, path)
        elif case.saved == "safetensors":
            from safetensors.torch import save_model

            save_model(model, str(path))
        elif case.saved == "Lightning":
            import lightning

            trainer = lightning.Trainer(logger=False, enable_checkpointing=False)
            trainer.strategy.connect(model)
            trainer.save_checkpoint(path)
        else:
            torch.save(model.state_dict(), path)
        return {"parameters": sum(each.numel() for each in model.parameters())}

    def call_bare(self, case: Case, folder: Path) -> Result:
        """Let torch's own calls have the model."""
        model, started = loaded(case, folder), cpu_s()
        found = bare_calls.call_both(bare_of(case, model), folder)
        return {"bare": {**found, "cpu_s": round(cpu_s() - started, 1)}}

    def export(self, case: Case, folder: Path) -> Result:
        """Run the command that a user would write."""
        started = cpu_s()
        words = command(case, folder, describes_itself(case))
        code, text = modelyard(folder, *words)
        if code and describes_itself(case) and "--input" in text:
            words = command(case, folder, False)
            code, text = modelyard(folder, *words)
        result: Result = {
            "command": " ".join(words).replace(f"{folder}/", ""),
            "exit": code,
            "cpu_s": round(cpu_s() - started, 1),
            "traceback": "Traceback (most recent call last)" in text,
            "message": "" if code == 0 else text.strip()[-1500:],
        }
        formats = {}
        for file in (folder / "out").glob("*.report.json") if (folder / "out").is_dir() else ():
            report = json.loads(file.read_text(encoding="utf-8"))
            formats[report["format"]] = {
                "max_abs": max(
                    (each["max_abs"] for each in report["parity"]["outputs"].values()), default=0
                ),
                "batchable": report["signature"].get("batching", {}).get("batchable"),
            }
        return result | {"formats": formats}

    def check(self, case: Case, folder: Path) -> Result:
        """Compare what was written with the model, at other sizes and on other values."""
        from modelyard.handlers.models.backends import open_artifact

        model = loaded(case, folder)
        right = {}
        for file in (folder / "out").glob("*.report.json"):
            artifact_path = file.with_name(file.name.removesuffix(".report.json"))
            report = json.loads(file.read_text(encoding="utf-8"))
            artifact = open_artifact(artifact_path, report["format"])

            def run(inputs: bare_calls.Values, artifact: Any = artifact) -> list[torch.Tensor]:
                with torch.no_grad():
                    found = artifact(*inputs)
                return [found] if isinstance(found, torch.Tensor) else list(found)

            right[report["format"]] = bare_calls.judge(written(case, model, report), run)
        return {"right": right}

    def serve(self, case: Case, folder: Path) -> Result:
        """Archive it, register it, and ask it."""
        reports = {
            json.loads(file.read_text(encoding="utf-8"))["format"]: file
            for file in (folder / "out").glob("*.report.json")
        }
        report_file = reports.get("onnx") or reports["pt2"]
        report = json.loads(report_file.read_text(encoding="utf-8"))
        artifact = report_file.with_name(report_file.name.removesuffix(".report.json"))
        name = case.name.replace("-", "_")
        words = [
            f"--artifact={artifact}",
            "--handler=base_handler",
            "--version=1.0",
            "--no-dry-run",
        ]
        code, text = modelyard(folder, "archive", name, *words, f"-o{self.store}")
        if code:
            is_traceback = "Traceback (most recent call last)" in text
            return {"served": f"archive: {text.strip()[-600:]}", "traceback": is_traceback}
        answer = self.server.register(f"{name}.mar")
        try:
            if answer.status_code != 200:
                return {"served": f"register: {answer.text[:600]}", "dead": "died" in answer.text}
            served = self.ask(case, folder, report, name)
            return {"served": served, "dead": bool(self.server.restarts(name))}
        finally:
            self.server.management.delete(f"/models/{name}")
            (self.store / f"{name}.mar").unlink(missing_ok=True)

    def ask(self, case: Case, folder: Path, report: Result, name: str) -> str:
        """Send one request and compare its answer; return "ok" or what is not."""
        bare = written(case, loaded(case, folder), report)
        # As base_handler has it: a request is one row of inputs that have rows, else all of them.
        first = [spec.shape[0] for spec in bare.signature.inputs]
        has_rows = all(size in (first[0], 1) for size in first)
        sizes = bare_calls.choose_sizes(bare.signature)[3]
        if has_rows and isinstance(first[0], Dim):
            sizes[first[0].name] = 1
        inputs = bare_calls.make_inputs(bare.signature, sizes, 9)
        expected = bare(inputs)
        names = [spec["name"] for spec in report["signature"]["inputs"]]
        rows = [(each[0] if has_rows else each).tolist() for each in inputs]
        body = json.dumps(rows[0] if len(rows) == 1 else dict(zip(names, rows, strict=True)))
        headers = {"content-type": "application/json"}
        answer = self.server.predict(name, body, headers=headers, timeout=120)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[:300]}"
        values = answer.json()
        found = [
            torch.tensor([each] if has_rows else each)
            for each in (values.values() if isinstance(values, dict) else [values])
        ]
        return bare_calls.difference(expected, found) or "ok"


def end_with_parent() -> None:
    """Let the kernel end this process when the one that forked it ends."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def made(case: Case) -> torch.nn.Module:
    """Build a case's model: each time with the same weights."""
    torch.manual_seed(1)
    model: torch.nn.Module = build(case)
    signature = signature_of(case)
    sizes = bare_calls.choose_sizes(signature)[0]
    inputs = bare_calls.make_inputs(
        signature, sizes | dict.fromkeys(sizes.keys() & {"batch"}, 16), 7
    )
    was_training, bare = model.training, bare_of(case, model.eval())
    with contextlib.suppress(Exception):  # of a network that does not take as many rows
        weights.draw_anew(model, lambda: bare(inputs))
    return model.train(was_training)


def loaded(case: Case, folder: Path) -> torch.nn.Module:
    """Return the model with the saved weights, as its user gets it back."""
    if case.saved == "folder":
        cls: Any = type(made(case))
        model: torch.nn.Module = cls.from_pretrained(checkpoint(case, folder))
        return model.eval()
    return made(case)


def checkpoint(case: Case, folder: Path) -> Path:
    """Return where a case's checkpoint lies."""
    suffix = {"folder": "", "safetensors": ".safetensors", "Lightning": ".ckpt"}
    return folder / f"{case.name}{suffix.get(case.saved, '.pt')}"


def bare_of(case: Case, model: torch.nn.Module) -> bare_calls.Bare:
    """Return what calls a case's model."""
    return bare_calls.Bare(model, signature_of(case), dict(case.call))


def signature_of(case: Case) -> Signature:
    """Return what a case's model takes, integers included."""
    return parse_inputs([text.replace("<2", "=0..1") for text in map(_numbers, case.inputs)])


def written(case: Case, model: torch.nn.Module, report: Result) -> bare_calls.Bare:
    """Return what calls the model as a report says that its artifact is called."""
    signature = parse_signature(report["signature"])
    integers = report["parity"]["integers"]
    specs = tuple(
        replace(spec, values=Values(End(integers[spec.name][0]), End(integers[spec.name][1])))
        if spec.name in integers and spec.values is None
        else spec
        for spec in signature.inputs
    )
    return bare_calls.Bare(model, replace(signature, inputs=specs), dict(case.call))


def _numbers(text: str) -> str:
    return re.sub(r"<(\d+)$", lambda found: f"=0..{int(found[1]) - 1}", text)


def describes_itself(case: Case) -> bool:
    """Return whether its user leaves out `--input`: the checkpoint or the library says it."""
    return case.saved == "folder" or bool(case.timm)


def command(case: Case, folder: Path, is_described: bool) -> list[str]:
    """Return the words of `modelyard export` for a case."""
    words = ["export", str(checkpoint(case, folder))]
    module, _, name = case.model.rpartition(":")
    if case.timm:
        words += ["--model", f"timm:{case.timm}"]
    elif module in FILES:
        words += ["--model", f"{HERE / module}.py:{name}"]
    elif case.saved != "folder":
        words += ["--model", case.model]
    if case.args and case.saved not in ("folder", "Lightning"):
        words += ["--model-args", json.dumps(case.args)]
    for text in () if is_described else case.inputs:
        words += ["--input", re.sub(r"<\d+$", "", text)]
    return [*words, *case.options, "-o", str(folder / "out")]


def modelyard(folder: Path, *words: str) -> tuple[int, str]:
    """Run the command line in this process; return its exit code and what it printed."""
    from modelyard.cli import main as command_line

    log = folder / f"{words[0]}.log"
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        command_line(list(words))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code, log.read_text(encoding="utf-8", errors="replace")


def cpu_s() -> float:
    """Return the processor time of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    sys.exit(main())
