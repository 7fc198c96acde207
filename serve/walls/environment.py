"""Which variables of the server's environment its workers get."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

SECRETS = ("MODELYARD_*", "*KEY*", "*SECRET*", "*TOKEN*", "*PASSW*", "*CREDENTIAL*")
"""Patterns of names that no pattern brings along; only a name that is written out does."""

PASSED = (
    # The interpreter and where it finds libraries.
    *("PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    # Language, time, certificates.
    *("LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "SSL_CERT_*", "*_CA_BUNDLE"),
    # Threads and memory.
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "MALLOC_*", "GLIBC_TUNABLES"),
    # Devices, and the libraries that compute on them.
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "CUBLAS*", "CUDNN*", "HIP_*", "ROCR_*", "HSA_*", "MIOPEN_*"),
    *("TORCH*", "PYTORCH_*", "ATEN_*", "TRITON_*", "ORT_*", "TF32_*", "TRT_*"),
    *("HF_*", "TRANSFORMERS_*", "TS_*"),
    # What torch compiles with.
    *("CC", "CXX", "CPATH", "LIBRARY_PATH"),
)
"""Patterns of the names that workers get."""


def choose_variables(
    variables: Mapping[str, str], passed: Iterable[str] = PASSED, hidden: str | None = None
) -> dict[str, str]:
    """Return the variables that a worker may see.

    Args:
        variables: the server's.
        passed: names, which are passed whatever they are, and patterns as shells have them.
        hidden: regular expression; what it matches whole is left out.
    """
    names = frozenset(passed)
    hides = re.compile(hidden).fullmatch if hidden else lambda name: None
    return {
        name: value
        for name, value in variables.items()
        if not hides(name) and (name in names or _is_harmless(name, names))
    }


def _is_harmless(name: str, patterns: Iterable[str]) -> bool:
    upper = name.upper()
    return any(fnmatchcase(name, each) for each in patterns) and not any(
        fnmatchcase(upper, each) for each in SECRETS
    )
