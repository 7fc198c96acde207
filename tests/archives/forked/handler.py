"""Describe the process that this runs in, and do to it what a request says."""

import ctypes
import gc
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import tabnanny  # ours: the standard library's may be imported already

IMPORTED_BY = os.getpid()


def handle(data, context):
    if data is None:
        return None
    return [act(row["body"], context) for row in data]


def act(body, context):
    if body == b"leave an orphan":
        return int(subprocess.check_output(["sh", "-c", "setsid sleep 600 >&- & echo $!"]))
    if body.startswith(b"exit"):
        os._exit(int(body.split()[1]))
    if body == b"kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return describe(context)


def describe(context):
    me = os.getpid()
    descriptors = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists()]
    kinds = sorted(re.sub(r"\[\d+\]$", "", each).replace(f"/{me}", "/self") for each in descriptors)
    return {
        "pid": me,
        "imported_by": IMPORTED_BY,
        "own_module": tabnanny.WHOSE,
        "draws": [random.random(), float(np.random.random()), float(torch.rand(())), multiprocessing.current_process().authkey.hex()],
        "same": {
            "parent": os.getppid(),
            "leads": [os.getpgid(0) == me, os.getsid(0) == me],
            "arguments": [Path(sys.argv[0]).name, len(sys.argv), sys.argv[1].isdigit()],
            "main": sys.modules["__main__"].__spec__.name,
            "safe_path": sys.flags.safe_path,
            "path": [each.replace(context.system_properties["model_dir"], ".") for each in sys.path],
            "folder": Path.cwd() == Path(context.system_properties["model_dir"]),
            "descriptors": [each.replace(context.model_name, "name") for each in kinds],
            "variables": {
                name: value.replace(context.system_properties["model_dir"], ".").replace(str(Path.home()), "~")
                for name, value in os.environ.items()
            },
            "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "torch_threads": torch.get_num_threads(),
            "blas_threads": blas_threads(),
            "collects": gc.isenabled(),
            "cuda": torch.cuda.is_initialized(),
            "dies_with_parent": parent_death_signal(),
        },
    }


def parent_death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
    return number.value


def blas_threads():
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := re.search(r"/\S*openblas\S*\.so\S*", line):
            return ctypes.CDLL(match[0]).scipy_openblas_get_num_threads64_()
    return None
