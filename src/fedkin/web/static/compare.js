// Several runs side by side: their curves in one chart, the numbers, and where their configurations differ.

import { ask, brief, byId, make, percent, percentTick, plain, points, runPath, shown, size, standing, table, taken } from "./base.js";
import { lineChart } from "./charts.js";

const DASHES = [null, "7 4", "2 3"];
const MEASURES = {
  macro: { name: "accuracy, macro (%)", low: 0, high: 100, show: percent, tick: percentTick },
  worst_decile: { name: "accuracy, worst decile (%)", low: 0, high: 100, show: percent, tick: percentTick },
  micro: { name: "accuracy, micro (%)", low: 0, high: 100, show: percent, tick: percentTick },
  test_loss: { name: "test loss", show: plain },
};
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// Runs that differ in nothing but the seed become one curve: the mean, with a band of one standard deviation.
function grouped(runs, key, along) {
  const groups = new Map();
  for (const run of runs) groups.set(run.group, [...(groups.get(run.group) || []), run]);
  return [...groups.values()].map((members) => {
    const length = Math.min(...members.map((run) => run.rounds.round.length));
    const points = [];
    const band = [];
    for (let i = 0; i < length; i += 1) {
      const values = members.map((run) => run.rounds[key][i]).filter((value) => value !== null);
      if (!values.length) continue;
      const [x, middle] = [mean(members.map((run) => along(run, i))), mean(values)];
      const spread = values.length > 1 ? Math.sqrt(values.reduce((sum, v) => sum + (v - middle) ** 2, 0) / (values.length - 1)) : 0;
      points.push([x, middle]);
      band.push([x, middle - spread, middle + spread]);
    }
    const ends = members.map((run) => run.final?.[key]).filter((value) => typeof value === "number");
    const rings = ends.length && points.length ? [[points.at(-1)[0], mean(ends)]] : [];
    return { rings, name: members.length > 1 ? `${members[0].group_label}, ${members.length} seeds` : members[0].label, points, band: members.length > 1 ? band : null };
  });
}

function curves(runs, key, along) {
  const each = () => runs.map((run) => ({ name: run.label, points: run.rounds.round.map((_, i) => [along(run, i), run.rounds[key][i]]),
    rings: run.final && run.rounds.round.length ? [[along(run, run.rounds.round.length - 1), run.final[key]]] : [] }));
  const series = byId("seeds").checked ? grouped(runs, key, along) : each();
  return series.map((one, i) => ({ ...one, slot: (i % 8) + 1, dash: DASHES[Math.floor(i / 8) % 3] }));
}

function numbers(runs) {
  return table("Results", ["run", "status", "method", "attack", "rule", { name: "seed", number: true }, { name: "rounds", number: true },
    { name: "macro", number: true }, { name: "worst decile", number: true }, { name: "micro", number: true }, { name: "std over clients", number: true },
    { name: "best round", number: true }, { name: "traffic", number: true }, { name: "time", number: true }],
  runs.map((run) => [make("a", { href: runPath(run.id) }, run.id), standing(run), run.method, run.attack, run.rule, brief(run.seed), plain(run.rounds_done),
    percent(run.macro), percent(run.worst_decile), percent(run.micro), points(run.std), plain(run.best_round), size(run.bytes), taken(run)]));
}

function differences(runs, diff) {
  if (!diff.length) return make("p", { class: "empty" }, "The configurations are the same.");
  return table("Configuration", ["setting", ...runs.map((run) => run.id)], diff.map((line) => [line.key, ...line.values.map(brief)]));
}

async function start() {
  const chosen = new URLSearchParams(location.search).getAll("run");
  const page = await shown(byId("content"), () => ask(`/api/compare?${new URLSearchParams(chosen.map((id) => ["run", id]))}`));
  if (!page) return;
  const { runs } = page;
  byId("lead").textContent = `${runs.length} runs${page.same_split ? ", all on the same split" : ", on different splits"}. Accuracies are of benign clients.`;
  const byRound = (run, i) => run.rounds.round[i];
  const byMegabyte = (run, i) => (run.rounds.bytes_down[i] + run.rounds.bytes_up[i]) / 1e6;
  const spec = (along, x, whole) => {
    const key = byId("measure").value;
    const measure = MEASURES[key];
    return { label: `${measure.name} of ${runs.length} runs by ${x}`, x, whole, height: 320, series: curves(runs, key, along), low: measure.low, high: measure.high, showY: measure.show, tickY: measure.tick || plain,
      hint: runs.some((run) => run.final) ? "rings: after the final tuning" : "" };
  };
  const repeated = new Set(runs.map((run) => run.group)).size < runs.length;
  byId("seeds").closest("label").hidden = !repeated;
  byId("seeds").checked = repeated;
  const perRound = lineChart(byId("by-round"), spec(byRound, "round", true));
  const perMegabyte = lineChart(byId("by-megabyte"), spec(byMegabyte, "megabytes sent", false));
  const again = () => { perRound(spec(byRound, "round", true)); perMegabyte(spec(byMegabyte, "megabytes sent", false)); };
  byId("measure").addEventListener("change", again);
  byId("seeds").addEventListener("change", again);
  byId("numbers").replaceChildren(numbers(runs));
  byId("diff").replaceChildren(differences(runs, page.diff));
}

start();
