"""The author's line that stops a trace → the smallest change, where that is mechanical."""

import ast
import linecache
from collections.abc import Callable

_SHOWN = 120


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
        for place, statement in enumerate(block):
            after = block[place + 1] if place + 1 < len(block) else None
            # Of an `if`, the line is that of its test; of others, any of theirs.
            last = statement.test.end_lineno if isinstance(statement, ast.If) else _end(statement)
            if not statement.lineno <= line <= (last or statement.lineno):
                continue
            for rule in _RULES:
                if changed := rule(statement, after):
                    text = " ".join(ast.unparse(changed).split())
                    return text if len(text) <= _SHOWN else ""
    return ""


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """Return every list of statements, the innermost last."""
    found = []
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                found.append(block)
    return found


def _end(statement: ast.stmt) -> int | None:
    """Return a statement's last line; of one that holds others, its first."""
    return statement.lineno if getattr(statement, "body", None) else statement.end_lineno


def _both_return(statement: ast.stmt, after: ast.stmt | None) -> ast.stmt | None:
    """`if c: return a` and `return b` → `return torch.where(c, a, b)`."""
    if not isinstance(statement, ast.If) or len(statement.body) != 1:
        return None
    first = statement.body[0]
    second = statement.orelse[0] if len(statement.orelse) == 1 else after
    if isinstance(first, ast.Return) and isinstance(second, ast.Return):
        chosen = _where(statement.test, first.value, second.value)
        return ast.Return(chosen) if chosen else None
    return None


def _both_assign(statement: ast.stmt, after: ast.stmt | None) -> ast.stmt | None:
    """`if c: x = a`, with or without `else: x = b` → `x = torch.where(c, a, b)`."""
    if not isinstance(statement, ast.If) or len(statement.body) != 1:
        return None
    first = statement.body[0]
    if not isinstance(first, ast.Assign) or len(first.targets) != 1:
        return None
    target, otherwise = first.targets[0], _loaded(first.targets[0])
    if statement.orelse:
        second = statement.orelse[0]
        if len(statement.orelse) > 1 or not isinstance(second, ast.Assign):
            return None
        if [ast.unparse(other) for other in second.targets] != [ast.unparse(target)]:
            return None
        otherwise = second.value
    chosen = _where(statement.test, first.value, otherwise)
    return ast.Assign([target], chosen, lineno=statement.lineno) if chosen else None


def _either(statement: ast.stmt, after: ast.stmt | None) -> ast.stmt | None:
    """`a if c else b` → `torch.where(c, a, b)`; `float(a)` and `a.item()` → `a`."""
    if isinstance(statement, ast.If | ast.For | ast.While | ast.With):
        return None
    before = ast.unparse(statement)
    copy = ast.parse(before).body[0]
    changed: ast.stmt = ast.fix_missing_locations(_Expressions().visit(copy))
    return changed if ast.unparse(changed) != before else None


_RULES: tuple[Callable[[ast.stmt, ast.stmt | None], ast.stmt | None], ...] = (
    _both_return,
    _both_assign,
    _either,
)


class _Expressions(ast.NodeTransformer):
    """Keep tensors where Python would ask for a number."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return _where(node.test, node.body, node.orelse) or node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "item" and not node.args:
            return function.value
        if not isinstance(function, ast.Name) or len(node.args) != 1 or node.keywords:
            return node
        (argument,) = node.args
        return argument if function.id in ("float", "int", "bool") else node


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


def _loaded(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body
