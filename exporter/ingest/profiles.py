"""Allow-lists of names beside torch's own, one per kind of writer; no wildcard, nothing callable.

A profile says which placeholders become values (`plain.to_plain`). torch's `safe_globals` would
let numpy's and OmegaConf's own unpickling run, on arguments that the file chooses: a numpy dtype
takes its flags from the file, and an array its size. Here the names are read, never resolved.
"""

from collections.abc import Iterable, Mapping

from modelyard.exporter.ingest.pickles import Global
from modelyard.exporter.ingest.plain import (
    FROMBUFFER,
    OMEGACONF_NODES,
    RECONSTRUCT,
    SCALARS,
    stock_class,
)
from modelyard.exporter.ingest.rebuild import is_known

_DTYPES = (
    *("Bool", "Float16", "Float32", "Float64", "Int8", "Int16", "Int32", "Int64"),
    *("UInt8", "UInt16", "UInt32", "UInt64"),
)
_BUILTINS = tuple(f"builtins.{n}" for n in ("dict", "list", "int", "float", "str", "bool"))

PROFILES: Mapping[str, frozenset[str]] = {
    "numpy-rng": frozenset(
        [*RECONSTRUCT, "numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType"]
    ),
    "numpy-scalars": frozenset(
        [*SCALARS, *RECONSTRUCT, *FROMBUFFER, "numpy.ndarray", "numpy.dtype"]
        + [f"numpy.dtypes.{name}DType" for name in _DTYPES]
    ),
    "stdlib-inert": frozenset(
        [
            "argparse.Namespace",
            "types.SimpleNamespace",
            "pathlib.PosixPath",
            "pathlib._local.PosixPath",
            "pathlib.PurePosixPath",
            "pathlib.WindowsPath",
            "pathlib.PureWindowsPath",
            "collections.defaultdict",
            "collections.deque",
            *_BUILTINS,
            "builtins.frozenset",
            "builtins.range",
            "builtins.slice",
            "datetime.datetime",
            "datetime.date",
            "datetime.time",
            "datetime.timedelta",
        ]
    ),
    "omegaconf": frozenset(
        [
            "omegaconf.dictconfig.DictConfig",
            "omegaconf.listconfig.ListConfig",
            "omegaconf.base.ContainerMetadata",
            "omegaconf.base.Metadata",
            *OMEGACONF_NODES,
            "typing.Any",
            "collections.defaultdict",
            *_BUILTINS,
        ]
    ),
    "lightning-old": frozenset(
        [
            "lightning.fabric.utilities.data.AttributeDict",
            "lightning_fabric.utilities.data.AttributeDict",
            "pytorch_lightning.utilities.parsing.AttributeDict",
            "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
            "pytorch_lightning.callbacks.early_stopping.EarlyStopping",
            "pytorch_lightning.utilities.enums._FaultTolerantMode",
            "pytorch_lightning.utilities.argparse._gpus_arg_default",
        ]
    ),
    # Classes of torch.nn only, by their exact module: `plain.stock_class` decides.
    "torch-nn": frozenset(["torch.nn.*"]),
}

_LOOP = ("numpy-scalars", "stdlib-inert")
_BY_KIND: Mapping[str, tuple[str, ...]] = {
    "Determined": ("numpy-rng",),
    "Lightning": ("stdlib-inert", "numpy-scalars", "omegaconf", "lightning-old", "torch-nn"),
    "Flyte": ("torch-nn", *_LOOP),
    "pickled module": ("torch-nn",),
    "fairseq": ("omegaconf", *_LOOP),
    "Composer": ("numpy-rng", *_LOOP),
}


def profiles_for(kind: str) -> tuple[str, ...]:
    """Name the profiles of a kind of checkpoint, the narrowest first."""
    for start, profiles in _BY_KIND.items():
        if kind.startswith(start):
            return profiles
    return _LOOP


def allowed_names(kind: str) -> frozenset[str]:
    """Unite the names that a kind's profiles hold."""
    return frozenset().union(*(PROFILES[name] for name in profiles_for(kind)))


def match_profiles(kind: str, names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the profiles that hold names beyond torch's, and the names that none holds."""
    unknown = {name for name in names if not is_known(name)}
    used = []
    for profile in profiles_for(kind):
        if covered := {name for name in unknown if _covers(profile, name)}:
            used.append(profile)
            unknown -= covered
    return tuple(used), tuple(sorted(unknown))


def _covers(profile: str, name: str) -> bool:
    if profile == "torch-nn":
        module, _, last = name.rpartition(".")
        return stock_class(Global(module, last)) is not None
    return name in PROFILES[profile]
