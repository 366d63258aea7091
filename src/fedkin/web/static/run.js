// One run: live curves while it goes on, then who got what, from whom, and at what price.

import { apiPath, ask, badge, brief, byId, command, known, make, plain, runPath, scoreOf, seconds, shown, size, spreadOf, table, when } from "./base.js";
import { heat, lines, saveLinks, show } from "./figures.js";

const id = byId("content").dataset.run;
const rows = new Map(); // "round.final" -> one record
let page = null;
const curves = new Map(); // a figure that grows with the run -> what draws it anew
let figuresDrawn = 0;

const everybody = () => (page.malicious.length ? "benign clients" : "clients"); // of whom a run's accuracy is

function jumps() {
  const cards = [...document.querySelectorAll("section.card")].filter((card) => !card.hidden);
  byId("jump").replaceChildren(...cards.map((card) => make("li", {}, make("a", { href: `#${card.id}` }, card.querySelector("h2").textContent))));
}

// ------------------------------------------------------------ curves

function absorb(columnsOf, final) {
  columnsOf.round.forEach((round, i) => {
    const record = Object.fromEntries(Object.entries(columnsOf).map(([key, values]) => [key, values[i]]));
    record.final = final ?? columnsOf.final[i];
    rows.set(`${round}.${record.final}`, record);
  });
}

const rounds = () => [...rows.values()].filter((row) => !row.final).sort((a, b) => a.round - b.round);
const newest = () => [...rows.values()].sort((a, b) => a.round - b.round || a.final - b.final).at(-1);

// A line of the table of rounds, as far as the run has come.
function grown(one) {
  if (!one.column) return one;
  const all = rounds();
  const last = [...rows.values()].find((row) => row.final)?.[one.column];
  const beside = (sign) => (one.spread ? all.map((row) => row[one.column] + sign * row[one.spread]) : null);
  return { ...one, x: all.map((row) => row.round), y: all.map((row) => row[one.column]), low: beside(-1), high: beside(1), last };
}

function drawCurves() {
  for (const [figure, update] of curves) {
    const [panel] = figure.panels;
    update(lines({ ...panel, series: panel.series.map(grown) }, figure.title));
  }
}

// ------------------------------------------------------------ head

const tile = (name, value, small) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, value, small ? make("small", {}, small) : null));

// Where the wall clock went; runs of older versions know of their rounds alone.
const spent = (last) => (known(last.training)
  ? `training ${seconds(last.training)} · server ${seconds(last.seconds - last.training)} · evaluating ${seconds(last.evaluating)} · writing ${seconds(last.writing)}`
  : `${seconds(last.seconds)} in rounds`);

function drawHead() {
  const last = newest();
  const total = page.rounds_total || 0;
  const done = last ? Math.max(last.round, page.rounds || 0) : page.rounds || 0;
  byId("status").replaceChildren(badge(page.status));
  document.title = `${page.status === "running" ? `${done}/${total} ` : ""}${id} – FedKin`;
  byId("lead").textContent = [page.method, page.data, `${plain(page.clients)} clients`, page.partition, `attack ${page.attack}`, `rule ${page.rule}`, `seed ${brief(page.seed)}`, `started ${when(page.created)} UTC`].join(" · ");
  const bar = byId("progress");
  bar.setAttribute("aria-valuemax", total);
  bar.setAttribute("aria-valuenow", done);
  bar.firstElementChild.style.width = `${total ? Math.min(100, (100 * done) / total) : 0}%`;
  const left = last && done && page.status === "running" ? `, about ${seconds(((known(last.wall) ? last.wall : last.seconds) / done) * (total - done))} left` : "";
  byId("going").textContent = `${done} of ${total} rounds${left}`;
  byId("problem").replaceChildren(...(page.error ? [make("p", { class: "problem", role: "alert" }, page.error)] : []),
    ...(page.diverged ? [make("p", { class: "problem", role: "alert" }, `Diverged: ${page.diverged}.`)] : []));
  byId("report").hidden = !page.report;
  byId("next").hidden = !page.next.length;
  byId("steps").replaceChildren(...page.next.map((step) => make("li", {}, make("span", {}, step.words), command(step.command))));
  if (!last) return;
  const ordered = [...rows.values()].sort((a, b) => a.round - b.round || a.final - b.final);
  const whole = ordered.filter((row) => !page.partly.includes(row.round)); // an accuracy without the weakest would look best
  const by = ordered.some((row) => known(row.validation_macro)) ? "validation_macro" : "micro"; // test data choose only where nothing else can
  const score = scoreOf(page);
  const better = (row, top) => (page.higher === false ? row[by] < top[by] : row[by] > top[by]);
  const best = (whole.length ? whole : ordered).reduce((top, row) => (known(row[by]) && (!top || better(row, top)) ? row : top), null);
  const few = page.judged < page.judgeable ? ` · of ${page.judged} of ${page.judgeable} clients` : "";
  byId("tiles").replaceChildren(
    tile(`${page.metric}, macro${page.malicious.length ? ", of benign clients" : ""}`, score(last.macro), `micro ${score(last.micro)} · std ${spreadOf(page)(last.std)}${few}`),
    tile("worst decile", score(last.worst_decile), `mean of the worst tenth of ${everybody()}`),
    tile("best round", best ? plain(best.round) : "–", best ? `${best.final ? "after final tuning, " : ""}micro ${score(best.micro)}, chosen on ${by === "micro" ? "test" : "validation"} data` : ""),
    tile("traffic", size((last.bytes_down || 0) + (last.bytes_up || 0)), `↓ ${size(last.bytes_down)} · ↑ ${size(last.bytes_up)}`),
    tile("time", seconds(known(page.wall) && !(last.wall > page.wall) ? page.wall : last.wall), spent(last)),
    tile("removed", plain(last.removed), page.found ? page.found : page.malicious.length ? `${page.malicious.length} are malicious` : ""));
}

// ------------------------------------------------------------ figures

// A figure in its card, or nothing; of a split into classes one says why there is none.
async function drawFigure(name) {
  const [host, card] = [byId(name), byId(`card-${name}`)];
  const found = await shown(host, () => ask(apiPath(id, `/figures/${name}`)));
  card.hidden = Boolean(found?.why) && (name !== "split" || page.prepared?.classes === 0);
  if (!found) return jumps();
  card.querySelector(".about").textContent = found.why ? `There is no figure: ${found.why}.` : found.caption;
  if (!found.why) {
    const update = show(host, found);
    saveLinks(host, found, (kind) => apiPath(id, `/figures/${name}/${kind}`));
    if (found.panels[0].series?.some((one) => one.column)) curves.set(found, update);
    if (found.rounds.length) drawFrames(found, update);
  }
  return jumps();
}

// Who learns from whom, round by round.
function drawFrames(newest, update) {
  const slider = byId("at-round");
  const cache = new Map([[newest.rounds.at(-1), newest]]);
  slider.max = newest.rounds.length - 1;
  slider.value = newest.rounds.length - 1;
  const go = async () => {
    const round = newest.rounds[Number(slider.value)];
    slider.setAttribute("aria-valuetext", `round ${round}`);
    if (!cache.has(round)) {
      const found = await ask(apiPath(id, `/figures/${newest.name}?round=${round}`)).catch((error) => ({ why: error.message }));
      if (found.why) { byId("at-round-now").textContent = found.why; return; }
      cache.set(round, found);
    }
    if (newest.rounds[Number(slider.value)] !== round) return;
    update(heat(cache.get(round).panels[0], cache.get(round).alt, !byId("by-likeness").checked));
    saveLinks(byId(newest.name), newest, (kind) => apiPath(id, `/figures/${newest.name}/${kind}?round=${round}`));
    byId("at-round-now").textContent = `${round} of ${newest.rounds.at(-1)}`;
  };
  slider.oninput = go;
  byId("by-likeness").onchange = go;
  go();
}

async function drawClients() {
  const found = await shown(byId("clients"), () => ask(apiPath(id, "/clients")));
  if (!found) return;
  byId("card-clients").querySelector(".about").textContent = `As of round ${plain(found.round)}. Open one for its own page.`;
  const counts = page.metric === "accuracy";
  const events = (one) => Object.entries(one.events).map(([kind, count]) => `${kind} ×${count}`).join(", ") || "–";
  byId("clients").replaceChildren(make("div", { class: "scroll tall" }, table("Clients", ["client", { name: page.metric, number: true }, { name: "loss", number: true },
    { name: counts ? "right / test" : "test", number: true }, { name: "received", number: true }, { name: "sent", number: true }, { name: "time", number: true }, "events", "truth"],
  found.clients.map((one) => [make("a", { href: `${runPath(id)}/client/${one.client}` }, one.name ?? String(one.client)), scoreOf(page)(one.accuracy), plain(one.loss),
    counts ? `${plain(one.correct)} / ${plain(one.count)}` : plain(one.count), size(one.bytes_down), size(one.bytes_up), seconds(one.seconds), events(one),
    page.malicious.length ? (one.malicious ? make("span", { class: "badge malicious" }, "⚑ malicious") : "benign") : "–"]))));
}

const flat = (value, prefix = "") => Object.entries(value || {}).flatMap(([key, inner]) =>
  (inner && typeof inner === "object" && !Array.isArray(inner) ? flat(inner, `${prefix}${key}.`) : [[`${prefix}${key}`, inner]]));

function drawFacts() {
  const facts = (caption, pairs) => make("div", { class: "scroll tall" }, table(caption, ["name", "value"], pairs.map(([key, value]) => [key, brief(value)])));
  byId("config").replaceChildren(facts("Configuration", [...flat(page.config), ...flat(page.options, "options.")]));
  byId("environment").replaceChildren(facts("Environment", [...flat(page.environment), ...flat(page.prepared), ["identity", page.identity], ["updated", page.updated]]));
}

// While a run goes on, what does not grow by itself is asked for again.
const drawFigures = () => {
  figuresDrawn = Date.now();
  const cards = [...document.querySelectorAll("[data-figure]")].map((card) => card.dataset.figure);
  const still = [...curves.keys()].map((figure) => figure.name).concat(byId("split").childElementCount ? ["split"] : []);
  return Promise.all([drawClients(), ...cards.filter((name) => !still.includes(name)).map(drawFigure)]);
};

// ------------------------------------------------------------ live

let stream = null;

function watch() {
  if (stream || page.status !== "running" || document.hidden) return;
  const last = newest();
  stream = new EventSource(apiPath(id, `/stream${last ? `?after=${last.round}.${last.final}` : ""}`));
  const stop = () => { stream?.close(); stream = null; };
  stream.addEventListener("rounds", (event) => {
    absorb(JSON.parse(event.data));
    drawCurves();
    drawHead();
    if (Date.now() - figuresDrawn > 5000 && !document.activeElement?.closest?.(".slider, .chart")) drawFigures();
  });
  stream.addEventListener("status", (event) => { Object.assign(page, JSON.parse(event.data)); drawHead(); });
  stream.addEventListener("problem", (event) => { byId("going").textContent = JSON.parse(event.data).error; stop(); });
  stream.addEventListener("end", async () => { stop(); await load(); });
  stream.addEventListener("error", () => { if (stream?.readyState === EventSource.CLOSED) { stop(); setTimeout(load, 10000); } });
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return watch();
  stream?.close(); // a hidden page holds no connection
  stream = null;
});

async function load() {
  const found = await shown(byId("problem"), () => ask(apiPath(id)));
  if (!found) return;
  page = found;
  curves.clear(); // captions may say more now
  absorb(page.curves, 0);
  if (page.final) absorb(Object.fromEntries(Object.entries(page.final).map(([key, value]) => [key, [value]])), 1);
  drawHead();
  drawCurves();
  drawFacts();
  jumps();
  watch();
  await drawFigures();
}

load();
