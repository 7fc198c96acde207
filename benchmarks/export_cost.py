"""CPU seconds and peak memory of `export --quick` beside the bare calls, imports included.

    python -m benchmarks.export_cost [--rounds 3] [--full] [toy resnet50]

The bare process loads the same state dict, calls torch.export.export, saves the program, and has
torch.onnx.export convert it and save. Memory is the largest sum over all processes of a command of
their proportional set sizes (a page of two processes counts half in each), looked at each 0.2 s.
Ours and bare take turns; figures are medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.procfs import descendants

NETWORKS = Path(__file__).parent.parent / "tests/networks.py"
_TOY = """
from torch import nn

class Toy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
"""
_BARE = """
import runpy, sys, torch
file, name, *sizes = sys.argv[1:]
net = runpy.run_path(file)[name]().eval()
net.load_state_dict(torch.load("net.pt"))
dims = ({0: torch.export.Dim("batch", min=1, max=8)},)
program = torch.export.export(net, (torch.randn(2, *map(int, sizes)),), dynamic_shapes=dims)
torch.export.save(program, "bare.pt2")
torch.onnx.export(program, dynamo=True, verbose=False).save("bare.onnx")
"""
_SAVE = """
import runpy, sys, torch
torch.manual_seed(0)
net = runpy.run_path(sys.argv[1])[sys.argv[2]]()
torch.save(net.state_dict(), "net.pt")
"""
SIZES = {"Toy": ["4"], "ResNet50": ["3", "224", "224"]}


def main() -> None:
    """Measure what was named and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*", default=["toy", "resnet50"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="without --quick")
    given = parser.parse_args()
    print(f"{'':18}{'CPU s':>8}{'of bare':>9}{'peak MB':>9}{'of bare':>9}")
    for net in given.nets:
        with tempfile.TemporaryDirectory() as folder:
            _measure(Path(folder), "Toy" if net == "toy" else "ResNet50", given.rounds, given.full)


def _measure(folder: Path, name: str, rounds: int, is_full: bool) -> None:
    (folder / "toy.py").write_text(_TOY)
    file = str(folder / "toy.py" if name == "Toy" else NETWORKS)
    subprocess.run([sys.executable, "-c", _SAVE, file, name], cwd=folder, check=True)
    text = f"x:float32[batch,{','.join(SIZES[name])}]"
    quick = [] if is_full else ["--quick"]
    commands = {
        "bare": [sys.executable, "-c", _BARE, file, name, *SIZES[name]],
        "modelyard": [
            str(Path(sys.executable).with_name("modelyard")), "export", "net.pt",
            "--model", f"{file}:{name}", "--input", text, *quick, "-o", "out",
        ],
    }  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {who: [] for who in commands}
    for _ in range(rounds):
        for who, command in commands.items():
            found[who].append(_run(command, folder))
    bare = [statistics.median(each) for each in zip(*found["bare"], strict=True)]
    for who, taken in found.items():
        cpu, memory = (statistics.median(each) for each in zip(*taken, strict=True))
        print(
            f"{name.lower() + ', ' + who:18}{cpu:8.2f}{cpu / bare[0]:9.2f}"
            f"{memory:9.0f}{memory / bare[1]:9.2f}",
            flush=True,
        )


def _run(command: list[str], folder: Path) -> tuple[float, float]:
    """Return the CPU seconds of a command and its peak memory in MB."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        peak = 0.0
        while True:
            peak = max(peak, sum(map(_pss_mb, [process.pid, *descendants(process.pid)])))
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.2)
    if status:
        sys.exit(f"{command[:2]} failed: {(folder / 'log').read_text()}")
    return used.ru_utime + used.ru_stime, peak


def _pss_mb(pid: int) -> float:
    with suppress(OSError, IndexError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(text.split("Pss:")[1].split()[0]) / 1000
    return 0.0


if __name__ == "__main__":
    main()
