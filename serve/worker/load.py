"""Import the author's handler, build its Context, and say clearly what went wrong."""

import contextlib
import ctypes
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.model_config import BATCH_INVARIANT
from modelyard.archiver.report import ARTIFACT_KEY, choose_artifact
from modelyard.base.plugins import registered
from modelyard.handlers import BUILT_IN, Context
from modelyard.handlers.entry_point import Entry, FoundHandler, find_handler
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.steps import Steps
from modelyard.serve.worker.codec import OURS, Answer, Rules
from modelyard.serve.worker.dialect import find_dialect

logger = logging.getLogger(__name__)


def _refuse_shares(data: Sequence[Any], context: Context) -> NoReturn:
    raise BadInput("this handler does not say what its answers come from; it has no `shares`")


def _refuse_tensors(data: Sequence[Any], context: Context) -> NoReturn:
    raise BadInput("this handler takes no tensors by name")


def _refuse_texts(data: Sequence[Any], context: Context) -> NoReturn:
    raise BadInput("this model gives no vector or score of a text")


@dataclass(frozen=True)
class Service:
    """A loaded model version."""

    predict: Entry
    explain: Entry
    context: Context
    batch_size: int
    device: str
    rules: Rules = OURS
    by_length: bool = False
    """Whether a batch is made of requests of like length."""
    steps: Steps | None = None
    """The handler, where requests join and leave between its steps."""
    shares: Entry = _refuse_shares
    """What says which parts of an input the handler's answer comes from."""
    handler: Any = None
    """The handler, where it inherits from ours."""
    infer: Entry = _refuse_tensors
    """What answers requests of tensors by name."""
    infer_stream: Entry = _refuse_tensors
    """The same, which sends on what the handler streams."""
    texts: Entry = _refuse_texts
    """What answers texts with the model's own numbers; of a plug-in."""
    golden: Entry | None = None
    """What predicts without an envelope, where one is set: archives are made without."""
    replay: Callable[[], Answer] = lambda: Answer(200, {}, b"")
    """Answers the archive's golden requests again."""


def load_service(message: dict[str, Any]) -> Service:
    """Load what the LOAD message names.

    Raises:
        Exception: whatever the author's code raises; LoadError for what we find ourselves.
    """
    folder = Path(message["folder"])
    config = read_config(folder, message["config_file"])
    manifest = choose_manifest(folder, message, config)
    device = choose_device(message["device"], message["worker"])
    device = settle_device(message["device"], device, manifest)
    gpu = int(device.removeprefix("cuda:")) if device != "cpu" else None
    if gpu is not None:
        import torch

        torch.cuda.set_device(gpu)  # for whatever does not ask which one
    context = Context(
        model_name=message["name"],
        model_dir=str(folder),
        manifest=manifest,
        batch_size=message["batch_size"],
        gpu=gpu,
        limit_max_image_pixels=message.get("limit_max_image_pixels", True),
        max_image_pixels=message.get("max_image_pixels"),
        model_yaml_config=config,
    )
    dialect = find_dialect()
    rules = dialect.choose_rules(message)
    context.metrics = dialect.metrics(context, message)
    sealed = "modelyard" in (manifest or {})
    place = (folder / message["handler"].partition(":")[0]).parent
    if place != folder:
        sys.path.insert(0, str(place))
    handler = find_handler(message["handler"], {**dialect.handlers, **(BUILT_IN if sealed else {})})
    try:
        handler.initialize(context)
    except LoadError as error:
        # A handler that lacks what somebody misspelt fails with the consequence of that.
        _check_settings(handler.target, f"; {error}")
        raise
    _check_settings(handler.target)
    steps = handler.target if isinstance(handler.target, Steps) else None
    keeps_bits = not steps and hasattr(getattr(handler.target, "model", None), "sizes")
    if config.get(BATCH_INVARIANT) and not keeps_bits:
        raise LoadError(
            f"{BATCH_INVARIANT} in model-config.yaml: only handlers whose requests go through an "
            "artifact together promise that; leave it out"
        )
    predict, explain = handler.handle, _explain_entry(handler, sealed)
    enveloped = golden = None
    if name := message.get("envelope"):
        envelope = dialect.envelope(name)
        golden = predict
        predict, explain = envelope(predict).handle, envelope(explain).handle
        if envelope.takes_tensors:
            enveloped = predict
        steps = None  # an envelope stands around whole batches
    return Service(
        predict,
        explain,
        context,
        message["batch_size"],
        device,
        rules,
        message.get("by_length", False),
        steps,
        getattr(handler.target, "shares", _refuse_shares) if sealed else _refuse_shares,
        handler.target if _is_ours(handler.target) else None,
        _tensor_entry(handler, enveloped),
        _tensor_entry(handler, enveloped, streams=True),
        _text_entry(handler.target),
        golden,
    )


def choose_manifest(folder: Path, message: dict[str, Any], config: dict[str, Any]) -> Any:
    """Return the archive's manifest, with the artifact that is to predict.

    It is named by the server's settings or by the archive, whose key means this for our handlers
    only. Where others explain, these handlers are not given the twin, which they would load.

    Raises:
        LoadError: that artifact cannot take the place.
    """
    manifest = message["manifest"]
    if message["handler"] not in BUILT_IN or "modelyard" not in (manifest or {}):
        return manifest
    if name := message.get(ARTIFACT_KEY) or config.get(ARTIFACT_KEY):
        try:
            manifest = choose_artifact(
                manifest, str(name), lambda file: (folder / file).read_bytes()
            )
        except ArchiveError as error:
            raise LoadError(" ".join(str(error).split())) from error
    if message.get("only_predicts"):
        return {**manifest, "modelyard": {**manifest["modelyard"], "explain": None}}
    return manifest


def choose_device(requested: str, worker: int) -> str:
    """Return `cpu` or `cuda:N` for the device of a LOAD message: auto, cpu, cuda or cuda:N.

    Workers are spread over the devices by their number.
    """
    if requested == "cpu":
        return "cpu"
    count = _count_devices()
    if requested == "auto":
        return f"cuda:{(worker - 1) % count}" if count else "cpu"
    index = int(requested.partition(":")[2] or (worker - 1) % max(1, count))
    if index >= count:
        raise LoadError(
            f"device {requested} was asked for but this process sees {count} CUDA devices; "
            "start with --device auto or cpu, or check the driver with nvidia-smi"
        )
    return f"cuda:{index}"


def settle_device(requested: str, device: str, manifest: Any) -> str:
    """Return the device that `choose_device` gave, or with `auto` the CPU for what cannot use it.

    That is an ONNX artifact of ours where the installed onnxruntime has no CUDA support; where a
    CUDA device was asked for, it is refused when it is opened.
    """
    if requested != "auto" or device == "cpu" or "modelyard" not in (manifest or {}):
        return device
    file = (manifest.get("model") or {}).get("serializedFile") or ""
    from modelyard.handlers.models.backends import onnx_has_cuda

    if not file.endswith(".onnx") or onnx_has_cuda():
        return device
    logger.warning(
        "%s runs on the CPU, as this onnxruntime has no CUDA support: install onnxruntime-gpu in "
        "its place, or say --device cpu",
        file,
    )
    return "cpu"


def _count_devices() -> int:
    """Count the CUDA devices that this process sees; without a driver, torch need not look."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def describe(error: BaseException, folder: Path) -> str:
    """Return one line: the error, and where in the author's code it came from."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, LoadError):
        text = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        with contextlib.suppress(ValueError):
            return f"{text} ({Path(frame.filename).relative_to(folder)}:{frame.lineno})"
    return text


def read_config(folder: Path, config_file: str | None) -> dict[str, Any]:
    """Return the archive's own configuration; empty where it has none."""
    if not config_file:
        return {}
    config = yaml.safe_load((folder / config_file).read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def _is_ours(target: object) -> bool:
    """Return whether a handler inherits from ours."""
    base = sys.modules.get("modelyard.handlers.base")  # imported by whoever does
    return base is not None and isinstance(target, base.BaseHandler)


def is_built_in(target: object) -> bool:
    """Return whether a handler is ours as it stands: what fails is not an author's code."""
    return type(target).__module__.startswith("modelyard.handlers.")


def _check_settings(target: Any, failed: str = "") -> None:
    """Refuse what the archive says to one of our handlers and means nothing to it.

    An author's class may read entries of its own at any time, so it is only warned of.

    Args:
        failed: why the handler could not be loaded, where it could not: only what looks like
            something that was asked for by then is told.

    Raises:
        LoadError: what it is, and what was likely meant.
    """
    if not _is_ours(target):
        return
    unread = target.unread_settings()
    likely = [problem for problem in unread if problem.endswith("?")]
    if is_built_in(target):
        if told := likely if failed else unread:
            raise LoadError(f"model-config.yaml: {'; '.join(told)}{failed}")
        if not failed and (problem := target.wrong_labels()):
            raise LoadError(problem)
        return
    for problem in likely:
        logger.warning("model-config.yaml: %s", problem)


def is_classifier(target: object) -> bool:
    """Return whether a handler answers labels as ours do."""
    base = sys.modules.get("modelyard.handlers.base")
    return base is not None and isinstance(target, base.Classifier)


def _tensor_entry(
    handler: FoundHandler, enveloped: Entry | None = None, streams: bool = False
) -> Entry:
    """Return what answers requests of tensors by name; most workers never get one."""
    entries: list[Entry] = []

    def answer(data: list[dict[str, Any]], context: Context) -> Any:
        if not entries:
            from modelyard.handlers.infer import tensor_entry

            entries.append(tensor_entry(handler, enveloped, streams))
        return entries[0](data, context)

    return answer


def _text_entry(target: Any) -> Entry:
    """Return what answers texts with a model's own numbers, where its handler reads texts as ours.

    Raises:
        LoadError: the archive's settings for it are wrong.
    """
    makes = (
        registered("texts").values() if _is_ours(target) and hasattr(target, "encodings") else ()
    )
    entries: list[Entry] = [entry.load()(target) for entry in makes]
    return entries[0] if entries else _refuse_texts


def _explain_entry(handler: FoundHandler, sealed: bool) -> Entry:
    """Return what answers explanations.

    Handlers of archives that we did not seal are called for them too, with a header that says so,
    and may have any attribute of the name `explain`.
    """
    explain = getattr(handler.target, "explain", None)
    if callable(explain) and (sealed or _is_ours(handler.target)):
        entry: Entry = explain
        return entry
    return handler.handle
