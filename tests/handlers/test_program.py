"""Exported programs, honest and doctored: what is refused, by name, without running any of it."""

import collections
import contextlib
import io
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

from modelyard.archiver.untrusted.container import OpenFile
from modelyard.handlers import LoadError
from modelyard.handlers.errors import UnsafeProgram
from modelyard.handlers.judge.check import check, load_program
from modelyard.handlers.judge.checked import call_problem
from modelyard.handlers.judge.grammar import expression_problem, guard_problem, operator_problem
from modelyard.handlers.judge.operators import ALLOWED
from modelyard.handlers.models.backends import open_artifact
from tests.breadth.operator_rules import problem
from tests.fuzz.programs import operators
from tests.networks import TextEncoder

AUTO = Dim.AUTO
# What torch says about its own exporter, and about expanded buffers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
    pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

SAMPLES = "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
MODEL = "models/model.json"


def check_program(path: Path) -> None:
    """Refuse a program as `load_program` does, without loading it."""
    with contextlib.closing(OpenFile(os.open(path, os.O_RDONLY))) as file:
        if findings := check(file):
            raise UnsafeProgram(path.name, findings)


def save(program: torch.export.ExportedProgram, path: Path) -> Path:
    program._example_inputs = None
    torch.export.save(program, path)
    return path


# ---- honest programs


class _Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        pooled = functional.adaptive_avg_pool2d(self.norm(self.conv(x)).relu(), 1)
        return self.head(pooled.flatten(1))  # type: ignore[no-any-return]


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(50, 8), nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.words(x))[0][:, -1]  # type: ignore[no-any-return]


class _Cond(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,))


class _Times(nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x * n


class _NonZero(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.nonzero().float().sum(0), x[x > 0.5]


class _Dicts(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"sum": x.sum(1), "both": (x, [x + 1])}


class _Ordered(nn.Module):
    def forward(self, d: dict[str, Any]) -> Any:
        return collections.OrderedDict(a=d["left"]["x"] + d["right"][0])


class _Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Buffer(torch.arange(3.0))
        self.repeated = nn.Buffer(torch.zeros(1).expand(4, 3))
        self.nothing = nn.Buffer(torch.zeros(0, 3))
        self.plain = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x * self.steps + self.plain, self.repeated, self.nothing]
        return torch.cat(parts) + torch.tensor([1.0, 2.0, 3.0])


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x, x, x, key_padding_mask=mask)[0]  # type: ignore[no-any-return]


class _Resize(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        double = functional.interpolate(x, scale_factor=2, mode="bilinear")
        return double, functional.pad(functional.interpolate(x, size=(7, 9)), (1, 2))


class _Shapes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        joined = torch.cat([x, y]).reshape(-1, 2, x.shape[1] // 2)
        return joined, torch.einsum("bi,bj->ij", x, x), x.shape[0]


class _Modes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            twice = x * 2
        with torch.autocast("cpu", torch.bfloat16):
            product = x @ x.T
        return twice * math.sqrt(x.shape[-1]), product


class _Item(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        k: Any = n.item()
        torch._check(k >= 0)  # type: ignore[no-untyped-call]
        torch._check(k <= x.shape[0])  # type: ignore[no-untyped-call]
        return x[:k].sum(), torch.ones(k)


class _Rest(nn.Module):
    def forward(self, *xs: Tensor) -> Tensor:
        return torch.stack(xs).sum(0)


class _Loop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.while_loop(  # type: ignore[no-untyped-call]
            lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x)
        )[1]


class _Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


ROWS = torch.linspace(-1, 1, 30).reshape(5, 6)
IMAGE = torch.linspace(0, 1, 5 * 3 * 16 * 20).reshape(5, 3, 16, 20)
IMAGE_DIMS = ({0: AUTO, 2: AUTO, 3: AUTO},)
WORDS = torch.arange(35).reshape(5, 7)

HONEST: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], Any]] = {
    "convolution": (_Conv, (IMAGE,), IMAGE_DIMS),
    "convolution in bfloat16": (lambda: _Conv().bfloat16(), (IMAGE.bfloat16(),), ({0: AUTO},)),
    "linear in half": (lambda: nn.Linear(6, 2).half(), (ROWS.half(),), ({0: AUTO},)),
    "static shape": (lambda: nn.Linear(6, 2), (ROWS,), None),
    "named range": (lambda: nn.Linear(6, 2), (ROWS,), ({0: Dim("batch", min=1, max=8)},)),
    "transformer encoder": (lambda: TextEncoder(1, 16, 50), (WORDS,), ({0: AUTO, 1: AUTO},)),
    "attention with a mask": (
        _Attention,
        (torch.rand(5, 7, 16), torch.zeros(5, 7, dtype=torch.bool)),
        ({0: AUTO, 1: AUTO}, {0: AUTO, 1: AUTO}),
    ),
    "cond": (_Cond, (ROWS,), ({0: AUTO},)),
    "while loop": (_Loop, (ROWS,), ({0: AUTO},)),
    "embedding and LSTM": (_Lstm, (WORDS,), ({0: AUTO},)),
    "GRU": (lambda: nn.GRU(6, 5, batch_first=True), (torch.rand(5, 7, 6),), ({0: AUTO},)),
    "integer argument": (_Times, (ROWS, 4), ({0: AUTO}, None)),
    "nonzero": (_NonZero, (ROWS,), ({0: AUTO},)),
    "dict output": (_Dicts, (ROWS,), ({0: AUTO},)),
    "nested input": (
        _Ordered,
        ({"left": {"x": ROWS}, "right": [ROWS]},),
        ({"left": {"x": {0: AUTO}}, "right": [{0: AUTO}]},),
    ),
    "buffers and constants": (_Buffers, (torch.rand(5, 3),), ({0: AUTO},)),
    "interpolate and pad": (_Resize, (IMAGE,), IMAGE_DIMS),
    "symbolic shapes": (_Shapes, (ROWS, ROWS), ({0: AUTO, 1: AUTO}, {0: AUTO, 1: AUTO})),
    "no_grad and autocast": (_Modes, (ROWS,), ({0: AUTO, 1: AUTO},)),
    "data-dependent size": (_Item, (ROWS, torch.tensor(3)), ({0: AUTO}, None)),
    "variable arguments": (_Rest, (ROWS, ROWS), (({0: AUTO}, {0: AUTO}),)),
}


def _leaves(output: Any) -> list[Any]:
    return list(torch.utils._pytree.tree_leaves(output))


AT_NIGHT = ("attention with a mask", "GRU", "convolution in bfloat16")
"""Left to the night: a transformer's encoder, an LSTM and a convolution run by day."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.nightly] * (kind in AT_NIGHT)) for kind in HONEST],
)
def test_an_honest_program_passes_and_gives_what_the_model_gives(kind: str, tmp_path: Path) -> None:
    make, inputs, dims = HONEST[kind]
    torch.manual_seed(0)
    model = make().eval()
    path = save(torch.export.export(model, inputs, dynamic_shapes=dims), tmp_path / "honest.pt2")
    check_program(path)
    with torch.no_grad():
        wanted, found = model(*inputs), load_program(path).module()(*inputs)
    for one, two in zip(_leaves(wanted), _leaves(found), strict=True):
        torch.testing.assert_close(one, two)


def test_strict_export_and_decompositions_pass(tmp_path: Path) -> None:
    strict = torch.export.export(_Conv().eval(), (IMAGE,), dynamic_shapes=({0: AUTO},), strict=True)
    check_program(save(strict, tmp_path / "strict.pt2"))
    check_program(save(strict.run_decompositions(), tmp_path / "decomposed.pt2"))


def test_sample_inputs_that_are_plain_tensors_pass(tmp_path: Path) -> None:
    path = tmp_path / "samples.pt2"
    torch.export.save(torch.export.export(nn.Linear(6, 2), (ROWS,)), path)
    check_program(path)
    assert load_program(path).example_inputs is not None


def test_a_program_under_another_file_name_and_suffix_passes(tmp_path: Path, honest: Path) -> None:
    renamed = tmp_path / "artifact.bin"
    renamed.write_bytes(honest.read_bytes())
    assert open_artifact(renamed, "pt2")(torch.ones(2, 6)).shape == (2, 2)  # type: ignore[union-attr]


# ---- doctored programs

Doctor = Callable[[dict[str, bytes], str], None]
ATTACKS: dict[str, tuple[Doctor, str]] = {}
"""What each does to a program's entries, given the file that the attack would make; what the error
must name."""

FIRES = set[str]()
"""Those that do make the file when torch.export.load is trusted."""


def attack(title: str, named: str, *, fires: bool = False) -> Callable[[Doctor], Doctor]:
    def register(doctor: Doctor) -> Doctor:
        ATTACKS[title] = (doctor, named)
        if fires:
            FIRES.add(title)
        return doctor

    return register


class _Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (self.marker,)


def _touch(marker: str) -> str:
    return f"__import__('os').mknod('{marker}')"


def _quoted(marker: str) -> str:
    return f'__import__("os").mknod("{marker}")'


def _pickled(marker: str) -> bytes:
    buffer = io.BytesIO()
    torch.save({"x": _Bomb(marker)}, buffer)
    return buffer.getvalue()


def _edit(entries: dict[str, bytes], name: str, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(entries[name])
    change(document)
    entries[name] = json.dumps(document).encode()


def _give_samples(entries: dict[str, bytes], *arguments: Any) -> None:
    """Leave sample inputs in the program: torch makes guards only where there are some."""
    buffer = io.BytesIO()
    torch.save((arguments, {}), buffer)
    entries[SAMPLES] = buffer.getvalue()


def _replace(entries: dict[str, bytes], model: nn.Module, *arguments: Any) -> None:
    """Put in the program of another model, with its sample inputs."""
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, arguments), buffer)
    entries.update(_entries(buffer))


def _graph(document: dict[str, Any]) -> dict[str, Any]:
    graph: dict[str, Any] = document["graph_module"]["graph"]
    return graph


def _rename(entries: dict[str, bytes], old: str, new: str) -> None:
    entries[MODEL] = entries[MODEL].replace(json.dumps(old).encode(), json.dumps(new).encode())


@attack("pickle among the sample inputs", f"{SAMPLES}: the sample inputs", fires=True)
def _samples_pickle(entries: dict[str, bytes], marker: str) -> None:
    entries[SAMPLES] = _pickled(marker)


@attack("weight stored as a pickle", "'weight' is stored as a pickle", fires=True)
def _weight_pickle(entries: dict[str, bytes], marker: str) -> None:
    entries["data/weights/weight_0"] = _pickled(marker)
    _edit(entries, WEIGHTS, lambda d: d["config"]["weight"].update(use_pickle=True))


@attack("weights in the old format", "data/weights/model.pt: it is a pickle", fires=True)
def _legacy_weights(entries: dict[str, bytes], marker: str) -> None:
    entries["data/weights/model.pt"] = _pickled(marker)


def _constant(entries: dict[str, bytes], path_name: str, payload: bytes) -> None:
    entry = {"path_name": path_name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    entries[f"data/constants/{path_name}"] = payload
    _edit(entries, CONSTANTS, lambda d: d["config"].update(thing=entry))


@attack("opaque object", "data/constants/opaque_obj_0: it is a pickle", fires=True)
def _opaque(entries: dict[str, bytes], marker: str) -> None:
    _constant(entries, "opaque_obj_0", pickle.dumps(_Bomb(marker)))


@attack("constant stored as a pickle", "'thing' is stored as a pickle", fires=True)
def _constant_pickle(entries: dict[str, bytes], marker: str) -> None:
    _constant(entries, "tensor_0", _pickled(marker))


@attack("custom object in the graph", "class_fqn")
def _custom_object(entries: dict[str, bytes], marker: str) -> None:
    thing = {"thing": {"name": "thing", "class_fqn": "__torch__.Thing"}}
    _edit(entries, MODEL, lambda d: _graph(d).update(custom_obj_values=thing))


@attack("code in a shape expression", "expr_str", fires=True)
def _expression(entries: dict[str, bytes], marker: str) -> None:
    old = json.loads(entries[MODEL])
    size = _graph(old)["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"]
    _rename(entries, size, f"{_touch(marker)} or {size}")


@attack("code in a guard", "guards_code", fires=True)
def _guard(entries: dict[str, bytes], marker: str) -> None:
    _give_samples(entries, ROWS)
    guard = f"L['x'].size()[0] != {_touch(marker)}"
    _edit(entries, MODEL, lambda d: d.update(guards_code=[guard]))


@attack("code in the text of a guard", "guards_code", fires=True)
def _guard_text(entries: dict[str, bytes], marker: str) -> None:
    _give_samples(entries, ROWS)
    guard = f"""{{'a\\'" + str({_quoted(marker)}) + "': 1}} != 1"""
    _edit(entries, MODEL, lambda d: d.update(guards_code=[guard]))


@attack("code as a key of the sample inputs", "the key", fires=True)
def _sample_key(entries: dict[str, bytes], marker: str) -> None:
    # repr() puts this into single quotes, and the text of a failed guard that into double ones.
    key = f"""it's" + str({_quoted(marker)}) + \""""
    _replace(entries, _First(), {key: ROWS})


class _Named(nn.Module):
    def forward(self, x: Tensor, name: str) -> Tensor:
        return x + 1


class _First(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return next(iter(x.values())) + 1


@attack("code as the text of an input", "as_string", fires=True)
def _input_text(entries: dict[str, bytes], marker: str) -> None:
    _replace(entries, _Named(), ROWS, "a")
    text = f"b' or {_quoted(marker)} or '"
    _edit(entries, MODEL, lambda d: _graph(d)["inputs"][1].update(as_string=text))


@attack("code as the name of an input", "is not a plain name", fires=True)
def _input_name(entries: dict[str, bytes], marker: str) -> None:
    _rename(entries, "x", f"x={_touch(marker)}")


@attack("code as the name of a node", "is not a plain name")
def _node_name(entries: dict[str, bytes], marker: str) -> None:
    _rename(entries, "linear", f"y={_touch(marker)};linear")


def _call(document: dict[str, Any]) -> dict[str, Any]:
    entry = document["graph_module"]["module_call_graph"][0]["signature"]
    assert isinstance(entry, dict)
    return entry


@attack("code as the name of an argument", "forward_arg_names", fires=True)
def _argument_name(entries: dict[str, bytes], marker: str) -> None:
    # The source holds the name twice; the text between the two becomes a string.
    name = f"x={_touch(marker)},y='''):\n    return 0 #"
    _edit(entries, MODEL, lambda d: _call(d).update(forward_arg_names=[name]))


@attack("code as the name of a keyword", "in_spec")
def _keyword_name(entries: dict[str, bytes], marker: str) -> None:
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    none = {"type": "builtins.tuple", "context": "null", "children_spec": []}
    names = json.dumps([f"x={_touch(marker)}"])
    named = {"type": "builtins.dict", "context": names, "children_spec": [leaf]}
    spec = [1, {"type": "builtins.tuple", "context": "null", "children_spec": [none, named]}]
    change = {"in_spec": json.dumps(spec), "forward_arg_names": []}
    _edit(entries, MODEL, lambda d: _call(d).update(change))


@attack("code as the name of a parameter", "is not a path of a parameter", fires=True)
def _parameter_name(entries: dict[str, bytes], marker: str) -> None:
    call = f"getattr(__import__('os'), 'mknod')('{marker}')"  # without a dot
    new = f'a", 0) or {call} or ("'
    entries[WEIGHTS] = entries[WEIGHTS].replace(b'"weight"', json.dumps(new).encode())
    old = b'"parameter_name": "weight"'
    entries[MODEL] = entries[MODEL].replace(old, b'"parameter_name": ' + json.dumps(new).encode())


def _spec(entries: dict[str, bytes], kind: str, context: Any) -> None:
    spec = [1, {"type": kind, "context": context, "children_spec": []}]
    _edit(entries, MODEL, lambda d: _call(d).update(out_spec=json.dumps(spec)))


@attack("import through a defaultdict", "out_spec")
def _default_dict(entries: dict[str, bytes], marker: str) -> None:
    names = {"default_factory_module": "this", "default_factory_name": "s", "dict_context": []}
    _spec(entries, "collections.defaultdict", names)


@attack("import through an enum", "out_spec")
def _enum(entries: dict[str, bytes], marker: str) -> None:
    member = {"__enum__": True, "fqn": "this:s", "name": "x"}
    _spec(entries, "builtins.dict", json.dumps([member]))


def _target(entries: dict[str, bytes], target: str) -> None:
    _edit(entries, MODEL, lambda d: _graph(d)["nodes"][0].update(target=target))


@attack("a function of the operating system", "torch.os.mknod")
def _os_function(entries: dict[str, bytes], marker: str) -> None:
    _target(entries, "torch.os.mknod")


@attack("an operator that reads files", "torch.ops.aten.from_file.default")
def _from_file(entries: dict[str, bytes], marker: str) -> None:
    _target(entries, "torch.ops.aten.from_file.default")


@attack("an operator that writes files", "torch.ops.aten.save.default")
def _save(entries: dict[str, bytes], marker: str) -> None:
    _target(entries, "torch.ops.aten.save.default")


@attack("an operator outside the grammar", "torch.ops.mylib.run.default")
def _own_operator(entries: dict[str, bytes], marker: str) -> None:
    _target(entries, "torch.ops.mylib.run.default")


@attack("offsets that nothing checks", "torch.ops.aten.segment_reduce.default")
def _offsets(entries: dict[str, bytes], marker: str) -> None:
    _target(entries, "torch.ops.aten.segment_reduce.default")


@attack("indices that nothing checks", "torch.ops.aten._sparse_coo_tensor_unsafe.default")
def _indices(entries: dict[str, bytes], marker: str) -> None:
    _target(entries, "torch.ops.aten._sparse_coo_tensor_unsafe.default")


@attack("a view of any size", "unless its author trusts it: export it with --trust")
def _strides(entries: dict[str, bytes], marker: str) -> None:
    _target(entries, "torch.ops.aten.as_strided.default")


@attack("memory that nobody wrote", "torch.ops.aten.empty_strided.default")
def _unwritten(entries: dict[str, bytes], marker: str) -> None:
    _target(entries, "torch.ops.aten.empty_strided.default")


@attack("an attribute of Python's", "torch.ops.aten.__dict__.copy")
def _attribute(entries: dict[str, bytes], marker: str) -> None:
    _target(entries, "torch.ops.aten.__dict__.copy")


@attack("a sparse tensor", "as_layout 1 is not the layout")
def _sparse(entries: dict[str, bytes], marker: str) -> None:
    layout = {"name": "layout", "arg": {"as_layout": 1}, "kind": 2}
    _edit(entries, MODEL, lambda d: _graph(d)["nodes"][0]["inputs"].append(layout))


@attack("keywords that are a number", "in_spec")
def _keyword_number(entries: dict[str, bytes], marker: str) -> None:
    none = {"type": "builtins.tuple", "context": "null", "children_spec": []}
    named = {"type": "builtins.dict", "context": "5", "children_spec": []}
    spec = [1, {"type": "builtins.tuple", "context": "null", "children_spec": [none, named]}]
    _edit(entries, MODEL, lambda d: _call(d).update(in_spec=json.dumps(spec)))


@attack("a foreign source function", "source_fn_stack")
def _source_function(entries: dict[str, bytes], marker: str) -> None:
    source = {"source_fn_stack": "x,torch.os.system"}
    _edit(entries, MODEL, lambda d: _graph(d)["nodes"][0]["metadata"].update(source))


@attack("an endless power", "computes an exponent")
def _power(entries: dict[str, bytes], marker: str) -> None:
    old = json.loads(entries[MODEL])
    size = _graph(old)["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"]
    _rename(entries, size, f"{size} + 9**9**9**9")


@attack("an endless count of symbols", "range_constraints")
def _many_symbols(entries: dict[str, bytes], marker: str) -> None:
    limits = {"u99999999999999": {"min_val": 0, "max_val": 1}}
    _edit(entries, MODEL, lambda d: d["range_constraints"].update(limits))


@attack("a graph without end", "nested deeper than")
def _deep(entries: dict[str, bytes], marker: str) -> None:
    entries[MODEL] = b'{"graph_module":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@attack("a graph nested deep", "nested more than")
def _rather_deep(entries: dict[str, bytes], marker: str) -> None:
    nested = json.loads("[" * 300 + "]" * 300)
    _edit(entries, MODEL, lambda d: d.update(nested=nested))


@attack("an overlong expression", "characters long")
def _long(entries: dict[str, bytes], marker: str) -> None:
    guard = "L['x'].size()[0] != " + "1 + " * 10_000 + "1"
    _edit(entries, MODEL, lambda d: d.update(guards_code=[guard]))


@attack("a graph that is not valid JSON", "models/model.json: it is not valid JSON")
def _no_json(entries: dict[str, bytes], marker: str) -> None:
    entries[MODEL] = b"{"


def _meta(entries: dict[str, bytes], **change: Any) -> None:
    _edit(entries, WEIGHTS, lambda d: d["config"]["weight"]["tensor_meta"].update(change))


@attack("a weight that ends outside its payload", "bytes into a payload of 48")
def _outside(entries: dict[str, bytes], marker: str) -> None:
    _meta(entries, storage_offset={"as_int": 1})


@attack("a weight before its payload", "no tensor_meta that can be read")
def _before(entries: dict[str, bytes], marker: str) -> None:
    _meta(entries, storage_offset={"as_int": -12})


@attack("a weight repeated without end", "repeats a payload")
def _repeated(entries: dict[str, bytes], marker: str) -> None:
    _meta(entries, sizes=[{"as_int": 2**30}, {"as_int": 2}], strides=[{"as_int": 0}] * 2)


@attack("a weight in a file that is not there", "data/weights/weight_7, which is not there")
def _absent(entries: dict[str, bytes], marker: str) -> None:
    _edit(entries, WEIGHTS, lambda d: d["config"]["weight"].update(path_name="weight_7"))


@attack("a weight in another folder", "'../../models/model.json', which holds no raw tensor")
def _elsewhere(entries: dict[str, bytes], marker: str) -> None:
    path = "../../models/model.json"
    _edit(entries, WEIGHTS, lambda d: d["config"]["weight"].update(path_name=path))


@attack("native code", "data/aotinductor/model/x.so: it is native code")
def _native(entries: dict[str, bytes], marker: str) -> None:
    entries["data/aotinductor/model/x.so"] = b"\x7fELF"


@attack("native code among the extra files", "extra/../x.so")
def _escaping(entries: dict[str, bytes], marker: str) -> None:
    entries["extra/../x.so"] = b"\x7fELF"


@attack("a file that belongs to nothing", "setup.py: it has no place")
def _foreign(entries: dict[str, bytes], marker: str) -> None:
    entries["setup.py"] = b""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = torch.export.export(_Linear(), (ROWS,), dynamic_shapes=({0: AUTO},))
    return save(program, tmp_path_factory.mktemp("honest") / "program.pt2")


def _entries(path: Path | io.BytesIO) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as container:
        return {name.partition("/")[2]: container.read(name) for name in container.namelist()}


def _zip(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as container:
        for name, data in entries.items():
            container.writestr(zipfile.ZipInfo(f"program/{name}"), data)
    return path


# Loads every file as a worker does ("safe") or as torch does ("trusting"), and tells what happened.
CHILD = """
import json, logging, sys, warnings
from pathlib import Path
import torch
from modelyard.handlers.judge.check import load_program
logging.disable()
warnings.simplefilter("ignore")
folder, way = Path(sys.argv[1]), sys.argv[2]
events, watching = [], False
def watch(event, arguments):
    # Reading text with `ast` is a compile without a run; a run is an exec.
    if watching and (event in WATCHED or event != "compile" and "marker" in repr(arguments)):
        events.append(f"{event}: {arguments!r:.200}")
WATCHED = {"os.system", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen"}
sys.addaudithook(watch)
found = {}
for path in sorted(folder.glob("*.pt2")):
    events.clear()
    watching, error = way == "safe", ""
    try:
        if way == "safe":
            load_program(path).module()
        else:
            program = torch.export.load(path)
            inputs = program.example_inputs or ((torch.ones(5, 6),), {})
            program.module()(*inputs[0])
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
    watching = False
    found[path.stem] = {"error": error, "events": list(events), "imported": "this" in sys.modules}
print(json.dumps(found))
"""


def _in_child(folder: Path, way: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(folder), way]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def hostile(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one file per attack, named by the attack; it would make `<name>-marker` beside it."""
    folder = tmp_path_factory.mktemp("hostile")
    for title, (doctor, _) in ATTACKS.items():
        entries = _entries(honest)
        doctor(entries, str(folder / f"{title}-marker"))
        _zip(folder / f"{title}.pt2", entries)
    return folder


@pytest.fixture(scope="module")
def outcome(hostile: Path) -> Iterator[dict[str, dict[str, Any]]]:
    yield _in_child(hostile, "safe")


@pytest.mark.parametrize("title", ATTACKS)
def test_a_doctored_program_is_refused_by_name_and_leaves_no_trace(
    title: str, hostile: Path, outcome: dict[str, dict[str, Any]]
) -> None:
    _, named = ATTACKS[title]
    seen = outcome[title]
    assert seen["error"].startswith("UnsafeProgram: ")
    assert named in seen["error"]
    assert seen["events"] == []
    assert not seen["imported"]
    assert not (hostile / f"{title}-marker").exists()


@pytest.mark.slow
def test_the_same_programs_do_run_code_when_they_are_trusted(honest: Path, tmp_path: Path) -> None:
    for title in FIRES:
        entries = _entries(honest)
        ATTACKS[title][0](entries, str(tmp_path / f"{title}-marker"))
        _zip(tmp_path / f"{title}.pt2", entries)
    _in_child(tmp_path, "trusting")
    assert {path.name.removesuffix("-marker") for path in tmp_path.glob("*-marker")} == FIRES


# ---- containers that two readers would read differently


def _raw(name: str, data: bytes = b"", **change: Any) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    for key, value in change.items():
        setattr(info, key, value)
    return info


CONTAINERS = {
    "a name that leaves the folder": (_raw("program/../x"), "program/../x"),
    "an absolute name": (_raw("/etc/passwd"), "/etc/passwd"),
    "a backslash": (_raw("program\\extra/x"), "program"),
    "no folder": (_raw("version"), "version"),
    "another folder": (_raw("other/extra/x"), "2 folders"),
    "compression": (_raw("program/extra/x", compress_type=zipfile.ZIP_DEFLATED), "compressed"),
    "a name in other letters": (_raw("program/MODELS/model.json"), "are one name where case"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_an_entry_that_torch_never_writes_is_refused(
    kind: str, honest: Path, tmp_path: Path
) -> None:
    info, named = CONTAINERS[kind]
    path = _zip(tmp_path / "program.pt2", _entries(honest))
    with zipfile.ZipFile(path, "a") as container:
        container.writestr(info, b"x" * 100)
    with pytest.raises(UnsafeProgram) as caught:
        check_program(path)
    assert named in str(caught.value)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_two_entries_of_one_name_are_refused(honest: Path, tmp_path: Path) -> None:
    path = _zip(tmp_path / "program.pt2", _entries(honest))
    with zipfile.ZipFile(path, "a") as container:
        container.writestr(f"program/{MODEL}", b"{}")
    with pytest.raises(UnsafeProgram, match=f'"program/{MODEL}" is there twice'):
        check_program(path)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: b"#!/bin/sh\n" + data,
        lambda data: data + b"#",
        lambda data: data + data,
        lambda data: data[:-40],
        lambda data: data[:300],
        lambda data: b"",
    ],
    ids=["bytes before", "bytes after", "twice", "cut", "cut short", "empty"],
)
def test_a_file_that_is_more_or_less_than_one_zip_is_refused(
    wrap: Callable[[bytes], bytes], honest: Path, tmp_path: Path
) -> None:
    path = tmp_path / "program.pt2"
    path.write_bytes(wrap(honest.read_bytes()))
    with pytest.raises(UnsafeProgram, match=r"program\.pt2 is refused"):
        check_program(path)


def test_every_finding_is_listed_with_its_part(honest: Path, tmp_path: Path) -> None:
    entries = _entries(honest)
    for doctor in (_samples_pickle, _outside, _from_file):
        doctor(entries, "unused")
    with pytest.raises(UnsafeProgram) as caught:
        check_program(_zip(tmp_path / "program.pt2", entries))
    assert {part for part, _ in caught.value.findings} == {SAMPLES, WEIGHTS, MODEL}


def test_a_program_cannot_be_exchanged_between_the_check_and_the_load(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "program.pt2"
    path.write_bytes(honest.read_bytes())
    load = torch.export.load

    def exchange_then_load(file: Any) -> Any:
        damaged = path.read_bytes().replace(b"torch.ops.aten.linear", b"torch.ops.evil.linear")
        with path.open("r+b") as same:
            same.write(damaged)
        return load(file)

    monkeypatch.setattr(torch.export, "load", exchange_then_load)
    assert "aten.linear" in str(load_program(path).graph)
    with pytest.raises(UnsafeProgram, match="CRC-32"):
        check_program(path)


def test_a_worker_cannot_open_a_refused_program(hostile: Path) -> None:
    with pytest.raises(LoadError, match="nothing of it was run"):
        open_artifact(hostile / "code in a guard.pt2", "pt2")


# ---- the grammars


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Mul(Integer(48), Symbol('s54', positive=True, integer=True))",
        "Pow(Symbol('s0', integer=True), Integer(2))",
        "FloorDiv(Add(Symbol('u0', integer=True), Integer(-1)), Integer(2))",
        "GreaterThan(Symbol('u0', integer=True), Integer(0))",
        "s0*s1 + 1",
        "2 <= s0",
    ],
)
def test_shape_expressions_of_torch_pass(text: str) -> None:
    assert expression_problem(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "open('x')",
        "Symbol('s0').func",
        "Symbol('__import__(\"os\")')",
        "[s0 for s0 in s1]",
        "lambda: s0",
        "s0 if s1 else s2",
        "s0[0]",
        "Add('s0', 1)",
        "Pow(Pow(9, 9), 9)",
        "Pow(2, Mul(64, 64))",
        "s0 ** 65",
        "Float('1.0', precision=9999999999)",
        "s0 # comment",
        "s0\n",
        "factorial(9999)",
        "9" * 30,
        "(" * 5000 + "s0" + ")" * 5000,
    ],
)
def test_other_expressions_are_refused(text: str) -> None:
    assert expression_problem(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].size()[0] == 5",
        "L['m'].size()[1] == L['x'].size()[1]",
        "L['d']['a']['x'].size()[0] == L['d']['b'][0].size()[0]",
        "((L['x'].size()[1]*(L['y'].size()[0] + 1)) % (2*(L['x'].size()[1] // 2))) == 0",
        "L['n'] == 4 and not L['flag']",
        "max(1, L['x'].size()[0]) < math.floor(L['x'].size()[1] / 2)",
        "L['flat_args'][0].size()[0] >= 2",
        "torch.sym_max(1, L['x'].size()[0] - 2)*torch.sym_min(3, L['y'].size()[0]) != 1",
    ],
)
def test_guards_of_torch_pass(text: str) -> None:
    assert guard_problem(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].data == 1",
        "L['x'].size().__class__ == 1",
        "L.size()[0] == 1 or x",
        "torch.load('x') == 1",
        "torch.sym_max.__globals__ == 1",
        "torch.sym_fresh_size(1) == 1",
        "math.__loader__ == 1",
        "print(1) == 1",
        "L[L['x'].size()[0]] == 1",
        "(y := 1) == 1",
        "f'{L}' == 1",
        "[1] == 1",
        "9 ** 9 ** 9 == 1",
    ],
)
def test_other_guards_are_refused(text: str) -> None:
    assert guard_problem(text) is not None


def test_every_operator_of_the_list_keeps_the_rules() -> None:
    here = operators(sorted(ALLOWED))
    assert len(here) > 400
    assert [(each.name, why) for each in here if (why := problem(each.run))] == []


@pytest.mark.parametrize("name", sorted(ALLOWED)[:3])
def test_an_operator_that_another_torch_lacks_is_no_error(name: str) -> None:
    assert operator_problem(f"torch.ops.{name}") is None
    assert operator_problem(f"torch.ops.{name}_of_tomorrow") is not None


def test_a_program_runs_an_operator_of_its_author_where_that_is_trusted(tmp_path: Path) -> None:
    class Segments(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return torch.segment_reduce(x, "sum", lengths=lengths)

    inputs = (torch.arange(4.0), torch.tensor([1, 3]))
    path = save(torch.export.export(Segments(), inputs), tmp_path / "own.pt2")
    with pytest.raises(UnsafeProgram, match=r"segment_reduce\.default' is not among"):
        load_program(path)
    artifact = open_artifact(path, "pt2", trusted=["aten.segment_reduce.default"])
    assert cast("Tensor", artifact(*inputs)).tolist() == [0, 6]


def test_a_number_where_torch_expects_a_dtype_is_refused(tmp_path: Path) -> None:
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float64)

    path = save(torch.export.export(Cast(), (ROWS,)), tmp_path / "cast.pt2")
    assert cast("Tensor", open_artifact(path, "pt2")(ROWS)).dtype == torch.float64
    entries = _entries(path)
    doubled = entries[MODEL].replace(b'{"as_scalar_type": 8}', b'{"as_int": 255}')
    assert doubled != entries[MODEL]
    _zip(path, {**entries, MODEL: doubled})
    with pytest.raises(UnsafeProgram, match="gives 255 where dtype is a ScalarType"):
        load_program(path)


@pytest.mark.parametrize(
    ("call", "args", "kwargs", "said"),
    [
        ("max_pool1d", [ROWS, [(1 << 63) - 1]], {}, "as kernel_size, expected numbers up to 16384"),
        ("conv1d", [ROWS, ROWS, None, [1 << 31]], {}, "as stride, expected numbers up to 16384"),
        ("pad", [ROWS, [2, -2], "circular"], {}, "pads by [2, -2] in a circle"),
        ("pad", [ROWS, [2, -2]], {"mode": "circular"}, "pads by [2, -2] in a circle"),
        ("relu", [None], {}, "gives nothing where self is a Tensor"),
        ("conv1d", [ROWS, ROWS, None, [1], "same"], {}, None),
        ("pad", [ROWS, [2, -2]], {}, None),
    ],
)
def test_constants_that_lead_a_kernel_outside_are_named(
    call: str, args: list[object], kwargs: dict[str, object], said: str | None
) -> None:
    """What the fuzzer found: each of them ended the process or gave memory that nobody wrote."""
    operators = getattr(torch.ops.aten, call)
    target = getattr(operators, "padding" if "same" in args else "default")
    found = call_problem(target, args, kwargs)
    assert found is None if said is None else said in (found or "")


def test_memory_that_a_program_never_writes_is_zeros(tmp_path: Path) -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            made = torch.empty(x.shape[0], 4000), torch.empty_like(x), x.new_empty(4000)
            return tuple(each + 0 for each in made)

    path = save(torch.export.export(Empty(), (ROWS,)), tmp_path / "empty.pt2")
    torch.full((4000,), 7.0)  # freed again
    for each in load_program(path).module()(ROWS):
        assert not each.any()


def test_statistics_and_lengths_that_are_too_few_are_not_read_past_their_end(
    tmp_path: Path,
) -> None:
    """Each kernel would read outside of a tensor of one number."""

    class Norm(nn.Module):
        def forward(self, x: Tensor, few: Tensor) -> Tensor:
            norm = torch.ops.aten._native_batch_norm_legit_no_training
            return cast("Tensor", norm(x, few, few, few, few, 0.1, 1e-5)[0])

    class Weight(nn.Module):
        def forward(self, x: Tensor, few: Tensor) -> Tensor:
            return torch._weight_norm(x, few, 0)

    for model, right in ((Norm(), torch.ones(6)), (Weight(), torch.ones(5, 1))):
        path = save(torch.export.export(model, (ROWS, right)), tmp_path / "few.pt2")
        module = load_program(path).module(check_guards=False)
        torch.testing.assert_close(module(ROWS, right), model(ROWS, right))
        with pytest.raises(RuntimeError):
            module(ROWS, torch.ones(2))


def test_no_operator_that_takes_a_file_name_is_known() -> None:
    schemas = torch._C._jit_get_all_schemas()
    named = [
        f"torch.ops.aten.{schema.name.partition('::')[2]}.{schema.overload_name or 'default'}"
        for schema in schemas
        if schema.name.startswith(("aten::", "prims::"))
        and any("file" in argument.name for argument in schema.arguments)
    ]
    assert len(named) >= 2
    assert all(operator_problem(name) for name in named)
