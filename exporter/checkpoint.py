"""Checkpoint + model file → the model, in eval mode, on the CPU.

`ingest` reads the checkpoint without running anything that it holds. The model file is the user's
code and does run: it is what `--model` names.
"""

import importlib
import importlib.util
import inspect
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from modelyard.exporter.errors import ModelError, UsageError, cause
from modelyard.exporter.hyper_parameters import class_arguments
from modelyard.exporter.ingest import Checkpoint, read_checkpoint
from modelyard.exporter.ingest.hugging_face import build_hugging_face
from modelyard.exporter.weights import load_weights

_MODEL_FORM = "file.py:Class, package.module:Class or package.module:factory"


@contextmanager
def open_model(
    checkpoint: Path | Checkpoint,
    model: str | None,
    model_args: Mapping[str, Any] | None = None,
    *,
    trust: bool = False,
) -> Iterator[nn.Module]:
    """Yield the model with the checkpoint's weights, in eval mode, on the CPU.

    Args:
        checkpoint: read by `read_checkpoint`, or its path.
        model: `file.py:Class`, `package.module:Class` or `package.module:factory`; None where the
            checkpoint names a class that is installed (Hugging Face, torch.nn's own layers).
        model_args: keyword arguments for the class or factory; they replace those of the same
            name among the checkpoint's hyper-parameters.
        trust: let the checkpoint's own code define the class, when `model` is None.

    Raises:
        UsageError: `model` has another form, or is needed.
        CheckpointError: no such file, no weights, or tensors that do not fit the class.
        ModelError: the model file or its class is not there, or fails.

    The author's modules stay imported until the context ends: a tracer may look for their source.
    """
    place = None if model is None else split_model(model)
    found = read_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    if place is None:
        with _open_without_model(found, trust) as built:
            yield built.eval()
        return
    source, name = place
    folder = source.parent if isinstance(source, Path) else Path.cwd()
    with _importable(folder) as imported:
        module = _import_model(source)
        built = _build(module, name, lambda factory: class_arguments(factory, found, model_args))
    try:
        load_weights(built, found, name)
        yield built.eval()
    finally:
        # A package stays, as any import does; a file's neighbours must not meet another's.
        if isinstance(source, Path):
            _forget(imported)


@contextmanager
def _open_without_model(checkpoint: Checkpoint, trust: bool) -> Iterator[nn.Module]:
    """Build the model from what the checkpoint itself says of its class."""
    if checkpoint.module is not None:
        yield checkpoint.module
    elif checkpoint.kind == "Hugging Face folder":
        yield build_hugging_face(checkpoint, is_trusted=trust)
    elif trust and checkpoint.kind.startswith("TorchServe") and len(checkpoint.sources) == 1:
        with _archived_class(checkpoint) as built:
            load_weights(built, checkpoint, type(built).__name__)
            yield built
    else:
        hint = checkpoint.class_hint
        seen = f'{hint.source} says "{hint.name}"' if hint else "it does not say of which"
        raise UsageError(
            f'"{checkpoint.path.name}" holds the weights of a class ({checkpoint.kind}; {seen}); '
            f"give the class with --model {_MODEL_FORM}"
        )


@contextmanager
def _archived_class(checkpoint: Checkpoint) -> Iterator[nn.Module]:
    """Import the model file of a trusted archive and build its one class, as TorchServe does."""
    ((file, text),) = checkpoint.sources.items()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / Path(file).name
        source.write_text(text, encoding="utf-8")
        with _importable(Path(folder)):
            module = _import_model(source)
            names = _own_classes(module)
            if len(names) != 1:
                raise ModelError(
                    f"{file} of the archive defines {len(names)} nn.Module classes; expected one: "
                    "give --model"
                )
            yield _build(module, names[0], lambda factory: {})


def split_model(model: str) -> tuple[Path | str, str]:
    """Split `--model` into its file (Path) or module (str), and the name inside it.

    Raises:
        UsageError: it has another form.
    """
    source, colon, name = model.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise UsageError(f'--model "{model}" names no class in a file; expected {_MODEL_FORM}')
    if source.endswith(".py"):
        return Path(source).absolute(), name
    if not all(part.isidentifier() for part in source.split(".")):
        raise UsageError(f'--model "{model}": "{source}" is not a file.py; expected {_MODEL_FORM}')
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
        for name, module in sys.modules.items():
            file = Path(getattr(module, "__file__", None) or "")
            elsewhere = folder not in file.parents or any(entry in file.parents for entry in deeper)
            if before.get(name) is not module and not elsewhere:
                imported[name] = module


def _import_model(source: Path | str) -> ModuleType:
    if isinstance(source, Path):
        if not source.is_file():
            raise ModelError(f'model file "{source}" does not exist; expected {_MODEL_FORM}')
        # The name is part of a TorchScript artifact, so it must not differ from run to run.
        name = f"modelyard_model_{source.stem}"
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # classes are looked up through it while it is being run
        with _named_failure(source.name, source):
            spec.loader.exec_module(module)
        return module
    with _named_failure(f"module {source}", None):
        return importlib.import_module(source)


def _build(
    module: ModuleType, name: str, arguments: Callable[[Callable[..., Any]], Mapping[str, Any]]
) -> nn.Module:
    file = Path(module.__file__) if module.__file__ else None
    where = file.name if file else module.__name__
    if not hasattr(module, name):
        classes = _own_classes(module)
        known = f"it has {', '.join(classes)}" if classes else "it defines no nn.Module class"
        raise ModelError(f'{where} has no "{name}"; {known}')
    factory = getattr(module, name)
    if not callable(factory):
        raise ModelError(f"{where}: {name} is a {type(factory).__name__}; expected {_MODEL_FORM}")
    model_args = arguments(factory)
    given = ", ".join(f"{key}={value!r}" for key, value in model_args.items())
    with _named_failure(f"{name}({given})", file):
        model = factory(**model_args)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{where}: {name}() gives a {type(model).__name__}; expected an nn.Module")
    return model


def _own_classes(module: ModuleType) -> list[str]:
    return [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
    ]


@contextmanager
def _named_failure(what: str, file: Path | None) -> Iterator[None]:
    """Turn whatever the author's code raises into one line that names the file and line."""
    try:
        yield
    # The author's code may fail in any way; a script without a main guard even ends the process.
    except (Exception, SystemExit) as error:
        place = _place(error, file)
        raise ModelError(
            f"{what} fails{f' at {place}' if place else ''}: {cause(error)}; "
            "it must import and build the model without error"
        ) from error


def _place(error: BaseException, file: Path | None) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is not None and Path(frame.filename) == file]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _forget(modules: Mapping[str, ModuleType]) -> None:
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
