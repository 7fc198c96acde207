"""TorchServe's own pytest suite as a judge: what passes with TorchServe and not with Modelyard.

    scripts/torchserve-suite CHECKOUT [--work FOLDER] [--side ours] [--only NAME …] [--again]

CHECKOUT is a working tree of https://github.com/pytorch/serve; nothing is written into it. Its
`test/pytest` runs file by file against the commands of this environment, and against TorchServe
0.12.0 with its two archivers from PyPI, in an environment that is made once and needs Java 17.
Made where the checkout lacks them: weights of the MNIST example, random, and gRPC stubs; models
whose weights are downloads are left out. torchvision is there on both sides, without its compiled
operators. What needs the internet fails on both, since each file runs in a network of its own,
where nothing but the loopback is; its processes end with it. What a file printed is kept: one that
has run is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.breadth.without_operators import NAMES

ROOT = Path(__file__).parents[1]
ISOLATED = ("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
LOOPBACK = 'ip link set lo up && exec "$@"'
OUTCOME = re.compile(
    r"^(?P<test>test_\S+?::\S.*?) (?P<now>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b"
    r"|^(?P<end>PASSED|FAILED|ERROR) (?P<summed>test_\S+?::\S.*?)(?: - |$)",
    re.MULTILINE,
)
"""A line of pytest's while it runs, where nothing is printed between; else one of its summary."""
TORCHVISION = "torchvision==0.28.0"
"""The version from PyPI; its compiled operators need CUDA's libraries, and are taken away."""
TOOLS = ("grpcio", "orjson", "protobuf", "pytest", "pytest-timeout", "requests", "torch")
"""What the suite itself needs beside the server, in the same versions on both sides."""
STOCK = ("torchserve==0.12.0", "torch-model-archiver==0.12.0", "torch-workflow-archiver==0.2.15",
         "captum", "googleapis-common-protos", "pyyaml")  # fmt: skip
WEIGHTS = """
import sys
import torch
sys.path.insert(0, "examples/image_classifier/mnist")
from mnist import Net
torch.manual_seed(0)
torch.save(Net().state_dict(), "examples/image_classifier/mnist/mnist_cnn.pt")
"""


@dataclass(frozen=True)
class Side:
    """One server under test."""

    name: str
    python: Path
    folder: Path
    """Holds a copy of the checkout, and what each file printed."""

    @property
    def checkout(self) -> Path:
        """The copy, which tests write into."""
        return self.folder / "serve"

    def printed(self, file: str) -> Path:
        """Where the output of a test file goes."""
        return self.folder / f"{file}.txt"


def main() -> int:
    """Run what has not run, print the table; 1 where a test passes with TorchServe alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "torchserve-suite")
    parser.add_argument("--side", choices=("ours", "stock"), help="run one of both")
    parser.add_argument("--only", nargs="*", default=[], help="test files, without folder")
    parser.add_argument("--again", action="store_true", help="run also what has run")
    parser.add_argument("--file-limit", type=int, default=600, help="seconds for a file")
    parser.add_argument("--test-limit", type=int, default=120, help="seconds for a test")
    given = parser.parse_args()
    work = given.work.resolve()
    stock = Side("stock", work / "stock" / "env" / "bin" / "python", work / "stock")
    ours = Side("ours", Path(sys.executable), work / "ours")
    sides = [side for side in (stock, ours) if given.side in (None, side.name)]
    files = sorted(path.name for path in (given.checkout / "test" / "pytest").glob("test_*.py"))
    files = [file for file in files if file not in ("test_utils.py", "test_gRPC_utils.py")]
    files = [file for file in files if not given.only or file in given.only]
    _install(stock)
    for side in sides:
        _prepare(side, given.checkout, stock.python)
    for file in files:
        for side in sides:
            if given.again or not side.printed(file).exists():
                _run(side, file, given.file_limit, given.test_limit)
    return _compare(stock, ours, files)


def _install(stock: Side) -> None:
    """Make TorchServe's environment, once."""
    if stock.python.with_name("torchserve").exists():
        return
    print(f"installing TorchServe into {stock.folder / 'env'}", flush=True)
    venv.create(stock.folder / "env", with_pip=True)
    exact = [f"{name}=={version(name).partition('+')[0]}" for name in TOOLS]
    compiler = f"grpcio-tools=={version('grpcio')}"
    _call(stock.python, "-m", "pip", "install", "--quiet", *STOCK, *exact, compiler)


def _prepare(side: Side, checkout: Path, stock: Path) -> None:
    """Make a copy of the checkout with what it lacks; `stock` is the Python beside TorchServe."""
    if not _torchvision(side).exists():
        target = side.folder / "torchvision.new"
        install = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", target)
        _call(stock, *install, TORCHVISION)
        module = target / "torchvision"
        (module / "_C.so").unlink()
        with (module / "extension.py").open("a", encoding="utf-8") as extension:
            extension.write(NAMES)
        target.rename(_torchvision(side))
    if side.checkout.exists():
        return
    draft = side.folder / "serve.new"
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(checkout, draft, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    _call(side.python, "-c", WEIGHTS, folder=draft)
    config = draft / "ts_scripts" / "mar_config.json"
    models = json.loads(config.read_text())
    config.write_text(json.dumps([m for m in models if "serialized_file_remote" not in m]))
    protos = draft / "frontend" / "server" / "src" / "main" / "resources" / "proto"
    stubs = draft / "stubs"
    stubs.mkdir()
    (others,) = stock.parents[1].glob("lib/python*/site-packages")
    paths = [f"-I{protos}", f"-I{others}"]
    out = [f"--python_out={stubs}", f"--grpc_python_out={stubs}"]
    names = sorted(protos.glob("*.proto"))
    _call(stock, "-m", "grpc_tools.protoc", *paths, *out, *names)
    draft.rename(side.checkout)


def _torchvision(side: Side) -> Path:
    return side.folder / "torchvision"


def _call(*command: str | Path, folder: Path | None = None) -> None:
    subprocess.run([str(part) for part in command], cwd=folder, check=True)


def _run(side: Side, file: str, file_limit_s: int, test_limit_s: int) -> None:
    """Run one test file; whatever it started ends with it."""
    print(f"{side.name}: {file}", end=" ", flush=True)
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    pytest = ("-m", "pytest", "-v", "-rfEp", "--tb=short", "-p", "no:cacheprovider",
              "-c", os.devnull, "--rootdir=.", f"--timeout={test_limit_s}", file)  # fmt: skip
    draft = side.printed(file).with_suffix(".part")
    # Sockets of workers lie there: a path of theirs has 107 characters.
    with tempfile.TemporaryDirectory(prefix="ts-", ignore_cleanup_errors=True) as temp:
        Path(temp, "workspace", "model_store").mkdir(parents=True)  # as its CI does
        with draft.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*ISOLATED, *root, "sh", "-c", LOOPBACK, "sh", str(side.python), *pytest],
                cwd=side.checkout / "test" / "pytest",
                env=_environment(side, temp),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(file_limit_s)
            except subprocess.TimeoutExpired:
                output.write(f"\nended after {file_limit_s} s\n")
            finally:
                process.kill()
                process.wait()
    draft.rename(side.printed(file))
    print(dict(Counter(_outcomes(side, file).values())), flush=True)


def _environment(side: Side, temp: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "JAVA_HOME") if name in os.environ}
    return {
        **kept,
        "PATH": f"{side.python.parent}{os.pathsep}{kept['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (side.checkout / "stubs", _torchvision(side)))),
        "HOME": temp,
        "TMPDIR": temp,
        "TEMP": temp,
        "CUDA_VISIBLE_DEVICES": "",
    }


def _outcomes(side: Side, file: str) -> dict[str, str]:
    """Return what became of each test; an error at its end counts."""
    printed = side.printed(file)
    if not printed.exists():
        return {}
    found: dict[str, str] = {}
    for line in OUTCOME.finditer(printed.read_text(encoding="utf-8", errors="replace")):
        test, outcome = line["test"] or line["summed"], line["now"] or line["end"]
        found[test] = "ERROR" if outcome == "ERROR" else found.get(test, outcome)
    return found


def _compare(stock: Side, ours: Side, files: list[str]) -> int:
    """Print the counts, and the tests that pass on one side alone."""
    there: dict[str, str] = {}
    here: dict[str, str] = {}
    for file in files:
        there |= _outcomes(stock, file)
        here |= _outcomes(ours, file)
    for side, found in ((stock, there), (ours, here)):
        print(f"{side.name}: {dict(Counter(found.values()))}")
    passing = [{test for test, outcome in found.items() if outcome == "PASSED"}
               for found in (there, here)]  # fmt: skip
    print(f"on both sides {len(passing[0] & passing[1])} pass")
    for title, tests, other in (
        ("pass with TorchServe and not here", passing[0] - passing[1], here),
        ("pass here and not with TorchServe", passing[1] - passing[0], there),
    ):
        print(f"{len(tests)} {title}")
        for test in sorted(tests):
            print(f"    {test}: {other.get(test, 'did not run')}")
    return int(bool(passing[0] - passing[1]))


if __name__ == "__main__":
    sys.exit(main())
