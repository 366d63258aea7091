// Figures as the server hands them over, drawn by charts.js. Titles, captions, labels, units, colours, order and numbers
// all come from there, as the report has them: here is only how a browser shows them.

import { known, make, percent, percentTick, plain, plainTick, seconds, size, sizeTick } from "./base.js";
import { bars, columns, heatMap, lineChart, timeline } from "./charts.js";

const SHOW = { "%": percent, B: size, s: seconds, "": plain };
const TICK = { "%": percentTick, B: sizeTick, s: seconds, "": plainTick };

const series = (one) => ({
  name: one.label, slot: one.colour, dash: one.dash, shape: one.mark || null, step: one.step,
  points: one.x.map((x, i) => [x, one.y[i]]),
  band: one.low ? one.x.map((x, i) => [x, one.low[i], one.high[i]]) : null,
  rings: known(one.last) && one.x.length ? [[one.x.at(-1), one.last]] : [],
});

export const lines = (panel, label) => ({
  label, x: panel.x, whole: panel.x === "round", low: panel.low, high: panel.high, far: panel.same_scale ? null : panel.far, showY: SHOW[panel.unit], tickY: TICK[panel.unit],
  series: panel.series.map(series),
});

// Where the axis says "client", a name need not say so again.
const short = (panel, name) => (panel.x === "client" || panel.y === "client" ? name.replace(/^client[-_ ](?=\d)/, "") : name);

// A map; in its order, where similar rows stand together, unless one wants it `asIs`.
export function heat(panel, label, asIs = false) {
  const order = panel.order.length && !asIs ? panel.order : null;
  const sorted = (values) => (order ? order.map((i) => values[i]) : values);
  const rows = order || panel.rows.map((_, i) => i);
  return {
    label, x: panel.x, y: panel.y, max: panel.most, show: plain, slot: panel.colour, square: panel.order.length > 0, wide: !panel.order.length,
    rows: sorted(panel.rows).map((name) => short(panel, name)),
    cols: (panel.order.length ? sorted(panel.columns) : panel.columns).map((name) => short(panel, name)),
    values: panel.order.length ? sorted(panel.values).map(sorted) : panel.values,
    marked: (i) => panel.marked.includes(rows[i]),
  };
}

const PAINT = {
  Lines: (host, panel, label) => lineChart(host, lines(panel, label)),
  Heat: (host, panel, label) => heatMap(host, heat(panel, label)),
  Bars: (host, panel, label) => bars(host, { label, show: SHOW[panel.unit], items: panel.rows.map((row, i) => ({
    label: row, parts: panel.parts.map((part) => ({ name: part.label, value: part.values[i], slot: part.colour })) })) }),
  Columns: (host, panel, label) => columns(host, {
    label, x: panel.x, high: panel.high, show: SHOW[panel.unit], tickY: TICK[panel.unit],
    keys: panel.groups.map(([name, slot]) => ({ name, slot })),
    items: panel.values.map((value, i) => ({ label: panel.names[i], value, slot: panel.groups[panel.of[i]][1], note: panel.groups[panel.of[i]][0] })),
    lines: panel.lines.map((line) => ({ name: line.label, value: line.value, until: line.until })),
  }),
  Timeline: (host, panel, label) => timeline(host, {
    label, x: panel.x, last: panel.last, truth: panel.truth, rows: panel.rows.map((row, i) => ({ label: short(panel, row), marked: panel.marked.includes(i) })),
    marks: panel.events.map((one) => ({ row: one.row, x: one.round, kind: one.kind, reason: one.reason })),
    kinds: Object.fromEntries(Object.entries(panel.kinds).map(([kind, how]) => [kind, { name: how.words, shape: how.mark, slot: how.colour }])),
  }),
};

// All panels of a figure below each other, bars beside each other; returns what changes the first.
export function show(host, figure) {
  const title = (panel) => panel.title || (panel.kind === "Bars" ? panel.x : "");
  const places = figure.panels.map((panel) => make("div", {}, title(panel) ? make("h3", {}, title(panel)) : null, make("div")));
  host.replaceChildren(...places);
  host.classList.toggle("beside", figure.panels.every((panel) => panel.kind === "Bars"));
  return figure.panels.map((panel, i) => PAINT[panel.kind](places[i].lastElementChild, panel, figure.alt))[0];
}

// Below a figure: links to it as a drawing, as the report has it, and as a table of its numbers. `where` gives the path
// of each.
export function saveLinks(host, figure, where) {
  const link = (kind, words) => make("a", { class: "button small", href: where(kind), download: "", "aria-label": `save ${figure.title} as ${words}` }, words);
  const links = make("p", { class: "save" }, "save as ", link("svg", "SVG"), link("csv", "CSV"));
  host.parentElement.querySelector("p.save")?.remove();
  host.after(links);
}
