"""Wrongs seeded between a runner and its library: what other runtimes get wrong, and what is right.

They stand in a copy of a runtime's environment, so that only that runtime has them.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from modelyard.plugins.recertify.environments import Environment

WEB = {
    "rounded to 1/512": "out = v => Math.round(v * 512) / 512",
    "numbers of eleven bits": "out = v => { const s = v * 4398046511105; return s - (s - v) }",
    "a gain of 1.001": "out = v => v * 1.001",
    "wrong in rows behind the fourth": "out = (v, i, t) => i >= 4 * t.row ? v * 1.01 : v",
    "wrong where the input is extreme": "input = v => Math.min(3, Math.max(-3, v))",
    "negative inputs are zeros": "input = v => Math.max(0, v)",
    "the last input is not read": "input = (v, i, t) => i === t.data.length - 1 ? 0 : v",
    "zeros give NaN": "out = (v, i, t) => t.isZero ? NaN : v",
    "equal dims change places": "input = (v, i, t) => turned(v, i, t)",
    "a row takes its neighbour's": "out = (v, i, t) => t.data[(i + t.row) % t.data.length]",
    "the last two outputs change places": "out = (v, i, t) => "
        "t.data[i % t.last < t.last - 2 ? i : i % t.last === t.last - 1 ? i - 1 : i + 1]",
}  # fmt: skip
"""What a wrapper of onnxruntime-web does to each number of float32 that goes in or comes out."""
WEB_HARMLESS = {
    "a last place": "out = v => Math.fround(v * (1 + 6e-8))",
    "denormal inputs are zeros": "input = v => Math.abs(v) < 1.2e-38 ? 0 : v",
}
OPENVINO = {
    "bfloat16 inside": "settings['INFERENCE_PRECISION_HINT'] = 'bf16'",
    "weights of float16": "change(model, lambda w: w.astype('f2').astype('f4'))",
    "weights of bfloat16": "change(model, lambda w: (w.view('u4') & 0xffff0000).view('f4'))",
    "weights of int8": "change(model, lambda w: rounded(w, abs(w).max() / 127))",
    "one weight of another sign": "first(model, lambda w: w[at(w)] * -1)",
    "one weight is zero": "first(model, lambda w: 0)",
    "one weight is a tenth further": "first(model, lambda w: w[at(w)] * 1.1)",
    "square kernels turned": "change(model, turned)",
    "biases left out": "change(model, lambda w: w * 0 if w.size == max(w.shape, default=0) else w)",
}  # fmt: skip
"""What a wrapper of OpenVINO does to a model, or to the settings it is compiled with."""
OPENVINO_HARMLESS = {
    "two threads": "settings['INFERENCE_NUM_THREADS'] = 2",
    "weights without the last two bits":
        "change(model, lambda w: (w.view('u4') & 0xfffffffc).view('f4'))",
}  # fmt: skip

_WRAPPER = """
import * as right from "./right.mjs";
let input = (v) => v, out = (v) => v;
const turned = (v, i, t) => {
  const n = t.dims.length, side = t.dims[n - 1];
  if (n < 3 || t.dims[n - 2] !== side) return v;
  const rest = i % (side * side);
  return t.data[i - rest + (rest % side) * side + Math.floor(rest / side)];
};
%s;
const each = (tensors, by) => Object.fromEntries(Object.entries(tensors).map(by));
const changed = (tensors, by, isZero) => each(tensors, ([name, t]) => {
  if (t.type !== "float32") return [name, t];
  const of = { data: t.data, dims: t.dims, row: t.data.length / (t.dims[0] || 1),
               last: t.dims[t.dims.length - 1] ?? 1, isZero };
  return [name, new right.Tensor("float32", t.data.map((v, i) => by(v, i, of)), t.dims)];
});
export const env = right.env, Tensor = right.Tensor;
export const InferenceSession = { create: async (...given) => {
  const session = await right.InferenceSession.create(...given);
  return { inputNames: session.inputNames, outputNames: session.outputNames, run: async (feed) => {
    const isZero = Object.values(feed).every((t) => t.data.every((v) => Number(v) === 0));
    return changed(await session.run(changed(feed, input, isZero)), out, isZero);
  } };
} };
"""
_PATCH = """
import numpy as np, openvino
from openvino import opset13

def weights(model):
    for op in model.get_ordered_ops():
        if op.get_type_name() == "Constant" and op.get_element_type() == openvino.Type.f32:
            yield op

def change(model, by):
    for op in list(weights(model)):
        value = np.array(op.data)
        if not value.size:
            continue
        new = np.ascontiguousarray(by(value.copy()), "f4").reshape(value.shape)
        if not np.array_equal(new, value):
            put(op, new)

def put(op, value):
    made = opset13.constant(value)
    for target in op.output(0).get_target_inputs():
        target.replace_source_output(made.output(0))

at = lambda w: np.unravel_index(abs(w).argmax(), w.shape)

def first(model, by):
    op = max(weights(model), key=lambda op: (len(op.shape) > 1, np.array(op.data).size))
    value = np.array(op.data).copy()
    value[at(value)] = by(value)
    put(op, value)

rounded = lambda w, step: np.round(w / step) * step if w.ndim > 1 and step else w
turned = lambda w: w.swapaxes(-1, -2) if w.ndim > 1 and w.shape[-1] == w.shape[-2] else w
right = openvino.Core.compile_model

def compile_model(self, path, device, settings):
    model = self.read_model(path)
    %s
    return right(self, model, device, settings)

openvino.Core.compile_model = compile_model
"""


def seeded(environment: Environment, name: str, fault: str, folder: Path) -> Environment:
    """Return a copy of a made environment of onnxruntime-web or OpenVINO with a wrapper.

    Args:
        name: what the copy is called.
        fault: a value of the tables above.
        folder: a folder that does not exist, on the disk of the environment where links are to be
            cheap.
    """
    whole = environment.python.parents[1]
    shutil.copytree(whole, folder, symlinks=True, copy_function=_linked)
    if environment.python.name == "node":
        library = folder / "node_modules" / "onnxruntime-web" / "dist" / "ort.wasm.bundle.min.mjs"
        library.rename(library.with_name("right.mjs"))
        library.write_text(_WRAPPER.replace("%s", fault), encoding="utf-8")
    else:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "sitecustomize.py").write_text(_PATCH.replace("%s", fault), encoding="utf-8")
    python = folder / environment.python.relative_to(whole)
    return replace(environment, name=name, python=python, requirements=())


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)
