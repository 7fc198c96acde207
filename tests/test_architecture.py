"""Who may import whom, and what must not load: read from the files or seen in an interpreter."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from modelyard.base.plugins import registered
from modelyard.cli import commands as registered_commands
from tests import neighbours

ROOT = Path(__file__).parents[1]
PACKAGES = ("base", "archiver", "handlers", "exporter", "serve")
"""Of core."""
PLUGINS = (
    *("audit", "clouds", "cluster", "grpc", "incidents", "mlflow", "ops", "provenance"),
    *("recertify", "tasks", "torchserve", "training", "triton", "tune"),
)

HAS_PLUGINS = (ROOT / "plugins").exists()

DATAPLANE = {
    *("base", "archiver", "serve.dataplane", "serve.settings", "serve.errors", "serve.policy"),
    "serve.walls",
}
CONTROL = DATAPLANE | {"serve.control"}
FRONT = CONTROL | {"serve.front"}
FACE = FRONT | {"serve.http", "serve.api"}

ALLOWED = {
    "base": {"base"},
    "archiver": {"archiver", "base"},
    "handlers": {"handlers", "archiver", "base"},
    "exporter": {"exporter", "handlers", "archiver", "base"},
    "serve": {"serve", "archiver", "base"},
    "serve.tools": {"serve", "archiver", "base"},
    "serve.errors": {"archiver"},
    "serve.settings": {"archiver", "base", "serve.errors"},
    "serve.policy": CONTROL,
    "serve.dataplane": DATAPLANE,
    "serve.walls": {"serve.walls"},
    "serve.control": CONTROL,
    "serve.front": FRONT,
    # Under TYPE_CHECKING: what a face is handed is of HTTP's kind.
    "serve.front.face": FRONT | {"serve.http"},
    "serve.http": DATAPLANE | {"serve.http", "serve.front"},
    "serve.api": FACE,
    # Wire, forms and batches of like length are what a server and its workers both keep to.
    "serve.worker": {
        "serve.worker",
        "serve.dataplane.wire",
        "serve.dataplane.heap",
        "serve.dataplane.form",
        "serve.dataplane.lengths",
        "serve.walls",
        "handlers",
        "archiver",
        "base",
    },
    "plugins": {"plugins", *PACKAGES},
    "plugins.clouds.shim": {"handlers.models.backends"},
    "plugins.torchserve.shim": {"handlers", "archiver", "base", "plugins.torchserve", "ts"},
}
"""A package or a module of ours → what else of ours it may import; the longest name decides."""


HEAVY = {"torch", "onnx", "onnxruntime", "captum", "fastapi", "starlette", "numpy", "PIL"}


def sources() -> Iterator[tuple[str, Path]]:
    """Yield every module of the product, as `serve.http.body`, with its file."""
    for package in (*PACKAGES, "plugins"):
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if parts[0] == "plugins" and "tests" in parts:
                continue
            yield ".".join(parts).removesuffix(".__init__"), file


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), file.name)


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return every node of a file; three rules look at them all."""
    return list(ast.walk(tree))


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield the full name of everything that a file imports, at whatever depth."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, "import from a parent folder"
            if node.level == 0:  # else from the file's own folder
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(tree: ast.Module) -> Iterator[str]:
    """Yield what a file imports of ours, without the leading `modelyard.`."""
    for name in imports(tree):
        head, _, rest = name.partition(".")
        if head == "modelyard":
            yield rest
        assert head not in PACKAGES, f"{name} is imported as modelyard.{name}"


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def runs_upwards(module: str, tree: ast.Module) -> Iterator[str]:
    rule = max((part for part in ALLOWED if is_in(module, part)), key=len)
    for name in ours(tree):
        may = any(is_in(name, part) for part in ALLOWED[rule])
        if is_in(name, "serve.app") and not is_in(module, "plugins.torchserve"):
            may = module in ("serve.app", "serve.server")
        if not may:
            yield name


def test_dependencies_run_downwards() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, file in sources()
        for name in runs_upwards(module, parse(file))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("archiver.read", "handlers.base"),
        ("handlers.base", "exporter.prove.parity"),
        ("exporter.trip", "serve.settings"),
        ("serve.front.begin", "serve.http.connection"),
        ("serve.app", "plugins.grpc.face"),
        ("serve.control.store", "handlers.context"),
        ("serve.dataplane.pool", "serve.api.inference"),
        ("archiver.cli", "plugins.torchserve.inference"),
        ("serve.worker.loop", "serve.dataplane.pool"),
        ("serve.control.registry", "serve.app"),
    ],
)
def test_an_import_that_runs_upwards_is_found(module: str, name: str) -> None:
    package, _, what = name.rpartition(".")
    for code in (
        f"import modelyard.{name}",
        f"def f():\n    from modelyard.{package} import {what}",
    ):
        assert list(runs_upwards(module, ast.parse(code))) == [name]


def test_every_package_is_read() -> None:
    for package in (*PACKAGES, *(["plugins"] if HAS_PLUGINS else [])):
        read = [module for module, _ in sources() if is_in(module, package)]
        assert len(read) >= 9, package
    parts = [part for part in ALLOWED if HAS_PLUGINS or not is_in(part, "plugins")]
    assert all(any(is_in(module, part) for module, _ in sources()) for part in parts)


OF_A_DIALECT = re.compile("torchserve", re.IGNORECASE)


def test_core_names_no_plug_in() -> None:
    """It meets them at the seams of base/plugins.py; no name of its own says TorchServe's."""
    wrong = []
    for module, file in (*sources(), ("modelyard.cli", ROOT / "modelyard" / "cli.py")):
        if is_in(module, "plugins") or is_in(module, "client"):
            continue
        tree = parse(file)
        wrong += [f"{module}: imports {name}" for name in ours(tree) if is_in(name, "plugins")]
        if not OF_A_DIALECT.search(file.read_text(encoding="utf-8")):
            continue
        attributes = ("id", "attr", "arg", "name", "asname")
        names = {str(getattr(node, each, "")) for node in nodes(tree) for each in attributes}
        wrong += [f"{module}: {name}" for name in names if OF_A_DIALECT.search(name)]
    assert not wrong, "\n".join(wrong)


FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
HARMLESS = {"pickle.UnpicklingError"}
TRUSTED = "exporter.ingest.trust"
"""Runs after a person has said `--trust`, and only then."""


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of a name and what is looked up in it, and nothing of another expression."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def unpickles_or_evaluates(module: str, tree: ast.Module) -> Iterator[str]:
    used = {dotted(node) for node in nodes(tree) if isinstance(node, ast.Attribute)}
    used |= set(imports(tree)) - FORBIDDEN
    yield from (name for name in used - HARMLESS if name.split(".")[0] in FORBIDDEN)
    for call in (node for node in nodes(tree) if isinstance(node, ast.Call)):
        text = dotted(call.func)
        given = {
            keyword.arg: ast.unparse(keyword.value)
            for keyword in call.keywords
            if keyword.arg in ("shell", "allow_pickle", "weights_only")
        }
        if text in ("eval", "exec", "yaml.load", "os.system", "os.popen"):
            yield text
        if "True" in (given.get("shell"), given.get("allow_pickle")):
            yield f"{text}(shell or allow_pickle)"
        if text == "torch.load":
            if given.get("weights_only") != str(module != TRUSTED):
                yield "torch.load without weights_only"
        elif given.get("weights_only") == "False":
            yield f"{text}(weights_only=False)"


def test_nothing_is_unpickled_or_evaluated() -> None:
    wrong = [
        f"{module}: {what}"
        for module, file in sources()
        for what in unpickles_or_evaluates(module, parse(file))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "pickle.loads(b)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "run(x, shell=True)",
        "eval(x)",
        "from dill import loads",
    ],
)
def test_the_rule_finds_what_it_forbids(code: str) -> None:
    assert list(unpickles_or_evaluates("serve.any", ast.parse(code)))


def loaded_by(statement: str, *names: str) -> set[str]:
    """Return which of these modules a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys; print(*({set(names)!r} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return set(ran.stdout.split())


def commands() -> Iterator[list[str]]:
    """Yield the words of every command and subcommand of `modelyard`."""
    for name, command in registered_commands().items():
        yield [name]
        app = getattr(importlib.import_module(command.module), command.app)
        for subcommand in getattr(typer.main.get_command(app), "commands", ()):
            yield [name, subcommand]


MAINS = {
    "torchserve": "modelyard.plugins.torchserve.cli",
    "torch-model-archiver": "modelyard.plugins.torchserve.archiver.cli",
}
HELPS = [("modelyard.cli", words) for words in commands()]
HELPS += [(main, []) for main in MAINS.values() if HAS_PLUGINS]
"""Every `main` that has a `--help`, and the words before it."""
HELP = """
import contextlib, importlib, io, json, sys
names, helps = json.load(sys.stdin)
before = set()
for module, words in helps:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        importlib.import_module(module).main([*words, "--help"])
    assert "usage: " in shown.getvalue().lower(), (module, words)
    loaded = {*names} & {*sys.modules}
    print(json.dumps(sorted(loaded - before)))
    before = loaded
"""
"""One after the other in one interpreter: what none may load is there after the first that does."""


@pytest.fixture(scope="module")
def loaded_by_help(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Run every help in a project with files of our packages' names.

    Return what each is the first to load.
    """
    project = tmp_path_factory.mktemp("project")
    neighbours.write_neighbours(project)
    ran = subprocess.run(
        [sys.executable, "-c", HELP],
        cwd=project,
        env=os.environ | neighbours.ENVIRONMENT,
        input=json.dumps([[*HEAVY, "modelyard.exporter.trip"], HELPS]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    "place", range(len(HELPS)), ids=["-".join([module, *words]) for module, words in HELPS]
)
def test_no_help_loads_torch_or_numpy_or_a_neighbour(
    place: int, loaded_by_help: list[list[str]]
) -> None:
    """Each command's own `--help`, run to its end."""
    assert len(loaded_by_help) == len(HELPS)
    assert not loaded_by_help[place]


@pytest.fixture(scope="module")
def loaded_by_handlers_base() -> set[str]:
    """Import `modelyard.handlers.base`, and the export beside it; return what the first loads.

    torch takes longest, so one interpreter imports it for both.
    """
    code = """
import os, sys
import modelyard.handlers.base
print(*sys.modules)
sys.stdout.flush()
for first in ("import modelyard.exporter.trip", ""):
    if not os.fork():
        exec(first)
        from modelyard.exporter import export, ExportReport
        assert callable(export)
        os._exit(0)
    assert os.wait()[1] == 0, first
"""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], timeout=60, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


@pytest.mark.usefixtures("loaded_by_handlers_base")
def test_export_is_the_function_whatever_was_imported_before() -> None:
    """The fixture looks."""


def test_a_handler_loads_torch_and_nothing_of_servers(loaded_by_handlers_base: set[str]) -> None:
    without = HEAVY - {"torch", "numpy", "PIL"} | {"modelyard.serve", "httpx", "jinja2"}
    assert "torch" in loaded_by_handlers_base
    assert not without & loaded_by_handlers_base


AFTER_THE_FORK_SERVER = {
    "modelyard.serve.app",
    "modelyard.serve.http.connection",
    "prometheus_client",
    "yaml",
}
NOT_AT_A_START = {"cryptography", "httpx", "modelyard.archiver.write", "opentelemetry.sdk"}
OBSERVERS = [entry.module.removeprefix("modelyard.") for entry in registered("observers").values()]


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("archiver", HEAVY | {"yaml", "pydantic", "typer", "rich"}),
        ("cli", HEAVY | {f"modelyard.{package}" for package in PACKAGES if package != "base"}),
        ("client", HEAVY | {f"modelyard.{package}" for package in PACKAGES}),
        ("serve.cli", HEAVY | {"yaml", "asyncio", "pydantic"}),
        # What a server imports before its fork server starts, and what it imports meanwhile.
        ("serve.server", HEAVY | {"modelyard.handlers", *AFTER_THE_FORK_SERVER}),
        # Observers come with it, and add to what it loads.
        (
            ", modelyard.".join(["serve.app", *OBSERVERS]),
            {"torch", "numpy", "modelyard.handlers", *NOT_AT_A_START},
        ),
        ("serve.worker.boot", HEAVY | {"pydantic", "typer"}),
        # A worker is tied to its server's life before it imports what takes time.
        ("serve.worker.__main__", {"modelyard.handlers", "modelyard.archiver", "yaml"}),
        ("handlers", HEAVY | {"modelyard.serve"}),
    ],
)
def test_importing_does_not_load_what_it_does_not_need(module: str, without: set[str]) -> None:
    assert not loaded_by(f"import modelyard.{module}", *without)


def test_a_worker_passes_through_packages_that_import_nothing() -> None:
    for package in ("serve/worker", "serve/dataplane"):
        tree = parse(ROOT / package / "__init__.py")
        assert [type(node) for node in tree.body] == [ast.Expr]
    assert not loaded_by("import modelyard.serve", *HEAVY, "modelyard.serve.errors", "pydantic")


def test_every_folder_of_the_package_is_the_one_at_the_top() -> None:
    for package in (*PACKAGES, "plugins"):
        assert (ROOT / "modelyard" / package).resolve() == ROOT / package
