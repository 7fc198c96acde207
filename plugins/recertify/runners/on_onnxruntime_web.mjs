// Run the cases of tasks on onnxruntime-web, in WebAssembly as browsers have it: what a page gets.
//
// It imports nothing of Modelyard; `runtimes` says what it reads and writes. The library lies in
// `node_modules` of FOLDER where it is started as FOLDER/bin/node.

import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { performance } from "node:perf_hooks";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const TYPES = {
  F64: ["float64", Float64Array], F32: ["float32", Float32Array], F16: ["float16", Uint16Array],
  I64: ["int64", BigInt64Array], I32: ["int32", Int32Array], I16: ["int16", Int16Array],
  I8: ["int8", Int8Array], U64: ["uint64", BigUint64Array], U32: ["uint32", Uint32Array],
  U16: ["uint16", Uint16Array], U8: ["uint8", Uint8Array], BOOL: ["bool", Uint8Array],
};

const sentence = (error) => String(error?.message ?? error).split(/\s+/).join(" ").slice(0, 500);

// Yield [name, type, sizes, bytes] of the tensors of a safetensors file.
function* read(file) {
  const data = readFileSync(file);
  const start = 8 + Number(data.readBigUInt64LE(0));
  for (const [name, told] of Object.entries(JSON.parse(data.subarray(8, start)))) {
    if (name === "__metadata__") continue;
    const [first, last] = told.data_offsets;
    // A copy: numbers of eight bytes must lie at a multiple of eight.
    yield [name, told.dtype, told.shape, new Uint8Array(data.subarray(start + first, start + last))];
  }
}

function write(file, tensors, metadata) {
  const header = { __metadata__: metadata };
  const parts = [];
  let end = 0;
  for (const [name, tensor] of tensors) {
    const { buffer, byteOffset, byteLength } = tensor.data;
    const dtype = Object.keys(TYPES).find((key) => TYPES[key][0] === tensor.type);
    header[name] = { dtype, shape: tensor.dims, data_offsets: [end, end + byteLength] };
    parts.push(Buffer.from(buffer, byteOffset, byteLength));
    end += byteLength;
  }
  let text = Buffer.from(JSON.stringify(header));
  text = Buffer.concat([text, Buffer.alloc((8 - (text.length % 8)) % 8, " ")]);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  writeFileSync(file, Buffer.concat([length, text, ...parts]));
}

async function main(task) {
  const folder = join(dirname(dirname(process.argv0)), "node_modules", "onnxruntime-web");
  const { version } = JSON.parse(readFileSync(join(folder, "package.json")));
  const ort = await import(pathToFileURL(join(folder, "dist", "ort.wasm.bundle.min.mjs")));
  ort.env.wasm.numThreads = 1; // as in a page without headers of its own
  // Bytes rather than a path: the build for browsers would fetch it.
  ort.env.wasm.wasmBinary = readFileSync(join(folder, "dist", "ort-wasm-simd-threaded.wasm"));
  const session = await ort.InferenceSession.create(
    new Uint8Array(readFileSync(task.artifact)),
    { executionProviders: ["wasm"], logSeverityLevel: 4 },
  );
  const cases = new Map();
  for (const [name, dtype, shape, bytes] of read(task.cases)) {
    const at = name.indexOf("/");
    const [type, Values] = TYPES[dtype];
    const feed = cases.get(name.slice(0, at)) ?? {};
    feed[name.slice(at + 1)] = new ort.Tensor(type, new Values(bytes.buffer), shape);
    cases.set(name.slice(0, at), feed);
  }
  const found = [];
  const began = performance.now();
  for (const [name, given] of cases) {
    const feed = Object.fromEntries(session.inputNames.map((input) => [input, given[input]]));
    const result = await session.run(feed);
    for (const output of session.outputNames) found.push([`${name}/${output}`, result[output]]);
  }
  const seconds = ((performance.now() - began) / 1000).toFixed(6);
  write(task.out, found, { "onnxruntime-web": version, node: process.versions.node, seconds });
}

for await (const line of createInterface({ input: process.stdin })) {
  const failed = (error) => `onnxruntime-web: ${sentence(error)}`;
  process.stdout.write(`${await main(JSON.parse(line)).then(() => "", failed)}\n`);
}
