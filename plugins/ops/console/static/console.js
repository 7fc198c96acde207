// What a page does beyond its HTML: plots, the theme, and saying when the server does not answer.
"use strict";

const WINDOW_S = 300;
const MOST_POINTS = 600;
const GAP_S = 4;
// Columns of a reading, in the order in which the server sends them.
const COLUMN = { rate: 1, errors: 2, refused: 3, p50: 4, p99: 5, batch: 6, queue: 7, busy: 8 };
const PLOTS = {
  rate: [["answers", "rate", "--plot-1"], ["errors", "errors", "--bad"], ["refused", "refused", "--warn"]],
  latency: [["p50", "p50", "--plot-1"], ["p99", "p99", "--plot-2"]],
  batch: [["rows", "batch", "--plot-1"]],
  queue: [["waiting", "queue", "--plot-1"]],
  busy: [["at work", "busy", "--plot-1"]],
};

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const short = (value) => {
  if (value === null || value === undefined) return "–";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 1 ? 1 : 2;
  return String(Number(value.toFixed(digits)));
};

// -- points: a bounded list, whatever the time for which the page stays open -----------------------

let points = [];

const take = (newest) => {
  const last = points.length ? points[points.length - 1][0] : 0;
  const fresh = newest.filter((each) => each[0] > last);
  if (!fresh.length) return false;
  const missed = last && fresh[0][0] - last > GAP_S;
  points = points.concat(fresh);
  const oldest = points[points.length - 1][0] - WINDOW_S;
  points = points.filter((each) => each[0] >= oldest).slice(-MOST_POINTS);
  return missed ? "missed" : true;
};

const load = async (place) => {
  try {
    const answer = await fetch(place, { headers: { "HX-Request": "true" } });
    if (!answer.ok) return;
    const found = await answer.json();
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

// A plot begins with its first point and is a minute wide at least, five at most.
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
  canvas.setAttribute("aria-label", `${title}, the last five minutes. ${said.join("; ")}`);
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
  const live = document.querySelector("[data-points]");
  if (live) {
    makeAll();
    load(live.dataset.points);
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
  const live = document.querySelector("[data-points]");
  const newest = live && live.querySelector("[data-newest]");
  if (!newest) return;
  const taken = take(JSON.parse(newest.dataset.newest));
  if (taken) plots.forEach(draw);
  if (taken === "missed") load(live.dataset.points);
});
document.addEventListener("htmx:error", () => lost(true));
document.addEventListener("htmx:response:error", () => lost(true));
