"""ONNX files that made onnxruntime read what is not theirs, or crash, before 1.29.

Each breaks what its operator takes for granted: an index, a length or a number of heads that does
not fit the tensors beside it, or weights in a file that is none of the archive's. A runtime that is
safe refuses every one, when it loads it or when it runs it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FAR = 1_000_000
"""An index beyond every tensor in here."""
DOMAINS = {"": 17, "com.microsoft": 1, "ai.onnx.ml": 3}
ROW = [1, 64]
SECRET = b"nobody's to read"

_Weights = dict[str, Any]
_Case = tuple[str, str, dict[str, Any], list[int], _Weights]


def _zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def _whole(*values: int) -> Any:
    return np.array(values, np.int64)


def _real(*values: float) -> Any:
    return np.array(values, np.float32)


def _short(*values: int) -> Any:
    return np.array(values, np.int32)


def _cases() -> dict[str, _Case]:
    """Return name → domain, operator, its attributes, the shape of `x`, its further inputs.

    An input whose name ends in `=x` is `x` itself again, and an empty name is one left out.
    """
    ml, ms = "ai.onnx.ml", "com.microsoft"
    scores = {"coefficients": [1.0] * 64, "targets": 64}
    classes = {"classlabels_ints": [0, 1, 2, 3]}
    tree = {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [0, 0, 0],
        "nodes_values": [0.5, 0.0, 0.0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
        "target_treeids": [0, 0],
        "target_nodeids": [1, 2],
        "target_ids": [10 * FAR, 10 * FAR],
        "target_weights": [1.0, 2.0],
        "n_targets": 1,
    }
    machine = {
        "coefficients": [1.0],
        "support_vectors": [1.0],
        "vectors_per_class": [4, 4],
        "rho": [0.0],
        "classlabels_ints": [0, 1],
        "kernel_type": "RBF",
        "kernel_params": [0.1, 0.0, 3.0],
    }
    heads = {"num_heads": 2, "kv_num_heads": 2}
    past = {"q=x": None, "k=x": None, "pk": _zeros(1, 2, 8, 8), "pv": _zeros(1, 2, 8, 8)}
    long_past = {**past, "pk": _zeros(1, 2, 8, 32), "pv": _zeros(1, 2, 8, 32)}
    image, box = [1, 1, 8, 8], np.array([[0, 0, 8, 8]], np.float32)
    turns = {"cos": _zeros(8, 4), "sin": _zeros(8, 4)}
    bits = {"B": np.zeros((16, 2, 16), np.uint8), "scales": np.ones(32, np.float32)}
    packed = {"K": 64, "bits": 4, "block_size": 32}
    masked = {
        **{"k=x": None, "v=x": None, "": None, " ": None},
        **{"pk": _zeros(1, 2, 8, 32), "pv": _zeros(1, 2, 8, 32), "length": _short(4)},
        **{"width": _short(1), "beams": np.full((1, 1, 8), FAR, np.int32)},
    }
    eights = {
        **{"w": np.zeros((16, 48), np.uint8), "b": _zeros(48), "sx": np.float32(1)},
        **{"sw": np.float32(1), "": None, "zx": np.uint8(0), "zw": np.uint8(0)},
    }
    return {
        "few-coefficients": (ml, "LinearRegressor", scores, ROW, {}),
        "one-coefficient": (ml, "LinearRegressor", {"coefficients": [1.0], "targets": 1}, ROW, {}),
        "classes": (
            *(ml, "LinearClassifier", {"coefficients": [1.0], "intercepts": [0.0], **classes}),
            *(ROW, {}),
        ),
        "support-vectors": (ml, "SVMClassifier", machine, ROW, {}),
        "leaf": (ml, "TreeEnsembleRegressor", tree, ROW, {}),
        "crop": (
            *(ms, "CropAndResize", {}, image),
            {"boxes": box / 8, "which": _short(FAR), "size": _short(4, 4)},
        ),
        "region": (
            *("", "RoiAlign", {"output_height": 4, "output_width": 4}, image),
            {"boxes": box, "which": _whole(FAR)},
        ),
        "region-before": (
            *("", "RoiAlign", {"output_height": 4, "output_width": 4}, image),
            {"boxes": box, "which": _whole(-FAR)},
        ),
        "unpool": (
            *("", "MaxUnpool", {"kernel_shape": [2, 2], "strides": [2, 2]}, image),
            {"places": np.full((1, 1, 8, 8), 1000 * FAR, np.int64)},
        ),
        "groups": (
            *(ms, "MatMulNBits", {**packed, "N": 16}, ROW),
            {**bits, "": None, "group": np.full(64, FAR, np.int32)},
        ),
        "attention-length": (
            *(ms, "GroupQueryAttention", heads, [1, 4, 16]),
            {**past, "length": _short(FAR), "total": _short(8)},
        ),
        "attention-before": (
            *(ms, "GroupQueryAttention", heads, [1, 1, 64]),
            {**long_past, "length": _short(-100), "total": _short(8)},
        ),
        "attention-total": (
            *(ms, "GroupQueryAttention", heads, [1, 4, 16]),
            {**past, "length": _short(3), "total": _short(-5)},
        ),
        "positions": (
            *(ms, "RotaryEmbedding", {"num_heads": 2}, [1, 4, 16]),
            {"at": np.full((1, 4), FAR, np.int64), **turns},
        ),
        "position": (
            *(ms, "RotaryEmbedding", {"num_heads": 2}, [1, 4, 16]),
            {"at": _whole(FAR), **turns},
        ),
        "position-before": (
            *(ms, "RotaryEmbedding", {"num_heads": 2}, [1, 4, 16]),
            {"at": _whole(-FAR), **turns},
        ),
        "beams": (
            *(ms, "DecoderMaskedMultiHeadAttention"),
            *({"num_heads": 2, "past_present_share_buffer": 1}, [1, 1, 64], masked),
        ),
        "heads": (ms, "QAttention", {"num_heads": 1000}, [1, 4, 16], eights),
    }


def _more_cases() -> dict[str, _Case]:
    """Return further files, as `_cases`: a runtime refuses them, or what they give is harmless."""
    ml, ms = "ai.onnx.ml", "com.microsoft"
    image, cube = [1, 1, 8, 8], [1, 4, 16]
    huge, wide = _whole(1 << 62), _whole(1 << 40, 1 << 40)
    box = np.array([[[0, 0, np.nan, np.inf]]], np.float32)
    lstm = {"w": _zeros(1, 32, 16), "r": _zeros(1, 32, 8)}
    trees = {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [FAR, 0, 0],
        "nodes_values": [0.5, 0.0, 0.0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [FAR, 0, 0],
        "nodes_falsenodeids": [0, 0, 0],
        "class_treeids": [0, 0],
        "class_nodeids": [1, 2],
        "class_ids": [FAR, -FAR],
        "class_weights": [1.0, 2.0],
        "classlabels_int64s": [0, 1],
    }
    vectors = {
        "coefficients": [1.0],
        "support_vectors": [1.0],
        "n_supports": FAR,
        "rho": [0.0],
        "kernel_type": "LINEAR",
    }
    packed = {"K": 64, "N": 16, "bits": 4, "block_size": 32}
    heads = {"num_heads": 2, "kv_num_heads": 2}
    sparse = {"num_heads": 2, "kv_num_heads": 2, "scale": 1.0, "sparse_block_size": 16}
    ids = {"words": np.full((1, 4), FAR, np.int32), "segments": np.full((1, 4), FAR, np.int32)}
    words = {"we": _zeros(2, 16), "pe": _zeros(2, 16), "se": _zeros(2, 16)}
    return {
        "machine": (ml, "SVMRegressor", vectors, ROW, {}),
        "tree-classes": (ml, "TreeEnsembleClassifier", trees, ROW, {}),
        "scaler": (ml, "Scaler", {"offset": [1.0] * 3, "scale": [1.0] * 3}, ROW, {}),
        "imputer": (ml, "Imputer", {"imputed_value_floats": [0.0] * 5}, ROW, {}),
        "features": (ml, "ArrayFeatureExtractor", {}, ROW, {"at": _whole(-FAR, FAR)}),
        "categories": (ml, "OneHotEncoder", {"cats_int64s": [0], "zeros": 1}, ROW, {}),
        "boxes": (
            *("", "NonMaxSuppression", {}, [1, 1, 64]),
            {"b": box, "most": huge, "iou": np.array([np.nan], np.float32)},
        ),
        "region-size": (
            *("", "RoiAlign", {"output_height": 1 << 20, "output_width": 1 << 20}, image),
            {"boxes": box[0], "which": _whole(0)},
        ),
        "region-nan": (
            *("", "RoiAlign", {"output_height": 4, "output_width": 4}, image),
            {"boxes": box[0], "which": _whole(0)},
        ),
        "region-count": (
            *("", "RoiAlign", {"output_height": 4, "output_width": 4}, image),
            {"boxes": _zeros(1, 4), "which": _whole(*[0] * 9)},
        ),
        "crop-nan": (
            *(ms, "CropAndResize", {}, image),
            {"boxes": box[0], "which": _short(0), "size": _short(1 << 30, 1 << 30)},
        ),
        "sequence": (
            *("", "LSTM", {"hidden_size": 8}, cube),
            {**lstm, "": None, "lengths": np.full(4, FAR, np.int32)},
        ),
        "sequence-before": (
            *("", "LSTM", {"hidden_size": 8}, cube),
            {**lstm, "": None, "lengths": np.full(4, -FAR, np.int32)},
        ),
        "hidden": ("", "LSTM", {"hidden_size": 1000}, cube, lstm),
        "gates": (
            "",
            "GRU",
            {"hidden_size": 8},
            cube,
            {"w": _zeros(1, 8, 16), "r": _zeros(1, 8, 8)},
        ),
        "unpool-size": (
            *("", "MaxUnpool", {"kernel_shape": [2, 2], "strides": [2, 2]}, image),
            {"places": np.zeros((1, 1, 8, 8), np.int64), "size": _whole(1, 1, 1, 1)},
        ),
        "unpool-before": (
            *("", "MaxUnpool", {"kernel_shape": [2, 2]}, image),
            {"places": np.full((1, 1, 8, 8), -FAR, np.int64)},
        ),
        "bits": (ms, "MatMulNBits", packed, ROW, {"B": np.zeros(9, np.uint8), "s": _zeros(1)}),
        "bits-zero": (
            *(ms, "MatMulNBits", packed, ROW),
            {"B": np.zeros((16, 2, 16), np.uint8), "s": _zeros(32), "z": np.zeros(1, np.uint8)},
        ),
        "attention-total-far": (
            *(ms, "GroupQueryAttention", heads, [1, 4, 16]),
            {
                **{"k=x": None, "v=x": None, "pk": _zeros(1, 2, 8, 8), "pv": _zeros(1, 2, 8, 8)},
                **{"length": _short(3), "total": _short(1 << 30)},
            },
        ),
        "sparse-attention": (
            *(ms, "SparseAttention", sparse, [1, 4, 16]),
            {
                **{"k=x": None, "v=x": None, "pk": _zeros(1, 2, 16, 8), "pv": _zeros(1, 2, 16, 8)},
                **{
                    "rows": np.full((1, 2), FAR, np.int32),
                    "columns": np.full((1, 1), FAR, np.int32),
                },
                **{"total": _short(16), "lengths": _short(FAR)},
            },
        ),
        "many-heads": (
            *(ms, "MultiHeadAttention", {"num_heads": 1 << 20}, [1, 4, 16]),
            {"k=x": None, "v=x": None},
        ),
        "words": (
            *(ms, "EmbedLayerNormalization", {}, ROW),
            {**ids, **words, "gamma": _zeros(16), "beta": _zeros(16)},
        ),
        "short-norm": (
            *(ms, "SkipLayerNormalization", {}, [1, 4, 16]),
            {"y=x": None, "gamma": _zeros(1), "beta": _zeros(1)},
        ),
        "short-bias": (ms, "BiasGelu", {}, ROW, {"bias": _zeros(3)}),
        "repeats": (
            *(ms, "NGramRepeatBlock", {"ngram_size": 1}, ROW),
            {"scores": _zeros(1, 64)},
        ),
        "gather": ("", "Gather", {}, ROW, {"at": _whole(FAR)}),
        "gather-nd": ("", "GatherND", {}, ROW, {"at": np.array([[0, -FAR]])}),
        "scatter": ("", "ScatterElements", {}, ROW, {"at": np.array([[FAR]]), "u": _zeros(1, 1)}),
        "scatter-nd": ("", "ScatterND", {}, ROW, {"at": np.array([[0, FAR]]), "u": _zeros(1)}),
        "tile": ("", "Tile", {}, ROW, {"times": wide}),
        "expand": ("", "Expand", {}, ROW, {"size": _whole(1 << 40, 64)}),
        "pad": ("", "Pad", {}, ROW, {"pads": _whole(0, 0, 0, 1 << 62)}),
        "pad-before": ("", "Pad", {}, ROW, {"pads": _whole(0, -FAR, 0, FAR)}),
        "resize": (
            "",
            "Resize",
            {},
            image,
            {"": None, "s": np.array([1, 1, 1e-38, 1e38], np.float32)},
        ),
        "resize-nan": (
            "",
            "Resize",
            {},
            image,
            {"": None, "s": np.array([1, 1, np.nan, 2], np.float32)},
        ),
        "slice": ("", "Slice", {}, ROW, {"a": _whole(-(1 << 63)), "b": huge, "c": _whole(FAR)}),
        "top": ("", "TopK", {}, ROW, {"k": huge}),
        "sum-along": ("", "CumSum", {}, ROW, {"axis": np.int64(FAR)}),
        "blocks": ("", "DepthToSpace", {"blocksize": 0}, image, {}),
        "dilated": ("", "MaxPool", {"kernel_shape": [2, 2], "dilations": [1 << 40] * 2}, image, {}),
        "turned-convolution": (
            *("", "ConvTranspose", {"pads": [-FAR] * 4, "output_padding": [FAR, FAR]}, image),
            {"w": _zeros(1, 1, 3, 3)},
        ),
        "sampled": ("", "GridSample", {}, image, {"at": np.full((1, 2, 2, 2), np.nan, np.float32)}),
    }


def _write(file: Path, case: _Case) -> None:
    domain, operator, attributes, shape, further = case
    # The type that the operator takes, from what every request sends: a row of 64 numbers.
    kind = TensorProto.UINT8 if operator == "QAttention" else TensorProto.FLOAT
    nodes = [
        helper.make_node("Reshape", ["row", "shape"], ["shaped"]),
        helper.make_node("Cast", ["shaped"], ["x"], to=kind),
    ]
    weights = {name: value for name, value in further.items() if value is not None}
    inputs = ["x", *("x" if name.endswith("=x") else name.strip() for name in further)]
    attends = operator in ("GroupQueryAttention", "DecoderMaskedMultiHeadAttention")
    outputs = ["label", "y"] if operator.endswith("Classifier") else ["y"]
    outputs += ["keys", "values"] * attends
    nodes.append(helper.make_node(operator, inputs, outputs, domain=domain, **attributes))
    _save(file, nodes, {**weights, "shape": _whole(*shape)})


def _save(file: Path, nodes: list[Any], weights: _Weights, *tensors: Any) -> None:
    number = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "hostile",
        [helper.make_tensor_value_info("row", number, ROW)],
        [helper.make_tensor_value_info("y", number, None)],
        [*(numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items()), *tensors],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in DOMAINS.items()]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    file.write_bytes(model.SerializeToString())


def _elsewhere(location: str) -> Any:
    """Return a weight whose bytes lie in another file."""
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[1, 4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def write_all(folder: Path) -> Iterator[str]:
    """Write every file into `folder`/models; yield their names. `honest` is the only one to pass.

    What some of them try to read lies in `folder`.
    """
    models = folder / "models"
    models.mkdir()
    secret = folder / "secret.bin"
    secret.write_bytes(SECRET)
    (models / "link.bin").symlink_to(secret)
    _save(models / "honest.onnx", [helper.make_node("Relu", ["row"], ["y"])], {})
    yield "honest"
    for name, case in _cases().items():
        _write(models / f"{name}.onnx", case)
        yield name
    places = {
        "absolute": str(secret),
        "upwards": "../secret.bin",
        "link": "link.bin",
        "process": "/proc/self/environ",
    }
    for name, location in places.items():
        node = helper.make_node("Identity", ["w"], ["y"])
        _save(models / f"{name}.onnx", [node], {}, _elsewhere(location))
        yield name


def write_more(folder: Path) -> Iterator[str]:
    """Write the files that a runtime may run, if it does no harm, into `folder`/models."""
    (folder / "models").mkdir(exist_ok=True)
    for name, case in _more_cases().items():
        _write(folder / "models" / f"{name}.onnx", case)
        yield name
    size = helper.make_node("ConstantOfShape", ["size"], ["y"])
    _save(folder / "models" / "terabytes.onnx", [size], {"size": _whole(1 << 21, 1 << 21)})
    yield "terabytes"
    count = helper.make_node("Range", ["a", "b", "c"], ["y"])
    ends = {"a": np.float32(0), "b": np.float32(1e30), "c": np.float32(1e-30)}
    _save(folder / "models" / "range.onnx", [count], ends)
    yield "range"
    for name, value in {"loop": 1 << 62, "loop-before": -(1 << 62)}.items():
        _save(
            folder / "models" / f"{name}.onnx",
            _loop(),
            {"n": np.int64(value), "go": np.array(False)},
        )
        yield name


def _loop() -> list[Any]:
    """Return a loop that ends where its condition is looked at."""
    flag, whole = TensorProto.BOOL, TensorProto.INT64
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["on"], ["on_"]),
            helper.make_node("Identity", ["state"], ["state_"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", whole, []),
            helper.make_tensor_value_info("on", flag, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on_", flag, []),
            helper.make_tensor_value_info("state_", TensorProto.FLOAT, None),
        ],
    )
    return [helper.make_node("Loop", ["n", "go", "row"], ["y"], body=body)]


TRY_ALL = """
import json, os, resource, sys
import numpy, onnxruntime
onnxruntime.set_default_logger_severity(4)

def outcome(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    answers = []
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        row = numpy.eye(1, 64, dtype=numpy.float32)
        feeds = {"row": row} if session.get_inputs() else {}
        answers = [each.ravel()[:6].tolist() for each in session.run(None, feeds)]
    except Exception as error:
        return "refused"
    return f"answered {answers}"

for name in sys.argv[1:]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        os.write(write, outcome(f"models/{name}.onnx").encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([name, text if status == 0 else f"ended by signal {-status}"]), flush=True)
"""
"""Runs in an environment with numpy and onnxruntime alone, in the folder of `write_all`."""
