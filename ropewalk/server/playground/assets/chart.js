/** The chart of latency against context length, as SVG and as a table. */

import { byId, drawn, duration, grouped, make } from "./dom.js";
import { difference, quantile } from "./quantiles.js";

const WIDTH = 420;
const HEIGHT = 220;
const LEFT = 52;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 34;
const CHARACTER = 7; // width of a digit in a label, at most
const MOST_OWN = 200; // requests of this page that are kept as dots
const WINDOW_MS = 60_000;

const own = []; // {context, first, token}, the oldest first
let snapshots = []; // {at, stats}, the oldest first, of the last minute and one before

/** Keeps one request of this page as a dot. */
export function noteOwn(context, first, token) {
  own.push({ context, first, token });
  own.splice(0, Math.max(0, own.length - MOST_OWN));
}

/** Keeps the server's counts of now. */
export function noteStats(stats, at = performance.now()) {
  snapshots.push({ at, stats });
  while (snapshots.length > 2 && snapshots[1].at <= at - WINDOW_MS) {
    snapshots.shift();
  }
}

/** Returns [{label, upper, p50, p95, count}] by context bucket, for a metric of /stats. */
export function rowsOf(newer, older, metric) {
  const now = newer[metric];
  const bounds = newer.context_bounds;
  return now.counts.map((counts, at) => {
    const then = older === null ? null : older[metric].counts[at];
    const seen = difference(counts, then);
    return {
      label: at < bounds.length ? grouped(bounds[at]) : `> ${grouped(bounds[bounds.length - 1])}`,
      upper: at < bounds.length ? bounds[at] : 2 * bounds[bounds.length - 1],
      p50: quantile(0.5, now.bounds, seen),
      p95: quantile(0.95, now.bounds, seen),
      count: seen[seen.length - 1],
    };
  });
}

/** Draws the chart and its table from what is kept. */
export function drawChart() {
  if (!snapshots.length) {
    return;
  }
  const isFirst = byId("chart-first").checked;
  const metric = isFirst ? "time_to_first_token_seconds" : "inter_token_latency_seconds";
  const newest = snapshots[snapshots.length - 1].stats;
  const oldest = byId("chart-minute").checked && snapshots.length > 1 ? snapshots[0].stats : null;
  const rows = rowsOf(newest, oldest, metric);
  const dots = own
    .map((each) => ({ context: each.context, seconds: isFirst ? each.first : each.token }))
    .filter((each) => each.seconds !== null);
  byId("chart").replaceChildren(...parts(rows, dots));
  const cells = rows.map((row) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, row.label),
      make("td", {}, duration(row.p50)),
      make("td", {}, duration(row.p95)),
      make("td", {}, grouped(row.count)),
    ),
  );
  byId("chart-rows").replaceChildren(...cells);
}

function parts(rows, dots) {
  const seconds = rows.flatMap((row) => [row.p50, row.p95]).concat(dots.map((dot) => dot.seconds));
  const there = seconds.filter((each) => each !== null && each > 0);
  const low = there.length ? Math.floor(Math.log10(Math.min(...there))) : -3;
  const high = there.length ? Math.ceil(Math.log10(Math.max(...there)) + 1e-9) : 0;
  const top = Math.max(high, low + 1);
  const lengths = rows.map((row) => row.upper);
  const last = rows.length - 1;
  // Half of the last label is right of its length.
  const width = WIDTH - LEFT - Math.max(RIGHT, Math.ceil((CHARACTER * rows[last].label.length) / 2));
  const [from, to] = [Math.log2(lengths[0]) - 1, Math.log2(lengths[lengths.length - 1])];
  const x = (tokens) =>
    LEFT +
    Math.max(4, ((Math.log2(Math.max(tokens, 1)) - from) / (to - from)) * width);
  const y = (value) =>
    TOP + ((top - Math.log10(value)) / (top - low)) * (HEIGHT - TOP - BOTTOM);
  const found = [];
  for (let power = low; power <= top; power += 1) {
    const at = y(10 ** power);
    found.push(drawn("line", { class: "grid", x1: LEFT, x2: LEFT + width, y1: at, y2: at }));
    found.push(drawn("text", { class: "axis", x: LEFT - 6, y: at + 4, "text-anchor": "end" }, duration(10 ** power)));
  }
  // Labels are as far apart as the longest needs.
  const longest = CHARACTER * Math.max(...rows.map((row) => row.label.length));
  const every = Math.ceil((1.5 * longest * rows.length) / width);
  rows.forEach((row, index) => {
    if ((last - index) % every === 0) {
      found.push(drawn("text", { class: "axis", x: x(row.upper), y: HEIGHT - 18, "text-anchor": "middle" }, row.label));
    }
  });
  found.push(drawn("text", { class: "axis", x: WIDTH / 2, y: HEIGHT - 3, "text-anchor": "middle" }, "context in tokens"));
  for (const name of ["p50", "p95"]) {
    const points = rows.filter((row) => row[name] !== null && row[name] > 0);
    const places = points.map((row) => `${x(row.upper)},${y(row[name])}`);
    found.push(drawn("polyline", { class: `line ${name}`, points: places.join(" ") }));
    for (const row of points) {
      const title = drawn("title", {}, `${name} up to ${row.label} tokens: ${duration(row[name])}`);
      found.push(drawn("circle", { class: `mark ${name}`, cx: x(row.upper), cy: y(row[name]), r: 4 }, title));
    }
  }
  for (const dot of dots) {
    const title = drawn("title", {}, `your request, ${grouped(dot.context)} tokens: ${duration(dot.seconds)}`);
    found.push(drawn("circle", { class: "mark own", cx: x(dot.context), cy: y(Math.max(dot.seconds, 10 ** low)), r: 3 }, title));
  }
  return found;
}
