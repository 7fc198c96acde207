"""Artifact file → callable on torch tensors: one function per format, and the table of them."""

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.archiver.signature import UNLIMITED, Dim, Size, TensorSpec
from modelyard.archiver.untrusted.container import OpenFile
from modelyard.archiver.untrusted.zip import TORCH_RULES, NotAZip, ZipReader, read_names
from modelyard.handlers.errors import InputMismatch, LoadError, UnsafeProgram
from modelyard.handlers.judge.check import load_program
from modelyard.handlers.judge.onnx_file import check_onnx
from modelyard.handlers.limits import sizes_of_dims
from modelyard.handlers.models import sharing

_log = logging.getLogger(__name__)

Output = Tensor | tuple[Tensor, ...]


def as_tuple(tensors: Output) -> tuple[Tensor, ...]:
    """Return what a model takes or gives as a tuple."""
    return (tensors,) if isinstance(tensors, Tensor) else tensors


def as_output(tensors: Sequence[Tensor]) -> Output:
    """Return tensors as a model takes or gives them: one alone, several as a tuple."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def main_output(outputs: Output) -> Tensor:
    """Return the output that answers are made of, as `Signature.main` states it."""
    tensors = as_tuple(outputs)
    return next((each for each in tensors if each.is_floating_point()), tensors[0])


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a signature's name.

    Raises:
        LoadError: torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f'torch {torch.__version__} has no dtype "{name}"')
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in a signature."""
    return str(dtype).removeprefix("torch.")


def type_name(tensor: Tensor) -> str:
    """Return dtype and sizes as a signature writes them: `float32[2,8]`."""
    return f"{dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


class Artifact:
    """A loaded artifact: call it with one tensor per input, in order.

    Args:
        format: its key in `FORMATS`.
        run: takes the tensors as they are, gives what the model gives.
        inputs: what the file says about its inputs.
        device: where the tensors must be.
        module: the torch module inside, None where gradients cannot flow.

    A single output comes as a tensor, several as a tuple in the model's order.
    """

    def __init__(
        self,
        format: str,
        run: Callable[..., Any],
        inputs: Sequence[TensorSpec],
        device: torch.device,
        module: nn.Module | None = None,
    ) -> None:
        self.format = format
        self.inputs = tuple(inputs)
        self.device = device
        self.module = module
        self.file = format
        """The name of its file; the format where it has none."""
        self.path: Path | None = None
        self._run = run
        self._takes = [_takes(spec) for spec in self.inputs]

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs' names, in the order of the call."""
        return tuple(spec.name for spec in self.inputs)

    @property
    def is_differentiable(self) -> bool:
        """Whether gradients can flow through a call."""
        return self.module is not None

    def accepts(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the number, dtypes and shapes of these tensors would pass."""
        return len(tensors) == len(self._takes) and all(
            takes(tensor) for takes, tensor in zip(self._takes, tensors, strict=True)
        )

    def __call__(self, *tensors: Tensor) -> Output:
        """Run the artifact.

        Raises:
            InputMismatch: a tensor's number, dtype or shape is not what the artifact takes.
        """
        if not self.accepts(tensors):
            raise InputMismatch(self._mismatch(tensors))
        output = self._run(*tensors)
        return output if isinstance(output, Tensor) else as_output(tuple(_tensors(output)))

    def _mismatch(self, tensors: Sequence[Tensor]) -> str:
        takes = ", ".join(map(str, self.inputs))
        if len(self.inputs) != len(tensors):
            return f"{len(tensors)} inputs given, the artifact takes {len(self.inputs)}: {takes}"
        spec, tensor = next(
            (spec, tensor)
            for spec, takes, tensor in zip(self.inputs, self._takes, tensors, strict=True)
            if not takes(tensor)
        )
        return f'input "{spec.name}" is {type_name(tensor)}, the artifact takes {spec}'


def _takes(spec: TensorSpec) -> Callable[[Tensor], bool]:
    """Return what says whether a tensor fits; on the hot path, so without a message."""
    if not spec.dtype:
        return lambda tensor: True
    dtype = torch_dtype(spec.dtype)
    limits = [(dim.min, dim.max) if isinstance(dim, Dim) else (dim, dim) for dim in spec.shape]

    def takes(tensor: Tensor) -> bool:
        if tensor.dtype is not dtype or tensor.dim() != len(limits):
            return False
        for size, (low, high) in zip(tensor.shape, limits, strict=True):
            if not low <= size <= high:
                return False
        return True

    return takes


def set_precision(device: torch.device, tf32: bool = False) -> contextlib.ExitStack:
    """Have CUDA compute in float32 from now on, or rounded to TensorFloat-32, which is 1e-3 apart.

    The one rule of exports, `verify`, workers and benchmarks, whatever torch's defaults are. It
    holds for the process, or for a `with` block. On a CPU nothing is changed.
    """
    restored = contextlib.ExitStack()
    libraries: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    for library in libraries:
        if device.type == "cuda":
            restored.callback(setattr, library, "allow_tf32", library.allow_tf32)
            library.allow_tf32 = tf32
    return restored


@dataclass(frozen=True)
class Opening:
    """How an artifact is loaded: `open_artifact` says what each means."""

    device: torch.device
    share: bool | sharing.Examples = False
    on_tensorrt: bool = False
    trusted: Collection[str] = ()
    tf32: bool = False


def open_artifact(
    path: Path,
    format: str,
    device: str | torch.device = "cpu",
    share: bool | sharing.Examples = False,
    on_tensorrt: bool = False,
    trusted: Collection[str] = (),
    tf32: bool = False,
) -> Artifact:
    """Load an artifact so that a worker can call it.

    Args:
        path: the artifact file.
        format: a key of `FORMATS`.
        device: "cpu" or "cuda[:N]"; an artifact exported on one device runs on the other.
        share: whether weights on the CPU are mapped, and so in memory once for all processes that
            do this. `path` must lie in a folder that nobody changes, and into which further files
            may be written. Instead of True, what returns inputs to try shared weights with where
            that needs proof; else they are made up.
        on_tensorrt: let ONNX Runtime's TensorRT provider run it, on a CUDA device.
        trusted: what a program calls beside the operators of the list.
        tf32: what the artifact was proven with, as `set_precision` takes it.

    Raises:
        LoadError: unknown format, no such device, or a file that is not what `format` says.

    The number of threads is torch's own (OMP_NUM_THREADS), for every format.
    """
    if format not in FORMATS:
        known = ", ".join(FORMATS)
        raise LoadError(f'unknown artifact format "{format}" of {path.name}; known are {known}')
    if not path.is_file():
        raise LoadError(f"artifact {path.name} is not there; expected a file at {path}")
    place = _check_device(torch.device(device))
    found = detect_format(path)
    if found != format:
        raise LoadError(
            f"{path.name} holds {found}, not {format}; say {found} or give the other file"
        )
    if on_tensorrt and format != "onnx":
        raise LoadError(
            f"onnx.tensorrt in model-config.yaml: {path.name} holds {format}; expected onnx"
        )
    set_precision(place, tf32)
    if format == "onnx":
        _check_provider(path, place)
    how = Opening(place, share if place.type == "cpu" else False, on_tensorrt, trusted, tf32)
    try:
        artifact = FORMATS[format](path, how)
    except LoadError:
        raise
    # The loaders raise whatever their parsers raise on a damaged file (KeyError, RuntimeError,
    # json and protobuf errors …), so no narrower class covers "this file does not load".
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        raise LoadError(
            f"{path.name} is damaged or from another version: {type(error).__name__}: {reason[0]}; "
            f"export it again with the torch that serves it ({torch.__version__})"
        ) from error
    artifact.file, artifact.path = path.name, path
    return artifact


def detect_format(path: Path) -> str:
    """Detect an artifact's format from its content, never from its name.

    Raises:
        LoadError: the file is none of `FORMATS`; a checkpoint is named as such.
    """
    try:
        members = {name.partition("/")[2] for name in read_names(path)}
    except NotAZip:
        with path.open("rb") as file:
            if is_onnx(file.read(3)):
                return "onnx"
    else:
        if any(name.startswith("data/aotinductor/") for name in members):
            return "aoti"
        if "archive_format" in members and any(name.startswith("models/") for name in members):
            return "pt2"
        if "constants.pkl" in members and any(name.startswith("code/") for name in members):
            return "torchscript"
        if "data.pkl" in members:
            raise LoadError(
                f"{path.name} is a checkpoint, not an artifact; run `modelyard export` on it first"
            )
    raise LoadError(
        f"{path.name} is not an artifact; expected the content of {' or '.join(FORMATS)}"
    )


def open_pt2(path: Path, how: Opening) -> Artifact:
    """Load an exported program; gradients flow through it exactly as through the checkpoint.

    Raises:
        UnsafeProgram: the file holds more than a program.
    """
    program = load_program(path, how.trusted, how.device)
    if how.share:
        values = [*program.state_dict.values(), *program.constants.values()]
        sharing.map_weights([value for value in values if isinstance(value, Tensor)], path)
    inputs = _program_inputs(program)
    own_check_is_enough = _has_free_dims_only(program) and not program._guards_code
    module = program.module(check_guards=not own_check_is_enough)
    _freeze(module)
    # The program's own check of its inputs is a hook, which forward() leaves out; on a small model
    # it costs as much as the model. An export of ours has no guards left: it tried what they ask.
    run = module.forward if own_check_is_enough else _guarded(module)
    return Artifact("pt2", run, inputs, how.device, module)


def open_torchscript(path: Path, how: Opening) -> Artifact:
    """Load a scripted or traced module; the file states its inputs' names, not their shapes."""
    with warnings.catch_warnings():
        # A DeprecationWarning, and a FutureWarning from torch 2.14 on.
        warnings.filterwarnings("ignore", r"`torch\.jit\.load` is")
        module = torch.jit.load(os.fspath(path), map_location=how.device)  # type: ignore[no-untyped-call]
    if how.share:
        sharing.map_weights([*module.parameters(), *module.buffers()], path)
    module.eval()
    _freeze(module)
    arguments = module.forward.schema.arguments[1:]  # the first is the module itself
    inputs = [TensorSpec(each.name) for each in arguments if not each.has_default_value()]
    return Artifact("torchscript", module, inputs, how.device, module)


def open_onnx(path: Path, how: Opening) -> Artifact:
    """Load an ONNX model into onnxruntime; tensors pass through numpy without a copy on the CPU."""
    session = open_session(path, how)
    inputs = [_onnx_input(node.name, node.type, node.shape) for node in session.get_inputs()]
    input_names = [spec.name for spec in inputs]
    output_names = [node.name for node in session.get_outputs()]

    def run(*tensors: Tensor) -> Output:
        arrays = [tensor.detach().numpy() for tensor in tensors]
        outputs = session.run(output_names, dict(zip(input_names, arrays, strict=True)))
        return as_output(tuple(map(torch.from_numpy, outputs)))

    # onnxruntime takes its inputs from the host and copies to its own device itself.
    return Artifact("onnx", run, inputs, torch.device("cpu"))


def open_session(path: Path, how: Opening, is_optimized: bool = True) -> Any:
    """Return onnxruntime's session of an ONNX model, which computes on its device if it can.

    Args:
        how: where `share` is set, what is opened is a copy, optimised for this machine and tried,
            of which onnxruntime maps the weights.
        is_optimized: False runs the operators of the file as they stand.

    Raises:
        UnsafeProgram: it names other files, or is not what it says.
    """
    import onnxruntime

    if findings := check_onnx(path)[0]:
        raise UnsafeProgram(path.name, findings, "an ONNX model of ONNX's operators")

    def start(file: Path, optimize: bool) -> Any:
        options = _session_options(onnxruntime)
        if not is_optimized:
            options.log_severity_level = 4  # what is tried may fail, and raises that, too
        if not optimize:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(os.fspath(file), options, providers=providers)

    available = onnxruntime.get_available_providers()
    providers = _onnx_providers(available, how.device, how.tf32)
    if how.on_tensorrt:
        providers = [_tensorrt_provider(available, how.device), *providers]
    if how.share and providers == _ONNX_CPU and path.stat().st_size >= sharing.MIN_FILE_BYTES:
        examples = how.share if callable(how.share) else None
        folder = sharing.make_once(path, partial(sharing.save_shared_onnx, path, examples))
        if folder is not None:
            # It is optimised: a second time might change the order of sums.
            return start(folder / sharing.SHARED_ONNX, False)
    return start(path, is_optimized)


def open_aoti(path: Path, how: Opening) -> Artifact:
    """Load an AOTInductor package: native code, which runs in this process as it is.

    Raises:
        LoadError: it is not modelyard's, or was compiled for another torch, device or CPU.
    """
    package: Any = torch._C._aoti.AOTIModelPackageLoader
    metadata: dict[str, str] = package.load_metadata_from_package(os.fspath(path), _AOTI_MODEL)
    stated = json.loads(metadata.get("modelyard", "{}"))
    if not stated:
        raise LoadError(
            f"{path.name} does not state its inputs, and native code checks none; "
            "expected a package from modelyard export --format aoti"
        )
    device, folder = how.device, None
    _check_native(path, stated["torch"], metadata, device)
    if how.share and path.stat().st_size >= sharing.MIN_FILE_BYTES:
        folder = sharing.make_once(path, partial(_unpack_native, path))
    # On CUDA one stream runs the code's calls in turn; the code's own locks would make the process
    # wait for the device in each.
    is_cuda = device.type == "cuda"
    native: Any = (
        package(os.fspath(path), _AOTI_MODEL, is_cuda, 1, device.index if is_cuda else -1)
        if folder is None
        else _SharedNative(folder)
    )
    # Without the proven ranges: explaining runs larger batches.
    inputs = []
    for spec in stated["inputs"]:
        shape = (size if isinstance(size, int) else Dim(size) for size in spec["shape"])
        inputs.append(TensorSpec(spec["name"], spec["dtype"], tuple(shape)))

    def run(*tensors: Tensor) -> Any:
        # Native code reads past the end of inputs that differ in a dim which they share.
        shapes = [tensor.shape for tensor in tensors]
        sizes_of_dims(inputs, shapes, 0, InputMismatch, "one size for each name")
        # The code takes the strides of what it was compiled with for granted.
        return native.run([tensor.contiguous() for tensor in tensors])

    return Artifact("aoti", run, inputs, device)


class _SharedNative:
    """Native code of a package that lies unpacked in a folder, computing with mapped weights."""

    def __init__(self, folder: Path) -> None:
        runner = _open_native(folder)
        fqns = runner.get_constant_names_to_original_fqns()
        names = {original: name for name, original in fqns.items()}
        stored = torch.load(folder / _AOTI_WEIGHTS, mmap=True, weights_only=True)
        # The code uses them where they are, and does not keep them alive.
        self._weights = {names[original]: weight for original, weight in stored.items()}
        runner.update_constant_buffer(self._weights, True, True, True)
        runner.swap_constant_buffer()
        runner.free_inactive_constant_buffer()  # the copies that the code began with
        sharing.release_freed_memory()
        self.run: Callable[[list[Tensor]], list[Tensor]] = runner.run


def _unpack_native(path: Path, folder: Path) -> None:
    """Unpack a package, and lay the weights of its code beside it, as they are in memory."""
    file = OpenFile(os.open(path, os.O_RDONLY))
    with contextlib.closing(ZipReader(file, TORCH_RULES)) as package:
        if problems := package.check():
            raise LoadError(f"{path.name} is damaged: {problems[0]}")
        for member in package.members:
            if not member.is_folder:
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(b"".join(package.chunks(member)))
    runner = _open_native(folder)  # it owns the weights, and must live until they are written
    torch.save(runner.extract_constants_map(False), folder / _AOTI_WEIGHTS)


def _open_native(folder: Path) -> Any:
    (library,) = folder.glob("*/data/aotinductor/*/*.wrapper.so")
    return torch._C._aoti.AOTIModelContainerRunnerCpu(os.fspath(library), 1)


FORMATS: Mapping[str, Callable[[Path, Opening], Artifact]] = {
    "pt2": open_pt2,
    "onnx": open_onnx,
    "torchscript": open_torchscript,
    "aoti": open_aoti,
}

_AOTI_MODEL = "model"
_AOTI_WEIGHTS = "weights.pt"

_ONNX_CPU: list[Any] = ["CPUExecutionProvider"]
_CUDA = "CUDAExecutionProvider"

_ALIKE = ("float16", "int64", "int32", "int16", "int8", "uint8", "bool")
_ONNX_DTYPES = {
    "tensor(float)": "float32", "tensor(double)": "float64", **{f"tensor({n})": n for n in _ALIKE}
}  # fmt: skip


def _check_device(device: torch.device) -> torch.device:
    """Return the device with its index, and refuse one that this machine does not have."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise LoadError(f'device "{device}" is not served; expected cpu or cuda[:N]')
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= present:
        raise LoadError(
            f'device "{device}" is not on this machine, which has {present} CUDA devices; '
            "use --device cpu, or install a torch build for CUDA"
        )
    return torch.device("cuda", index)


def _freeze(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def _program_inputs(program: torch.export.ExportedProgram) -> list[TensorSpec]:
    names = set(program.graph_signature.user_inputs)
    return [
        TensorSpec(node.name, *_traced_type(node.meta["val"], program.range_constraints))
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names
    ]


def _guarded(module: nn.Module) -> Callable[..., Any]:
    """Return a failed guard of an exported program the error that other unfit inputs get."""

    def run(*tensors: Tensor) -> Any:
        try:
            return module(*tensors)
        except AssertionError as error:
            seen = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise InputMismatch(f"inputs of shapes {seen} do not go together: {error}") from error

    return run


def _has_free_dims_only(program: torch.export.ExportedProgram) -> bool:
    """Return whether `TensorSpec` states all that the program asks: no size depends on another."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    sizes: list[Any] = [
        size for value in values if isinstance(value, Tensor) for size in value.shape
    ]
    symbols = [size.node.expr for size in sizes if not isinstance(size, int)]
    return len(set(symbols)) == len(symbols) and all(symbol.is_Symbol for symbol in symbols)


def _traced_type(value: Any, ranges: Mapping[Any, Any]) -> tuple[str, tuple[Size, ...]]:
    if not isinstance(value, Tensor):
        return "", ()
    return dtype_name(value.dtype), tuple(_traced_dim(size, ranges) for size in value.shape)


def _traced_dim(size: int | torch.SymInt, ranges: Mapping[Any, Any]) -> Size:
    if isinstance(size, int):
        return size
    limits = ranges.get(size.node.expr)
    if limits is None:
        return Dim(str(size))
    # A lower limit of 2 is the tracer's own assumption, not the model's: 0 and 1 do run.
    low = int(limits.lower) if int(limits.lower) > 2 else 0
    return Dim(str(size), low, int(limits.upper) if limits.upper.is_Integer else UNLIMITED)


def _check_native(
    path: Path, version: str, metadata: Mapping[str, str], device: torch.device
) -> None:
    """Refuse native code that this torch or machine cannot run: it would end the process."""
    made_for = metadata.get("AOTI_DEVICE_KEY", "cpu")
    instructions = metadata.get("AOTI_CPU_ISA", "").partition(" ")[0]
    here = torch.backends.cpu.get_cpu_capability()
    lacking = made_for == "cpu" and instructions == "AVX512" and here != "AVX512"
    if version != torch.__version__ or made_for != device.type or lacking:
        raise LoadError(
            f"{path.name} was compiled for torch {version} on {made_for} {instructions}; this is "
            f"torch {torch.__version__} on {device.type} {here}: export --format aoti here again"
        )


def _onnx_input(name: str, kind: str, shape: Sequence[int | str | None]) -> TensorSpec:
    if kind not in _ONNX_DTYPES:
        raise LoadError(
            f'input "{name}" is a {kind}, which cannot be handed to onnxruntime from here; '
            f"expected one of {', '.join(_ONNX_DTYPES)}: export it as pt2 instead"
        )
    dims = (size if isinstance(size, int) else Dim(size or "?") for size in shape)
    return TensorSpec(name, _ONNX_DTYPES[kind], tuple(dims))


def _session_options(onnxruntime: Any) -> Any:
    options = onnxruntime.SessionOptions()
    # Else a file that is called .ort would be read as something else than what was judged.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only: probing for devices warns on machines without
    # Spinning threads cost other workers their cores between two requests.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def onnx_has_cuda() -> bool:
    """Return whether the installed onnxruntime can use CUDA devices."""
    import onnxruntime

    return _CUDA in onnxruntime.get_available_providers()


def _check_provider(path: Path, device: torch.device) -> None:
    """Refuse a CUDA device that onnxruntime would leave unused: the CPU is to be asked for."""
    if device.type == "cuda" and not onnx_has_cuda():
        raise LoadError(
            f"{path.name} would run on the CPU, and {device} was asked for: this onnxruntime has "
            "no CUDA support; install onnxruntime-gpu in its place, name a pt2 artifact of the "
            "archive as `artifact` in model-config.yaml, or say deviceType: cpu there"
        )


def _onnx_providers(available: Sequence[str], device: torch.device, tf32: bool) -> list[Any]:
    if device.type == "cpu":
        return _ONNX_CPU
    if _CUDA not in available:  # for the dialect of TorchServe, which falls back as it did
        _log.warning("this onnxruntime has no CUDA support, so the model runs on the CPU")
        return _ONNX_CPU
    return [(_CUDA, {"device_id": device.index, "use_tf32": int(tf32)}), *_ONNX_CPU]


def _tensorrt_provider(available: Sequence[str], device: torch.device) -> tuple[str, Any]:
    if device.type == "cpu":
        raise LoadError(
            "onnx.tensorrt in model-config.yaml: TensorRT needs a CUDA device, and this worker "
            "runs on the CPU; leave it out, or serve with --device cuda"
        )
    if "TensorrtExecutionProvider" not in available:
        raise LoadError(
            "onnx.tensorrt in model-config.yaml: this onnxruntime has no TensorRT support; "
            "pip install onnxruntime-gpu tensorrt"
        )
    return "TensorrtExecutionProvider", {"device_id": device.index}


def is_onnx(head: bytes) -> bool:
    """Recognise the first field of an ONNX ModelProto: `ir_version`, a small varint."""
    return len(head) > 2 and head[0] == 0x08 and 3 <= head[1] < 0x80 and head[2] & 7 in (0, 2)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)
    else:
        raise TypeError(f"the model gave a {type(output).__name__}; expected tensors")
