"""The rooms and who may import whom, read from every file's imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("archiver", "handlers", "exporter", "serve", "modelyard", "ts")

ALLOWED = {
    "archiver": {"archiver"},
    "handlers": {"handlers"},
    "exporter": {"exporter", "handlers.backends"},
    "serve": {"serve", "archiver"},
    "serve.worker": {"serve.worker", "serve.wire", "serve.lengths", "handlers", "archiver"},
    "serve.worker.shim": {"handlers", "ts"},
    "archiver.shim": {"archiver"},
    "modelyard": set[str](),
}
"""A room, or a part of one that has rules of its own → what of ours it may import."""

HEAVY = {
    "torch",
    "onnx",
    "onnxruntime",
    "captum",
    "fastapi",
    "starlette",
    "numpy",
    "PIL",
}
CLI_MAY = {"typer", "rich"}


def files() -> list[Path]:
    found = [ROOT / "modelyard.py"]
    for room in ("archiver", "handlers", "exporter", "serve"):
        found += sorted((ROOT / room).rglob("*.py"))
    return found


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """Return the longest entry of the table that a module belongs to."""
    return max((part for part in ALLOWED if is_in(module, part)), key=len)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of everything that a file imports, at whatever depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, "import from a parent folder"
            if node.level == 0:  # else from the file's own folder
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), file.name)


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", files(), ids=name)
def test_a_file_imports_only_the_rooms_that_its_own_may(file: Path) -> None:
    allowed = ALLOWED[part_of(module_of(file))]
    ours = {found for found in imports(parse(file)) if found.split(".")[0] in ROOMS}
    wrong = {found for found in ours if not any(is_in(found, part) for part in allowed)}
    assert not wrong, f"{name(file)} may import {sorted(allowed)} of ours"


@pytest.mark.parametrize(
    "file",
    [f for f in files() if is_in(module_of(f), "handlers") or is_in(module_of(f), "serve.worker")],
    ids=name,
)
def test_what_runs_beside_authors_imports_nothing_of_ours_inside_functions(file: Path) -> None:
    """There an author's file of the same name would be found instead."""
    functions = [
        node
        for node in ast.walk(parse(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inside = {found for function in functions for found in imports(function)}
    assert not {found for found in inside if found.split(".")[0] in ROOMS}


@pytest.mark.parametrize("file", [f for f in files() if f.name == "cli.py"], ids=name)
def test_a_command_line_imports_nothing_heavy_before_its_command_runs(file: Path) -> None:
    top = ast.Module([node for node in parse(file).body if not is_definition(node)], [])
    assert not {found.split(".")[0] for found in imports(top)} & HEAVY


def is_definition(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
HARMLESS = {"pickle.UnpicklingError"}
TRUSTED = "exporter/ingest/trust.py"
"""Runs after a person has said `--trust`, and only then."""


@pytest.mark.parametrize("file", files(), ids=name)
def test_nothing_is_unpickled_or_evaluated(file: Path) -> None:
    tree = parse(file)
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= set(imports(tree)) - FORBIDDEN
    assert not {found for found in used - HARMLESS if found.split(".")[0] in FORBIDDEN}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        text = ast.unparse(call.func)
        assert text not in ("eval", "exec", "yaml.load", "os.system", "os.popen"), text
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("shell") != "True"
        assert given.get("allow_pickle") != "True"
        if text == "torch.load":
            assert given.get("weights_only") == str(name(file) != TRUSTED)
        else:
            assert given.get("weights_only") != "False"


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}; import sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    ("statement", "without"),
    [
        ("import archiver", HEAVY | {"yaml", "pydantic", "typer", "rich"}),
        ("import archiver.cli", HEAVY | {"yaml", "pydantic"}),
        ("import modelyard", HEAVY | {"archiver", "handlers", "exporter", "serve"}),
        ("import serve", HEAVY),
        ("import serve.server", {"torch", "onnx", "onnxruntime", "captum", "numpy", "handlers"}),
        ("import serve.frontend", HEAVY | {"pydantic", "yaml", "prometheus_client"}),
        ("import serve.cli", {"torch", "onnx", "onnxruntime", "fastapi", "handlers"}),
        ("import serve.worker.loop", {"fastapi", "starlette", "pydantic", "typer"}),
        ("import serve.worker.__main__", {"fastapi", "starlette", "onnxruntime"}),
        ("import handlers", {"onnx", "onnxruntime", "captum", "fastapi", "serve", "exporter"}),
    ],
)
def test_importing_does_not_load_what_it_does_not_need(statement: str, without: set[str]) -> None:
    assert not loaded_by(statement) & without


def test_the_server_process_never_holds_torch_or_an_authors_code() -> None:
    """The one place that builds the server is imported whole, with all that it builds."""
    assert "torch" not in loaded_by("import serve.app, serve.lifecycle, serve.pool, serve.server")


def test_a_worker_passes_through_an_empty_package() -> None:
    for package in ("serve", "serve/worker", "serve/api"):
        tree = parse(ROOT / package / "__init__.py")
        assert [type(node) for node in tree.body] == [ast.Expr]


def test_no_tests_folder_is_a_package() -> None:
    """`tests/serve/__init__.py` alone would make `import serve` find the tests."""
    inits = (ROOT / "tests").rglob("__init__.py")
    assert [file for file in inits if "archives" not in file.parts] == []
