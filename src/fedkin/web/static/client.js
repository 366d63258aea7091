// One client of one run: how well its own model does round by round, what it sent, what happened to it.

import { ask, apiPath, byId, make, percentTick, plain, plainTick, runPath, scoreOf, seconds, shown, size, sizeTick, table } from "./base.js";
import { bars, lineChart } from "./charts.js";

const place = byId("content").dataset;

const tile = (name, value, small) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, value, small ? make("small", {}, small) : null));

async function start() {
  const page = await shown(byId("content"), () => ask(apiPath(place.run, `/clients/${place.client}`)));
  if (!page) return;
  byId("name").textContent = /^client/i.test(page.name) ? page.name : `Client ${page.name}`;
  byId("truth").hidden = !page.malicious;
  const count = page.clients;
  for (const [id, other] of [["previous", page.client - 1], ["next", page.client + 1]]) {
    if (other >= 0 && other < count) byId(id).href = `${runPath(place.run)}/client/${other}`;
    else byId(id).setAttribute("aria-disabled", "true");
  }
  const series = page.series;
  const last = series.accuracy.at(-1);
  const [score, share] = [scoreOf(page), page.unit === "%"];
  const others = page.attacked ? "benign clients" : "all clients";
  byId("tiles").replaceChildren(
    tile(page.metric, score(last), `round ${plain(series.round.at(-1))}; mean of ${others}: ${score(page.macro.at(-1))}`),
    tile("test samples", plain(series.count.at(-1)), page.metric === "accuracy" ? `${plain(series.correct.at(-1))} right` : null),
    tile("received", size(page.bytes_down)), tile("sent", size(page.bytes_up)), tile("time", seconds(page.seconds)),
    tile("events", plain(page.events.length), page.removed ? `removed in round ${page.removed}` : "not removed"));
  lineChart(byId("accuracy"), {
    label: `${page.metric} of client ${page.name}`, x: "round", whole: true, showY: score, ...(share ? { low: 0, high: 100, tickY: percentTick } : { tickY: plainTick, far: 50 }),
    series: [{ name: "this client", slot: 0, points: series.round.map((r, i) => [r, series.accuracy[i]]) },
      { name: `mean of ${others} (macro)`, slot: 6, dash: 1, points: page.macro_round.map((r, i) => [r, page.macro[i]]) }],
  });
  lineChart(byId("loss"), {
    label: `Test loss of client ${page.name}`, x: "round", whole: true, low: 0, far: 50, tickY: plainTick,
    series: [{ name: "test loss", slot: 1, points: series.round.map((r, i) => [r, series.loss[i]]) }],
  });
  lineChart(byId("bytes"), {
    label: `Bytes of client ${page.name}`, x: "round", whole: true, low: 0, showY: size, tickY: sizeTick,
    series: [{ name: "received", slot: 0, points: page.traffic.round.map((r, i) => [r, page.traffic.bytes_down[i]]) },
      { name: "sent", slot: 1, dash: 1, points: page.traffic.round.map((r, i) => [r, page.traffic.bytes_up[i]]) }],
  });
  if (!byId("classes")) { /* samples have no classes */ } else if (page.classes.length) {
    bars(byId("classes"), { label: `Samples of client ${page.name} by class`, items: page.classes.map((row) =>
      ({ label: row.name, parts: [{ name: "samples", value: row.count, slot: 0 }] })) });
  } else byId("classes").replaceChildren(make("p", { class: "empty" }, page.classes_problem || "The run did not store how many samples of each class this client has."));
  byId("events").replaceChildren(page.events.length
    ? table("Events", [{ name: "round", number: true }, "phase", "what", "reason"], page.events.map((e) => [plain(e.round), e.phase, e.kind, e.reason]))
    : make("p", { class: "empty" }, "Nothing happened to this client."));
}

start();
