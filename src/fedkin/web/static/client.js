// One client of one run: how well its own model does round by round, what it sent, what happened to it.

import { ask, apiPath, byId, make, plain, runPath, scoreOf, seconds, shown, size, table } from "./base.js";
import { saveLinks, show } from "./figures.js";

const place = byId("content").dataset;

const tile = (name, value, small) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, value, small ? make("small", {}, small) : null));

async function drawFigure(host) {
  const name = host.dataset.figure;
  const path = apiPath(place.run, `/clients/${place.client}/figures/${name}`);
  const found = await shown(host, () => ask(path));
  if (!found) return;
  byId(`about-${name}`).textContent = found.why ? `There is no figure: ${found.why}.` : found.caption;
  if (found.why) return;
  show(host, found);
  saveLinks(host, found, (kind) => `${path}/${kind}`);
}

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
  const score = scoreOf(page);
  const others = page.attacked ? "benign clients" : "all clients";
  byId("tiles").replaceChildren(
    tile(page.metric, score(last), `round ${plain(series.round.at(-1))}; mean of ${others}: ${score(page.macro.at(-1))}`),
    tile("test samples", plain(series.count.at(-1)), page.metric === "accuracy" ? `${plain(series.correct.at(-1))} right` : null),
    tile("received", size(page.bytes_down)), tile("sent", size(page.bytes_up)), tile("time", seconds(page.seconds)),
    tile("events", plain(page.events.length), page.removed ? `removed in round ${page.removed}` : "not removed"));
  for (const host of document.querySelectorAll("[data-figure]")) drawFigure(host);
  byId("events").replaceChildren(page.events.length
    ? table("Events", [{ name: "round", number: true }, "phase", "what", "reason"], page.events.map((e) => [plain(e.round), e.phase, e.kind, e.reason]))
    : make("p", { class: "empty" }, "Nothing happened to this client."));
}

start();
