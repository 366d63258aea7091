// Several runs side by side: their curves in one chart, the numbers, and where their configurations differ.

import { ask, brief, byId, make, plain, runPath, scored, shown, size, spreadOf, standing, table, taken } from "./base.js";
import { lineChart } from "./charts.js";
import { lines, saveLinks } from "./figures.js";

function numbers(runs) {
  return table("Results", ["run", "status", "method", "attack", "rule", { name: "seed", number: true }, { name: "rounds", number: true },
    { name: "macro", number: true }, { name: "worst decile", number: true }, { name: "micro", number: true }, { name: "std over clients", number: true },
    { name: "best round", number: true }, { name: "traffic", number: true }, { name: "time", number: true }],
  runs.map((run) => [make("a", { href: runPath(run.id) }, run.id), standing(run), run.method, run.attack, run.rule, brief(run.seed), plain(run.rounds),
    scored(run, run.macro), scored(run, run.worst_decile), scored(run, run.micro), spreadOf(run)(run.std), plain(run.best_round), size(run.bytes), taken(run)]));
}

function differences(runs, diff) {
  if (!diff.length) return make("p", { class: "empty" }, "The configurations are the same.");
  return table("Configuration", ["setting", ...runs.map((run) => run.id)], diff.map((line) => [line.key, ...line.values.map(brief)]));
}

const chosen = new URLSearchParams(location.search).getAll("run").map((id) => ["run", id]);
const charts = new Map();

async function draw() {
  const how = [["measure", byId("measure").value], ["seeds", byId("seeds").checked]];
  const page = await shown(byId("content"), () => ask(`/api/compare?${new URLSearchParams([...chosen, ...how])}`));
  for (const [i, place] of ["per-round", "per-megabyte"].entries()) {
    const figure = page?.figures[i];
    if (!figure) continue;
    byId(`about-${place}`).textContent = figure.caption ?? `There is no figure: ${figure.why}.`;
    if (!figure.panels) { byId(place).replaceChildren(); byId(place).parentElement.querySelector("p.save")?.remove(); charts.delete(place); continue; }
    const spec = { ...lines(figure.panels[0], figure.title), height: 320 };
    if (charts.has(place)) charts.get(place)(spec);
    else charts.set(place, lineChart(byId(place), spec));
    saveLinks(byId(place), figure, (kind) => `/api/compare/${place}/${kind}?${new URLSearchParams([...chosen, ...how])}`);
  }
  return page;
}

async function start() {
  const page = await draw();
  if (!page) return;
  const { runs } = page;
  const older = page.older.length ? ` Left out of the mean, because a newer run has the same settings and seed: ${page.older.join(", ")}.` : "";
  byId("lead").textContent = `${runs.length} runs${page.same_split ? ", all on the same split" : ", on different splits"}. ${runs.every((run) => run.metric === "accuracy") ? "Accuracies" : "Scores"} are of benign clients.${older}`;
  for (const option of byId("measure").options) option.textContent = page.measures[option.value] ?? option.textContent;
  byId("seeds").closest("label").hidden = new Set(runs.map((run) => run.group)).size === runs.length;
  byId("measure").addEventListener("change", draw);
  byId("seeds").addEventListener("change", draw);
  byId("numbers").replaceChildren(numbers(runs));
  byId("diff").replaceChildren(differences(runs, page.diff));
}

start();
