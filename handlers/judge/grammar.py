"""What the text inside an exported program may say: a grammar for every string that reaches code.

torch turns several strings of `models/*.json` into running code (torch 2.13 to 2.15, read in its source):

| field | what torch does with it |
| --- | --- |
| `expr_str` | `sympy.sympify`, which is `eval`, while loading |
| `guards_code` | pasted into a function and given to `exec`, when the module is made |
| `name`, `as_name`, `forward_arg_names`, keyword names of `in_spec` | pasted as variable names into the Python source of the module, then `exec` |
| `parameter_name`, `buffer_name`, …, keys of a weights config | pasted as `getattr(self, "…")` into that source |
| `as_string` of an input, keys of dicts in the sample inputs | pasted between quotes into the function of guards |
| `target`, `as_operator`, `source_fn_stack` | looked up attribute by attribute from `torch`, `math`, `operator` (`torch.os.mknod` resolves) |
| `in_spec`, `out_spec` | JSON; an `__enum__` or a `defaultdict` in it imports any module by name |
| `range_constraints` keys | `u<number>` makes a loop of that many steps |
| `custom_obj…`, `opaque…` | unpickled |

All others are data: they are still held to plain text. Nothing here evaluates anything; `ast` reads
the expressions.
"""  # noqa: E501 - a table row cannot be broken

import ast
import functools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from modelyard.handlers.judge.checked import REPLACED
from modelyard.handlers.judge.operators import ALLOWED

MAX_TEXT = 20_000
MAX_DEPTH = 120
_MAX_SHOWN = 160

ANY = "any"
"""Among what is trusted: every operator of torch."""

_Problem = str | None
_Rule = Callable[[str], _Problem]

# What computes on tensors. Whose two underscores Python does not know are the bitwise operators'.
_KERNEL = re.compile(
    r"torch\.ops\.((aten|prims)\.((?!__)\w+|__i?(and|or|xor|lshift|rshift)__)\.(?!__)\w+)", re.ASCII
)
# What calls a part of the program, and arithmetic of sizes.
_OPERATOR = re.compile(
    r"torch\.ops\.higher_order\.(cond|while_loop|scan|associative_scan|map_impl|map"
    r"|wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|torch\.(_sym_sqrt|sym_(float|int|ite|not|max|min|sqrt|sum|fresh_size))"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|xor"
    r"|not_|lshift|rshift|getitem)"
    r"|math\.(ceil|floor|trunc|sqrt)"
)

_SYMBOL = re.compile(r"[A-Za-z_]{1,16}[0-9]{0,6}")
_SHORT_SYMBOL = re.compile(r"(s|u|f|z|zf|zuf)[0-9]{1,6}")
_NUMBER = re.compile(r"-?[0-9]{1,40}(\.[0-9]{0,40})?(e[+-]?[0-9]{1,3})?|-?Infinity|NaN")
_EXPRESSION_TEXT = re.compile(r"[A-Za-z0-9_ .,()'=<>!+*/%-]*")
_GUARD_TEXT = re.compile(r"[\w .,()\[\]'=<>!+*/%-]*")
_CALL = re.compile(
    "Symbol|Integer|Rational|Float|Add|Mul|Pow|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|Max|Min"
    "|ModularIndexing|Where|Eq|Ne|Equality|Unequality|GreaterThan|LessThan|StrictGreaterThan"
    "|StrictLessThan|And|Or|Not|Piecewise|ExprCondPair|Identity|ToFloat|TruncToInt|TruncToFloat"
    "|CeilToInt|FloorToInt|RoundToInt|RoundDecimal|IntTrueDiv|FloatTrueDiv|PowByNatural|FloatPow"
    "|LShift|RShift|floor|ceiling|Abs|IsNonOverlappingAndDenseIndicator"
)
_VALUES = {"oo", "int_oo", "nan", "true", "false"}
_ASSUMPTIONS = {"positive", "negative", "nonnegative", "nonzero", "integer", "real", "precision"}
_POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"}
_GUARD_CALLS = {"max", "min", "abs", "int", "float", "round", "cast_symbool_to_symint_guardless"}
_MODULE_CALLS = {
    "math": {"ceil", "floor", "trunc", "sqrt"},
    "torch": {"sym_float", "sym_max", "sym_min"},  # torch 2.14; before it they were `max` and `min`
}
_TENSOR_CALLS = {"size", "stride", "storage_offset", "numel", "dim"}
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_EXPONENTS = {"Integer", "Rational", "Float", "Symbol"}
_MAX_EXPONENT = 64
_MAX_PRECISION = 1024
_DENSE = 7  # torch._export.serde.schema.Layout.Strided

_CONTAINER = re.compile(
    r"builtins\.(tuple|list|dict)|collections\.(OrderedDict|deque|namedtuple)|torch\.Size"
    r"|torch\.fx\.immutable_collections\.immutable_(list|dict)|torch\.return_types\.\w+"
)
# Where a walk from `torch` leaves torch.
_FOREIGN = {"os", "sys", "builtins", "importlib", "subprocess", "ctypes", "shutil", "pickle", "io"}


def check_document(document: object, trusted: Collection[str] = ()) -> Iterator[str]:
    """Yield every problem of a parsed `models/*.json`, each as one phrase that quotes the text.

    Args:
        document: what the file holds.
        trusted: operators that it may call beside those of the list.
    """
    operators = functools.partial(operator_problem, trusted=frozenset(trusted))
    rules: Mapping[str, _Rule] = {**_RULES, "target": operators, "as_operator": operators}
    yield from _walk(document, "", 0, rules)


def name_problem(text: str) -> _Problem:
    """Ask for a Python identifier, or nothing: it becomes a variable of generated source."""
    return None if not text or text.isidentifier() else "is not a plain name"


def path_problem(text: str) -> _Problem:
    """Ask for a dotted path of a parameter or module: it is pasted between double quotes."""
    plain = text.isprintable() and not set(text) & set("\"'\\")
    return None if plain else "is not a path of a parameter"


@functools.lru_cache(4096)
def operator_problem(text: str, trusted: frozenset[str] = frozenset()) -> _Problem:
    """Ask for an operator of the list, or one that is trusted."""
    if kernel := _KERNEL.fullmatch(text):
        if any(kernel[1] in names for names in (ALLOWED, REPLACED, trusted)) or ANY in trusted:
            return None
        return (
            f"is not among the {len(ALLOWED)} operators that a program may call unless its author "
            "trusts it: export it with --trust"
        )
    return None if _OPERATOR.fullmatch(text) else "is not an operator that a program may call"


@functools.lru_cache(4096)
def expression_problem(text: str) -> _Problem:
    """Ask for one expression over symbols and integers, cheap to evaluate."""
    tree = _parse(text, _EXPRESSION_TEXT)
    if tree is None:
        return "is not a shape expression"
    return next(filter(None, map(_expression_node, ast.walk(tree))), None)


@functools.lru_cache(4096)
def guard_problem(text: str) -> _Problem:
    """Ask for comparisons of integers and of the inputs' sizes."""
    tree = _parse(text, _GUARD_TEXT)
    if tree is None:
        return "is not a comparison of sizes"
    return _guard(tree)


def container_problem(text: str) -> _Problem:
    """Ask for the shape of arguments: tuples, lists and dicts, with names for keywords."""
    try:
        version, tree = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return "is not a description of arguments"
    if version != 1:
        return f"has version {version!r}, expected 1"
    return _container(tree, 0) or _keywords(tree)


def metadata_problem(key: str, text: str) -> _Problem:
    """Ask for what torch writes about a node: where it came from, and nothing to run."""
    if key == "stack_trace":
        return None  # kept as text, and shown as text
    if key in ("custom", "from_node"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return "is not valid JSON"
        return next(_unprintable(document, 0), None)
    if key == "source_fn_stack":
        return next(filter(None, map(_source_problem, text.split(";"))), None)
    return _printable(text)


def shown(text: object) -> str:
    """Quote text for a message, cut where it is long."""
    whole = repr(text)
    return whole if len(whole) <= _MAX_SHOWN else f"{whole[:_MAX_SHOWN]}…"


def _walk(value: object, key: str, depth: int, rules: Mapping[str, _Rule]) -> Iterator[str]:
    if depth > MAX_DEPTH:
        yield f"{shown(key)} is nested more than {MAX_DEPTH} deep"
    elif isinstance(value, dict):
        yield from _walk_dict(value, key, depth, rules)
    elif isinstance(value, list):
        for item in value:
            if item.__class__ is not int:  # sizes, of which there are many
                yield from _walk(item, key, depth + 1, rules)
    elif isinstance(value, str) and (problem := _text_problem(value, rules.get(key, _plain))):
        yield f"{key} {shown(value)} {problem}"


def _walk_dict(
    value: dict[str, Any], key: str, depth: int, rules: Mapping[str, _Rule]
) -> Iterator[str]:
    rule = _KEYS.get(key, path_problem)
    for name, item in value.items():
        # An operator gets its text as an object; an input's text is pasted into source.
        free = name != "as_string" or key == "arg"
        if name in _PICKLED and item:
            yield f"{name} {shown(item)} is a custom object, which is stored as a pickle"
        elif problem := rule(name):
            yield f"{key} {shown(name)} {problem}"
        elif not free and path_problem(str(item)):
            yield f"{name} {shown(item)} is not plain text for an input"
        elif key == "metadata" and isinstance(item, str):
            if problem := metadata_problem(name, item):
                yield f"{name} {shown(item)} {problem}"
        elif name == "as_layout" and item != _DENSE:
            yield f"{name} {shown(item)} is not the layout of plain tensors ({_DENSE})"
        else:
            yield from _walk(item, name, depth + 1, rules)


def _text_problem(text: str, rule: _Rule) -> _Problem:
    if len(text) > MAX_TEXT and rule not in (container_problem, _printable):
        return f"is {len(text)} characters long, expected at most {MAX_TEXT}"
    return rule(text)


def _printable(text: str) -> _Problem:
    return None if text.replace("\n", "").isprintable() else "holds control characters"


def _matching(pattern: str, problem: str) -> _Rule:
    """Return the rule that asks for text of a pattern."""
    is_of = re.compile(pattern).fullmatch
    return lambda text: None if is_of(text) else problem


_plain = _matching(r"[\w.+<=-]*", "is not a plain word")
_number = _matching(_NUMBER.pattern, "is not a number")
_verifier = _matching("|ATEN|TRAINING", "is not a verifier of torch")


def _symbol(text: str) -> _Problem:
    return None if _SYMBOL.fullmatch(text) else expression_problem(text)


def _unprintable(value: object, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        yield f"is nested more than {MAX_DEPTH} deep"
    elif isinstance(value, dict | list):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        for item in inside:
            yield from _unprintable(item, depth + 1)
    elif isinstance(value, str) and not value.isprintable():
        yield "holds control characters"


def _source_problem(entry: str) -> _Problem:
    parts = entry.partition(",")[2].split(".")
    if entry.partition(",")[2].startswith("#") or any(
        part in _FOREIGN or part.startswith("__") for part in parts
    ):
        return "names what is not torch's"
    return _printable(entry)


def _parse(text: str, alphabet: re.Pattern[str]) -> ast.expr | None:
    # Line ends and # would let torch's own parsers read something else than `ast` does.
    if len(text) > MAX_TEXT or not alphabet.fullmatch(text):
        return None
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _expression_node(node: ast.AST) -> _Problem:
    """Judge one node by itself; those below it are judged in their turn."""
    if isinstance(node, ast.Call):
        return _call(node)
    if isinstance(node, ast.Name):
        known = node.id in _VALUES or any(
            pattern.fullmatch(node.id) for pattern in (_CALL, _SHORT_SYMBOL)
        )
        return None if known else f"names {node.id}"
    if isinstance(node, ast.Constant):
        return _constant(node)
    if isinstance(node, ast.keyword):
        small = isinstance(node.value, ast.Constant) and node.value.value in range(_MAX_PRECISION)
        known = node.arg in _ASSUMPTIONS and small
        return None if known else f"holds the keyword {node.arg}={ast.unparse(node.value)}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(node.left, node.right)
    if isinstance(node, ast.UnaryOp | ast.BinOp | ast.Compare | ast.BoolOp | ast.expr_context):
        return None
    allowed = (*_ARITHMETIC, *_COMPARISONS, ast.Pow, ast.USub, ast.UAdd, ast.Not, ast.And, ast.Or)
    return None if isinstance(node, allowed) else f"holds a {type(node).__name__}"


def _call(node: ast.Call) -> _Problem:
    if not isinstance(node.func, ast.Name) or not _CALL.fullmatch(node.func.id):
        return f"calls {ast.unparse(node.func)}"
    name, arguments = node.func.id, node.args
    texts = [item for item in arguments if _is_text(item)]
    if texts and name not in ("Symbol", "Float"):
        return f"gives text to {name}"
    if name == "Symbol" and (len(arguments) != 1 or len(texts) != 1):
        return "makes a symbol of something else than its name"
    if name in _POWERS:
        return _power(*arguments) if len(arguments) == 2 else f"calls {name} without an exponent"
    return None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _constant(node: ast.Constant) -> _Problem:
    value = node.value
    if isinstance(value, str):
        known = _SYMBOL.fullmatch(value) or _NUMBER.fullmatch(value)
        return None if known else f"holds the text {shown(value)}"
    if isinstance(value, bool | float):
        return None
    small = isinstance(value, int) and abs(value) < 2**64
    return None if small else f"holds {shown(value)}"


def _power(base: ast.expr, exponent: ast.expr) -> _Problem:
    """Ask for a power whose value stays small: 9**9**9**9 never ends."""
    if any(_is_power(node) for node in ast.walk(base)):
        return "takes the power of a power"
    for node in ast.walk(exponent):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func) not in _EXPONENTS
        if isinstance(node, ast.BinOp) or is_call:
            return "computes an exponent"
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, int | float) and abs(value) > _MAX_EXPONENT:
            return f"takes a power of {shown(value)}"
    return None


def _is_power(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.Pow() | ast.LShift()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _POWERS
    return False


def _guard(node: ast.expr) -> _Problem:
    """Judge a guard from its root down: only what is named here may stand where it stands."""
    known: bool
    children: list[ast.expr]
    if isinstance(node, ast.Compare):
        known = all(isinstance(op, _COMPARISONS) for op in node.ops)
        children = [node.left, *node.comparators]
    elif isinstance(node, ast.BoolOp):
        known, children = True, node.values
    elif isinstance(node, ast.UnaryOp):
        known, children = isinstance(node.op, ast.Not | ast.USub), [node.operand]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        known = isinstance(node.right, ast.Constant) and _power(node.left, node.right) is None
        children = [node.left]
    elif isinstance(node, ast.BinOp):
        known, children = isinstance(node.op, _ARITHMETIC), [node.left, node.right]
    elif isinstance(node, ast.Call) and _is_pure(node.func) and not node.keywords:
        known, children = True, node.args
    else:
        known, children = _constant_or_size(node), []
    if not known:
        return f"holds {shown(ast.unparse(node))}"
    return next(filter(None, map(_guard, children)), None)


def _is_pure(function: ast.expr) -> bool:
    match function:
        case ast.Name(id=name):
            return name in _GUARD_CALLS
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return name in _MODULE_CALLS.get(module, ())
    return False


def _constant_or_size(node: ast.expr) -> bool:
    """Accept a number, a word, `L['x'][0]['y']`, and `.size()`, `.size()[i]`, `.size(i)` of it."""
    if isinstance(node, ast.Constant):
        return _constant(node) is None
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
        return _is_index(node.slice) and _is_size(node.value)
    return _is_size(node) if isinstance(node, ast.Call) else _is_input(node)


def _is_size(node: ast.Call) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=place, attr=name), args=args, keywords=[]):
            return name in _TENSOR_CALLS and all(map(_is_index, args)) and _is_input(place)
    return False


def _is_input(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript):
        if not _is_index(node.slice) and not _is_key(node.slice):
            return False
        node = node.value
    return isinstance(node, ast.Name) and node.id == "L"


def _is_index(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _is_key(node: ast.expr) -> bool:
    return _is_text(node) and path_problem(ast.literal_eval(node)) is None


def _container(node: object, depth: int) -> _Problem:
    if depth > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} deep"
    if not isinstance(node, dict) or not isinstance(node.get("children_spec"), list):
        return f"holds {shown(node)} where a container is expected"
    kind, children = node.get("type"), node["children_spec"]
    if kind is None:
        return None if node.get("context") is None and not children else "gives a leaf children"
    if not isinstance(kind, str) or not _CONTAINER.fullmatch(kind):
        return f"holds a {shown(kind)}; only tuples, lists and plain dicts are known"
    if problem := _context(node.get("context")):
        return problem
    return next(filter(None, (_container(child, depth + 1) for child in children)), None)


def _context(text: object) -> _Problem:
    """Ask for the keys of a dict, or nothing; torch would import what a dict in here names."""
    if text is None or (isinstance(text, str) and re.fullmatch(r"[\w.]+", text)):
        return None
    try:
        context = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return f"holds the context {shown(text)}"
    keys = context if isinstance(context, list) else [context]
    plain = all(
        path_problem(key) is None if isinstance(key, str) else isinstance(key, int | None)
        for key in keys
    )
    return None if plain else f"holds the context {shown(text)}"


def _keywords(tree: Mapping[str, Any]) -> _Problem:
    """Ask for identifiers as the names of keyword arguments: (args tuple, kwargs dict)."""
    parts = tree["children_spec"]
    if len(parts) != 2 or parts[1].get("type") != "builtins.dict":
        return None
    context = parts[1].get("context")
    try:
        names = json.loads(context) or []
    except (ValueError, TypeError):
        names = None
    if not isinstance(names, list):
        return f"holds the context {shown(context)}"
    wrong = [name for name in names if not (isinstance(name, str) and name.isidentifier())]
    return f"names an argument {shown(wrong[0])}" if wrong else None


_PICKLED = {"custom_obj", "custom_obj_values", "as_custom_obj", "class_fqn", "custom_obj_name"}

# The rule for the text under a key; everything else is one plain word.
_RULES: Mapping[str, _Rule] = {
    "expr_str": expression_problem,
    "guards_code": guard_problem,
    "verifiers": _verifier,
    **dict.fromkeys(("in_spec", "out_spec"), container_problem),
    **dict.fromkeys(("as_string", "as_strings"), _printable),
    **dict.fromkeys(("as_float", "as_floats", "as_float_lists", "real", "imag"), _number),
    **dict.fromkeys(
        ("name", "as_name", "user_input_name", "forward_arg_names", "field_names"), name_problem
    ),
    **dict.fromkeys(("fqn", "parameter_name", "buffer_name", "tensor_constant_name"), path_problem),
}

# The rule for the keys of a dict, where they are more than a field's name.
_KEYS: Mapping[str, _Rule] = {
    "range_constraints": _symbol,
    "as_string_to_argument": name_problem,
    **dict.fromkeys(
        ("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values"), name_problem
    ),
}
