// Charts as inline SVG: lines with bands and dots, heat maps, bars, columns, timelines.
// Each redraws itself when its width changes, answers to the mouse and to the arrow keys, and says what it shows in
// a line of text below, which screen readers announce.

import { draw, known, make, plain } from "./base.js";

const GAP = { left: 62, right: 14, top: 10, bottom: 36 };
const LEVELS = 16; // of a map's colours, in /palette.css

// A chart in `host`: `paint(width)` returns an SVG element and, if there is anything to point at, `point` and `step`.
function chart(host, label, paint) {
  const frame = make("div", { class: "chart" });
  const readout = make("p", { class: "readout", role: "status" });
  host.replaceChildren(frame, readout);
  let drawn = null;
  let width = 0;
  const say = (text) => { readout.textContent = text || drawn?.hint || ""; };
  const repaint = () => {
    width = Math.max(260, frame.clientWidth || 560);
    const focused = frame.contains(document.activeElement);
    drawn = paint(width);
    drawn.svg.setAttribute("role", "img");
    drawn.svg.setAttribute("aria-label", label());
    if (drawn.step) drawn.svg.setAttribute("tabindex", "0");
    frame.replaceChildren(drawn.svg);
    if (focused && drawn.step) drawn.svg.focus();
    say("");
    drawn.svg.addEventListener("pointermove", (event) => {
      const box = drawn.svg.getBoundingClientRect();
      if (drawn.point) say(drawn.point(event.clientX - box.left, event.clientY - box.top));
    });
    drawn.svg.addEventListener("pointerleave", () => { drawn.clear?.(); say(""); });
    drawn.svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!move || !drawn.step) return;
      event.preventDefault();
      say(drawn.step(...move));
    });
  };
  new ResizeObserver(() => { if (Math.abs((frame.clientWidth || width) - width) > 2) repaint(); }).observe(frame);
  repaint();
  return repaint;
}

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((m) => m * power >= raw) || 10);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// Powers of ten, as many as there is room for.
function powersOfTen(low, high, count) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const step = Math.max(1, Math.ceil((last - first) / count));
  return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, i) => 10 ** (first + i * step));
}

function nearest(sorted, value) {
  let best = 0;
  for (let i = 1; i < sorted.length; i += 1) if (Math.abs(sorted[i] - value) < Math.abs(sorted[best] - value)) best = i;
  return best;
}

function extent(values, fallback) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) if (known(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return low <= high ? [low, high] : fallback;
}

function axes(svg, at, spec, width, height, xs, ys) {
  const right = width - GAP.right;
  const bottom = height - GAP.bottom;
  for (const y of ys) {
    svg.append(draw("line", { class: "grid", x1: GAP.left, x2: right, y1: at.y(y), y2: at.y(y) }));
    svg.append(draw("text", { class: "tick", x: GAP.left - 8, y: at.y(y) + 4, "text-anchor": "end" }, (spec.tickY || spec.showY || plain)(y, ys.at(-1))));
  }
  for (const x of xs) {
    svg.append(draw("text", { class: "tick", x: at.x(x), y: bottom + 16, "text-anchor": "middle" }, (spec.showX || plain)(x)));
  }
  svg.append(draw("line", { class: "axis", x1: GAP.left, x2: right, y1: bottom, y2: bottom }));
  svg.append(draw("text", { class: "axis-name", x: (GAP.left + right) / 2, y: height - 4, "text-anchor": "middle" }, spec.x));
}

const SHAPES = {
  dot: (x, y) => `M${x - 2.6} ${y}a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0 -5.2 0`,
  ring: (x, y) => `M${x - 3.2} ${y}a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0`,
  cross: (x, y) => `M${x - 3.5} ${y - 3.5}l7 7m-7 0l7 -7`,
  triangle: (x, y) => `M${x} ${y - 4}l4 7h-8z`,
  square: (x, y) => `M${x - 4} ${y - 4}h8v8h-8z`,
};
const HOLLOW = new Set(["ring", "cross", "square"]);

export function mark(shape, slot, filled = false) {
  const path = draw("path", { class: `${HOLLOW.has(shape) && !filled ? "stroke" : "solid"} s${slot}`, d: SHAPES[shape](8, 8) });
  return draw("svg", { class: "swatch", width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" }, path);
}

const sample = (one) =>
  one.shape
    ? mark(one.shape, one.slot)
    : draw("svg", { class: "swatch", width: 22, height: 16, viewBox: "0 0 22 16", "aria-hidden": "true" },
        draw("line", { class: `line s${one.slot} d${one.dash || 0}`, x1: 1, x2: 21, y1: 8, y2: 8 }));

// Two lines of which the later would hide the earlier.
const sameLine = (one, other) => !one.shape && !other.shape && one.points.length > 0 && one.points.length === other.points.length
  && one.points.every((p, i) => p[0] === other.points[i][0] && p[1] === other.points[i][1]);

// series: {name, slot and dash (places in the palette), points [[x, y]], band [[x, low, high]], rings [[x, y]], shape (dots instead of a line), step}
// `far`: a logarithmic scale where the largest value is more than so many times the smallest
export function lineChart(host, first) {
  let spec = first;
  const off = new Set();
  let at = null;
  const legend = make("ul", { class: "legend" });
  const body = make("div");
  host.replaceChildren(legend, body);
  const drawLegend = () => legend.replaceChildren(...spec.series.map((one) =>
    make("li", {}, make("button", {
      type: "button", "aria-pressed": String(!off.has(one.name)),
      onclick: (event) => {
        if (off.has(one.name)) off.delete(one.name); else off.add(one.name);
        event.currentTarget.setAttribute("aria-pressed", String(!off.has(one.name)));
        repaint();
      },
    }, sample(one), one.name))));
  const shownSeries = () => spec.series.filter((one) => !off.has(one.name));
  const label = () => `${spec.label}. ${spec.series.map((one) => {
    const last = one.points.filter((p) => known(p[1])).at(-1);
    return last && !one.shape ? `${one.name}: ${(spec.showY || plain)(last[1])} at ${spec.x} ${(spec.showX || plain)(last[0])}` : one.name;
  }).join("; ")}`;
  const repaint = chart(body, label, (width) => {
    const height = spec.height || 250;
    const series = shownSeries();
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    const all = series.flatMap((one) => [...one.points, ...(one.rings || [])].filter((p) => known(p[0])));
    const [x0, x1] = extent(all.map((p) => p[0]), [0, 1]);
    const [low, high] = extent([...all.map((p) => p[1]), ...series.flatMap((one) => (one.band || []).flatMap((b) => [b[1], b[2]]))], [0, 1]);
    const [least, most] = extent(all.map((p) => p[1]), [0, 0]);
    const log = known(spec.far) && least > 0 && most > spec.far * least;
    const y0 = log ? least / 1.3 : spec.low ?? Math.min(low, low - 0.05 * (high - low));
    const y1 = log ? Math.max(most, high) * 1.3 : spec.high ?? (high > y0 ? high + 0.05 * (high - y0) : y0 + 1);
    const along = log ? Math.log10 : (v) => v;
    const [left, right, bottom] = [GAP.left, width - GAP.right, height - GAP.bottom];
    const scale = {
      x: (v) => left + ((v - x0) / (x1 - x0 || 1)) * (right - left) + (x1 === x0 ? (right - left) / 2 : 0),
      y: (v) => bottom - ((along(Math.min(Math.max(v, y0), y1)) - along(y0)) / (along(y1) - along(y0))) * (bottom - GAP.top),
    };
    axes(svg, scale, spec, width, height, ticks(x0, x1, width / 90).filter((t) => !spec.whole || Number.isInteger(t)), log ? powersOfTen(y0, y1, 5) : ticks(y0, y1, 5));
    for (const one of series) {
      const band = (one.band || []).filter((b) => known(b[1]) && known(b[2]));
      if (band.length > 1) {
        const there = band.map((b) => `${scale.x(b[0])} ${scale.y(b[2])}`);
        const back = band.toReversed().map((b) => `${scale.x(b[0])} ${scale.y(b[1])}`);
        svg.append(draw("path", { class: `band s${one.slot}`, d: `M${there.join("L")}L${back.join("L")}Z` }));
      }
    }
    for (const one of series) {
      const points = one.points.filter((p) => known(p[0]) && known(p[1]));
      const rings = (one.rings || []).filter((p) => known(p[0]) && known(p[1])).map((p) => SHAPES.ring(scale.x(p[0]), scale.y(p[1])));
      if (rings.length) svg.append(draw("path", { class: `stroke s${one.slot}`, d: rings.join("") }));
      if (one.shape) {
        const d = points.map((p) => SHAPES[one.shape](scale.x(p[0]), scale.y(p[1]))).join("");
        svg.append(draw("path", { class: `${HOLLOW.has(one.shape) ? "stroke" : "solid"} s${one.slot}`, d }));
      } else if (points.length) {
        const corners = one.step ? points.flatMap((p, i) => [-1, 1].map((side) => [points[i + side] ? (p[0] + points[i + side][0]) / 2 : p[0], p[1]])) : points;
        const d = `M${corners.map((p) => `${scale.x(p[0]).toFixed(1)} ${scale.y(p[1]).toFixed(1)}`).join("L")}`;
        const covered = series.slice(series.indexOf(one) + 1).some((other) => sameLine(one, other));
        svg.append(draw("path", { class: `line s${one.slot} ${covered ? "under" : `d${one.dash || 0}`}`, d }));
        if (points.length === 1) svg.append(draw("path", { class: `solid s${one.slot}`, d: SHAPES.dot(scale.x(points[0][0]), scale.y(points[0][1])) }));
      }
    }
    if (!all.length) svg.append(draw("text", { class: "nothing", x: (left + right) / 2, y: height / 2, "text-anchor": "middle" }, spec.empty || "nothing yet"));
    const xs = [...new Set(all.map((p) => p[0]))].sort((a, b) => a - b);
    const hair = draw("line", { class: "hair", y1: GAP.top, y2: bottom, visibility: "hidden" });
    svg.append(hair);
    const tell = (index) => {
      at = index;
      const x = xs[index];
      hair.setAttribute("x1", scale.x(x));
      hair.setAttribute("x2", scale.x(x));
      hair.setAttribute("visibility", "visible");
      const parts = series.flatMap((one) => {
        const here = one.points.filter((p) => p[0] === x && known(p[1])).map((p) => p[1]);
        if (!here.length) return [];
        const show = spec.showY || plain;
        const tuned = (one.rings || []).filter((p) => p[0] === x && known(p[1])).map((p) => `, then ${show(p[1])}`).join("");
        if (here.length === 1) return [`${one.name} ${show(here[0])}${tuned}`];
        return [`${one.name} ${show(Math.min(...here))} to ${show(Math.max(...here))} (${here.length})`];
      });
      return `${spec.x} ${(spec.showX || plain)(x)}: ${parts.join(" · ")}`;
    };
    const alike = series.flatMap((one, i) => series.slice(i + 1).filter((other) => sameLine(one, other)).map((other) => `${one.name} and ${other.name} are equal throughout`));
    return {
      svg, hint: alike.slice(0, 3).join("; "),
      point: (px) => (xs.length ? tell(nearest(xs.map(scale.x), px)) : ""),
      step: (dx) => (xs.length ? tell(Math.min(xs.length - 1, Math.max(0, (at ?? (dx > 0 ? -1 : xs.length)) + dx))) : ""),
      clear: () => hair.setAttribute("visibility", "hidden"),
    };
  });
  drawLegend();
  return (next) => { spec = next; drawLegend(); repaint(); };
}

// values [[...]] over rows x cols; null is left blank. `marked(row)` puts a mark beside a row's name. With a `slot` all
// that is there has its colour, and there is no scale.
export function heatMap(host, first) {
  let spec = first;
  let cell = null;
  const repaint = chart(host, () => spec.label, (width) => {
    const [rows, cols] = [spec.rows.length, spec.cols.length];
    const flags = spec.marked && spec.rows.some((_, i) => spec.marked(i)) ? 16 : 0;
    const left = Math.min(150, 16 + flags + 7.5 * Math.max(1, ...spec.rows.map((name) => Math.min(18, name.length))));
    const top = (spec.show || plain)(spec.max);
    const aside = 38 + 7.5 * top.length; // the scale and its label
    const side = Math.max(0.5, Math.min(spec.wide ? 110 : 34, (width - left - aside) / Math.max(1, cols)));
    const tall = Math.max(2, Math.min(22, Math.max(7, 560 / Math.max(1, rows))));
    const [w, h] = spec.square ? [side, side] : [side, tall];
    const height = Math.max(80, rows * h + 46);
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    const paths = Array.from({ length: LEVELS + 1 }, () => []);
    spec.values.forEach((line, i) => line.forEach((value, j) => {
      if (!known(value) || i >= rows || j >= cols) return;
      const level = value <= 0 || !(spec.max > 0) ? 0 : Math.min(LEVELS, Math.max(1, Math.ceil((value / spec.max) * LEVELS)));
      paths[level].push(`M${(left + j * w).toFixed(2)} ${(i * h).toFixed(2)}h${w.toFixed(2)}v${h.toFixed(2)}h${(-w).toFixed(2)}z`);
    }));
    const scaled = spec.slot === null || spec.slot === undefined;
    paths.forEach((d, level) => { if (d.length) svg.append(draw("path", { class: `heat ${scaled ? `h${level}` : `fill s${spec.slot}`}${w > 6 && h > 6 ? " apart" : ""}`, d: d.join("") })); });
    const everyRow = Math.ceil(12 / h);
    spec.rows.forEach((name, i) => {
      const marked = spec.marked?.(i);
      if (i % everyRow && !marked) return;
      if (marked && h < 9 && i % everyRow) { svg.append(draw("rect", { class: "solid s2", x: left - 5, y: i * h, width: 3, height: h })); return; }
      svg.append(draw("text", { class: marked ? "tick marked" : "tick", x: left - 8, y: i * h + h / 2 + 4, "text-anchor": "end" },
        (marked ? "⚑ " : "") + (name.length > 18 ? `${name.slice(0, 17)}…` : name)));
    });
    const widest = Math.max(1, ...spec.cols.map((name) => name.length));
    const everyCol = Math.max(1, Math.ceil((6.6 * Math.min(10, widest) + 6) / w));
    spec.cols.forEach((name, j) => {
      if (j % everyCol) return;
      svg.append(draw("text", { class: "tick", x: left + j * w + w / 2, y: rows * h + 16, "text-anchor": "middle" }, name.length > 10 ? `${name.slice(0, 9)}…` : name));
    });
    svg.append(draw("text", { class: "axis-name", x: left + (cols * w) / 2, y: rows * h + 36, "text-anchor": "middle" }, spec.x));
    if (scaled) {
      const bar = left + cols * w + 18;
      const part = Math.min(rows * h, 130) / (LEVELS + 1);
      for (let level = 0; level <= LEVELS; level += 1) {
        svg.append(draw("rect", { class: `heat h${level}`, x: bar, y: (LEVELS - level) * part, width: 10, height: part + 0.5 }));
      }
      svg.append(draw("text", { class: "tick", x: bar + 14, y: 9 }, top));
      svg.append(draw("text", { class: "tick", x: bar + 14, y: Math.max(20, (LEVELS + 1) * part) }, "0"));
    }
    const cursor = draw("rect", { class: "cursor", width: w, height: h, visibility: "hidden" });
    svg.append(cursor);
    const tell = (i, j) => {
      if (i < 0 || j < 0 || i >= rows || j >= cols) { cursor.setAttribute("visibility", "hidden"); return ""; }
      cell = [i, j];
      cursor.setAttribute("x", left + j * w);
      cursor.setAttribute("y", i * h);
      cursor.setAttribute("visibility", "visible");
      const value = spec.values[i]?.[j];
      return `${spec.y} ${spec.rows[i]}, ${spec.x} ${spec.cols[j]}: ${known(value) ? (spec.show || plain)(value) : "–"}`;
    };
    return {
      svg,
      point: (px, py) => tell(Math.floor(py / h), Math.floor((px - left) / w)),
      step: (dx, dy) => {
        const [i, j] = cell || [-Math.min(0, dy), -Math.min(0, dx)];
        const inside = (value, top) => Math.min(top - 1, Math.max(0, value));
        return cell ? tell(inside(i + dy, rows), inside(j + dx, cols)) : tell(0, 0);
      },
      clear: () => cursor.setAttribute("visibility", "hidden"),
    };
  });
  return (next) => { spec = next; repaint(); };
}

// items [{label, parts: [{name, value, slot}]}]: one horizontal bar each, its parts side by side
export function bars(host, spec) {
  const names = [...new Map(spec.items.flatMap((item) => item.parts.map((part) => [part.name, part]))).values()];
  const body = make("div");
  const legend = make("ul", { class: "legend" }, names.length > 1
    ? names.map((part) => make("li", {}, mark("square", part.slot, true), part.name)) : []);
  host.replaceChildren(legend, body);
  const total = (item) => item.parts.reduce((sum, part) => sum + (part.value || 0), 0);
  const told = (item) => `${item.label}: ${item.parts.map((part) => `${part.name} ${(spec.show || plain)(part.value)}`).join(" · ")}`;
  let at = -1;
  chart(body, () => spec.label, (width) => {
    const row = 26;
    const left = Math.min(150, 16 + 7 * Math.max(1, ...spec.items.map((item) => Math.min(18, item.label.length))));
    const height = spec.items.length * row + 6;
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    const most = Math.max(...spec.items.map(total), 1e-12);
    spec.items.forEach((item, i) => {
      let x = left;
      svg.append(draw("text", { class: "tick", x: left - 8, y: i * row + 17, "text-anchor": "end" }, item.label.length > 18 ? `${item.label.slice(0, 17)}…` : item.label));
      for (const part of item.parts) {
        const long = ((part.value || 0) / most) * (width - left - 92);
        svg.append(draw("rect", { class: `fill s${part.slot}`, x, y: i * row + 5, width: Math.max(part.value ? 1 : 0, long), height: row - 10, rx: 2 }));
        x += long;
      }
      svg.append(draw("text", { class: "tick", x: x + 6, y: i * row + 17 }, (spec.show || plain)(total(item))));
    });
    const tell = (i) => { at = i; return spec.items[i] ? told(spec.items[i]) : ""; };
    return {
      svg,
      point: (px, py) => tell(Math.floor(py / row)),
      step: (dx, dy) => tell(Math.min(spec.items.length - 1, Math.max(0, at + dx + dy))),
    };
  });
}

// items [{label, value, slot}]: many thin columns, in the order given; lines [{name, value, until}] across them, or across
// the first `until` of them
export function columns(host, spec) {
  const show = spec.show || plain;
  const body = make("div");
  host.replaceChildren(make("ul", { class: "legend" }, spec.lines.filter((line) => known(line.value)).map((line, i) =>
    make("li", {}, draw("svg", { class: "swatch", width: 22, height: 16, viewBox: "0 0 22 16", "aria-hidden": "true" },
      draw("line", { class: `across d${1 + (i % 3)}`, x1: 1, x2: 21, y1: 8, y2: 8 })), `${line.name} ${show(line.value)}`)),
  spec.keys.map((key) => make("li", {}, mark("square", key.slot, true), key.name))), body);
  let at = -1;
  const told = (item) => `${item.label}: ${show(item.value)}${item.note ? ` (${item.note})` : ""}`;
  chart(body, () => spec.label, (width) => {
    const height = 250;
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    const [left, right, bottom] = [GAP.left, width - GAP.right, height - GAP.bottom];
    const wide = (right - left) / Math.max(1, spec.items.length);
    const [least, most] = extent(spec.items.map((item) => item.value), [0, 1]);
    const y0 = Math.min(0, least);
    const y1 = spec.high ?? (Math.max(0, most) > y0 ? Math.max(0, most) + 0.05 * (most - y0) : y0 + 1);
    const scale = { x: (i) => left + i * wide, y: (v) => bottom - ((v - y0) / (y1 - y0)) * (bottom - GAP.top) };
    axes(svg, scale, spec, width, height, [], ticks(y0, y1, 5));
    spec.items.forEach((item, i) => {
      if (!known(item.value)) return;
      svg.append(draw("rect", { class: `fill s${item.slot}`, x: scale.x(i) + Math.min(1, wide * 0.1), y: scale.y(Math.max(0, item.value)),
        width: Math.max(0.5, wide - Math.min(2, wide * 0.2)), height: Math.max(1, Math.abs(scale.y(0) - scale.y(item.value))) }));
    });
    spec.lines.filter((line) => known(line.value)).forEach((line, i) => svg.append(draw("line", {
      class: `across d${1 + (i % 3)}`, x1: left, x2: scale.x(line.until), y1: scale.y(line.value), y2: scale.y(line.value) })));
    const tell = (i) => { at = i; return spec.items[i] ? told(spec.items[i]) : ""; };
    return {
      svg,
      point: (px) => tell(Math.floor((px - left) / wide)),
      step: (dx) => tell(Math.min(spec.items.length - 1, Math.max(0, at + dx))),
    };
  });
}

// rows [{label, marked}], marks [{row, x, kind}], kinds {kind: {name, shape, slot}}; x from 1 to `last`
export function timeline(host, spec) {
  const used = Object.keys(spec.kinds).filter((kind) => spec.marks.some((one) => one.kind === kind));
  const body = make("div");
  host.replaceChildren(make("ul", { class: "legend" },
    used.map((kind) => make("li", {}, mark(spec.kinds[kind].shape, spec.kinds[kind].slot), spec.kinds[kind].name)),
    spec.rows.some((row) => row.marked) ? make("li", {}, make("span", { class: "swatch truth" }), `⚑ ${spec.truth}`) : null), body);
  let cell = null;
  chart(body, () => spec.label, (width) => {
    const h = spec.rows.length > 40 ? 13 : 18;
    const left = Math.min(150, 30 + 7 * Math.max(1, ...spec.rows.map((row) => Math.min(16, row.label.length))));
    const height = spec.rows.length * h + 40;
    const [right, bottom] = [width - GAP.right, spec.rows.length * h];
    const x = (round) => left + ((round - 0.5) / Math.max(1, spec.last)) * (right - left);
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    spec.rows.forEach((row, i) => {
      svg.append(draw("rect", { class: row.marked ? "truth" : i % 2 ? "stripe" : "bare", x: left, y: i * h, width: right - left, height: h }));
      svg.append(draw("text", { class: row.marked ? "tick marked" : "tick", x: left - 8, y: i * h + h / 2 + 4, "text-anchor": "end" },
        (row.marked ? "⚑ " : "") + (row.label.length > 16 ? `${row.label.slice(0, 15)}…` : row.label)));
    });
    for (const kind of used) {
      const d = spec.marks.filter((one) => one.kind === kind).map((one) => SHAPES[spec.kinds[kind].shape](x(one.x), one.row * h + h / 2)).join("");
      svg.append(draw("path", { class: `${HOLLOW.has(spec.kinds[kind].shape) ? "stroke" : "solid"} s${spec.kinds[kind].slot}`, d }));
    }
    for (const tick of ticks(1, spec.last, width / 90).filter(Number.isInteger)) {
      svg.append(draw("text", { class: "tick", x: x(tick), y: bottom + 16, "text-anchor": "middle" }, plain(tick)));
    }
    svg.append(draw("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    svg.append(draw("text", { class: "axis-name", x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, spec.x));
    const cursor = draw("rect", { class: "cursor", width: Math.max(4, (right - left) / Math.max(1, spec.last)), height: h, visibility: "hidden" });
    svg.append(cursor);
    const tell = (i, round) => {
      if (i < 0 || i >= spec.rows.length || round < 1 || round > spec.last) { cursor.setAttribute("visibility", "hidden"); return ""; }
      cell = [i, round];
      cursor.setAttribute("x", x(round - 0.5) );
      cursor.setAttribute("y", i * h);
      cursor.setAttribute("visibility", "visible");
      const here = spec.marks.filter((one) => one.row === i && one.x === round);
      const what = here.map((one) => `${spec.kinds[one.kind].name}${one.reason ? ` (${one.reason})` : ""}`);
      return `${spec.rows[i].label}${spec.rows[i].marked ? `, ${spec.truth}` : ""}, round ${round}: ${what.join(", ") || "nothing"}`;
    };
    const round = (px) => Math.floor(((px - left) / (right - left)) * spec.last) + 1;
    return {
      svg,
      point: (px, py) => tell(Math.floor(py / h), round(px)),
      step: (dx, dy) => (cell ? tell(Math.min(spec.rows.length - 1, Math.max(0, cell[0] + dy)), Math.min(spec.last, Math.max(1, cell[1] + dx))) : tell(0, 1)),
      clear: () => cursor.setAttribute("visibility", "hidden"),
    };
  });
}
