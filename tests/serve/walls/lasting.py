"""Every endpoint of a server, asked while the kernel drops what nobody holds of files and names.

As root, `python -m tests.serve.walls.lasting 3600` asks for an hour, with a drop each minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.serve.live import LiveServer, modelyard, running
from tests.shared import DIGITS, EXPORT, METHODS, ROOT, archive_digits

OPTIONS = {
    "layer_integrated_gradients": "&layer=features.2&n_steps=8",
    "layer_grad_cam": "&layer=features.2",
    "guided_grad_cam": "&layer=features.2",
    "gradient_shap": "&n_samples=8",
    "smoothgrad": "&n_samples=8",
    "kernel_shap": "&n_samples=80",
    "integrated_gradients": "&n_steps=8",
    "occlusion": "&window=4&stride=4",
}


def ask_everything(server: LiveServer, model: str) -> dict[str, int]:
    """Return the status of each endpoint."""
    scan = (DIGITS / "scans" / "3.png").read_bytes()
    tensor = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}
    asked = {
        f"explanation by {method}": server.client.post(
            f"/explanations/{model}?method={method}{OPTIONS.get(method, '')}", content=scan
        )
        for method in METHODS
        if method != "tree_shap"  # these are no trees
    }
    asked |= {
        "ping": server.client.get("/ping"),
        "prediction": server.predict(model, scan),
        "inference": server.client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]}),
        "metadata": server.client.get(f"/v2/models/{model}"),
        "ready": server.client.get("/v2/health/ready"),
        "models": server.management.get("/models"),
        "model": server.management.get(f"/models/{model}"),
        "metrics": server.metrics.get("/metrics"),
    }
    return {name: answer.status_code for name, answer in asked.items()}


WAYS = {"drop": "echo 3 >/proc/sys/vm/drop_caches", "remount": "mount -o remount /proc"}
"""How the kernel is made to forget each name that nobody holds, as it does where memory is short:
all of them, and those of procfs, which root of a user namespace may."""
ALL_WAYS = {**WAYS, "replace": "mount -t proc proc /proc"}
"""The last one is what no rule outlives: nothing of ours may need one there."""


def ask_for(seconds: float, forget: str, store: Path, state: Path) -> int:
    """Ask until the time is over, and print what went wrong; return how often that was.

    The kernel forgets after the first answers, and then each minute.
    """
    wrong, rounds, drops = 0, 0, 0
    with running(state, store, "--models=onnx") as server:
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < seconds or rounds < 2:
            answers = ask_everything(server, "onnx")
            if now >= 60 * drops:
                subprocess.run(["sh", "-c", forget], check=True)
                drops += 1
            rounds += 1
            if bad := {name: status for name, status in answers.items() if status != 200}:
                sys.stdout.write(f"after {now:.0f} s: {bad}\n")
                wrong += len(bad)
            time.sleep(1)
    sys.stdout.write(f"{rounds} rounds of {len(answers)} endpoints, {drops} drops: {wrong} wrong\n")
    return wrong


def main(seconds: str, way: str = "drop", store: str = "") -> int:
    """Ask for so long; a store with the digits model as `onnx` saves making one."""
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not store:
            formats = ("--format", "onnx", "--format", "pt2")
            exported = modelyard(*EXPORT, *formats, "-o", folder)
            assert exported.returncode == 0, exported.stderr
            archive_digits("onnx", folder / "digits.onnx", folder / "store")
        wrong = ask_for(
            float(seconds), ALL_WAYS[way], Path(store or folder / "store"), folder / "state"
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
