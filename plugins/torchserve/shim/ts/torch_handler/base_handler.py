"""`from ts.torch_handler.base_handler import BaseHandler`."""

import importlib
import importlib.util
import logging
import os
import re
import tempfile
import time
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from modelyard.base.extras import how_to_install
from modelyard.handlers.context import Context
from modelyard.handlers.errors import LoadError
from modelyard.handlers.models.backends import Opening, detect_format, open_artifact, open_session
from modelyard.handlers.models.sharing import map_weights
from ts.handler_utils.timer import timed
from ts.utils.util import check_valid_pt2_backend, list_classes_from_module, load_label_mapping

_log = logging.getLogger(__name__)

PROFILER_AVAILABLE = True
"""Whether torch has a profiler; authors' tests ask."""


class BaseHandler(ABC):  # noqa: B024  authors ask isinstance(…, ABC)
    """TorchServe's handler: initialize → preprocess → inference → postprocess.

    An author's class changes some of the steps. `context` is also the place where handlers keep
    what they need later; it is the same object in every call.

    Attributes (set by `initialize`):
        model: what the archive holds, on `device`: a module, or a session of onnxruntime.
        mapping: class index as str → label, None without index_to_name.json.
        device: where the model computes; `map_location` is its kind.
        model_pt_path: the artifact's path, None where the manifest names none.
        manifest: the archive's, as written.
        model_yaml_config: the archive's model-config.yaml.
        explain: whether there has ever been a request for an explanation.
        profiler_args: arguments for `torch.profiler.profile`, where ENABLE_TORCH_PROFILER is set.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, Any] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: Any = None
        self.map_location: str | None = None
        self.model_yaml_config: dict[str, Any] = {}
        self.explain: Any = False
        self.target: Any = 0
        self.profiler_args: dict[str, Any] = {}

    def initialize(self, context: Context) -> None:
        """Load what the archive holds; a worker calls it once, before any request.

        Raises:
            LoadError: a checkpoint that would run code of its own, or does not fit its model.
            RuntimeError: the archive holds nothing that can be loaded.
            ValueError: the model file has no class or several, or `pt2` cannot be read.
        """
        self.model_yaml_config = context.model_yaml_config or {}
        properties = context.system_properties
        self.map_location, self.device = _choose_device(properties.get("gpu_id"))
        self.manifest = context.manifest
        entries = (self.manifest or {}).get("model", {})
        folder = cast("str", properties.get("model_dir"))
        artifact = entries.get("serializedFile")
        self.model_pt_path = os.path.join(folder, artifact) if artifact else None  # noqa: PTH118
        self.model = self._load_model(folder, entries.get("modelFile"))
        options = _compile_options(self.model_yaml_config.get("pt2"))
        if options is not None:
            self.model = _compile(self.model, options)
        self.mapping = load_label_mapping(os.path.join(folder, "index_to_name.json"))  # noqa: PTH118
        self.initialized = True

    @timed
    def preprocess(self, data: Any) -> Any:
        """Turn the rows into a tensor; made for rows of numbers, as of envelopes."""
        return torch.as_tensor(data, device=self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch; no gradient is recorded."""
        if hasattr(self.model, "get_inputs"):
            return _run_session(self.model, [data, *args])
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Turn the output into one answer per request."""
        return cast("list[Any]", data.tolist())

    def handle(self, data: Any, context: Context) -> list[Any]:
        """Answer a batch: predict, explain or describe, as the first request's headers say."""
        return self._handle(data, context, self._predict)

    def _predict(self, data: Any, marked: Callable[[str], Any] = nullcontext) -> Any:
        with marked("preprocess"):
            inputs = self.preprocess(data)
        if self._is_explain():
            with marked("explain"):
                return self.explain_handle(inputs, data)
        with marked("inference"):
            output = self.inference(inputs)
        with marked("postprocess"):
            return self.postprocess(output)

    def _handle(self, data: Any, context: Context, predict: Callable[[Any], Any]) -> list[Any]:
        begin = time.perf_counter()
        self.context = context
        output: Any
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            self.manifest = self.manifest or context.manifest
            output, _ = self._infer_with_profiler(data)
        elif self._is_describe():
            output = [self.describe_handle()]
        else:
            output = predict(data)
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - begin) * 1000, 2))
        return cast("list[Any]", output)

    def explain_handle(self, data_preprocess: Any, raw_data: Sequence[Any]) -> Any:
        """Answer a batch of explanations with `get_insights`, which subclasses have.

        Args:
            data_preprocess: what `preprocess` returned.
            raw_data: the rows. `target` of a row is the class to explain, 0 without one; where the
                rows name different ones, `get_insights` gets a list.
        """
        first = raw_data[0]
        inputs = first.get("data") or first.get("body") if isinstance(first, Mapping) else None
        targets = [_target(row) for row in raw_data]
        target = targets[0] if all(other == targets[0] for other in targets) else targets
        return cast("Any", self).get_insights(data_preprocess, inputs, target)

    def describe_handle(self) -> Any:
        """Return what `GET /models/{name}?customized=true` adds to the model's description."""
        return None

    def get_device(self) -> Any:
        """Return the device of the model."""
        return self.device

    def _is_explain(self) -> bool:
        if self.context and self.context.get_request_header(0, "explain") == "True":
            self.explain = True
            return True
        return False

    def _is_describe(self) -> bool:
        return bool(self.context and self.context.get_request_header(0, "describe") == "True")

    def _infer_with_profiler(self, data: Any) -> tuple[Any, Any]:
        """Answer a batch, and leave a trace of it below `pytorch_profiler` in the temp folder."""
        profiler = torch.profiler
        if not self.profiler_args:
            activity = profiler.ProfilerActivity
            self.profiler_args |= {"activities": [activity.CPU, activity.CUDA]}
            self.profiler_args["record_shapes"] = True
        if "on_trace_ready" not in self.profiler_args:
            name = (self.manifest or {}).get("model", {}).get("modelName", "")
            traces = Path(tempfile.gettempdir()) / "pytorch_profiler" / name
            self.profiler_args["on_trace_ready"] = profiler.tensorboard_trace_handler(str(traces))
            _log.info("traces of %s go to %s", name, traces)
        with profiler.profile(**self.profiler_args) as profile:
            output = self._predict(data, profiler.record_function)
        return output, profile

    def _load_model(self, folder: str, model_file: str | None) -> Any:
        path = self.model_pt_path
        if model_file:
            model = self._load_pickled_model(folder, model_file, path)
            return self._share_weights(model.to(self.device)).eval()
        suffix = Path(path).suffix if path else None
        if suffix == ".pt":
            return self._share_weights(self._load_torchscript_model(path)).eval()
        if suffix == ".onnx":
            how = Opening(torch.device(self.device), share=True)
            return open_session(Path(cast("str", path)), how)
        if suffix == ".pt2":
            return _open_package(Path(cast("str", path)), self.device)
        if suffix == ".so" and self._use_torch_export_aot_compile():
            return self._load_torch_export_aot_compile(path)
        raise RuntimeError(
            "No model weights could be loaded: the manifest names "
            f"{Path(path).name if path else 'no serializedFile and no modelFile'}; expected a "
            "TorchScript .pt, an .onnx, a .pt2, a .so with `pt2: {export: {aot_compile: true}}` in "
            "model-config.yaml, or a checkpoint with its --model-file"
        )

    def _load_pickled_model(
        self, model_dir: str, model_file: str, model_pt_path: str | None
    ) -> nn.Module:
        """Build the one class of the model file, and load its checkpoint without running its code.

        Raises:
            RuntimeError: there is no model file.
            ValueError: it has no class, or several.
            LoadError: the checkpoint cannot be read, or is that of another model.
        """
        if not (Path(model_dir) / model_file).is_file():
            raise RuntimeError(
                f"Missing the model.py file: the archive names {model_file} and does not hold it"
            )
        module = importlib.import_module(model_file.split(".")[0])
        classes = list_classes_from_module(module)
        if len(classes) != 1:
            raise ValueError(f"Expected only one class as model definition. {classes}")
        model: nn.Module = classes[0]()
        if model_pt_path:
            weights = load_weights(Path(model_pt_path), self.device)
            try:
                model.load_state_dict(weights)
            except (RuntimeError, TypeError, AttributeError) as error:
                reason = " ".join(str(error).split())
                raise LoadError(f"{Path(model_pt_path).name} does not fit: {reason}") from error
        return model

    def _load_torchscript_model(self, model_pt_path: Any) -> Any:
        """Load a TorchScript file onto the device."""
        return torch.jit.load(model_pt_path, map_location=self.device)  # type: ignore[no-untyped-call]

    def _share_weights(self, model: Any) -> Any:
        """Map weights on the CPU from the archive's file: in memory once for all workers."""
        if isinstance(model, nn.Module) and self.model_pt_path:
            map_weights([*model.parameters(), *model.buffers()], Path(self.model_pt_path))
        return model

    def _use_torch_export_aot_compile(self) -> bool:
        section = self.model_yaml_config.get("pt2")
        export = section.get("export") if isinstance(section, dict) else None
        return bool(isinstance(export, dict) and export.get("aot_compile"))

    def _load_torch_export_aot_compile(self, model_so_path: Any) -> Callable[..., Any]:
        """Load a library that AOTInductor compiled, for this device."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.set_device(self.device)
        return torch._export.aot_load(model_so_path, str(self.map_location))


def import_captum() -> Any:
    """Import `captum.attr`.

    Raises:
        LoadError: it is not installed.
    """
    try:
        return importlib.import_module("captum.attr")
    except ImportError as error:
        raise LoadError(
            f"explanations of this handler: {how_to_install(error) or error}"
        ) from error


def load_weights(path: Path, device: Any = "cpu") -> Any:
    """Read what `torch.save` wrote, as far as it is tensors, numbers, text, lists and dicts.

    Raises:
        LoadError: the file holds more, which only running code of its own would bring back, or it
            is damaged; nothing of it was run.
    """
    try:
        return torch.load(path, map_location=device, weights_only=True)
    # A damaged file makes the reader raise whatever its parts raise.
    except Exception as error:
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        reason = str(error).strip().partition("\n")[0]
        seen = f"objects of {unknown[1]}" if unknown else f"something else: {reason}"
        raise LoadError(
            f"{path.name} is not made of tensors alone but holds {seen}; nothing of it was run. "
            "Save the state dict, torch.save(model.state_dict(), FILE), and archive that"
        ) from error


def _choose_device(gpu_id: Any) -> tuple[str | None, Any]:
    """Return what weights are mapped to, and the device; `gpu_id` is the server's choice."""
    if gpu_id is not None and torch.cuda.is_available():
        if torch.cuda.get_device_capability(int(gpu_id)) >= (8, 0):
            torch.set_float32_matmul_precision("high")  # TorchServe's numbers are those of TF32
        return "cuda", torch.device(f"cuda:{gpu_id}")
    if importlib.util.find_spec("torch_xla"):
        return None, importlib.import_module("torch_xla.core.xla_model").xla_device()
    return "cpu", torch.device("cpu")


def _compile_options(section: Any) -> dict[str, Any] | None:
    """Read `pt2` of model-config.yaml: what `torch.compile` is given, None to leave it out.

    Its forms: {compile: {enable: true, backend: …, mode: …}}, {export: …}, and the older ones, a
    backend's name or {backend: …, mode: …}.
    """
    if section is None:
        return None
    if isinstance(section, str):
        options = {"backend": section}
    elif not isinstance(section, dict):
        raise ValueError(f"pt2 should be str or dict; model-config.yaml has {section!r}")
    elif "compile" in section:
        options = dict(section["compile"])
        if not options.pop("enable", False):
            return None
    elif "export" in section:
        return None
    else:
        options = dict(section)
    if "backend" in options and not check_valid_pt2_backend(options["backend"]):
        return None
    return options


def _compile(model: Any, options: Mapping[str, Any]) -> Any:
    """Compile a model; one that cannot be compiled runs as it is, and the log says so."""
    try:
        return torch.compile(model, **options)
    # TorchServe's contract, whatever a backend raises.
    except Exception as error:
        _log.warning("the model runs uncompiled: torch.compile(%s): %s", dict(options), error)
        return model


def _open_package(path: Path, device: torch.device) -> Any:
    """Open an exported program, or native code that AOTInductor compiled from one."""
    if detect_format(path) == "aoti":
        return torch._inductor.aoti_load_package(str(path))
    return open_artifact(path, "pt2", device, share=True).module


def _run_session(session: Any, inputs: Sequence[Tensor]) -> Any:
    """Call a session of onnxruntime as if it were a module."""
    names = [node.name for node in session.get_inputs()]
    feed = {name: value.cpu().numpy() for name, value in zip(names, inputs, strict=True)}
    outputs = [torch.from_numpy(output) for output in session.run(None, feed)]
    return outputs[0] if len(outputs) == 1 else outputs


def _target(row: Any) -> Any:
    """Read a row's `target`; one of a form arrives as bytes."""
    target = row.get("target") if isinstance(row, Mapping) else None
    if isinstance(target, bytes | bytearray | str) and target:
        return int(target)
    return target or 0
