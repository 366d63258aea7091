"""The figures as matplotlib drawings: a `Figure` with its numbers in, SVG or PNG out. Nothing here reads a file.

All share one look: the palette's colours, line styles beside them, text as text. `inline_svg` writes colours as CSS
variables, so that one drawing serves a light and a dark page.
"""

from __future__ import annotations

import io
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from textwrap import wrap
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from fedkin.report.figures import Bars, Columns, Figure, Floats, Heat, Lines, Panel, Series, Strips, Timeline, said
from fedkin.report.gather import MOST_ROUNDS
from fedkin.report.palette import BAD, DASHES, GOOD, HEAT, LIGHT, SERIES

INK, MUTED, GRID = LIGHT["ink"], LIGHT["muted"], LIGHT["grid"]
PAPER = "#fefefe"  # the page's own, not any white
FIXED = tuple(f"#{int(c[1:], 16) + 1:06x}" for c in SERIES)  # the same within images, out of CSS's reach
THEME = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", **{c: f"c{i}" for i, c in enumerate(SERIES)}}
MARKS = {"dot": "o", "ring": "o", "cross": "x", "triangle": "^", "square": "s"}
HOLLOW = ("ring", "square")
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": "auto",
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "svg.fonttype": "none",
    "figure.constrained_layout.use": True,
}
WIDE = 8.4  # inches
COLOURS = LinearSegmentedColormap.from_list("heat", HEAT)
MANY_POINTS = 1500  # a cloud of more is drawn as an image within the drawing
_ONE_AT_A_TIME = threading.RLock()  # matplotlib's settings belong to the whole process


class Drawing(Canvas):
    """A figure of matplotlib, which a notebook shows without pyplot."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return save(self, "png"), {"width": round(96 * self.get_figwidth())}


# ---------------------------------------------------------------- files and pages


def save(figure: Drawing, kind: Literal["png", "svg"]) -> bytes:
    """A file of its own, on white."""
    out = io.BytesIO()
    with _drawing("fedkin"):
        FigureCanvasAgg(figure)
        figure.savefig(out, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


@contextmanager
def _drawing(salt: str) -> Iterator[None]:
    with _ONE_AT_A_TIME, mpl.rc_context({**STYLE, "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a script that our font has not; a page's fonts may
        yield


def inline_svg(figure: Drawing, alt: str, salt: str) -> str:
    """A drawing to stand in an HTML page: colours from the page's CSS, `alt` for those who do not see it.

    `salt` keeps the names inside different drawings of one page apart."""
    out = io.StringIO()
    figure.patch.set_alpha(0)
    with _drawing(salt):
        FigureCanvasAgg(figure)
        figure.savefig(out, format="svg", dpi=110, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style type=\"text/css\">.*?</style>", "", text, count=2, flags=re.S)
    text = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", text)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)  # a pixel has no finer
    text = re.sub("|".join(THEME), lambda found: f"var(--{THEME[found[0]]})", text)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert size, "matplotlib writes the size of a drawing"
    head = f'<svg role="img" aria-label="{escape(printable(alt))}" viewBox="0 0 {size[1]} {size[2]}"'
    head += f' style="max-width: {1.5 * float(size[1]):.0f}px"'
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f"{head} {names}>" + text[text.index(">") + 1 :].strip()


# ---------------------------------------------------------------- pieces


def printable(text: str) -> str:
    """Without what has no glyph of its own: control characters, changes of direction."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)


def _short(name: str, most: int = 14) -> str:
    return printable(name if len(name) <= most else name[: most - 1] + "…")


def _folded(name: str, wide: int, most: int) -> str:
    """In lines that are no wider: labels often differ in their last words."""
    return "\n".join(wrap(printable(name), wide, max_lines=most, placeholder=" …"))


def _sheet(height: float, rows: int = 1, columns: int = 1, **how: Any) -> tuple[Drawing, list[Axes]]:
    drawing = Drawing(figsize=(WIDE, height))
    return drawing, list(drawing.subplots(rows, columns, squeeze=False, **how).flat)


def _whole(axis: Any) -> None:
    axis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))


def _name_ticks(axis: Any, names: Sequence[str], most: int = 25, bold: Sequence[int] = ()) -> None:
    """Every name where there is room, else every n-th."""
    step = max(1, -(-len(names) // most))
    at = range(0, len(names), step)
    axis.set_major_locator(FixedLocator(list(at)))
    labels = [_short(names[i]) for i in at]
    turn = axis.axis_name == "x" and sum(map(len, labels)) > 60
    axis.set_ticklabels(labels, **({"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if turn else {}))
    axis.set_tick_params(length=0, labelsize=8)
    for i, label in zip(at, axis.get_ticklabels(), strict=False):
        label.set_fontweight("bold" if i in bold else "normal")


def _look(colour: int, dash: int = 0) -> dict[str, Any]:
    return {"color": SERIES[colour], "linestyle": (0, DASHES[dash]) if DASHES[dash] else "-"}


def _legend_below(drawing: Drawing, always: bool = False) -> None:
    """One for all charts of a drawing, each label once."""
    found: dict[str, Any] = {}
    for ax in drawing.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if len(found) > 1 or always:
        across = max(1, min(len(found), int(120 / (max(map(len, found)) + 8))))
        drawing.legend(found.values(), found.keys(), loc="outside lower left", ncols=across, fontsize=8)


def _picture(ax: Axes, pixels: Floats) -> None:
    ax.grid(visible=False)
    ax.imshow(pixels, aspect="auto", interpolation="none")
    for side in ax.spines.values():
        side.set_visible(True)
        side.set_color(GRID)


# ---------------------------------------------------------------- a figure


def draw(figure: Figure) -> Drawing:
    """Panels below each other; conditions of one panel, and bars, beside each other."""
    with _ONE_AT_A_TIME, mpl.rc_context(STYLE):
        return _drawn(figure)


def _drawn(figure: Figure) -> Drawing:
    first, *others = figure.panels
    if isinstance(first, Lines) and not others:
        return _conditions(first)
    if isinstance(first, Heat) and first.order:
        drawing = Drawing(figsize=(0.78 * WIDE, 0.66 * WIDE))
        axes = [drawing.subplots()]
    elif isinstance(first, Bars):
        drawing, axes = _sheet(_height(first), 1, len(figure.panels), sharey=True)
    else:
        heights = [_height(panel) for panel in figure.panels]
        how = {"height_ratios": heights} if others else {}
        drawing, axes = _sheet(sum(heights), len(heights), 1, **how)
    for ax, panel in zip(axes, figure.panels, strict=True):
        _paint(ax, panel)
    _legend_below(drawing, always=isinstance(first, Timeline))
    return drawing


def _height(panel: Panel) -> float:
    if isinstance(panel, Heat):
        return min(7.0, 1.1 + 0.16 * max(6, min(len(panel.rows), 30)) + 0.08 * len(panel.rows) * panel.written)
    if isinstance(panel, Timeline):
        return min(7.0, 1.5 + 0.19 * max(6, len(panel.rows)))
    if isinstance(panel, Bars):
        return 1.2 + 0.3 * max(2, len(panel.rows))
    return 1.1 + 0.34 * max(2, len(panel.rows)) if isinstance(panel, Strips) else 2.9


def _paint(ax: Axes, panel: Panel) -> None:
    match panel:
        case Lines():
            _lines(ax, panel, panel.series)
        case Heat():
            _heat(ax, panel)
        case Bars():
            _bars(ax, panel)
        case Columns():
            _columns(ax, panel)
        case Strips():
            _strips(ax, panel)
        case Timeline():
            _timeline(ax, panel)
    ax.set_xlabel(panel.x)


# ---------------------------------------------------------------- lines


def _conditions(lines: Lines) -> Drawing:
    """One chart for each condition; a label has the same colour and dashes in all of them.

    Without `same_scale`, values that lie far apart get a logarithmic scale, and others each chart its own."""
    panels = list(dict.fromkeys(s.panel for s in lines.series))
    values = np.concatenate([s.y for s in lines.series])
    values = values[np.isfinite(values)]
    far = len(values) > 0 and values.min() > 0 and values.max() > lines.far * values.min()
    logarithmic = not lines.same_scale and bool(far)
    columns = 1 if len(panels) == 1 else 2 if len(panels) in (2, 4) else 3
    rows = -(-len(panels) // columns)
    names = len({s.label for s in lines.series})
    height = (3.3 if columns == 1 else 2.7 if columns == 2 else 2.3) * rows + 0.1 * names * (names > 1)
    drawing, axes = _sheet(height, rows, columns, sharey=lines.same_scale or logarithmic)
    for ax, panel in zip(axes, panels, strict=False):
        _lines(ax, lines, [s for s in lines.series if s.panel == panel])
        ax.set_title(_folded(panel, 96 // columns, 3))
        ax.set_ylabel("")
        if logarithmic:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[max(0, len(panels) - columns) : len(panels)]:
        ax.set_xlabel(lines.x)
    drawing.supylabel(lines.y, fontsize=9)
    _legend_below(drawing)
    return drawing


def _lines(ax: Axes, lines: Lines, series: Sequence[Series]) -> None:
    crowd = sum(len(s.x) for s in series if s.mark) > MANY_POINTS
    for s in series:
        label, look = _short(s.label, 34), _look(s.colour, s.dash)
        if s.mark:
            _cloud(ax, s, label, crowd)
            continue
        if s.low is not None and s.high is not None:
            ax.fill_between(s.x, s.low, s.high, color=look["color"], alpha=0.18, linewidth=0)
        dots: dict[str, Any] = {"marker": "o", "markersize": 4} if lines.marks or len(s.x) == 1 else {}
        ax.plot(s.x, s.y, label=label, drawstyle="steps-mid" if s.step else "default", **dots, **look)
        if s.last is not None and len(s.x):
            ax.plot([s.x[-1]], [s.last], marker="D", markersize=5, color=look["color"], markeredgecolor=PAPER)
    if lines.x == "round":
        _whole(ax.xaxis)
    if lines.title:
        ax.set_title(lines.title)
    ax.set_ylabel(lines.y)
    ax.margins(x=0.02)


def _cloud(ax: Axes, s: Series, label: str, crowd: bool) -> None:
    """A crowd is an image, whose colours CSS cannot reach."""
    colour = (FIXED if crowd else SERIES)[s.colour]
    how: dict[str, Any] = {"s": 16, "color": colour, "linewidths": 1 if s.mark == "cross" else 0, "alpha": 0.75}
    if s.mark in HOLLOW:
        how = {"s": 44, "facecolors": "none", "edgecolors": colour, "linewidths": 0.9}
    ax.scatter(s.x, s.y, marker=MARKS[s.mark], label=label, rasterized=crowd, **how)


# ---------------------------------------------------------------- maps


def _heat(ax: Axes, panel: Heat) -> None:
    """A map of numbers, nothing where there is none, and its scale."""
    values, rows, columns = panel.values, panel.rows, panel.columns
    marked = [i for i, row in enumerate(panel.order) if row in panel.marked] if panel.order else panel.marked
    if panel.order:
        values = values[np.ix_(panel.order, panel.order)]
        rows, columns = ([f"{names[i]}{'*' * (i in panel.marked)}" for i in panel.order] for names in (rows, columns))
    if panel.colour is not None:
        _picture(ax, np.where(np.isfinite(values)[..., None], to_rgba(FIXED[panel.colour]), (0, 0, 0, 0)))
    else:
        _scaled(ax, panel, values)
    for (row, column), value in np.ndenumerate(values) if panel.written else ():
        if np.isfinite(value):
            ink = "#ffffff" if value < 0.55 * panel.most else "#000000"
            ax.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=ink)
    _name_ticks(ax.yaxis, rows, 25, marked)
    if panel.x == "round":
        _rounds_axis(ax, [int(c) for c in columns])
    else:
        _name_ticks(ax.xaxis, columns, 25 if panel.order else 40)
    ax.set_ylabel(panel.y)
    if panel.title:
        ax.set_title(panel.title)


def _scaled(ax: Axes, panel: Heat, values: Floats) -> None:
    ax.grid(visible=False)
    how: dict[str, Any] = {"cmap": COLOURS, "aspect": "equal" if panel.order else "auto", "interpolation": "none"}
    image = ax.imshow(np.ma.masked_invalid(values), vmin=0, vmax=panel.most, **how)
    over = bool((np.nan_to_num(values) > panel.most).any())
    drawing = ax.get_figure(root=True)
    assert drawing is not None
    bar = drawing.colorbar(image, ax=ax, pad=0.015, fraction=0.04, extend="max" if over else "neither")
    bar.set_label(panel.what, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def _rounds_axis(ax: Axes, rounds: Sequence[int]) -> None:
    """Columns of a map are rounds, not always every one; round numbers are labelled first."""
    step = next((s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500) if len(rounds) <= 12 * s), 1000)
    at = [i for i, number in enumerate(rounds) if number % step == 0] or list(range(0, len(rounds), step))
    ax.set_xticks(at, [str(rounds[i]) for i in at])


def _timeline(ax: Axes, panel: Timeline) -> None:
    rounds, states = panel.cells(MOST_ROUNDS)
    pixels = np.zeros((len(states), len(rounds), 4))
    for row, line in enumerate(states):
        for column, state in enumerate(line):
            if state:
                pixels[row, column] = to_rgba(FIXED[panel.kinds[state].colour])
    _picture(ax, pixels)
    _name_ticks(ax.yaxis, panel.rows, 34, panel.marked)
    _rounds_axis(ax, rounds)
    ax.set_ylabel(panel.y)
    bad = len(panel.marked)
    if 0 < bad < len(states):
        ax.axhline(bad - 0.5, color=INK, linewidth=1.2)
    if bad:
        ax.set_title(f"bold, above the line: {panel.truth}")
    for kind in panel.kinds.values():  # for the legend
        ax.fill_between([], [], color=FIXED[kind.colour], label=kind.words)


# ---------------------------------------------------------------- bars and dots


def _columns(ax: Axes, panel: Columns) -> None:
    """Clients from the worst served to the best."""
    at, of = np.arange(len(panel.values)), np.asarray(panel.of)
    for i, (label, colour) in enumerate(panel.groups):
        ax.bar(at[of == i], panel.values[of == i], 0.85, color=SERIES[colour], label=label)
    for i, line in enumerate(panel.lines):
        label = f"{line.label} {said(line.value, panel.unit)}"
        dash = (0, DASHES[1 + i % 3])
        ax.plot([-0.7, line.until - 0.3], [line.value] * 2, color=INK, linewidth=1, linestyle=dash, label=label)
    _name_ticks(ax.xaxis, panel.names, 40)
    ax.set(ylabel=panel.y, xlim=(-0.7, len(at) - 0.3))
    if panel.high is not None:
        ax.set_ylim(0, panel.high)
    ax.grid(visible=False, axis="x")


def _strips(ax: Axes, panel: Strips) -> None:
    """What is above nothing has another colour than what is below."""
    crowd = sum(map(len, panel.rows.values())) > MANY_POINTS
    for row, values in enumerate(panel.rows.values()):
        order = np.sort(values)
        lift = 0.3 * np.sin(np.arange(len(order)) * 2.4)  # apart from each other, the same every time
        for sign, colour in ((order >= 0, SERIES[GOOD]), (order < 0, SERIES[BAD])):
            where = order[sign], row + lift[sign]
            ax.scatter(*where, s=13, color=colour, alpha=0.75, linewidths=0, rasterized=crowd)
        ax.plot([np.median(order)] * 2, [row - 0.36, row + 0.36], color=INK, linewidth=2)
    ax.axvline(0, color=MUTED, linewidth=1)
    ax.set_yticks(range(len(panel.rows)), [_folded(n, 40, 2) for n in panel.rows])
    ax.set(ylim=(len(panel.rows) - 0.4, -0.6))
    ax.grid(visible=False, axis="y")


def _bars(ax: Axes, panel: Bars) -> None:
    at, total = np.arange(len(panel.rows)), np.zeros(len(panel.rows))
    for part in panel.parts:
        label = part.label if len(panel.parts) > 1 else None
        ax.barh(at, part.values, 0.7, left=total, color=SERIES[part.colour], label=label)
        total = total + part.values
    ax.set_yticks(at, [_folded(row, 38, 2) for row in panel.rows])
    ax.set_ylim(max(len(at) - 0.4, 1), min(-0.6, len(at) - 2))
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: said(v, panel.unit)))
    ax.margins(x=0.2)
    for i, value in zip(at, total, strict=True):
        where: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7.5}
        ax.annotate(said(float(value), panel.unit), (value, i), (3, 0), **where)
