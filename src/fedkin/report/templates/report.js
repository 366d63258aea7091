"use strict";
// Closed sections open for the printer; and the collaboration matrix: a slider over rounds, drawn from one byte a weight,
// where arrow keys walk over the cells.
const closed = () => document.querySelectorAll("details:not([open])");
let opened = [];
window.addEventListener("beforeprint", () => { opened = [...closed()]; opened.forEach((one) => { one.open = true; }); });
window.addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const heat = JSON.parse(document.getElementById("heat")?.textContent || "[]").map((text) =>
  [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)));
const LEFT = 92, BOTTOM = 104, WIDEST = 560, SCALE = 78, LINE = 15;

function slider(box) {
  const data = JSON.parse(box.querySelector("script").textContent), n = data.names.length;
  const frames = data.frames.map(bytes), range = box.querySelector("input"), canvas = box.querySelector("canvas");
  const [shown, said] = [box.querySelector("output"), box.querySelector(".said")];
  const pen = canvas.getContext("2d"), sharp = Math.max(2, Math.ceil(window.devicePixelRatio || 1));
  let row = -1, column = -1;
  let side = WIDEST, width = 0;

  function fit() { // letters keep their size on a small screen, the map shrinks
    side = Math.max(140, Math.min(WIDEST, box.parentElement.clientWidth - LEFT - SCALE));
    width = LEFT + side + SCALE;
    canvas.width = width * sharp; canvas.height = (side + BOTTOM) * sharp; canvas.style.width = width + "px";
    draw();
  }

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const short = (name) => (name.length > 13 ? name.slice(0, 12) + "…" : name);

  function colour(v) { // between two of the palette's colours they are mixed
    const place = (v / 254) * (heat.length - 1), below = Math.min(heat.length - 2, Math.floor(place));
    return `rgb(${heat[below].map((low, i) => Math.round(low + (place - below) * (heat[below + 1][i] - low)))})`;
  }

  function draw() {
    const frame = frames[range.value], cell = side / n, step = Math.ceil(n * LINE / side);
    const none = style("--soft");
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
      const v = frame[i * n + j];
      pen.fillStyle = v === 255 ? none : colour(v);
      pen.fillRect(LEFT + j * cell, 4 + i * cell, cell + 0.3, cell + 0.3);
    }
    pen.fillStyle = style("--ink"); pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    for (let i = 0; i < n; i += step) {
      const at = 4 + (i + 0.5) * cell;
      pen.textAlign = "right";
      pen.fillText(short(data.names[i]), LEFT - 6, at);
      pen.save(); pen.translate(LEFT - 4 + at, side + 10); pen.rotate(-Math.PI / 3); pen.fillText(short(data.names[i]), 0, 0); pen.restore();
    }
    pen.textAlign = "center"; pen.fillText(data.x, LEFT + side / 2, side + BOTTOM - 10);
    for (let v = 0; v < 255; v++) {
      pen.fillStyle = colour(v);
      pen.fillRect(LEFT + side + 14, 4 + side * (1 - (v + 1) / 255), 14, side / 255 + 0.5);
    }
    pen.fillStyle = style("--ink"); pen.textAlign = "left";
    for (const part of [0, 0.25, 0.5, 0.75, 1])
      pen.fillText((part * data.most).toPrecision(2), LEFT + side + 33, Math.max(10, 4 + side * (1 - part)));
    if (row >= 0) {
      pen.strokeStyle = style("--c1"); pen.lineWidth = 2;
      pen.strokeRect(LEFT + column * cell, 4 + row * cell, cell, cell);
      const v = frame[row * n + column];
      const weight = v === 255 ? "not in this round" : (v / 254 * data.most).toPrecision(2);
      said.textContent = `${data.names[row]} ${data.x} ${data.names[column]}: ` +
        (v === 254 ? "at least " : "") + weight;
    }
    shown.textContent = "round " + data.rounds[range.value];
    range.setAttribute("aria-valuetext", shown.textContent);
  }

  function point(i, j) {
    [row, column] = [Math.min(n - 1, Math.max(0, i)), Math.min(n - 1, Math.max(0, j))];
    draw();
  }
  range.max = frames.length - 1; range.value = frames.length - 1;
  range.addEventListener("input", draw);
  canvas.addEventListener("pointermove", (event) => {
    const area = canvas.getBoundingClientRect(), scale = width / area.width;
    const j = Math.floor(((event.clientX - area.left) * scale - LEFT) / side * n);
    const i = Math.floor(((event.clientY - area.top) * scale - 4) / side * n);
    if (i >= 0 && j >= 0 && i < n && j < n && (i !== row || j !== column)) point(i, j);
  });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (move) { event.preventDefault(); point(row + move[0], column + move[1]); }
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("resize", fit);
  box.classList.add("ready");
  fit();
}

document.querySelectorAll(".slider").forEach(slider);
