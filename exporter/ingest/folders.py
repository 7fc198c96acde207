"""Folders that trainers write, and model archives → the weights inside.

Only files of weights and JSON are opened, by name. An archive is read by `archiver`, so that what
`modelyard verify` refuses is refused here: names, sizes, digests.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.read import Archive, open_archive
from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest import dcp
from modelyard.exporter.ingest.kinds import (
    match_profiles,
    spread_over_ranks,
    tensor_map,
    weight_sets,
)
from modelyard.exporter.ingest.mlflow import read_mlflow
from modelyard.exporter.ingest.single_file import (
    Announce,
    may_hold_weights,
    parse_beside,
    read_file,
    refusal,
)
from modelyard.exporter.ingest.source import (
    DETERMINED_WEIGHTS,
    PLAIN_NAME,
    Source,
    inside,
    parse_object,
    read_object,
    read_object_or_nothing,
    sniff,
)
from modelyard.exporter.ingest.value import (
    ClassHint,
    ParsedCheckpoint,
    Weights,
    as_dict,
    as_text,
    code_names,
    parse_labels,
)

_MAX_PLACES = 100
_LABELS = "index_to_name.json"
_FOREIGN = ("tf_model.h5", "flax_model.msgpack")
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def read_folder(folder: Path, announce: Announce | None = None) -> ParsedCheckpoint:
    """Read a folder of any kind that holds weights.

    Raises:
        CheckpointError: it is none, is damaged, or its weights are elsewhere.
    """
    format = sniff(folder)
    reader = _READERS.get(format)
    if reader is None:
        raise refusal(format, folder.name, _weights_inside(folder))
    return reader(folder, announce)


def _present(folder: Path, *names: str) -> Iterator[Path]:
    """Yield the files of these names that are there."""
    return (inside(folder, name) for name in names if (folder / name).is_file())


def _weights_inside(folder: Path) -> list[str]:
    """List files and folders of weights in a folder that is none itself, two levels down."""
    ranks = [path.name for path in folder.glob("consolidated.*.pth")]
    if len(ranks) > 1:
        raise CheckpointError(
            f'"{folder.name}" holds {len(ranks)} model-parallel ranks of Llama '
            f"({min(ranks)} …); convert them to one model with transformers' "
            "convert_llama_weights_to_hf.py first"
        )
    found = []
    below = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    for place in (folder, *sorted(below)[:_MAX_PLACES]):
        kind = None
        if place != folder and any((place / name).is_file() for name in _WEIGHT_FILES):
            with suppress(CheckpointError):
                kind = _config_class(read_object_or_nothing(inside(place, "config.json")))
            found.append(f"{place.name}{f' ({kind})' if kind else ''}")
            continue
        found += [
            path.relative_to(folder).as_posix()
            for path in sorted(place.iterdir())[:_MAX_PLACES]
            if may_hold_weights(path.name) and path.is_file() and not path.is_symlink()
        ]
    return found


def _config_class(config: Mapping[str, Any]) -> str | None:
    """Return the class that a `config.json` of transformers, timm or diffusers names."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    names = (name, config.get("architecture"), config.get("_class_name"))
    return next((text for each in names if (text := as_text(each))), None)


def _determined(folder: Path, announce: Announce | None) -> ParsedCheckpoint:
    load_data = read_object_or_nothing(inside(folder, "load_data.json"))
    metadata = read_object_or_nothing(inside(folder, "metadata.json"))
    trial = as_text(load_data.get("trial_type")) or ""
    if "Keras" in trial:
        raise refusal("Keras checkpoint", folder.name)
    if trial == "DeepSpeedTrial":
        parsed = _deepspeed(folder, announce)
    else:
        path = next(_present(folder, *DETERMINED_WEIGHTS, "checkpoint.pt"), None)
        if path is None:
            raise CheckpointError(
                f'"{folder.name}" is a Determined checkpoint without state_dict.pth; copy it again'
            )
        parsed = read_file(Source.of_file(path), announce)
    stated, steps = load_data.get("hparams"), metadata.get("steps_completed")
    hyper = as_dict(metadata.get("hparams") if stated is None else stated)
    spec = as_text(load_data.get("trial_cls_spec"))
    note = f'its trial class is "{spec}" under code/, which was not imported'
    return replace(
        parsed,
        kind=parsed.kind if parsed.kind.startswith("Determined") else f"Determined ({parsed.kind})",
        paths=(*parsed.paths, *_present(folder, "load_data.json", "metadata.json")),
        writer="Determined",
        writer_version=as_text(metadata.get("determined_version")),
        hyper_parameters=hyper,
        hyper_parameters_name="kwargs" if hyper else None,
        class_hint=ClassHint(spec, "load_data.json") if spec else parsed.class_hint,
        training={**parsed.training, **({"steps": steps} if isinstance(steps, int) else {})},
        notes=(*parsed.notes, *([note] if spec else [])),
    )


def _hugging_face(folder: Path, announce: Announce | None) -> ParsedCheckpoint:
    config = read_object_or_nothing(inside(folder, "config.json"))
    parsed = _weights_folder(folder, announce)
    state = read_object_or_nothing(inside(folder, "trainer_state.json"))
    name = _config_class(config)
    library = "timm" if "pretrained_cfg" in config else "Hugging Face"
    library = "diffusers" if "_class_name" in config else library
    notes = list(parsed.notes)
    if "auto_map" in config:
        code = code_names(config["auto_map"])
        notes.append(f"its class is code in the folder ({code}), which was not imported")
    if (folder / "modules.json").is_file():
        notes.append(
            "modules.json adds steps to the transformer, such as pooling, which are not in it; the "
            "handler text_encoder pools"
        )
    return replace(
        parsed,
        kind=f"{library} folder" if config else parsed.kind,
        paths=(*parsed.paths, *_present(folder, "config.json", "trainer_state.json")),
        writer="transformers" if "transformers_version" in config else parsed.writer,
        writer_version=as_text(config.get("transformers_version")),
        hyper_parameters=config,
        class_hint=ClassHint(name, "config.json") if name else None,
        labels=parse_labels(config.get("id2label")),
        training={
            key: state[key]
            for key in ("epoch", "global_step", "best_metric", "best_model_checkpoint")
            if isinstance(state.get(key), int | float | str)
        },
        notes=tuple(notes),
    )


def _weights_folder(folder: Path, announce: Announce | None) -> ParsedCheckpoint:
    """Read the one set of weights of a folder, safetensors first."""
    path = next(_present(folder, *_WEIGHT_FILES), None)
    if path is None:
        own = sorted(path.name for path in folder.glob("*.safetensors*") if path.is_file())
        names = [name for name in own if name.endswith(".index.json")] or own
        if len(names) != 1:
            return _distributed_inside(folder, announce, own)
        path = inside(folder, names[0])
    if path.suffix != ".json":
        return read_file(Source.of_file(path), announce)
    kind = "safetensors" if ".safetensors" in path.suffixes else "state dict"
    tensors, shards = _read_shards(path, announce)
    refused = tuple(sorted({name for shard in shards for name in shard.refused}))
    return ParsedCheckpoint(
        kind=f"{kind} (sharded)",
        loader=", ".join(sorted({shard.loader for shard in shards})),
        weights={"": Weights(tensors)},
        training={key: value for shard in shards for key, value in shard.training.items()},
        paths=(path, *(file for shard in shards for file in shard.paths)),
        refused=refused,
    )


def _read_shards(
    index: Path, announce: Announce | None
) -> tuple[dict[str, Tensor], list[ParsedCheckpoint]]:
    """Read the files that a `….index.json` names, and no file outside its folder.

    Returns:
        The tensors in the order of the index, and what was read.

    Raises:
        CheckpointError: a shard is missing, or has other names than the index says.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'"{index.name}" has no weight_map; copy the folder again')
    shards: dict[str, ParsedCheckpoint] = {}
    for name in sorted({str(value) for value in weight_map.values()}):
        if not PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                f'"{index.name}" is refused: its shard {name!r} is not a plain file name'
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(f'"{index.name}" names "{name}", which is missing: copy it too')
        shards[name] = read_file(Source.of_file(inside(index.parent, name)), announce)
    tensors = {}
    for name, shard in weight_map.items():
        found = shards[shard].weights.get("")
        if found is None or name not in found.tensors:
            raise CheckpointError(
                f'"{index.name}": "{name}" is not in "{shard}"; copy the folder again'
            )
        tensors[name] = found.tensors[name]
    return tensors, list(shards.values())


def _distributed_inside(
    folder: Path, announce: Announce | None, own: list[str]
) -> ParsedCheckpoint:
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp"):
        if (folder / name / ".metadata").is_file():
            return _distributed(inside(folder, name), announce)
    if not own and (elsewhere := _weights_inside(folder)):
        raise refusal("unknown", folder.name, elsewhere)
    foreign = [file.name for file in sorted(folder.glob("*_model.*")) if file.name in _FOREIGN]
    if foreign and not own:
        way = "from_tf" if foreign[0].endswith(".h5") else "from_flax"
        raise CheckpointError(
            f'"{folder.name}" has {foreign[0]}, weights of another framework, alone; expected '
            f"model.safetensors: with transformers 4, load the folder by AutoModel.from_pretrained"
            f"(…, {way}=True) and write it by save_pretrained"
        )
    seen = f"several files of weights ({', '.join(own)})" if own else "no file of weights"
    raise CheckpointError(
        f'"{folder.name}" has {seen}; expected one of {", ".join(_WEIGHT_FILES)}: give the file '
        "itself"
    )


def _distributed(folder: Path, announce: Announce | None) -> ParsedCheckpoint:
    """Read a DCP folder; with `meta.pt` it is a sharded checkpoint of Lightning."""
    index = dcp.read_index(folder)
    content: dict[str, Any] = {}
    optimizers: set[str] = set()
    wanted: set[str] = set()
    values: dict[str, Any] = {}
    for item in index.items.values():
        if (optimizer := _optimizer(item)) is not None:
            optimizers.add(optimizer)
        elif item.dtype is not None:
            _put(content, item.path, dcp.read_tensor(index, item))
        elif (file := dcp.read_value(index, item)) is not None:
            wanted |= file.wanted
            values[".".join(item.path)] = file.value
    whole = tensor_map(content)
    is_flat = whole is not None and any(isinstance(value, Tensor) for value in content.values())
    weights = {"": whole} if whole is not None and is_flat else weight_sets(content)
    usual = [key for key in weights if key.rpartition(".")[2] in ("model", "state_dict", "")]
    usual = list(weights) if len(weights) == 1 else usual
    default = usual[0] if len(usual) == 1 or usual[:1] == ["model"] else None
    training = {
        key: value for key, value in values.items() if type(value) in (int, float, str, bool)
    }
    _, refused = match_profiles("DCP", wanted)
    parsed = ParsedCheckpoint(
        kind="distributed checkpoint (DCP)",
        loader="dcp",
        weights=weights,
        default=default,
        paths=index.paths,
        writer="torch.distributed.checkpoint",
        writer_version=index.version,
        training={**training, **({"optimizers": sorted(optimizers)} if optimizers else {})},
        refused=refused,
    )
    meta = folder / "meta.pt"
    return _with_meta(parsed, meta) if meta.is_file() else parsed


def _optimizer(item: dcp.Item) -> str | None:
    """Return the path of the optimizer that an item is of; None of any other."""
    parts = item.path if len(item.path) > 1 else tuple(item.name.split("."))
    place = next((at for at, part in enumerate(parts) if part.startswith("optim")), None)
    return None if place is None else ".".join(parts[: place + 1])


def _put(content: dict[str, Any], path: Sequence[str], tensor: Tensor) -> None:
    """Put a tensor where it was in the dicts that were saved."""
    *keys, last = path
    for key in keys:
        inner = content.setdefault(key, {})
        if not isinstance(inner, dict):
            raise CheckpointError(f'DCP index: "{key}" is a tensor and holds others; copy it again')
        content = inner
    content[last] = tensor


def _with_meta(parsed: ParsedCheckpoint, meta: Path) -> ParsedCheckpoint:
    """Add what Lightning keeps beside the shards: all of its checkpoint but tensors."""
    weights = parsed.weights.get(parsed.default or "", Weights({})).tensors
    beside = parse_beside(
        Source.of_file(inside(meta.parent, meta.name)), {"state_dict": dict(weights)}
    )
    return replace(
        parsed,
        kind="Lightning checkpoint (sharded)" if beside.writer else parsed.kind,
        writer=beside.writer or parsed.writer,
        writer_version=beside.writer_version or parsed.writer_version,
        hyper_parameters=beside.hyper_parameters,
        hyper_parameters_name=beside.hyper_parameters_name,
        training={**parsed.training, **beside.training},
        refused=tuple(sorted({*parsed.refused, *beside.refused})),
        notes=(*parsed.notes, *beside.notes),
        paths=(*parsed.paths, meta),
    )


def _deepspeed(folder: Path, announce: Announce | None) -> ParsedCheckpoint:
    latest = folder / "latest"
    place = folder
    if latest.is_file():
        tag = inside(folder, "latest").read_text("utf-8", "replace")[:200].strip()
        if not PLAIN_NAME.fullmatch(tag):
            raise CheckpointError(
                f'"{folder.name}/latest" names {tag!r}, which is not a folder name'
            )
        place = folder / tag
    elif (folder / "checkpoint").is_dir():
        place = folder / "checkpoint"
    if not place.is_dir():
        raise CheckpointError(f'"{folder.name}/latest" names "{place.name}", which is missing')
    names = sorted(path.name for path in place.glob("*model_states.pt"))
    ranks = [name for name in names if re.fullmatch(r"mp_rank_\d+_model_states\.pt", name)]
    if not ranks:
        seen = "ZeRO stage 3 shards" if names else "no mp_rank_00_model_states.pt"
        raise spread_over_ranks(f'"{place.name}" has {seen}')
    if len(ranks) > 1:
        raise spread_over_ranks(f'"{place.name}" has {len(ranks)} model-parallel ranks')
    parsed = read_file(
        Source.of_file(inside(folder, f"{place.relative_to(folder)}/{ranks[0]}")), announce
    )
    paths = (*parsed.paths, *([latest] if latest.is_file() else []))
    return replace(parsed, kind="DeepSpeed checkpoint", writer="DeepSpeed", paths=paths)


def _ray(folder: Path, announce: Announce | None) -> ParsedCheckpoint:
    read_object(inside(folder, ".metadata.json"))
    if path := next(_present(folder, "model.pt", "checkpoint.ckpt", "checkpoint.pt"), None):
        parsed = read_file(Source.of_file(path), announce)
    elif (folder / "checkpoint").is_dir():
        parsed = read_folder(inside(folder, "checkpoint"), announce)
    else:
        raise CheckpointError(
            f'"{folder.name}" is of Ray Train with files of your own; give the file of weights'
        )
    return replace(parsed, kind=f"Ray Train checkpoint ({parsed.kind})", writer="Ray Train")


@contextmanager
def checked_archive(path: Path) -> Iterator[Archive]:
    """Open an archive of which every name, size and digest has been checked.

    Raises:
        CheckpointError: it is refused, in the words of `modelyard verify`.
    """
    try:
        with open_archive(path) as archive:
            yield archive
    except ArchiveError as error:
        raise CheckpointError(str(error)) from error


def serialized_source(archive: Archive) -> Source | None:
    """Return the bytes of the file of weights that the manifest names, when it is there."""
    name = archive.manifest.serialized_file
    if name is None or name not in archive.names:
        return None
    return Source(name, archive.view(name))


def read_archive(path: Path, announce: Announce | None = None) -> ParsedCheckpoint:
    """Read the weights inside an archive, a file or a folder.

    Raises:
        CheckpointError: it is refused, or has no weights, or they are refused.
    """
    with checked_archive(path) as archive:
        return read_weights(archive, announce)


def read_weights(archive: Archive, announce: Announce | None = None) -> ParsedCheckpoint:
    """Read the weights inside an open archive; errors as `read_archive`."""
    source = serialized_source(archive)
    if source is None:
        raise CheckpointError(
            f'"{archive.path.name}" names no serializedFile that is in it; its handler makes the '
            "model itself, so there are no weights to export"
        )
    inner = read_file(source, announce)
    names, path = archive.names, archive.path
    model_file = archive.manifest.model_file
    labels = parse_object(archive.read(_LABELS), _LABELS) if _LABELS in names else {}
    parsed = replace(
        inner,
        kind=f"TorchServe archive ({inner.kind})",
        paths=tuple(path / name for name in names) if path.is_dir() else (path,),
        writer="TorchServe",
        writer_version=archive.manifest.archiver_version,
        labels=parse_labels(labels),
    )
    if model_file is None or model_file not in names:
        return parsed
    return replace(
        parsed,
        class_hint=ClassHint(model_file, "modelFile of its manifest"),
        sources={model_file: archive.read(model_file).decode("utf-8", "replace")},
    )


_READERS: Mapping[str, Callable[[Path, Announce | None], ParsedCheckpoint]] = {
    "Determined": _determined,
    "Hugging Face": _hugging_face,
    "weights folder": _weights_folder,
    "DCP": _distributed,
    "DeepSpeed": _deepspeed,
    "MLflow": read_mlflow,
    "Ray Train": _ray,
    "TorchServe archive": read_archive,
}
