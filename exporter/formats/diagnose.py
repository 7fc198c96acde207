"""A failed conversion → the author's own line, the construct there, and what to do about it.

What torch says at length goes to a file that the message names.
"""

import ast
import linecache
import os
import platform
import re
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path

import torch

from modelyard.archiver.signature import Signature
from modelyard.exporter.errors import ConversionError, cause
from modelyard.exporter.tables import read_table

_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_FILE_LINE = re.compile(r'File "([^"<>]+)", line (\d+)')
_INSTALLED = {"site-packages", "dist-packages"}
_SHOWN = 80
_DRAFT_SHOWN = 120


_BY_SCRIPT = "or export --format torchscript, which keeps Python's own control flow when scripted"


def explain(
    error: BaseException, stage: str, signature: Signature, *, reason: str = "", log: str = ""
) -> ConversionError:
    """Turn what a converter raised into one sentence, and keep the rest in a file.

    Args:
        error: error with its causes.
        stage: who failed, as `diagnoses.yaml` has it.
        signature: the inputs, for the file.
        reason: the sentence, where the caller knows better; the line is added.
        log: what the converter logged meanwhile, for the file; the line may stand there.
    """
    text = "\n".join(f"{type(one).__name__}: {one}" for one in _chain(error))
    place = find_place(error, log)
    report = _keep(error, stage, signature, log)
    if not reason:
        known = read_table(__package__, "diagnoses")
        unknown = {"construct": "it stops there", "advice": known["otherwise"][stage]}
        fitting = (rule for rule in known["rules"] if re.search(rule["pattern"], text, re.S))
        rule = next(fitting, unknown)
        advice = rule["advice"].replace("BY_SCRIPT", _BY_SCRIPT)
        lines = _author_lines(error, log)
        # Of the innermost line; a library's is not theirs to change.
        is_theirs = "is_drafted" in rule and lines and not _is_installed(lines[-1])
        if is_theirs and (change := draft_change(*lines[-1])):
            advice = f'write "{change}" in its place, {_BY_SCRIPT}'
        happened = cause(_chain(error)[-1] if error.__cause__ else error)  # the innermost
        reason = f"{rule['construct']} ({happened[:200]}); {advice}"
    return ConversionError(
        f"the model cannot be written by {stage}{place}: {reason}; full report: {report}"
    )


def find_place(error: BaseException, log: str = "") -> str:
    """Name the author's line that an error comes from: ` at net.py:12 "if x > 0:"`, or nothing.

    Where that line calls a library, its line is named too.
    """
    lines = _author_lines(error, log)
    outside = [line for line in lines if not _is_installed(line)]
    named = dict.fromkeys([(outside or lines)[-1], lines[-1]]) if lines else {}
    return f" at {', in '.join(_shown(*line) for line in named)}" if named else ""


def _author_lines(error: BaseException, log: str) -> list[tuple[str, int]]:
    """List the lines that are neither torch's nor ours, the innermost last."""
    found = [
        (frame.filename, frame.lineno or 0)
        for one in _chain(error)
        for frame in traceback.extract_tb(one.__traceback__)
    ]
    texts = [log, *map(str, _chain(error))]
    quoted = [(file, int(line)) for text in texts for file, line in _FILE_LINE.findall(text)]
    for candidates in (found, quoted):
        if own := [(file, line) for file, line in candidates if _is_author(file)]:
            return own
    return []


def _is_installed(line: tuple[str, int]) -> bool:
    return bool(_INSTALLED & set(Path(line[0]).parts))


def _shown(file: str, line: int) -> str:
    source = linecache.getline(file, line).strip()
    source = f"{source[:_SHOWN]} …" if len(source) > _SHOWN else source
    return f"{Path(file).name}:{line}" + (f' "{source}"' if source else "")


def _is_author(file: str) -> bool:
    """Return whether a file is neither torch's, nor ours, nor Python's own."""
    path = Path(file)
    standard = Path(os.__file__).parent
    in_standard = standard in path.parents and not _INSTALLED & set(path.parts)
    torchs = _TORCH in path.parents or (not path.is_absolute() and path.parts[:1] == ("torch",))
    tools = {"onnxscript", "onnx", "onnx_ir", "sympy", "typer", "click", "pytest", "_pytest"}
    return not (
        file.startswith("<")
        or torchs
        or _OURS in path.parents
        or in_standard
        or tools & set(path.parts)
    )


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, the outermost first."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return chain


def _keep(error: BaseException, stage: str, signature: Signature, log: str) -> Path:
    """Write the full report to a file of the temporary folder that only its owner can read."""
    lines = [
        f"modelyard export: {stage} failed",
        f"python {platform.python_version()}, torch {torch.__version__}, onnx {version('onnx')}",
        *(f"input {spec}" for spec in signature.inputs),
        "",
        "".join(traceback.format_exception(error)),
        *(["what the converter said meanwhile:", log] if log else []),
    ]
    handle, name = tempfile.mkstemp(prefix="modelyard-export-", suffix=".log", text=True)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    latest = Path(tempfile.gettempdir(), f"modelyard-export-{os.getuid()}-{stage}.log")
    try:
        return Path(name).replace(latest)  # one for each stage, so that they do not gather
    except OSError:  # it is somebody else's
        return Path(name)


# -- the author's line that stops a trace → the smallest change, where that is mechanical ----------


def draft_change(file: str, line: int) -> str:
    """Return the statement at a line as a trace can take it; empty where that needs thought.

    Args:
        file: Python's source.
        line: where a trace stopped, from 1.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ""
    for block in _blocks(tree):
        for statement, after in zip(block, [*block[1:], None], strict=True):
            # Of an `if`, the line is that of its test; of others, any of theirs, or the first.
            last = statement.test.end_lineno if isinstance(statement, ast.If) else _end(statement)
            if statement.lineno <= line <= (last or statement.lineno):
                changed = _both_branches(statement, after) or _in_place(statement)
                if changed:
                    text = " ".join(changed.split())
                    return text if len(text) <= _DRAFT_SHOWN else ""
    return ""


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """Return every list of statements, the innermost last."""
    names = ("body", "orelse", "finalbody")
    found = [getattr(node, name, None) for node in ast.walk(tree) for name in names]
    return [block for block in found if isinstance(block, list) and block]


def _end(statement: ast.stmt) -> int | None:
    """Return a statement's last line; of one that holds others, its first."""
    return statement.lineno if getattr(statement, "body", None) else statement.end_lineno


def _both_branches(statement: ast.stmt, after: ast.stmt | None) -> str:
    """`if c: return a` and `return b` → `return torch.where(c, a, b)`; `x = a`, `x = b` likewise.

    Without an `else`, `x` stays what it was.
    """
    if not isinstance(statement, ast.If) or len(statement.body) != 1 or len(statement.orelse) > 1:
        return ""
    first, second = statement.body[0], statement.orelse[0] if statement.orelse else after
    if isinstance(first, ast.Return) and isinstance(second, ast.Return):
        start, values = "return", (first.value, second.value)
    elif isinstance(first, ast.Assign) and len(first.targets) == 1:
        target = ast.unparse(first.targets[0])
        otherwise = ast.parse(target, mode="eval").body
        if statement.orelse:
            if not isinstance(second, ast.Assign) or [*map(ast.unparse, second.targets)] != [
                target
            ]:
                return ""
            otherwise = second.value
        start, values = f"{target} =", (first.value, otherwise)
    else:
        return ""
    chosen = _where(statement.test, *values)
    return f"{start} {ast.unparse(chosen)}" if chosen else ""


def _in_place(statement: ast.stmt) -> str:
    """`a if c else b` → `torch.where(c, a, b)`; `float(a)` and `a.item()` → `a`."""
    if isinstance(statement, ast.If | ast.For | ast.While | ast.With):
        return ""
    before = ast.unparse(statement)
    changed = ast.unparse(ast.fix_missing_locations(_Expressions().visit(ast.parse(before))))
    return changed if changed != before else ""


class _Expressions(ast.NodeTransformer):
    """Keep tensors where Python would ask for a number."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return _where(node.test, node.body, node.orelse) or node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="item"), args=[]):
                return value
            case ast.Call(func=ast.Name(id="float" | "int" | "bool"), args=[one], keywords=[]):
                return one
        return node


def _where(test: ast.expr, first: ast.expr | None, second: ast.expr | None) -> ast.expr | None:
    """Return torch.where(…) of two tensors; nothing where the test is more than one question."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _where(test.operand, second, first)
    several = isinstance(test, ast.BoolOp) or (
        isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot | ast.In)
    )
    if several or first is None or second is None:
        return None
    texts = ", ".join(ast.unparse(part) for part in (test, first, second))
    return ast.parse(f"torch.where({texts})", mode="eval").body
