// What every page shares: making elements, asking the server, and writing numbers for people.
// Text from a run goes through textContent or attributes only, so that it can never become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const make = (name, attributes = {}, ...children) =>
  fill(document.createElement(name), attributes, children);

export const draw = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

export const byId = (id) => document.getElementById(id);

export const runPath = (id) => `/run/${encodeURIComponent(id)}`;
export const apiPath = (id, rest = "") => `/api/runs/${encodeURIComponent(id)}${rest}`;

export async function ask(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error || `the server answered ${answer.status}`);
  return body;
}

// Runs a loader and shows in words what went wrong, in the place where its content would have been.
export async function shown(host, load) {
  try {
    return await load();
  } catch (error) {
    host.replaceChildren(make("p", { class: "problem", role: "alert" }, error.message));
    return null;
  }
}

export const known = (value) => typeof value === "number" && Number.isFinite(value);

// A number and its unit stay on one line: the space between them does not break.
export const percent = (value) => (known(value) ? `${value.toFixed(2)}\u00a0%` : "–");
export const percentTick = (value) => `${plain(value)}\u00a0%`;
export const points = (value) => (known(value) ? `${value.toFixed(2)} points` : "–");

const powers = (value) => value.toExponential(3).replace(/\.?0+e/, "e");

export const plain = (value) =>
  !known(value) ? "–" : Math.abs(value) >= 1e9 ? powers(value) : Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));

// Along an axis, where there is room for eight characters.
export const plainTick = (value) => (known(value) && Math.abs(value) >= 1e6 ? powers(value) : plain(value));

// A value of a run's metric, and one with the metric's name where that does not go without saying.
export const scoreOf = (run) => (run.unit === "%" ? percent : plain);
export const spreadOf = (run) => (run.unit === "%" ? points : plain);
export const scored = (run, value) => `${scoreOf(run)(value)}${run.metric === "accuracy" || !known(value) ? "" : `\u00a0${run.metric}`}`;

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function size(count) {
  if (!known(count)) return "–";
  let unit = 0;
  for (; count >= 999.5 && unit < UNITS.length - 1; unit += 1) count /= 1000;
  return `${unit === 0 || count >= 100 ? count.toFixed(0) : count.toFixed(1)}\u00a0${UNITS[unit]}`;
}

// Along an axis that ends at `most`, which all its numbers share the unit of.
export function sizeTick(count, most) {
  let unit = 0;
  for (; most >= 999.5 && unit < UNITS.length - 1; unit += 1) [count, most] = [count / 1000, most / 1000];
  return `${plain(count)}\u00a0${UNITS[unit]}`;
}

// Always in seconds until minutes are shorter, so that two times can be held against each other.
export function seconds(value) {
  if (!known(value)) return "–";
  if (value < 100) return `${value === 0 ? "0" : value.toFixed(value < 0.1 ? 3 : value < 10 ? 2 : 1)}\u00a0s`;
  const whole = Math.round(value);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : `${minutes} min ${whole % 60} s`;
}

export function when(text) {
  const date = new Date(text);
  if (Number.isNaN(date.getTime())) return String(text ?? "–");
  return `${date.toISOString().slice(0, 10)} ${date.toISOString().slice(11, 16)}`;
}

// Any value of a configuration, in one line.
export function brief(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// How a run stands, and whether its numbers are to be believed.
export const standing = (run) => make("span", {}, badge(run.status), run.diverged ? make("small", { class: "diverged", title: run.diverged }, " diverged") : null);

// The wall clock; runs of older versions know the time of their rounds alone.
export const taken = (run) => (known(run.wall) || !known(run.seconds) ? seconds(run.wall) : `${seconds(run.seconds)} (rounds)`);

export const badge = (status) => make("span", { class: `badge ${String(status).replace(/[^a-z]/g, "")}` }, String(status));

// A command to type, and a button that copies it. Where a browser gives no clipboard (a page that came over plain HTTP from
// another machine), the command is marked, to be copied by hand.
export function command(words) {
  const code = make("code", { tabindex: "0" }, words);
  const done = make("span", { class: "unseen", role: "status" });
  const copy = async () => {
    const told = await navigator.clipboard?.writeText(words).then(() => "copied", () => null);
    if (!told) getSelection().selectAllChildren(code);
    button.textContent = told || "marked";
    done.textContent = told ? "The command is copied." : "The command is marked: copy it with Ctrl-C.";
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  };
  const button = make("button", { type: "button", class: "button small", "aria-label": `copy: ${words}`, onclick: copy }, "copy");
  return make("span", { class: "command" }, code, button, done);
}

// A table from head cells and rows of cells; numbers are right-aligned. A cell is text, a number's text, or a node.
export function table(caption, head, rows) {
  const numeric = head.map((cell) => typeof cell === "object" && cell.number);
  const names = head.map((cell) => (typeof cell === "object" ? cell.name : cell));
  return make(
    "table",
    {},
    make("caption", { class: "unseen" }, caption),
    make("thead", {}, make("tr", {}, names.map((name, i) => make("th", { scope: "col", class: numeric[i] ? "number" : null }, name)))),
    make("tbody", {}, rows.map((row) =>
      make("tr", {}, row.map((cell, i) => make("td", { class: numeric[i] ? "number" : null, "data-name": names[i] }, cell ?? "–"))))),
  );
}
