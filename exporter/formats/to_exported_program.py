"""The model ↔ an exported program (`.pt2`), which is also what ONNX is made from."""

import inspect
import linecache
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.export.exported_program import default_decompositions
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, GraphModule
from torch.utils import _pytree

from modelyard.archiver.signature import Dim as DynamicDim
from modelyard.archiver.signature import Signature
from modelyard.exporter.arguments import WRAPPED, own_name
from modelyard.exporter.errors import CheckpointError, ConversionError
from modelyard.exporter.formats.decompose import IN_LISTED, nodes_of, plain_sizes
from modelyard.exporter.formats.diagnose import explain, find_place
from modelyard.handlers.errors import UnsafeProgram
from modelyard.handlers.judge.check import load_program
from modelyard.handlers.judge.grammar import ANY, operator_problem

_SHAPES_LOG = "torch.fx.experimental.symbolic_shapes"
_TALKATIVE = ("torch.export._trace", "torch._dynamo", "torch._guards", _SHAPES_LOG)
_OUR_CALL = re.compile(r' *File "<eval_with_key>[^\n]*\n?(    [^\n]*\n?)?')
_SOURCE_FILE = re.compile(r'(?<=File ")[^"\n]*[/\\](?=[^"/\\\n]+")')
# How torch logs why a size became a number, with the end of the file's path:
# eval Eq(s77, 5) [guard added] (r/net.py:12 in forward), for more info …
_GUARD = re.compile(r"eval Eq\(\w+, \d+\) \[guard added\] \(([^)\s]+):(\d+) in ")
# What torch's converters say about themselves on every run, kept from the user's terminal.
_KNOWN: tuple[tuple[str, type[Warning]], ...] = (
    # TorchScript is deprecated, and still what many deployments run; torch's compiler defines some.
    (r"`torch\.jit\.\w+` is", DeprecationWarning),
    (r"`torch\.jit\.\w+` is", FutureWarning),  # from torch 2.14 on
    # Advice of the script compiler, which goes on; from torch 2.14 on of torch's own classes too.
    ("The TorchScript type system doesn't support instance-level", UserWarning),
    # Raised by torch.while_loop, of torch's own lines.
    ("_check_is_size will be removed", FutureWarning),
    # Raised inside torch.export, torch.onnx and the compiler, which copy programs of this torch.
    (r".*treespec, LeafSpec", FutureWarning),
    # Recurrent layers of torch set their list of weights anew in every call.
    (r"The tensor attributes? (self\.\S*_flat_weights\[\d+\](, )?)+ w", UserWarning),
    # Reading bytecode, torch asks the example for a number as forward() would.
    ("Converting a tensor with requires_grad=True to a scalar", UserWarning),
    # Inductor's advice on CUDA; the export itself says what is rounded (`--tf32`).
    ("TensorFloat32 tensor cores", UserWarning),
    # One name that stands in two inputs is one size: what the signature means.
    ("# The axis name: .* will not be used", UserWarning),
)


def capture(model: nn.Module, signature: Signature, example: tuple[Tensor, ...]) -> ExportedProgram:
    """Trace the model into a program in which every named dim stays dynamic.

    Raises:
        ConversionError: the model cannot be traced, or fixes a named dim; names dim and input.
    """
    shapes = _shapes(model, signature)
    try:
        program = _trace(model, example, shapes)
    # Tracing runs the author's code on unknown sizes, which fails in any way.
    except Exception as error:
        try:
            program = _trace(model, example, shapes, strict=True)
        except Exception as second:  # the first says more of everything but sizes
            raise _why_not(model, signature, example, error, second) from error
    if fixed := _fixed_dims(program, signature):
        raise ConversionError(_fixed_message(fixed))
    if narrowed := _narrowed_dims(program, signature):
        raise ConversionError(
            f"forward() chooses by a size, and what the example took holds for {narrowed} only; "
            "expected one way for every size: use torch.cond, give --input that range, or export "
            "--format torchscript"
        )
    _take_own_names(program, model)
    free_names(program)
    _shorten_paths(program)
    return program


def write(program: ExportedProgram, path: Path) -> dict[str, object]:
    """Save the program without the inputs it was traced with: they may be somebody's data.

    One that calls operators which only its author may trust is decomposed, if it then calls none.

    Returns:
        `trusted_operators`: what it calls that only its author may trust, if anything.
    """
    example, program._example_inputs = program._example_inputs, None
    try:
        written = program
        if foreign := _foreign(program):
            written = _decomposed(program)
            if _foreign(written):
                written = program
        torch.export.save(plain_sizes(written), path)
    finally:
        program._example_inputs = example  # the next format may be compiled with them
    return {"trusted_operators": foreign} if foreign and written is program else {}


def _foreign(program: ExportedProgram) -> list[str]:
    return sorted(
        {str(node.target) for node in nodes_of(program.graph_module) if _is_foreign(node.target)}
    )


def _is_foreign(called: Any) -> bool:
    if isinstance(called, OpOverload):
        return bool(operator_problem(f"torch.ops.{called}"))
    return str(getattr(called, "__module__", "")).startswith("torch._functorch")  # vmap, grad


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    """Return it without calls that change a tensor in place, nor of operators off the list.

    Those that are listed stay whole, with the speed and the numbers that they have. Where torch or
    we know no way, it is returned as it is.
    """
    standard: Any = default_decompositions()
    known = {**decomposition_table, **dict(standard.items())}
    table: Any = {each: way for each, way in known.items() if _is_foreign(each)}
    table.update(IN_LISTED)
    # What an operator decomposes to may fail in any way on unknown sizes.
    with suppress(Exception), quiet(*_TALKATIVE), any_length():
        decomposed: ExportedProgram = program.run_decompositions(table)
        _leave_inputs(decomposed)
        return decomposed
    return program


def _leave_inputs(program: ExportedProgram) -> None:
    """Do not write results into the inputs: torch does not find all of these when it loads them."""
    output, specs = program.graph.output_node(), program.graph_signature.output_specs
    given = [*zip(output.args[0], specs, strict=True)]
    kept = [pair for pair in given if pair[1].kind is not OutputKind.USER_INPUT_MUTATION]
    output.args = (tuple(node for node, _ in kept),)
    specs[:] = [spec for _, spec in kept]
    program.graph_module.recompile()


def _trace(
    model: nn.Module,
    example: tuple[Tensor, ...],
    shapes: tuple[object, ...],
    *,
    strict: bool = False,
) -> ExportedProgram:
    """Trace without what torch prints when it fails: the error that it raises says it.

    Args:
        model: takes the example.
        example: each dynamic dim has a size of its own.
        shapes: the dynamic axes.
        strict: read the model's bytecode instead of running it, which knows what a size is where
            Python asks for a number (`len(x)`, `int(x.max())`), and does not know much else.
    """
    # einsum takes its operands in their order: the best one, by sizes, would fix them.
    in_order = torch.backends.opt_einsum.flags(enabled=False)
    with quiet(*_TALKATIVE), redirect_stderr(StringIO()), any_length(), in_order:
        return torch.export.export(model, example, dynamic_shapes=shapes, strict=strict)


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Silence the warnings that are known, and these loggers: the error that is raised says it."""
    with ExitStack() as stack:
        for logger in map(logging.getLogger, loggers):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        stack.enter_context(warnings.catch_warnings())
        for message, category in _KNOWN:
            warnings.filterwarnings("ignore", message, category)
        yield


@contextmanager
def _overheard(lines: StringIO) -> Iterator[None]:
    """Write down, and keep from the terminal, what torch logs about sizes that it fixes."""
    logger, handler = logging.getLogger(_SHAPES_LOG), logging.StreamHandler(lines)
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])


def _shapes(
    model: nn.Module, signature: Signature, kind: object = Dim.DYNAMIC
) -> tuple[object, ...]:
    """Return for each argument of forward() which axes are dynamic.

    Dim.DYNAMIC fails where the model needs one size; Dim.AUTO would quietly keep that size. No
    range is set: the report states the proven one, and explaining runs larger batches.
    """
    shapes = tuple(
        {axis: kind for axis, size in enumerate(spec.shape) if not isinstance(size, int)}
        for spec in signature.inputs
    )
    parameters = inspect.signature(model.forward).parameters.values()
    takes_rest = [parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters]
    if True in takes_rest:  # torch wants the arguments that *args gathers as one tuple
        place = takes_rest.index(True)
        return (*shapes[:place], shapes[place:])
    return shapes


def _why_not(
    model: nn.Module,
    signature: Signature,
    example: tuple[Tensor, ...],
    error: Exception,
    strict_error: Exception,
) -> ConversionError:
    """Explain a failed trace: by the dims that the model fixes, else by what stopped torch."""
    lines = StringIO()
    shapes = _shapes(model, signature, Dim.AUTO)
    try:
        with _overheard(lines), quiet(), redirect_stderr(StringIO()), any_length():
            program = torch.export.export(model, example, dynamic_shapes=shapes)
    except Exception:
        return explain(error, "torch.export", signature)
    reason = ""
    if fixed := _fixed_dims(program, signature):
        # Reading bytecode, torch knows the whole way to the line, through libraries too.
        says_where = "Constraints violated" in str(strict_error)
        place = find_place(strict_error) if says_where else ""
        reason = _fixed_message(fixed, place or _guard_place(model, lines.getvalue()))
    return explain(error, "torch.export", signature, reason=reason, log=lines.getvalue())


def _guard_place(model: nn.Module, log: str) -> str:
    """Name the author's line at which a size became a number: ` at net.py:12 "x.view(5, 3)"`."""
    files = {}
    for kind in {type(module) for module in model.modules()}:
        with suppress(TypeError, OSError):  # a class from a notebook or a string has no file
            path = Path(inspect.getfile(kind))
            files[path.name] = path
    for file, line in _GUARD.findall(log):
        name = Path(file).name
        if name in files:
            source = linecache.getline(str(files[name]), int(line)).strip()
            return f' at {name}:{line} "{source}"'
    return ""


def dynamic_sizes(
    program: ExportedProgram, signature: Signature
) -> Iterator[tuple[DynamicDim, str, Any]]:
    """Yield every named dim, the input that has it, and the size that was traced."""
    user_inputs = set(program.graph_signature.user_inputs)
    shapes = [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in user_inputs
    ]
    for spec, shape in zip(signature.inputs, shapes, strict=True):
        for dim, size in zip(spec.shape, shape, strict=True):
            if not isinstance(dim, int):
                yield dim, spec.name, size


def _fixed_dims(program: ExportedProgram, signature: Signature) -> list[str]:
    """Describe the named dims that the program holds as one size, if only after all of a trace."""
    return [
        f'dim "{dim.name}" of input "{name}" to {size}'
        for dim, name, size in dynamic_sizes(program, signature)
        if isinstance(size, int) or bool(size.node.expr.is_number)
    ]


def _fixed_message(fixed: list[str], where: str = "") -> str:
    is_loop = re.search(r"\bfor\b", where)
    advice = (
        "compute over the whole dim at once, since a loop over it is unrolled"
        if is_loop
        else "use x.shape[…] or -1 instead of a number in forward()"
    )
    return (
        f"the model fixes {', '.join(fixed)}{where}; expected it to take every size: {advice}, or "
        "write the dim as a number in --input"
    )


def _narrowed_dims(program: ExportedProgram, signature: Signature) -> str:
    """Describe the named dims for which the trace holds in a part of their range."""
    found: dict[str, str] = {}
    for dim, _, size in dynamic_sizes(program, signature):
        limits = program.range_constraints.get(size.node.expr)
        if limits is not None:
            low, high = int(limits.lower), limits.upper
            # A lower limit of 2 is the tracer's own assumption, not the model's.
            if low > max(2, dim.min) or bool(high < dim.max):
                found[dim.name] = f"{dim.name}={low}..{high if high.is_Integer else '…'}"
    return ", ".join(found.values())


def free_names(program: ExportedProgram) -> None:
    """Rename the tensors that torch cannot put in their place when it loads the program.

    It makes a GraphModule of it, which has attributes of its own: weights of a submodule that is
    called `meta`, `graph` or `code` have no place there, and become those of `meta_`.
    """
    taken = frozenset(dir(GraphModule(nn.Module(), Graph())))

    def free(name: str) -> str:
        # So torch calls a part of the model where it reads bytecode.
        name = re.sub(r"__dict__\['_modules'\]\['(\w+)'\]", r"\1", name)
        first, dot, rest = name.partition(".")
        return f"{first}_{dot}{rest}" if first in taken else name

    _rename(program, free)


def _rename(program: ExportedProgram, new_name: Callable[[str], str]) -> None:
    """Rename the program's tensors and submodules; nodes of its graph keep their names."""
    for tensors in (program._state_dict, program._constants):
        renamed = {new_name(name): value for name, value in tensors.items()}
        tensors.clear()
        tensors.update(renamed)
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        spec.target = spec.target and new_name(spec.target)
    for call in program._module_call_graph:
        call.fqn = new_name(call.fqn)


def _take_own_names(program: ExportedProgram, model: nn.Module) -> None:
    """Name weights and submodules as the author's model does, not as the calls around it."""
    if not hasattr(model, WRAPPED):
        return
    author = model
    while hasattr(author, WRAPPED):
        author = getattr(author, WRAPPED)
    root = f"{type(author).__module__}.{type(author).__qualname__}"
    _rename(program, own_name)
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        spec.arg.name = _own_node_name(spec.arg.name)
    calls = {call.fqn: call for call in reversed(program._module_call_graph)}
    program._module_call_graph[:] = reversed(calls.values())
    for node in nodes_of(program.graph_module):
        if node.op == "placeholder" and node.name != _own_node_name(node.name):
            node.name = node.target = _own_node_name(node.name)
        if stack := node.meta.get("nn_module_stack"):
            by_path = {own_name(path): (key, kind) for key, (path, kind) in stack.items()}
            node.meta["nn_module_stack"] = {
                # A key is as `L__self___model.layer`, a form that torch does not state.
                key.replace(f"{WRAPPED}.", "").replace(WRAPPED, ""): (path, kind if path else root)
                for path, (key, kind) in by_path.items()
            }


def _own_node_name(name: str) -> str:
    return name.replace(f"{WRAPPED}_", "")


def _shorten_paths(program: ExportedProgram) -> None:
    """Keep file names and lines of the author's code, not the folders of this machine."""
    for node in nodes_of(program.graph_module):
        if trace := node.meta.get("stack_trace"):
            node.meta["stack_trace"] = _SOURCE_FILE.sub("", _OUR_CALL.sub("", trace))


# -- LSTM, GRU and RNN of every length ------------------------------------------------------------
# torch keeps the operator in the program, but learns the shape of its output by running a
# decomposition that loops over the sequence, which fixes the length to the example's. Here the
# shape is stated instead, from the shapes that go in.

_Kernel = Callable[..., Any]


def _lstm(x: Tensor, hx: tuple[Tensor, Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """State the shapes of aten.lstm: the hidden state's last size is the projection's, if any."""
    hidden, cell = hx
    return _sequence(x, hidden, *options), torch.empty_like(hidden), torch.empty_like(cell)


def _rnn(x: Tensor, hx: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """State the shapes of aten.gru and of both plain RNNs."""
    return _sequence(x, hx, *options), torch.empty_like(hx)


def _sequence(x: Tensor, hidden: Tensor, *options: Any) -> Tensor:
    _params, _has_biases, _num_layers, _dropout, _train, bidirectional, _batch_first = options
    # Batch and length keep their places, whichever comes first.
    return x.new_empty((*x.shape[:2], hidden.shape[-1] * (2 if bidirectional else 1)))


_KERNELS: dict[Any, _Kernel] = {
    torch.ops.aten.lstm.input: _lstm,
    torch.ops.aten.gru.input: _rnn,
    torch.ops.aten.rnn_tanh.input: _rnn,
    torch.ops.aten.rnn_relu.input: _rnn,
}
# Where torch's own decomposition is registered.
_KEYS = (
    torch._C.DispatchKey.CompositeImplicitAutograd,
    torch._C.DispatchKey.Autograd,
)


@contextmanager
def any_length() -> Iterator[None]:
    """Trace or convert recurrent layers of every length inside this context.

    It changes torch for the whole process meanwhile: no other thread may run a model.
    """
    with ExitStack() as stack:
        # Fake tensors of unknown sizes look here before they ask the operator.
        stack.enter_context(replaced(decomposition_table, _KERNELS))
        for operator, kernel in _KERNELS.items():
            kernels = {key: kernel for key in _KEYS if key in operator.py_kernels}
            stack.callback(operator._dispatch_cache.clear)
            stack.enter_context(replaced(operator.py_kernels, kernels))
            operator._dispatch_cache.clear()
        yield


@contextmanager
def replaced(table: dict[Any, Any], entries: Mapping[Any, Any]) -> Iterator[None]:
    """Keep entries in the place of those of a table of torch inside this context."""
    before = {key: table[key] for key in entries}
    table.update(entries)
    try:
        yield
    finally:
        table.update(before)


# -- an exported program from elsewhere → a module, so that it is exported as any model ------------


def open_program(path: Path, trust: bool = False) -> nn.Module:
    """Return a program's module, which takes one tensor per input, by place, and can be in eval().

    What it takes for granted of sizes is asked in each call; where that is nothing, its check of
    its inputs is left out. What is proven is what the program computes.

    Raises:
        CheckpointError: loading it could run code, or this torch cannot load it.
    """
    try:
        program = load_program(path, (ANY,) if trust else (), torch.device("cpu"))
    except UnsafeProgram as error:
        raise CheckpointError(str(error)) from error
    free_names(program)
    module = program.module(check_guards=bool(program._guards_code))
    assert isinstance(module, GraphModule)
    for name in ("train", "eval"):  # replaced by ones that only raise
        vars(module).pop(name, None)
    _keep_constants(module)
    _take_tensors(module)
    return module


def _take_tensors(module: GraphModule) -> None:
    """Let forward() take the program's tensors one by one, out of the dicts that held them."""
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    codegen = module.graph._codegen
    assert isinstance(codegen, torch.fx.graph._PyTreeCodeGen)
    codegen.pytree_info = codegen.pytree_info._replace(
        orig_args=names, in_spec=_pytree.tree_structure((tuple(names), {}))
    )
    module.recompile()


def _keep_constants(module: nn.Module) -> None:
    """Make buffers of the tensors that forward() was traced with: they are the program's own."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor):
                delattr(part, name)
                part.register_buffer(name, value)
