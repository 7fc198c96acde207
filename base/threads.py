"""The environment of a process that computes: how many threads, and that they sleep meanwhile."""

import os


def thread_environment(threads: int | None = None) -> dict[str, str]:
    """Return the variables that must be set before torch is imported.

    OpenMP teams that spin at their barriers collapse when anything else runs on their cores (a
    call of 2 ms took 100); GOMP_SPINCOUNT=0 makes them sleep.

    Args:
        threads: None for those of this process: OMP_NUM_THREADS, else the cores it may use.
    """
    if threads is None:
        stated = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(stated) if stated.isdecimal() else len(os.sched_getaffinity(0))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**dict.fromkeys(names, str(threads)), "GOMP_SPINCOUNT": "0"}
