// The list of runs: filters that live in the address, sorting, and a selection to compare.

import { ask, brief, byId, known, make, plain, runPath, scored, shown, size, standing, taken, when } from "./base.js";

const FILTERS = ["method", "data", "status", "attack", "text"];
const PAGE = 200;
const COLUMNS = [
  { key: "id", name: "run", cell: (run) => make("a", { href: runPath(run.id) }, run.id) },
  { key: "created", name: "started (UTC)", cell: (run) => when(run.created) },
  { key: "status", name: "status", cell: standing },
  { key: "macro", name: "accuracy", number: true, cell: (run) => (known(run.macro) ? make("span", {}, run.unit === "%" ? meter(run.macro) : null, scored(run, run.macro)) : "–") },
  { key: "worst_decile", name: "worst decile", number: true, cell: (run) => scored(run, run.worst_decile) },
  { key: "method", name: "method", cell: (run) => run.method },
  { key: "data", name: "data", cell: (run) => run.data },
  { key: "attack", name: "attack", cell: (run) => run.attack },
  { key: "rule", name: "rule", cell: (run) => run.rule },
  { key: "differs", name: "differs in", cell: (run) => make("span", { title: run.differs }, run.differs || "–") },
  { key: "seed", name: "seed", number: true, cell: (run) => brief(run.seed) },
  { key: "rounds", name: "rounds", number: true, cell: (run) => `${plain(run.rounds)} / ${plain(run.rounds_total)}` },
  { key: "bytes", name: "traffic", number: true, cell: (run) => size(run.bytes) },
  { key: "wall", name: "time", number: true, cell: taken },
  { key: "clients", name: "clients", number: true, cell: (run) => plain(run.clients) },
  { key: "partition", name: "partition", cell: (run) => run.partition },
];

const state = new URLSearchParams(location.search);
const picked = new Set();
let limit = PAGE;
let asked = 0;
let visible = COLUMNS;

function meter(value) {
  const inner = make("i");
  inner.style.width = `${Math.min(100, Math.max(0, value))}%`;
  return make("span", { class: "meter", "aria-hidden": "true" }, inner);
}

function put(key, value) {
  if (value) state.set(key, value); else state.delete(key);
  limit = PAGE;
  history.replaceState(null, "", state.size ? `?${state}` : location.pathname);
  return refresh();
}

function choices(select, values, chosen) {
  const all = chosen && !values.includes(chosen) ? [chosen, ...values] : values;
  const now = [...select.options].slice(1).map((one) => one.value);
  if (now.join("\n") !== all.join("\n")) {
    select.replaceChildren(make("option", { value: "" }, "all"), ...all.map((value) => make("option", { value }, value)));
  }
  select.value = chosen || "";
}

const sorted = () => [state.get("sort") || "created", state.get("order") !== "up"];

function sortBy(key) {
  const [now, down] = sorted();
  state.set("sort", key);
  return put("order", now === key && down ? "up" : "");
}

function selection() {
  const link = byId("compare");
  const many = picked.size > 1;
  link.textContent = picked.size ? `Compare ${picked.size} selected` : "Compare selected";
  link.setAttribute("aria-disabled", String(!many));
  if (many) link.href = `/compare?${new URLSearchParams([...picked].map((id) => ["run", id]))}`;
  else link.removeAttribute("href");
}

function row(run) {
  const box = make("input", {
    type: "checkbox", "aria-label": `select ${run.id}`,
    onchange: () => {
      if (box.checked) picked.add(run.id); else picked.delete(run.id);
      box.closest("tr").classList.toggle("picked", box.checked);
      selection();
    },
  });
  box.checked = picked.has(run.id);
  return make("tr", { class: box.checked ? "picked" : null, "data-run": run.id, role: "row" }, make("td", { "data-key": "pick", role: "cell" }, box),
    visible.map((column) => make("td", { class: column.number ? "number" : null, "data-key": column.key, "data-name": column.name, role: "cell" }, column.cell(run))));
}

function head() {
  const [sort, down] = sorted();
  return make("tr", {}, make("th", { scope: "col" }, make("span", { class: "unseen" }, "select")),
    visible.map((column) => make("th", {
      scope: "col", class: column.number ? "number" : null,
      "aria-sort": column.key === sort ? (down ? "descending" : "ascending") : null,
    }, make("button", { type: "button", onclick: () => sortBy(column.key) }, column.name))));
}

async function refresh() {
  const mine = (asked += 1);
  const query = new URLSearchParams([...state, ["limit", limit]]);
  const page = await shown(byId("problem"), () => ask(`/api/runs?${query}`));
  if (!page || mine !== asked) return;
  byId("problem").replaceChildren();
  for (const key of FILTERS.slice(0, 4)) choices(byId(`by-${key}`), page.facets[key], state.get(key));
  visible = COLUMNS.filter((column) => column.key !== "differs" || page.runs.some((run) => run.differs));
  const score = COLUMNS.find((column) => column.key === "macro");
  score.name = page.runs.every((run) => run.metric === "accuracy") ? "accuracy" : "score";
  byId("sort").querySelector("[value=macro]").textContent = score.name;
  const focused = document.activeElement?.closest?.("#runs") ? document.activeElement.textContent : null;
  byId("runs").replaceChildren(make("caption", { class: "unseen" }, "Runs"), make("thead", {}, head()), make("tbody", {}, page.runs.map(row)));
  const [sort, down] = sorted();
  byId("sort").value = sort;
  byId("order").textContent = down ? "▼" : "▲";
  byId("order").setAttribute("aria-label", down ? "largest first" : "smallest first");
  const beside = byId("runs").parentElement; // the column that the list is sorted by is never out of sight
  const mark = byId("runs").querySelector("th[aria-sort]");
  if (mark && sort !== refresh.seen) beside.scrollLeft = Math.max(beside.scrollLeft, mark.offsetLeft + mark.offsetWidth - beside.clientWidth);
  refresh.seen = sort;
  if (focused) [...byId("runs").querySelectorAll("th button")].find((one) => one.textContent === focused)?.focus();
  byId("none").hidden = page.runs.length > 0;
  byId("none").textContent = page.all ? "No run matches these filters." : "No runs yet. Start one with: fedkin run fedcap --attack ipm";
  byId("count").textContent = page.total === page.all ? `${plain(page.all)} runs` : `${plain(page.total)} of ${plain(page.all)} runs`;
  byId("more").hidden = page.runs.length >= page.total;
  byId("broken").hidden = !page.broken.length;
  byId("broken-list").replaceChildren(...page.broken.map((one) => make("li", {}, make("b", {}, one.name), ` ${one.reason}`)));
  byId("broken-count").textContent = page.broken.length === 1 ? "1 other folder that is not a whole run" : `${page.broken.length} other folders that are not whole runs`;
  selection();
  clearTimeout(refresh.later);
  refresh.later = setTimeout(() => { if (!document.activeElement?.closest?.("#runs tbody")) refresh(); }, page.running ? 3000 : 15000);
}

for (const key of FILTERS.slice(0, 4)) byId(`by-${key}`).addEventListener("change", (event) => put(key, event.target.value));
byId("sort").replaceChildren(...COLUMNS.map((column) => make("option", { value: column.key }, column.name)));
byId("sort").addEventListener("change", (event) => sortBy(event.target.value));
byId("order").addEventListener("click", () => sortBy(sorted()[0]));
byId("by-text").value = state.get("text") || "";
byId("by-text").addEventListener("input", (event) => {
  clearTimeout(put.later);
  put.later = setTimeout(() => put("text", event.target.value.trim()), 200);
});
byId("clear").addEventListener("click", () => {
  clearTimeout(put.later);
  for (const key of FILTERS) state.delete(key);
  byId("by-text").value = "";
  put("text", "");
});
byId("more").addEventListener("click", () => { limit += PAGE; refresh(); });
refresh();
