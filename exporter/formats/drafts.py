"""The author's line that stops a trace → the smallest change, where that is mechanical."""

import ast
import linecache

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
        for statement, after in zip(block, [*block[1:], None], strict=True):
            # Of an `if`, the line is that of its test; of others, any of theirs, or the first.
            last = statement.test.end_lineno if isinstance(statement, ast.If) else _end(statement)
            if statement.lineno <= line <= (last or statement.lineno):
                changed = _both_branches(statement, after) or _in_place(statement)
                if changed:
                    text = " ".join(changed.split())
                    return text if len(text) <= _SHOWN else ""
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
