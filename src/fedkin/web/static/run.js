// One run: live curves while it goes on, then who got what, from whom, and at what price.

import { apiPath, ask, badge, brief, byId, known, make, percent, percentTick, plain, points, runPath, seconds, shown, size, sizeTick, table, when } from "./base.js";
import { bars, columns, heatMap, lineChart, timeline } from "./charts.js";

const id = byId("content").dataset.run;
const CURVES = ["round", "micro", "macro", "worst_decile", "std", "test_loss", "train_loss", "bytes_down", "bytes_up", "seconds", "participants", "failed", "removed", "training", "evaluating", "writing", "wall"];
const KINDS = {
  removed: { name: "removed", shape: "cross", slot: 2 },
  rejected: { name: "rejected", shape: "ring", slot: 4 },
  left_out: { name: "left out of the average", shape: "square", slot: 1 },
  failed: { name: "failed", shape: "triangle", slot: 8 },
  unjudged: { name: "gave no accuracy", shape: "dot", slot: 3 },
};
const rows = new Map(); // "round.final" -> one record
let page = null;
let charts = null;
let figuresDrawn = 0;

const open = (card) => {
  byId(`card-${card}`).hidden = false;
  jumps();
};
const nameOf = (client) => page.names[client] ?? `client ${client}`;
const shortOf = (client) => nameOf(client).replace(/^client[-_ ](?=\d)/, ""); // where the axis says "client"
const everybody = () => (page.malicious.length ? "benign clients" : "clients"); // of whom a run's accuracy is
const isMalicious = (client) => page.malicious.includes(client);

function jumps() {
  const cards = [...document.querySelectorAll("section.card")].filter((card) => !card.hidden);
  byId("jump").replaceChildren(...cards.map((card) => make("li", {}, make("a", { href: `#${card.id}` }, card.querySelector("h2").textContent))));
}

// ------------------------------------------------------------ curves

function absorb(columnsOf, final) {
  columnsOf.round.forEach((round, i) => {
    const record = Object.fromEntries(CURVES.map((key) => [key, columnsOf[key][i]]));
    record.final = final ?? columnsOf.final[i];
    rows.set(`${round}.${record.final}`, record);
  });
}

const rounds = () => [...rows.values()].filter((row) => !row.final).sort((a, b) => a.round - b.round);
const newest = () => [...rows.values()].sort((a, b) => a.round - b.round || a.final - b.final).at(-1);

function specs() {
  const all = rounds();
  const tuned = [...rows.values()].filter((row) => row.final);
  const line = (key) => all.map((row) => [row.round, row[key]]);
  const clip = (value) => Math.min(100, Math.max(0, value));
  const ending = (key) => tuned.map((row) => [row.round, row[key]]);
  return {
    accuracy: {
      label: "Accuracy by round", x: "round", whole: true, low: 0, high: 100, showY: percent, tickY: percentTick,
      series: [{ name: "macro", slot: 1, points: line("macro"), band: all.filter((row) => known(row.macro) && known(row.std)).map((row) => [row.round, clip(row.macro - row.std), clip(row.macro + row.std)]), rings: ending("macro") },
        { name: "worst decile", slot: 2, dash: "7 4", points: line("worst_decile"), rings: ending("worst_decile") }],
      hint: tuned.length ? "rings: after the final tuning" : "",
    },
    loss: {
      label: "Loss by round", x: "round", whole: true, low: 0,
      series: [{ name: "test", slot: 1, points: line("test_loss"), rings: ending("test_loss") }, { name: "training", slot: 2, dash: "7 4", points: line("train_loss") }],
    },
    bytes: {
      label: "Bytes sent since the start", x: "round", whole: true, low: 0, showY: size, tickY: sizeTick,
      series: [{ name: "to clients", slot: 1, points: line("bytes_down") }, { name: "to the server", slot: 2, dash: "7 4", points: line("bytes_up") }],
    },
  };
}

function drawCurves() {
  const all = specs();
  if (charts) for (const [name, update] of Object.entries(charts)) update(all[name]);
  else charts = Object.fromEntries(Object.entries(all).map(([name, spec]) => [name, lineChart(byId(name), spec)]));
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
    ...(page.resume ? [make("p", {}, "Go on with it: ", make("code", {}, page.resume))] : []),
    ...(page.diverged ? [make("p", { class: "problem", role: "alert" }, `Diverged: ${page.diverged}.`)] : []));
  byId("card-accuracy").querySelector(".about").textContent = `Of the personal models of ${everybody()}, in percent. The band is one standard deviation over clients.`;
  byId("card-loss").querySelector(".about").textContent = `Test loss of the personal models of ${everybody()}, and training loss of those who trained.`;
  byId("report").hidden = !page.report;
  if (!last) return;
  const ordered = [...rows.values()].sort((a, b) => a.round - b.round || a.final - b.final);
  const whole = ordered.filter((row) => !page.partly.includes(row.round)); // an accuracy without the weakest would look best
  const best = (whole.length ? whole : ordered).reduce((top, row) => (known(row.micro) && (!top || row.micro > top.micro) ? row : top), null);
  const few = page.judged < page.judgeable ? ` · of ${page.judged} of ${page.judgeable} clients` : "";
  const found = page.detection;
  byId("tiles").replaceChildren(
    tile(`accuracy, macro${page.malicious.length ? ", of benign clients" : ""}`, percent(last.macro), `micro ${percent(last.micro)} · std ${points(last.std)}${few}`),
    tile("worst decile", percent(last.worst_decile), `mean of the worst tenth of ${everybody()}`),
    tile("best round", best ? plain(best.round) : "–", best ? `${best.final ? "after final tuning, " : ""}micro ${percent(best.micro)}` : ""),
    tile("traffic", size((last.bytes_down || 0) + (last.bytes_up || 0)), `↓ ${size(last.bytes_down)} · ↑ ${size(last.bytes_up)}`),
    tile("time", seconds(known(page.wall) && !(last.wall > page.wall) ? page.wall : last.wall), spent(last)),
    tile("removed", plain(last.removed), found && known(found.accuracy) ? `found out: ${percent(100 * found.accuracy)}` : page.malicious.length ? `${page.malicious.length} are malicious` : ""));
}

// ------------------------------------------------------------ figures

async function drawClients() {
  const found = await shown(byId("clients"), () => ask(apiPath(id, "/clients")));
  if (!found) return;
  byId("card-clients").querySelector(".about").textContent = `As of round ${plain(found.round)}. Open one for its own page.`;
  const order = found.clients.toSorted((a, b) => a.malicious - b.malicious || (a.accuracy ?? -1) - (b.accuracy ?? -1));
  const until = order.filter((one) => !one.malicious).length;
  if (until < order.length) byId("card-spread").querySelector(".about").textContent = "Accuracy of every benign client, from worst to best; malicious ones stand apart at the right, and count in no mean.";
  const last = newest();
  columns(byId("spread"), {
    label: "Accuracy of every client, sorted", x: "clients, worst first", high: 100, show: percent, tickY: percentTick,
    keys: page.malicious.length ? [{ name: "benign", slot: 1 }, { name: "malicious", slot: 2 }] : [],
    items: order.map((one) => ({ label: one.name ?? String(one.client), value: one.accuracy, slot: one.malicious ? 2 : 1, note: one.malicious ? "malicious" : null })),
    lines: last ? [{ name: `mean of ${everybody()} (macro)`, value: last.macro, until }, { name: "worst decile", value: last.worst_decile, until }] : [],
  });
  const events = (one) => Object.entries(one.events).map(([kind, count]) => `${KINDS[kind]?.name ?? kind} ×${count}`).join(", ") || "–";
  byId("clients").replaceChildren(make("div", { class: "scroll tall" }, table("Clients", ["client", { name: "accuracy", number: true }, { name: "loss", number: true },
    { name: "right / test", number: true }, { name: "received", number: true }, { name: "sent", number: true }, { name: "time", number: true }, "events", "truth"],
  found.clients.map((one) => [make("a", { href: `${runPath(id)}/client/${one.client}` }, one.name ?? String(one.client)), percent(one.accuracy), plain(one.loss),
    `${plain(one.correct)} / ${plain(one.count)}`, size(one.bytes_down), size(one.bytes_up), seconds(one.seconds), events(one),
    page.malicious.length ? (one.malicious ? make("span", { class: "badge malicious" }, "⚑ malicious") : "benign") : "–"]))));
}

async function drawSplit() {
  open("split");
  if (page.deployed) {
    byId("card-split").querySelector(".about").textContent = "Only the sites know how many samples of each class they have: no site tells, and the run stores nothing of it.";
    return;
  }
  const found = await shown(byId("split"), () => ask(apiPath(id, "/split")));
  if (!found) return;
  heatMap(byId("split"), {
    label: "Samples per client and class", rows: found.clients.map((_, i) => shortOf(i)), cols: found.classes, values: found.counts, x: "class", y: "client", wide: true,
    max: Math.max(1, ...found.counts.flat()), marked: isMalicious, hint: `split ${found.hash.slice(0, 12)}`,
  });
}

async function drawMatrix() {
  const first = await shown(byId("matrix"), () => ask(apiPath(id, "/matrix")));
  byId("card-split").classList.toggle("wide", !first?.rounds.length);
  if (!first?.rounds.length) return;
  open("matrix");
  const slider = byId("at-round");
  const cache = new Map([[first.round, first]]);
  const orderOf = (found) => (found.clients ? found.order.map((i) => found.clients[i]) : null);
  const common = orderOf(first);
  let update = null;
  const show = (found) => {
    const names = found.clients ? found.clients.map(shortOf) : found.values.map((_, i) => String(i + 1));
    let order = found.values.map((_, i) => i);
    if (byId("by-likeness").checked) {
      const place = new Map((common || []).map((client, i) => [client, i]));
      order = common && found.clients ? order.toSorted((a, b) => (place.get(found.clients[a]) ?? 1e9) - (place.get(found.clients[b]) ?? 1e9)) : found.order;
    }
    const square = found.values[0].length === found.values.length;
    const across = square ? order : found.values[0].map((_, i) => i);
    const values = order.map((i) => across.map((j) => found.values[i][j]));
    const spec = {
      label: `Weights of ${found.name} in round ${found.round}`, rows: order.map((i) => names[i]), cols: across.map((j) => (square ? names[j] : String(j + 1))),
      values, x: "learns from", y: "client", square: true, max: Math.max(1e-9, ...values.flat().filter(known)), show: plain,
      marked: (i) => Boolean(found.clients) && isMalicious(found.clients[order[i]]),
    };
    if (update) update(spec); else update = heatMap(byId("matrix"), spec);
    byId("at-round-now").textContent = `${found.round} of ${first.rounds.at(-1)}`;
  };
  slider.max = first.rounds.length - 1;
  slider.value = first.rounds.length - 1;
  const go = async () => {
    const round = first.rounds[Number(slider.value)];
    slider.setAttribute("aria-valuetext", `round ${round}`);
    if (!cache.has(round)) {
      const found = await ask(apiPath(id, `/matrix?round=${round}`)).catch((error) => ({ error }));
      if (found.error) { byId("at-round-now").textContent = found.error.message; return; }
      cache.set(round, found);
    }
    if (first.rounds[Number(slider.value)] === round) show(cache.get(round));
  };
  slider.oninput = go;
  byId("by-likeness").onchange = go;
  show(first);
}

async function drawJudged() {
  const found = await shown(byId("judged"), () => ask(apiPath(id, "/judgements")));
  if (!found?.rounds.length) return;
  const votes = found.what === "score";
  byId("title-judged").textContent = votes ? "Committee votes and threshold" : "Update lengths and threshold";
  byId("card-judged").querySelector(".about").textContent = votes
    ? "The score of every update by the committee; those under the threshold are rejected."
    : "The length of every calibrated update; longer than the threshold, and its client is removed.";
  open("judged");
  const dots = { benign: [], malicious: [], all: [] };
  for (const round of found.rounds) {
    round.values.forEach((value, i) => {
      const client = round.clients?.[i];
      const kind = client === undefined || !page.malicious.length ? "all" : isMalicious(client) ? "malicious" : "benign";
      dots[kind].push([round.round, value]);
    });
  }
  const seats = new Map(found.rounds.map((round) => [round.round, round.committee]));
  const kinds = [["all", "each update", "dot", 1], ["benign", "benign", "dot", 1], ["malicious", "malicious", "cross", 2]];
  lineChart(byId("judged"), {
    label: votes ? "Committee scores and threshold" : "Update lengths and threshold", x: "round", whole: true, height: 280, low: 0,
    series: [...kinds.filter(([kind]) => dots[kind].length).map(([kind, name, shape, slot]) => ({ name, shape, slot, points: dots[kind] })),
      { name: "threshold", slot: 3, dash: "7 4", points: found.rounds.map((round) => [round.round, round.limit]) }],
    more: (round) => (seats.get(round)?.length ? ` · committee: ${seats.get(round).map(nameOf).join(", ")}` : ""),
  });
}

async function drawTimeline() {
  const found = await shown(byId("timeline"), () => ask(apiPath(id, "/events")));
  if (!found) return;
  const { events } = found;
  const clients = [...new Set([...page.malicious, ...events.client.filter(known)])].sort((a, b) => isMalicious(b) - isMalicious(a) || a - b).slice(0, 150);
  if (!clients.length) return;
  open("timeline");
  const at = new Map(clients.map((client, i) => [client, i]));
  const marks = events.client.flatMap((client, i) => (at.has(client) && KINDS[events.kind[i]]
    ? [{ row: at.get(client), x: events.round[i], kind: events.kind[i], reason: events.reason[i] }] : []));
  timeline(byId("timeline"), {
    label: "Rejections and removals", rows: clients.map((client) => ({ label: shortOf(client), marked: isMalicious(client) })),
    marks, kinds: KINDS, last: Math.max(1, page.rounds_total || 0, ...events.round.filter(known)),
    hint: found.more ? "only the first 20,000 events are drawn" : "",
  });
}

async function drawContribution() {
  const found = await shown(byId("contribution"), () => ask(apiPath(id, "/contributions")));
  if (!found?.rounds.length) return;
  open("contribution");
  heatMap(byId("contribution"), {
    label: "Contribution weights", rows: found.values.map((_, client) => shortOf(client)), cols: found.rounds.map(String), values: found.values,
    x: "round", y: "client", wide: true, max: Math.max(1e-9, ...found.values.flat().filter(known)), marked: isMalicious,
  });
}

async function drawPhases() {
  const found = await shown(byId("phase-bytes"), () => ask(apiPath(id, "/phases")));
  if (!found?.phases.length) return;
  open("phase-bytes");
  open("phase-seconds");
  bars(byId("phase-bytes"), { label: "Bytes per phase", show: size, items: found.phases.map((one) => ({ label: one.phase,
    parts: [{ name: "to clients", value: one.bytes_down, slot: 1 }, { name: "to the server", value: one.bytes_up, slot: 2 }] })) });
  bars(byId("phase-seconds"), { label: "Seconds per phase", show: seconds, items: found.phases.map((one) => ({ label: one.phase, parts: [{ name: "time", value: one.seconds, slot: 3 }] })) });
}

const flat = (value, prefix = "") => Object.entries(value || {}).flatMap(([key, inner]) =>
  (inner && typeof inner === "object" && !Array.isArray(inner) ? flat(inner, `${prefix}${key}.`) : [[`${prefix}${key}`, inner]]));

function drawFacts() {
  const facts = (caption, pairs) => make("div", { class: "scroll tall" }, table(caption, ["name", "value"], pairs.map(([key, value]) => [key, brief(value)])));
  byId("config").replaceChildren(facts("Configuration", [...flat(page.config), ...flat(page.options, "options.")]));
  byId("environment").replaceChildren(facts("Environment", [...flat(page.environment), ...flat(page.prepared), ["identity", page.identity], ["updated", page.updated]]));
}

const drawFigures = () => {
  figuresDrawn = Date.now();
  return Promise.all([drawClients(), drawMatrix(), drawJudged(), drawTimeline(), drawContribution(), drawPhases()]);
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
  absorb(page.curves, 0);
  if (page.final) absorb(Object.fromEntries(CURVES.map((key) => [key, [page.final[key]]])), 1);
  drawHead();
  drawCurves();
  drawFacts();
  jumps();
  watch();
  await Promise.all([drawFigures(), drawSplit()]);
}

load();
