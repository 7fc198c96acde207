"""Checkpoint + model file → the model, in eval mode, on the CPU.

`ingest` reads the checkpoint without running anything that it holds. The model file is the user's
code and does run: it is what `--model` names.
"""

import importlib
import importlib.util
import inspect
import json
import re
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelyard.base.nearest import nearest
from modelyard.exporter.classes import MODEL_FORM
from modelyard.exporter.errors import (
    ArgumentsKnown,
    CheckpointError,
    ModelError,
    NoClass,
    UsageError,
    cause,
)
from modelyard.exporter.formats.diagnose import find_place
from modelyard.exporter.formats.from_onnx import open_onnx_file
from modelyard.exporter.formats.to_exported_program import open_program
from modelyard.exporter.ingest import ONNX, PROGRAM, Checkpoint, read_checkpoint
from modelyard.exporter.ingest.hugging_face import (
    build_hugging_face,
    library_factory,
    quiet_and_offline,
)
from modelyard.exporter.ingest.plain import Placeholder
from modelyard.exporter.ingest.value import KEYS_SHOWN, fit_names, list_shown, place_of

# Packages whose class methods do not make a network with random weights.
_BASES = frozenset(("torch", "lightning", "pytorch_lightning", "transformers", "builtins"))

_MAKES = re.compile(r"from|build|create|make")

_NEAREST_SHOWN = 200


@contextmanager
def open_model(
    checkpoint: Path | Checkpoint,
    model: str | None,
    model_args: Mapping[str, Any] | None = None,
    *,
    task: str | None = None,
    trust: bool = False,
    keeps_cache: bool = False,
    notes: list[str] | None = None,
) -> Iterator[nn.Module]:
    """Yield the model with the checkpoint's weights, in eval mode, on the CPU.

    Args:
        checkpoint: read by `read_checkpoint`, or its path.
        model: `file.py:Class`, `package.module:Class` or `package.module:factory`; None where the
            checkpoint names a class that is installed (Hugging Face, torch.nn's own layers) or is
            a program itself.
        model_args: keyword arguments for the class or factory; they replace those of the same
            name among the checkpoint's hyper-parameters, and values of a folder's `config.json`.
        task: what a Hugging Face folder is for, instead of `model`.
        trust: let the checkpoint's own code define the class, when `model` is None.
        keeps_cache: leave a Hugging Face decoder its cache.
        notes: gets a sentence for each thing that was done otherwise than the checkpoint says.

    Raises:
        UsageError: `model` has another form, or is needed; or `task` or `model_args` mean nothing
            for this checkpoint.
        CheckpointError: no such file, no weights, or tensors that do not fit the class.
        ModelError: the model file or its class is not there, or fails.

    The author's modules stay imported until the context ends: a tracer may look for their source.
    """
    source, name = (None, None) if model is None else split_model(model)
    if isinstance(checkpoint, Path):
        checkpoint = read_checkpoint(checkpoint)
    file, is_described = f'"{checkpoint.path.name}"', checkpoint.kind == "Hugging Face folder"
    if checkpoint.kind == ONNX and model is not None:
        raise UsageError(
            f"--model {model}: {file} is a program, whose class is not known; leave --model out"
        )
    if task is not None and model is not None:
        raise UsageError(f"--task {task} chooses the class; leave --model {model} out")
    if task is not None and not is_described:
        raise UsageError(
            f"--task {task} is for a Hugging Face folder, and {file} is a {checkpoint.kind}; give "
            f"the folder with config.json, or --model {MODEL_FORM}"
        )
    if is_described and source in (None, "transformers"):
        with quiet_and_offline():
            yield build_hugging_face(
                checkpoint,
                name,
                task=task,
                model_args=model_args,
                is_trusted=trust,
                keeps_cache=keeps_cache,
                notes=notes,
            ).eval()
        return
    if not isinstance(source, Path) and (made := library_factory(checkpoint, source, name)):
        built = _make(made[1], source or checkpoint.kind, made[0], model_args or {})
        load_weights(built, checkpoint, made[0])
        yield built.eval()
        return
    if source is None or name is None:
        with _open_without_model(checkpoint, model_args or {}, trust) as built:
            yield built.eval()
        return
    folder = source.parent if isinstance(source, Path) else Path.cwd()
    with _importable(folder) as imported:
        module = _import_model(source)
        where = source.name if isinstance(source, Path) else source
        factory = _factory(module, where, name)
        arguments = class_arguments(factory, checkpoint, model_args)
        _check_required(factory, where, name, arguments, checkpoint)
        built = _make(factory, where, name, arguments)
    try:
        load_weights(built, checkpoint, name, lambda: _fitting(factory, arguments, checkpoint))
        yield built.eval()
    finally:
        # A package stays, as any import does; a file's neighbours must not meet another's.
        for key, module in imported.items() if isinstance(source, Path) else ():
            if sys.modules.get(key) is module:
                del sys.modules[key]


@contextmanager
def _open_without_model(
    checkpoint: Checkpoint, model_args: Mapping[str, Any], trust: bool
) -> Iterator[nn.Module]:
    """Build the model from what the checkpoint itself says of its class."""
    is_whole = checkpoint.module is not None or checkpoint.is_program
    if is_whole and model_args:
        raise UsageError(
            f'--model-args: "{checkpoint.path.name}" is a whole module, which takes no '
            "arguments; give its class with --model, or leave --model-args out"
        )
    if checkpoint.module is not None:
        yield checkpoint.module
    elif checkpoint.kind == PROGRAM:
        yield open_program(checkpoint.program or checkpoint.path, trust)
    elif checkpoint.kind == ONNX:
        with open_onnx_file(checkpoint.program or checkpoint.path) as built:
            yield built
    elif trust and checkpoint.kind.startswith("TorchServe") and len(checkpoint.sources) == 1:
        ((name, text),) = checkpoint.sources.items()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / Path(name).name
            file.write_text(text, encoding="utf-8")
            with _importable(file.parent):
                found = _own_classes(_import_model(file))
            if len(found) != 1:
                raise ModelError(
                    f"{name} of the archive defines {len(found)} nn.Module classes; expected one: "
                    "give --model"
                )
            with open_model(checkpoint, f"{file}:{found[0]}", model_args) as built:
                yield built
    else:
        hint = checkpoint.class_hint
        seen = f'{hint.source} says "{hint.name}"' if hint else "it does not say of which"
        raise NoClass(
            f'"{checkpoint.path.name}" holds the weights of a class ({checkpoint.kind}; {seen}); '
            f"give the class with --model {MODEL_FORM}"
        )


def split_model(model: str) -> tuple[Path | str, str]:
    """Split `--model` into its file (Path) or module (str), and the name inside it.

    Raises:
        UsageError: it has another form.
    """
    source, colon, name = model.rpartition(":")
    if not colon or not source or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f'--model "{model}" names no class in a file; expected {MODEL_FORM}')
    if source.endswith(".py"):
        return Path(source).absolute(), name
    if not all(part.isidentifier() for part in source.split(".")):
        raise UsageError(f'--model "{model}": "{source}" is not a file.py; expected {MODEL_FORM}')
    return source, name


@contextmanager
def _importable(folder: Path) -> Iterator[dict[str, ModuleType]]:
    """Let the author's file import its neighbours, as it can when it is run.

    The dict holds, once the context has ended, the modules that it imported from `folder`.
    """
    path, before = list(sys.path), dict(sys.modules)
    deeper = [entry for entry in map(Path, path) if folder in entry.parents]  # .venv, say
    imported: dict[str, ModuleType] = {}
    sys.path.insert(0, str(folder))
    try:
        yield imported
    finally:
        sys.path[:] = path
        for name, module in list(sys.modules.items()):  # a lazy one imports others when it is asked
            if before.get(name) is module:
                continue
            file = Path(vars(module).get("__file__") or "")
            if folder in file.parents and not any(entry in file.parents for entry in deeper):
                imported[name] = module


def _import_model(source: Path | str) -> ModuleType:
    if isinstance(source, Path):
        if not source.is_file():
            raise ModelError(f'model file "{source}" does not exist; expected {MODEL_FORM}')
        # The name is part of a TorchScript artifact, so it must not differ from run to run.
        name = f"modelyard_model_{source.stem}"
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # classes are looked up through it while it is being run
        with _named_failure(source.name):
            spec.loader.exec_module(module)
        return module
    with _named_failure(f"module {source}"):
        return importlib.import_module(source)


def _factory(module: ModuleType, where: str, name: str) -> Callable[..., Any]:
    """Return the class or function of a name, also `Class.method`."""
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            classes = _own_classes(module)
            known = f"it has {', '.join(classes)}" if classes else "it defines no nn.Module class"
            raise ModelError(f'{where} has no "{name}"; {known}')
        found = getattr(found, part)
    if not callable(found):
        seen = type(found).__name__
        raise ModelError(f"{where}: {name} is a {seen}; expected {MODEL_FORM}")
    return cast("Callable[..., Any]", found)


def _make(
    factory: Callable[..., Any], where: str, name: str, arguments: Mapping[str, Any]
) -> nn.Module:
    """Call a class or function of the author's, which has to give a network."""
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    try:
        with _named_failure(f"{name}({given})"):
            model = factory(**arguments)
    except ModelError as error:
        if not (makers := _class_methods(factory)):
            raise
        raise ModelError(
            f"{error}. Its class has {', '.join(makers)} to make it: give --model "
            f"{where}:{name}.{makers[0].partition('(')[0]} and what it takes as --model-args"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{where}: {name}() gives a {type(model).__name__}; expected an nn.Module")
    return model


def _class_methods(factory: Callable[..., Any]) -> list[str]:
    """List the methods of a class that may make an instance, with their arguments."""
    names = {
        name
        for part in (factory.__mro__ if inspect.isclass(factory) else ())
        if part.__module__.partition(".")[0] not in _BASES
        for name, value in vars(part).items()
        if isinstance(value, classmethod) and _MAKES.match(name) and "pretrained" not in name
    }
    return [f"{name}{inspect.signature(getattr(factory, name))}" for name in sorted(names)]


def _check_required(
    factory: Callable[..., Any],
    where: str,
    name: str,
    arguments: Mapping[str, Any],
    checkpoint: Checkpoint,
) -> None:
    """Name the arguments that nothing gives, and the lines that would.

    Raises:
        ModelError: there are some.
    """
    missing = [
        parameter.name
        for parameter in _signature(factory)
        if parameter.default is parameter.empty
        and parameter.kind in _NAMED
        and parameter.name not in arguments
    ]
    if not missing:
        return
    known = [key for key in arguments if key.isidentifier()]
    call = ", ".join([*(f"{key}=…" for key in missing), *(f"{key}={key}" for key in known)])
    line = f"def make({', '.join(known)}): return {name}({call})"
    place = f"to {where}" if where.endswith(".py") else f"to a file net.py that imports {name}"
    values = ", ".join(f'"{key}": …' for key in missing)
    if found := _read_off(factory, missing, arguments, checkpoint):
        raise ArgumentsKnown(
            f"{name}() needs {', '.join(missing)}, which the shapes of the weights say", found
        )
    own = [key for key in missing if all(n.startswith(f"{key}.") for n in checkpoint.tensors)]
    inside = f"; or name the class of {own[0]}, whose weights these are" if own else ""
    raise ModelError(
        f"{name}() needs {', '.join(missing)}, which neither the checkpoint nor --model-args "
        f"gives; give --model-args '{{{values}}}' or, for an object, add the factory `{line}` "
        f"{place} and give it with --model{inside}"
    )


# Sizes that no other argument has by chance, for what takes any, and for what divides them.
_MARKS = ((211, 223, 227, 229, 233, 239), (120, 168, 264, 312, 408, 456))


def _read_off(
    factory: Callable[..., Any],
    missing: Sequence[str],
    arguments: Mapping[str, Any],
    checkpoint: Checkpoint,
) -> dict[str, Any]:
    """Return whole numbers for the arguments, by where a size of theirs turns up in the weights."""
    for marks in _MARKS:
        marked = dict(zip(missing, marks, strict=False))
        try:
            found = _fitting(factory, {**arguments, **marked}, checkpoint)
        # The author's class may refuse such a value in any way.
        except Exception:
            continue
        if found.keys() >= set(missing):
            return {key: found[key] for key in missing}
    return {}


def _own_classes(module: ModuleType) -> list[str]:
    return [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
    ]


@contextmanager
def _named_failure(what: str) -> Iterator[None]:
    """Turn whatever the author's code raises into one line that names the file and line."""
    try:
        yield
    except UsageError:  # of a library's maker, which knows its own arguments
        raise
    # The author's code may fail in any way; a script without a main guard even ends the process.
    except (Exception, SystemExit) as error:
        place = find_place(error)
        if isinstance(error, SyntaxError) and error.filename:
            place = f" at {Path(error.filename).name}:{error.lineno}"
        raise ModelError(
            f"{what} fails{place}: {cause(error)}; it must import and build the model without error"
        ) from error


# -- hyper-parameters of the checkpoint → arguments of the class ---------------------------------


class Arguments(dict[str, Any]):
    """A mapping whose keys are attributes too, as trainers hand hyper-parameters over."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def class_arguments(
    factory: Callable[..., Any], checkpoint: Checkpoint, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the keyword arguments that the class was built with in training.

    Args:
        factory: the class, or a function that makes the model.
        checkpoint: its hyper-parameters count where the format says how the class takes them.
        given: what the user says; replaces values of the same name.

    Raises:
        CheckpointError: an argument is a value that was refused, and the user gives none.
    """
    given = dict(given or {})
    how = checkpoint.hyper_parameters_name
    if how is None or not checkpoint.hyper_parameters:
        return given
    parameters = _signature(factory)
    names = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if how != "kwargs" and how in names:
        arguments: dict[str, Any] = {how: Arguments(checkpoint.hyper_parameters)}
    else:
        # Only Lightning says that these are the class's arguments; others keep more beside them.
        takes_all = takes_all and checkpoint.kind.startswith("Lightning")
        arguments = {
            name: value
            for name, value in checkpoint.hyper_parameters.items()
            if isinstance(name, str) and (takes_all or name in names)
        }
    arguments.update(given)
    for name, value in arguments.items():
        if (refused := _refused(value)) is not None:
            raise CheckpointError(
                f'hyper-parameter "{name}" of "{checkpoint.path.name}" is {refused}, which was '
                "not loaded because that could run code; give its value with --model-args, name a "
                "function with --model that sets it, or use --trust"
            )
    return arguments


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _signature(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return []


def _refused(value: Any) -> str | None:
    """Return the name of a value that was not made, at whatever depth."""
    if isinstance(value, Placeholder):
        return value.dotted
    items = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple):
        return None
    return next((refused for item in items if (refused := _refused(item)) is not None), None)


# -- the checkpoint's tensors → parameters and buffers ------------------------------------------


def _fitting(
    factory: Callable[..., Any], arguments: Mapping[str, Any], checkpoint: Checkpoint
) -> dict[str, Any]:
    """Return other whole numbers for the class, with which the checkpoint's shapes fit; else none.

    An argument is changed where its value is the size of a dim that differs, to the checkpoint's.
    """
    values = {p.name: arguments.get(p.name, p.default) for p in _signature(factory)}
    expected = factory(**arguments).state_dict()
    tensors = fit_names(checkpoint.tensors, checkpoint.original_names, expected)
    sizes: dict[int, set[int]] = {}
    for key, value in expected.items():
        if key in tensors and tensors[key].ndim == value.ndim:
            for ours, theirs in zip(value.shape, tensors[key].shape, strict=True):
                sizes.setdefault(ours, set()).add(theirs)
    changed = {
        key: min(sizes[value] - {value})
        for key, value in values.items()
        if type(value) is int and len(sizes.get(value, set()) - {value}) == 1
    }
    try:
        fitted = factory(**{**arguments, **changed}).state_dict()
    # The author's class may refuse such a value in any way.
    except Exception:
        return {}
    fits = all(value.shape == tensors[key].shape for key, value in fitted.items() if key in tensors)
    return changed if changed and fits and fitted.keys() == tensors.keys() else {}


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    name: str,
    find_arguments: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Copy the checkpoint's tensors into the model.

    Args:
        model: an instance of the class that it was trained with.
        checkpoint: read by `read_checkpoint`.
        name: what messages call the class.
        find_arguments: returns what the class needs to have the checkpoint's shapes.

    Raises:
        CheckpointError: names or shapes do not fit; the model is as it was.
    """
    expected = model.state_dict()
    tensors = fit_names(checkpoint.tensors, checkpoint.original_names, expected)
    state = OrderedDict(tensors | _stripped(checkpoint.extra_state, checkpoint))
    versions = _stripped(checkpoint.versions, checkpoint, end=".")
    vars(state)["_metadata"] = {path: {"version": each} for path, each in versions.items()}
    missing = _missing(expected, state)
    unexpected = [key for key in state if key not in expected]
    misshaped = _misshaped(expected, state)
    found = {
        "missing": missing,
        "unexpected": _with_nearest(unexpected, missing),
        "mis-shaped": misshaped,
    }
    problems = "; ".join(f"{what} {list_shown(keys)}" for what, keys in found.items() if keys)
    unfit = f'checkpoint "{checkpoint.path.name}" does not fit {name}:'
    advice = "ive the class and --model-args that it was trained with"
    if misshaped and (arguments := find_arguments()):
        fits = f"It fits with --model-args '{json.dumps(arguments)}': give these too"
        raise CheckpointError(f"{unfit} {problems}. {fits}")
    if problems:
        hint = _hint(checkpoint, unexpected, missing)
        raise CheckpointError(f"{unfit} {problems}. {hint}G{advice}")
    try:
        model.load_state_dict(state, strict=False)
    # A module may check its own state (load_state_dict hooks), in any way.
    except Exception as error:
        raise CheckpointError(f"{unfit} {cause(error)}; g{advice}") from error


def _stripped(named: Mapping[str, Any], checkpoint: Checkpoint, end: str = "") -> dict[str, Any]:
    """Return what belongs to modules of the file by the names of the class; names end as told."""
    found = {f"{name}{end}": value for name, value in named.items()}
    for prefix in checkpoint.prefixes:
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    return {name.removesuffix(end): value for name, value in found.items()}


def _missing(expected: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """List the names without a tensor, but not those that share one which is there."""
    given = {place_of(expected[key]) for key in state if isinstance(expected.get(key), Tensor)}
    return [
        key
        for key, value in expected.items()
        if key not in state
        and not (isinstance(value, Tensor) and place_of(value) in given)
        and key != "_metadata"  # torch's own, which some libraries write among the tensors
    ]


def _misshaped(expected: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} (checkpoint {list(state[key].shape)}, model {list(value.shape)})"
        for key, value in expected.items()
        if isinstance(state.get(key), Tensor)
        and isinstance(value, Tensor)
        and not is_lazy(value)  # takes its shape from the checkpoint
        and state[key].shape != value.shape
    ]


def _with_nearest(names: list[str], missing: list[str]) -> list[str]:
    """Put behind a name the missing one that is most like it."""
    if len(missing) > _NEAREST_SHOWN:
        return names
    near = {name: nearest(name, missing) for name in names[:KEYS_SHOWN]}
    return [f"{name} (nearest missing: {near[name]})" if near.get(name) else name for name in names]


def _hint(checkpoint: Checkpoint, unexpected: list[str], missing: list[str]) -> str:
    """Point at a prefix, or at other weights in the file, when that may be the reason."""
    prefixes = {key.partition(".")[0] + "." for key in unexpected}
    if len(prefixes) == 1 and missing:
        (prefix,) = prefixes
        if {key.removeprefix(prefix) for key in unexpected} == set(missing):
            return f'Every name starts with "{prefix}": give the class whose attribute that is. '
    if checkpoint.alternatives:
        others = ", ".join(checkpoint.alternatives)
        chosen = checkpoint.weights_key or "the file itself"
        return f"The weights are those of {chosen}; --weights-key can choose {others}. "
    return ""
