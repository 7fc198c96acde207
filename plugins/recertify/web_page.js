// Verify the archive of this page in this browser, by its own rule; only then, predict.

const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const SHOWN = 12; // cases before a click
const KINDS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array,
  int16: Int16Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const short = (value) => (value === 0 ? "0" : value.toExponential(1));

async function unpack(id) {
  const packed = new Blob([bytesOf(at(id).textContent)]).stream();
  return new Uint8Array(
    await new Response(packed.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
}

const valuesOf = (kept) => new KINDS[kept.dtype](bytesOf(kept.values).buffer);
const tensorOf = (ort, kept) => new ort.Tensor(kept.dtype, valuesOf(kept), kept.shape);

// ---- the rule: |a - b| of every number, over its unit
function furthest(found, expected, units) {
  let most = 0;
  for (let i = 0; i < expected.length; i++) {
    const a = Number(found[i]), b = Number(expected[i]);
    if (a === b || (Number.isNaN(a) && Number.isNaN(b))) continue;
    const apart = Math.abs(a - b) / units[i];
    if (!(apart <= most)) most = Number.isNaN(apart) ? Infinity : apart;
  }
  return most;
}

function judge(found, kept) {
  if (!found || found.type !== kept.dtype || `${found.dims}` !== `${kept.shape}`) return Infinity;
  return furthest(found.data, valuesOf(kept), valuesOf(kept.units));
}

async function verify(ort, session) {
  const rows = [];
  for (const each of data.cases) {
    const feed = Object.fromEntries(
      Object.entries(each.inputs).map(([name, kept]) => [name, tensorOf(ort, kept)]));
    let worst = { over: -1 };
    const told = await session.run(feed).catch((error) => error);
    for (const [name, kept] of Object.entries(each.outputs)) {
      const apart = told instanceof Error ? Infinity : judge(told[name], kept);
      // Written the other way round, what is not a number would pass.
      const over = apart <= kept.allowed ? apart / (kept.allowed || 1) : Infinity;
      if (over > worst.over) worst = { over, apart, allowed: kept.allowed };
    }
    rows.push({ name: each.name, ...worst, agrees: worst.over <= 1 });
    report(rows);
    await new Promise((done) => setTimeout(done));
  }
  for (const each of data.pictures?.examples ?? []) {
    const { input } = each;
    const apart = await pictureOf(blobOf(each)).then(
      (found) => furthest(found, valuesOf(input), valuesOf(input.units)), () => Infinity);
    const agrees = apart <= input.allowed;
    rows.push({ name: `${each.name}, its picture as the server reads it`, apart, allowed: input.allowed, agrees });
    report(rows);
  }
  return rows;
}

function report(rows) {
  const hidden = rows.length - SHOWN;
  const drawn = [...rows].sort((a, b) => a.agrees - b.agrees).map((row, place) => element(
    "tr", place >= SHOWN && row.agrees ? { class: "rest", ...(at("more").dataset.open ? {} : { hidden: "" }) } : {},
    element("td", {}, row.name),
    element("td", {}, row.apart === Infinity ? "–" : short(row.apart)),
    element("td", {}, short(row.allowed)),
    element("td", { class: row.agrees ? "good" : "bad" }, row.agrees ? "agrees" : "differs")));
  at("cases").replaceChildren(...drawn);
  at("more").hidden = hidden <= 0 || Boolean(at("more").dataset.open);
  at("more").textContent = `Show ${hidden} more`;
}
at("more").addEventListener("click", () => {
  at("more").dataset.open = "yes";
  at("more").hidden = true;
  for (const row of document.querySelectorAll("tr.rest")) row.hidden = false;
});

function say(kind, title, text) {
  at("state").className = `state ${kind}`;
  at("state").firstElementChild.textContent = title;
  at("state").lastElementChild.textContent = text;
}

// ---- a picture → the model's input, as Pillow and the handler make it
const FILTERS = {
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, (x) => {
    const near = Math.abs(x);
    if (near === 0) return 1;
    return near >= 1 ? 0 : (Math.sin(Math.PI * near) / (Math.PI * near)) * (0.54 + 0.46 * Math.cos(Math.PI * near));
  }],
  bicubic: [2, (x) => {
    const near = Math.abs(x), a = -0.5;
    if (near < 1) return ((a + 2) * near - (a + 3)) * near * near + 1;
    return near < 2 ? (((near - 5) * near + 8) * near - 4) * a : 0;
  }],
  lanczos: [3, (x) => {
    const sinc = (v) => (v === 0 ? 1 : Math.sin(Math.PI * v) / (Math.PI * v));
    return x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0;
  }],
};

// For each place of the new line: where it begins in the old one, and weights in 1 / 2^22.
function weights(from, to, name) {
  const [reach, filter] = FILTERS[name];
  const scale = from / to, stretch = Math.max(1, scale), support = reach * stretch;
  return Array.from({ length: to }, (_, place) => {
    const centre = (place + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - support + 0.5));
    const last = Math.min(from, Math.trunc(centre + support + 0.5));
    const raw = Array.from({ length: last - first }, (_, i) => filter((i + first - centre + 0.5) / stretch));
    const sum = raw.reduce((a, b) => a + b, 0);
    const share = raw.map((weight) => Math.trunc((weight / sum) * 2 ** 22 + (weight < 0 ? -0.5 : 0.5)));
    return [first, share];
  });
}

// Resize planes of bytes along one dim of `count` lines.
function resample(pixels, lines, from, to, step, across, name) {
  const made = new Uint8ClampedArray(lines * to);
  const table = weights(from, to, name);
  for (let line = 0; line < lines; line++) {
    for (let place = 0; place < to; place++) {
      const [first, share] = table[place];
      let sum = 2 ** 21;
      for (let i = 0; i < share.length; i++) sum += pixels[line * across + (first + i) * step] * share[i];
      made[step === 1 ? line * to + place : place * lines + line] =
        Math.min(255, Math.max(0, Math.floor(sum / 2 ** 22)));
    }
  }
  return made;
}

function resized(plane, width, height, toWidth, toHeight, name) {
  if (name === "nearest") {
    return Uint8Array.from({ length: toWidth * toHeight }, (_, i) => {
      const x = Math.floor(((i % toWidth) + 0.5) * (width / toWidth));
      return plane[Math.floor((Math.floor(i / toWidth) + 0.5) * (height / toHeight)) * width + x];
    });
  }
  if (toWidth !== width) plane = resample(plane, height, width, toWidth, 1, width, name);
  if (toHeight !== height) plane = resample(plane, toWidth, height, toHeight, toWidth, 1, name);
  return plane;
}

// Where the box lies that the model sees, as `placement` of the handler says.
function placed(width, height, { size, resize, longest, crop, pads }) {
  let across = width, down = height;
  if (size) [down, across] = size;
  else if (resize) {
    const shorter = Math.min(width, height), longer = Math.max(width, height);
    const side = longest && longer * resize > longest * shorter ? (longest * shorter) / longer : resize;
    [across, down] = [width, height].map(
      (each) => (each === shorter ? even(side) : Math.trunc((side * each) / shorter)));
  }
  const [boxDown, boxAcross] = crop ?? [down, across];
  if (!pads && (boxDown > down || boxAcross > across)) throw new Error("the picture is too small");
  const round = pads ? Math.floor : even;
  return { across, down, boxAcross, boxDown, left: round((across - boxAcross) / 2), top: round((down - boxDown) / 2) };
}
// Python rounds halves to the even number.
const even = (value) => (Math.abs(value % 1) === 0.5 ? 2 * Math.round(value / 2) : Math.round(value));

async function pictureOf(blob) {
  const { settings, table } = data.pictures;
  const bitmap = await createImageBitmap(blob, {
    colorSpaceConversion: "none", premultiplyAlpha: "none",
    imageOrientation: settings.upright ? "from-image" : "none",
  });
  const { width, height } = bitmap;
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  const rgba = context.getImageData(0, 0, width, height).data;
  for (let i = 3; i < rgba.length; i += 4)
    if (rgba[i] !== 255) throw new Error("the picture is transparent in places; a page cannot read which colour lies below");
  const lookup = valuesOf(table), channels = table.shape[0];
  const box = placed(width, height, settings);
  const input = new Float32Array(channels * box.boxDown * box.boxAcross);
  for (let channel = 0; channel < channels; channel++) {
    const plane = new Uint8Array(width * height);
    for (let i = 0; i < plane.length; i++)
      plane[i] = channels === 1
        ? (rgba[4 * i] * 19595 + rgba[4 * i + 1] * 38470 + rgba[4 * i + 2] * 7471 + 0x8000) >> 16
        : rgba[4 * i + channel];
    const small = resized(plane, width, height, box.across, box.down, settings.resample);
    for (let y = 0; y < box.boxDown; y++)
      for (let x = 0; x < box.boxAcross; x++) {
        const row = y + box.top, column = x + box.left;
        const isIn = row >= 0 && row < box.down && column >= 0 && column < box.across;
        const pixel = isIn ? small[row * box.across + column] : 0;
        input[(channel * box.boxDown + y) * box.boxAcross + x] = lookup[channel * 256 + pixel];
      }
  }
  return Object.assign(input, { sizes: [1, channels, box.boxDown, box.boxAcross] });
}

const blobOf = (each) => new Blob([bytesOf(each.picture)], { type: each.type });

// ---- predicting
function probabilities(scores, kind) {
  if (kind === "probabilities" || kind === "none") return [...scores];
  if (kind === "sigmoid") return [...scores].map((score) => 1 / (1 + Math.exp(-score)));
  const most = Math.max(...scores);
  const powers = [...scores].map((score) => Math.exp(score - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

function answer(result) {
  if (data.labels) {
    const scores = result[data.main].data;
    const ranked = probabilities(scores, data.labels.function)
      .map((share, index) => [data.labels.names[index] ?? String(index), share])
      .sort((a, b) => b[1] - a[1]).slice(0, 5);
    return [element("h3", {}, ranked[0][0]), ...ranked.map(([name, share]) => element("div", { class: "row" },
      element("span", {}, name), element("i", { style: `width:${(100 * share).toFixed(1)}%` }),
      element("span", {}, `${(100 * share).toFixed(1)} %`)))];
  }
  return Object.entries(result).map(([name, tensor]) => {
    const numbers = [...tensor.data.slice(0, 200)].map((value) => String(Number(Number(value).toPrecision(6))));
    const rest = tensor.data.length > 200 ? ` … ${tensor.data.length} in all` : "";
    return element("div", {}, element("p", { class: "quiet" }, `${name} ${tensor.type}[${tensor.dims}]`),
      element("pre", {}, numbers.join(", ") + rest));
  });
}

function offer(ort, session) {
  const show = (blob) => {
    at("shown").hidden = !blob;
    if (!blob) return;
    at("shown").src = URL.createObjectURL(blob);
    at("shown").onload = () => at("shown").classList.toggle("tiny", at("shown").naturalWidth < 64);
  };
  const predict = async (feed, blob) => {
    try {
      const result = await session.run(await feed());
      show(blob);
      at("answer").replaceChildren(...answer(result));
    } catch (error) {
      at("answer").replaceChildren(element("p", { class: "wrong" }, String(error.message ?? error)));
    }
  };
  const [first] = Object.keys(data.cases[0].inputs);
  const ofPicture = (blob) => async () => {
    const input = await pictureOf(blob);
    return { [first]: new ort.Tensor("float32", input, input.sizes) };
  };
  const ofNumbers = (file) => async () => {
    const given = JSON.parse(await file.text());
    const named = Array.isArray(given) ? { [first]: given } : given;
    return Object.fromEntries(Object.entries(data.takes).map(([name, dtype]) => {
      if (!(name in named)) throw new Error(`the file has no "${name}"; expected a list for each of ${Object.keys(data.takes).join(", ")}`);
      const sizes = [];
      for (let part = named[name]; Array.isArray(part); part = part[0]) sizes.push(part.length);
      const flat = named[name].flat(Infinity).map(dtype === "int64" ? BigInt : Number);
      return [name, new ort.Tensor(dtype, KINDS[dtype].from(flat), sizes)];
    }));
  };
  const take = (file) => {
    if (!file) return;
    if (data.pictures) predict(ofPicture(file), file);
    else predict(ofNumbers(file));
  };
  at("file").addEventListener("change", () => take(at("file").files[0]));
  for (const [kind, isOver] of [["dragover", true], ["dragleave", false], ["drop", false]])
    at("drop").addEventListener(kind, (event) => {
      event.preventDefault();
      at("drop").classList.toggle("over", isOver);
      if (kind === "drop") take(event.dataTransfer.files[0]);
    });
  at("ask").textContent = data.pictures
    ? "Drop a picture here, or click to choose one" : "Drop a JSON file of the model's inputs here, or click to choose one";
  const pictures = (data.pictures?.examples ?? []).map((each) => {
    const blob = blobOf(each);
    const image = element("img", { alt: each.name, src: URL.createObjectURL(blob), class: "tiny" });
    const button = element("button", { title: each.name }, image);
    button.addEventListener("click", () => predict(ofPicture(blob), blob));
    return button;
  });
  const tensors = data.cases.slice(0, 6).map((each) => {
    const button = element("button", { class: "text" }, each.name);
    button.addEventListener("click", () => predict(async () => Object.fromEntries(
      Object.entries(each.inputs).map(([name, kept]) => [name, tensorOf(ort, kept)]))));
    return button;
  });
  at("examples").replaceChildren(...(pictures.length ? pictures : tensors));
  at("predict").hidden = false;
}

async function main() {
  at("takes").textContent = data.summary;
  at("rule").textContent = data.rule;
  for (const [term, text] of Object.entries({ ...data.facts, "This browser": navigator.userAgent }))
    at("facts").append(element("dt", {}, term), element("dd", {}, text));
  const source = URL.createObjectURL(new Blob([await unpack("library")], { type: "text/javascript" }));
  const ort = await import(source);
  ort.env.wasm.numThreads = 1; // threads would need headers that a file has not
  ort.env.wasm.wasmBinary = (await unpack("machine")).buffer;
  const session = await ort.InferenceSession.create(await unpack("model"), { executionProviders: ["wasm"] });
  const rows = await verify(ort, session);
  const wrong = rows.filter((row) => !row.agrees);
  const far = rows.reduce((a, b) => ((b.apart / (b.allowed || 1)) > (a.apart / (a.allowed || 1)) ? b : a));
  if (wrong.length || !rows.length) {
    say("bad", "This model does not verify in this browser", `${wrong.length} of ${rows.length} comparisons differ `
      + `by more than the archive allows, as “${wrong[0]?.name}”. Its answers here would not be those that were proven, so this page does not predict.`);
    return;
  }
  say("good", "Verified in this browser", `All ${rows.length} comparisons agree: at most ${short(far.apart)} apart, where ${short(far.allowed)} is allowed.`);
  offer(ort, session);
}

main().catch((error) => say("bad", "This model does not run in this browser", `${error.message ?? error}. This page does not predict.`));
