// What a page does beyond its HTML: plots and their marks, tables in order, the theme, and saying when
// the server does not answer.
"use strict";

const SPANS = { "": { seconds: 300, text: "the last five minutes" }, hour: { seconds: 3600, text: "the last hour" } };
const MOST_POINTS = 700;
const GAP_S = 4;
// Columns of a reading, in the order in which the server sends them.
const COLUMN = { rate: 1, errors: 2, refused: 3, p50: 4, p99: 5, batch: 6, queue: 7, busy: 8, memory: 9 };
const PLOTS = {
  rate: [["answers", "rate", "--plot-1"], ["errors", "errors", "--bad"], ["refused", "refused", "--warn"]],
  latency: [["p50", "p50", "--plot-1"], ["p99", "p99", "--plot-2"]],
  batch: [["rows", "batch", "--plot-1"]],
  queue: [["waiting", "queue", "--plot-1"]],
  busy: [["at work", "busy", "--plot-1"]],
  memory: [["workers", "memory", "--plot-1"]],
};

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const short = (value) => {
  if (value === null || value === undefined) return "–";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 1 ? 1 : 2;
  return String(Number(value.toFixed(digits)));
};

// -- points: a bounded list, whatever the time for which the page stays open -----------------------

let points = [];
let span = "";
let marks = [];

const take = (newest) => {
  const last = points.length ? points[points.length - 1][0] : 0;
  const fresh = newest.filter((each) => each[0] > last);
  if (!fresh.length) return false;
  const missed = last && fresh[0][0] - last > GAP_S;
  points = points.concat(fresh);
  const oldest = points[points.length - 1][0] - SPANS[span].seconds;
  points = points.filter((each) => each[0] >= oldest).slice(-MOST_POINTS);
  return missed ? "missed" : true;
};

const load = async (live) => {
  const place = live.dataset.points;
  live.dataset.span = span;
  try {
    const answer = await fetch(span ? `${place}?span=${span}` : place, { headers: { "HX-Request": "true" } });
    if (!answer.ok) return;
    const found = await answer.json();
    if (live.dataset.span !== span) return;
    const last = found.length ? found[found.length - 1][0] : 0;
    points = found.concat(points.filter((each) => each[0] > last)).slice(-MOST_POINTS);
    plots.forEach(draw);
  } catch {
    // The next update says that the server does not answer.
  }
};

// -- plots ------------------------------------------------------------------------------------------

const plots = [];

const make = (figure) => {
  const kind = figure.dataset.plot;
  const canvas = figure.querySelector(".canvas");
  const lines = PLOTS[kind];
  const axis = {
    stroke: color("--dim"),
    grid: { stroke: color("--line"), width: 1 },
    ticks: { stroke: color("--line"), width: 1, size: 4 },
    font: "11px system-ui, sans-serif",
  };
  const plot = new uPlot(
    {
      width: canvas.clientWidth || 300,
      height: 150,
      cursor: { y: false },
      hooks: { drawClear: [drawMarks] },
      legend: { live: false },
      scales: { x: { time: true, range: (_, first, last) => window_(first, last) }, y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] } },
      axes: [
        { ...axis, size: 26, space: (_, __, first, last) => (last - first > 120 ? 38 : 62), values: (_, ticks) => ticks.map((at) => clock(at)) },
        { ...axis, size: 48, values: (_, ticks) => ticks.map(short) },
      ],
      series: [
        {},
        ...lines.map(([label, , line]) => ({
          label,
          stroke: color(line),
          width: 1.5,
          spanGaps: false,
          points: { show: false },
        })),
      ],
    },
    [[], ...lines.map(() => [])],
    canvas,
  );
  return { figure, canvas, kind, lines, plot };
};

// A line where something has happened, a band where it went on; the list of events says what it was.
const drawMarks = (plot) => {
  const { ctx, bbox } = plot;
  const first = plot.scales.x.min;
  ctx.save();
  ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.lineWidth = devicePixelRatio;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  let free = bbox.left;
  for (const [at, until, level, kind] of marks.slice().reverse()) {
    if ((until || at) < first || at > plot.scales.x.max) continue;
    const x = Math.max(bbox.left, plot.valToPos(at, "x", true));
    ctx.strokeStyle = ctx.fillStyle = color(`--${level}`);
    if (until) {
      ctx.globalAlpha = 0.12;
      ctx.fillRect(x, bbox.top, Math.max(1, plot.valToPos(until, "x", true) - x), bbox.height);
      ctx.globalAlpha = 1;
    }
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const width = ctx.measureText(kind).width;
    const left = Math.min(x + 3 * devicePixelRatio, bbox.left + bbox.width - width);
    if (left >= free) {
      ctx.fillText(kind, left, bbox.top + 10 * devicePixelRatio);
      free = left + width + 6 * devicePixelRatio;
    }
  }
  ctx.restore();
};

const readMarks = () => {
  const events = document.querySelector("[data-marks]");
  const found = events ? events.dataset.marks : "[]";
  if (found === readMarks.last) return false;
  readMarks.last = found;
  marks = JSON.parse(found);
  return true;
};

// A plot begins with its first point and is a minute wide at least.
const window_ = (first, last) => {
  const end = last || Date.now() / 1000;
  return [Math.min(first || end, end - 60), end];
};

const clock = (at) => new Date(at * 1000).toTimeString().slice(0, at % 60 ? 8 : 5);

const draw = ({ figure, canvas, lines, plot }) => {
  const columns = lines.map(([, column]) => points.map((each) => each[COLUMN[column]]));
  plot.setData([points.map((each) => each[0]), ...columns]);
  const said = lines.map(([label], at) => {
    const known = columns[at].filter((value) => value !== null);
    if (!known.length) return `${label}: none yet`;
    const most = known.reduce((a, b) => Math.max(a, b), 0);
    return `${label}: ${short(known[known.length - 1])} now, at most ${short(most)}`;
  });
  const title = figure.querySelector("figcaption").textContent.trim().replace(/\s+/g, " ");
  canvas.setAttribute("aria-label", `${title}, ${SPANS[span].text}. ${said.join("; ")}`);
};

const makeAll = () => {
  for (const { plot } of plots) plot.destroy();
  plots.length = 0;
  for (const figure of document.querySelectorAll("[data-plot]")) plots.push(make(figure));
  plots.forEach(draw);
};

const fit = () => {
  for (const { canvas, plot } of plots) {
    if (canvas.clientWidth && canvas.clientWidth !== plot.width) {
      plot.setSize({ width: canvas.clientWidth, height: 150 });
    }
  }
};

// -- tables: the order and the search of whoever looks, whatever an update brings -------------------

const orders = {};

const valueOf = (row, column) => {
  const cell = row.cells[column];
  return cell ? (cell.dataset.value ?? cell.textContent.trim()) : "";
};

const compare = (a, b) => {
  const numbers = [Number(a), Number(b)];
  if (a !== "" && b !== "" && numbers.every(Number.isFinite)) return numbers[0] - numbers[1];
  return a.localeCompare(b, "en", { numeric: true });
};

const arrange = (table) => {
  const [body] = table.tBodies;
  const order = orders[table.id];
  if (order) {
    const rows = [...body.rows];
    const sorted = rows.slice().sort((a, b) => order.way * compare(valueOf(a, order.column), valueOf(b, order.column)));
    if (sorted.some((row, at) => row !== rows[at])) body.append(...sorted);
  }
  const field = document.querySelector(`[data-finds="${table.id}"]`);
  const wanted = field ? field.value.trim().toLowerCase() : "";
  for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
};

const arrangeAll = () => document.querySelectorAll("table[data-sorts]").forEach(arrange);

const makeSorts = (table) => {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const before = orders[table.id];
      const isNumber = head.classList.contains("n");
      const way = before && before.column === column ? -before.way : isNumber ? -1 : 1;
      orders[table.id] = { column, way };
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      arrange(table);
    });
  });
};

// -- the theme --------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

const theme = () => document.documentElement.dataset.theme || "system";

const choose = (name) => {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  try {
    if (name === "system") localStorage.removeItem("modelyard-theme");
    else localStorage.setItem("modelyard-theme", name);
  } catch {
    // It lasts for this page.
  }
  showTheme();
  if (plots.length) makeAll();
};

const showTheme = () => {
  for (const each of document.querySelectorAll("[data-theme-name]")) each.textContent = theme();
};

// -- the page ---------------------------------------------------------------------------------------

const lost = (isLost) => {
  document.body.classList.toggle("is-lost", isLost);
  const notice = document.querySelector("[data-lost]");
  if (!notice || notice.hidden !== isLost) return;
  notice.querySelector("[data-lost-since]").textContent = new Date().toTimeString().slice(0, 8);
  notice.hidden = !isLost;
};

document.addEventListener("DOMContentLoaded", () => {
  for (const button of document.querySelectorAll("[data-theme-toggle]")) {
    button.hidden = false;
    button.addEventListener("click", () =>
      choose(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]),
    );
  }
  showTheme();
  document.querySelectorAll("table[data-sorts]").forEach(makeSorts);
  for (const field of document.querySelectorAll("[data-finds]")) {
    field.addEventListener("input", arrangeAll);
  }
  const live = document.querySelector("[data-points]");
  if (live) {
    readMarks();
    makeAll();
    for (const button of live.querySelectorAll("[data-span]")) {
      button.addEventListener("click", () => {
        span = button.dataset.span;
        for (const each of live.querySelectorAll("[data-span]")) {
          each.setAttribute("aria-pressed", String(each === button));
        }
        points = [];
        load(live);
      });
    }
    load(live);
    new ResizeObserver(fit).observe(document.querySelector("main"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", makeAll);
  }
  // What takes a while says so, and is not sent twice.
  for (const form of document.querySelectorAll("form[data-busy]")) {
    form.addEventListener("submit", () => {
      form.setAttribute("aria-busy", "true");
      for (const button of form.querySelectorAll("button")) {
        button.disabled = true;
        button.textContent = "…";
      }
      const said = document.createElement("p");
      said.className = "hint";
      said.setAttribute("role", "status");
      said.textContent = `${form.dataset.busy} …`;
      form.append(said);
    });
  }
});

document.addEventListener("htmx:after:swap", () => {
  lost(false);
  arrangeAll();
  const isMarked = readMarks();
  const live = document.querySelector("[data-points]");
  const newest = live && live.querySelector("[data-newest]");
  if (!newest) return;
  const taken = take(JSON.parse(newest.dataset.newest));
  if (taken || isMarked) plots.forEach(draw);
  if (taken === "missed") load(live);
});
document.addEventListener("htmx:error", () => lost(true));
document.addEventListener("htmx:response:error", () => lost(true));
