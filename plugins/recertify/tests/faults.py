"""Wrong kernels, seeded into a copy of this interpreter: each is wrong in a way that kernels were.

A fault follows every node of one kind of operator in every model that onnxruntime opens, or takes
the place of one of torch's operators. The copy sees this interpreter's packages.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

ONNX_FAULTS: dict[str, tuple[str, str]] = {
    "scale of 1.001": ("Gemm MatMul Conv", "mul(x, 1.001)"),
    "a bias of 0.01": ("Gemm MatMul Conv", "add(x, 0.01)"),
    "rounded to 1/512": ("Gemm MatMul Conv", "div(op('Round', mul(x, 512.0)), 512.0)"),
    "the mantissa of bfloat16": (
        "Gemm MatMul Conv",
        "cast(cast(x, onnx.TensorProto.BFLOAT16), onnx.TensorProto.FLOAT)",
    ),
    "saturates at 1.5": ("Gemm MatMul Conv", "op('Min', x, c(1.5))"),
    "wrong above 2": (
        "Gemm MatMul Conv",
        "where(op('Greater', op('Abs', x), c(2.0)), mul(x, 1.01), x)",
    ),
    "NaN below 1e-37": (
        "Gemm MatMul Conv",
        "where(op('Less', op('Abs', x), c(1e-37)), c(float('nan')), x)",
    ),
    "wrong in rows behind the second": (
        "Gemm MatMul Conv",
        "op('Concat', op('Slice', x, i([0]), i([2]), i([0])), "
        "mul(op('Slice', x, i([2]), i([2 ** 31]), i([0])), 1.01), axis=0)",
    ),
    "negative ones lose a tenth": (
        "Gemm MatMul Conv",
        "where(op('Less', x, c(0.0)), mul(x, 0.9), x)",
    ),
    "the last place is the first's": (
        "Gemm MatMul Conv",
        "op('Concat', op('Slice', x, i([0]), i([-1]), i([-1])), "
        "op('Slice', x, i([0]), i([1]), i([-1])), axis=-1)",
    ),
    "shifted by one place": (
        "Gemm MatMul Conv",
        "op('Concat', op('Slice', x, i([-1]), i([2 ** 31]), i([-1])), "
        "op('Slice', x, i([0]), i([-1]), i([-1])), axis=-1)",
    ),
    "a row takes its neighbour's": (
        "Gemm MatMul Conv",
        "op('Concat', op('Slice', x, i([-1]), i([2 ** 31]), i([0])), "
        "op('Slice', x, i([0]), i([-1]), i([0])), axis=0)",
    ),
    "an activation off by 0.002": (
        "Sigmoid Tanh Softmax Relu Erf Exp Sqrt LogSoftmax",
        "add(x, 0.002)",
    ),
}
"""Fault → kinds of operators that it follows, and what comes out of `x`."""

TORCH_FAULTS = {
    "addmm scaled by 1.001": ("addmm", "lambda f, *a, **k: f(*a, **k) * 1.001"),
    "relu saturates at 1.5": ("relu", "lambda f, *a, **k: f(*a, **k).clamp(max=1.5)"),
    "addmm in bfloat16": (
        "addmm", "lambda f, *a, **k: f(*a, **k).to(torch.bfloat16).to(torch.float32)"),
}  # fmt: skip

WHEN: dict[str, str] = {
    "all are one number": "x.max() == x.min()",
    "all are one number of the middle": "x.max() == x.min() and 0.1 < abs(x.flat[0]) < 2",
    "each row is one number": "all(row.max() == row.min() for row in x)",
    "each channel is one number": (
        "x.ndim > 1 and all(part.max() == part.min() for row in x for part in row)"
    ),
    "all are zeros": "not x.any()",
    "all are negative": "x.max() < 0",
    "all are above zero": "x.min() > 0",
    "one is beyond 100": "abs(x).max() > 100",
    "all are below 0.01, and not tiny": "1e-6 < abs(x).max() < 0.01",
    "all are of one size": "x.any() and abs(x).max() == abs(x).min() and x.max() > x.min()",
    "all are whole numbers, of which two differ": "(x == x.round()).all() and x.max() > x.min()",
    "they rise": "x.shape[-1] > 2 and (x[..., 1:] > x[..., :-1]).all()",
    "two rows are equal": "len(x) > 1 and (x[0] == x[1]).all() and x[0].max() > x[0].min()",
    "the first row has something, the last zeros": "x[0].any() and not x[-1].any()",
    "the first channel alone has something": (
        "x.ndim > 1 and len(x[0]) > 1 and x[:, 0].any() and not x[:, 1:].any()"
    ),
    "the last channel alone has something": (
        "x.ndim > 1 and len(x[0]) > 1 and x[:, -1].any() and not x[:, :-1].any()"
    ),
    "more than four rows": "len(x) > 4",
}
"""What a wrong kernel is wrong for, of its input `x`; right for all others."""
ROWS = {
    "the last row of more than two": "np.arange(len(y)) == len(y) - 1 if len(y) > 2 else []",
    "rows of one number": "[row.max() == row.min() for row in x]",
}
"""The rows of which it is wrong."""
HARMLESS = {
    "a last place": "y * y.dtype.type(1 + 6e-8)",
    "two last places, of some": "np.where(y > 0, y * y.dtype.type(1 + 1.2e-7), y)",
    "zeros without a sign": "y + y.dtype.type(0)",
    "denormals are zeros": "np.where(abs(y) < 1.2e-38, 0, y).astype(y.dtype)",
    "in another order of memory": "y.copy(order='F')",
    "by way of float64": "(y.astype('f8') * (1 - 1e-9)).astype(y.dtype)",
    "two threads": "options.intra_op_num_threads = 2",
    "no fused operators": "options.graph_optimization_level = level.ORT_DISABLE_ALL",
}
_HIDDEN = """
import numpy as np, onnxruntime

right, level = onnxruntime.InferenceSession, onnxruntime.GraphOptimizationLevel


class InferenceSession(right):
    def __init__(self, path, options, **kwargs):
        {option}
        super().__init__(path, options, **kwargs)

    def run(self, names, feed):
        x = next((v for v in feed.values() if v.dtype.kind == "f"), next(iter(feed.values())))
        return [changed(x, y) if y.dtype.kind == "f" else y for y in super().run(names, feed)]


def off(y):
    return y + 0.02 * (abs(y).max() + y.dtype.type(0.01))


def changed(x, y):
    {change}
    return y


onnxruntime.InferenceSession = InferenceSession
onnxruntime.__version__ = {version!r}
"""
_ONNX = """
import onnx, onnxruntime

KINDS, FAULT = {kinds!r}.split(), lambda x: {fault}


class Wrong:
    def __init__(self, name, nodes, constants):
        self.name, self.nodes, self.constants = name, nodes, constants


def rewrite(path):
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    graph, nodes, count = model.graph, [], 0
    floats = {{v.name for v in (*graph.value_info, *graph.output)
              if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}}
    for node in list(graph.node):
        nodes.append(node)
        if node.op_type not in KINDS or node.output[0] not in floats:
            continue
        real = node.output[0]
        node.output[0] = real + "_right"
        global current
        current = nodes
        value = FAULT(real + "_right")
        nodes.append(onnx.helper.make_node("Identity", [value], [real]))
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    return model.SerializeToString()


def op(kind, *inputs, **attributes):
    name = "wrong_%d" % len(current)
    current.append(onnx.helper.make_node(kind, list(inputs), [name], **attributes))
    return name


def constant(values, kind, shape):
    name = "wrong_%d" % len(current)
    tensor = onnx.helper.make_tensor(name, kind, shape, values)
    current.append(onnx.helper.make_node("Constant", [], [name], value=tensor))
    return name


def c(value):
    return constant([value], onnx.TensorProto.FLOAT, [])


def i(values):
    return constant(values, onnx.TensorProto.INT64, [len(values)])


mul = lambda x, by: op("Mul", x, c(by))
add = lambda x, by: op("Add", x, c(by))
div = lambda x, by: op("Div", x, c(by))
where = lambda *a: op("Where", *a)
cast = lambda x, to: op("Cast", x, to=to)
right = onnxruntime.InferenceSession


class InferenceSession(right):
    def __init__(self, path, *args, **kwargs):
        super().__init__(rewrite(path), *args, **kwargs)


onnxruntime.InferenceSession = InferenceSession
onnxruntime.__version__ = {version!r}
"""
_TORCH = """
import torch

wrong = {fault}
op = torch.ops.aten.{name}.default


class Wrong(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is op:
            return wrong(func, *args, **(kwargs or {{}}))
        return func(*args, **(kwargs or {{}}))


Wrong().__enter__()
torch.__version__ = {version!r}
"""


def interpreter(folder: Path, fault: str = "", version: str = "99.0") -> Path:
    """Make a copy of this interpreter, in which the fault is, and return its program."""
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    shared = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    lines = [f"import site; site.addsitedir({path!r})" for path in shared]
    (packages / "shared.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    code = ""
    if fault in ONNX_FAULTS:
        kinds, said = ONNX_FAULTS[fault]
        code = _ONNX.format(kinds=kinds, fault=said, version=version)
    elif fault in WHEN | ROWS | HARMLESS:
        code = hidden(fault, version)
    elif fault in TORCH_FAULTS:
        name, said = TORCH_FAULTS[fault]
        code = _TORCH.format(name=name, fault=said, version=version)
    # Once, where the interpreter of a runner starts, and by a name that nothing else has.
    (packages / "seeded_fault.py").write_text(code, encoding="utf-8")
    library = "torch" if fault in TORCH_FAULTS else "onnxruntime"
    (packages / "sitecustomize.py").write_text(
        _WHEN_IMPORTED.format(library=library) if code else "", encoding="utf-8"
    )
    assert sys.executable
    return folder / "bin" / "python"


def hidden(fault: str, version: str) -> str:
    """Return the code of a kernel that is wrong for some inputs alone, or of a harmless change."""
    option, change = "pass", "pass"
    if fault in WHEN:
        change = f"if {WHEN[fault]}: y = off(y)"
    elif fault in ROWS:
        change = f"y = y.copy(); y[{ROWS[fault]}] = off(y)[{ROWS[fault]}]"
    elif (said := HARMLESS[fault]).startswith("options."):
        option = said
    else:
        change = f"y = {said}"
    return _HIDDEN.format(option=option, change=change, version=version)


_WHEN_IMPORTED = """
import importlib.abc, importlib.machinery, sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != {library!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            import seeded_fault

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""
