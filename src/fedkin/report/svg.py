"""The figures: numbers in, a matplotlib `Figure` out. Nothing here reads a file or knows what a run is.

All share one look: colours that colour-blind readers can tell apart (Okabe and Ito), line styles beside them, text
as text. `inline_svg` writes colours as CSS variables, so that one drawing serves a light and a dark page.
"""

from __future__ import annotations

import io
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from html import escape
from typing import Any, Literal, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

Floats = np.ndarray[Any, np.dtype[Any]]
P = ParamSpec("P")

INK, MUTED, GRID, PAPER = "#1b1f24", "#5b6470", "#dde2e8", "#fefefe"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4e")
DARK_SERIES = ("#4aa8e0", "#f0803c", "#2fc79b", "#e39cc4", "#f2b533", "#9ad4f7", "#b9bec5")
GOOD, BAD, ODD, FAINT = SERIES[0], SERIES[1], SERIES[4], SERIES[5]
FIXED = ("#0173b2", "#d65e00", "#019e73", "#cd79a7", "#e79f00", "#57b4e9")  # the same within images, out of CSS's reach
THEME = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", **{c: f"c{i}" for i, c in enumerate(SERIES)}}
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)))
HEAT = "cividis"
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
FAR = 50
MANY_POINTS = 1500  # a cloud of more is drawn as an image within the drawing
_ONE_AT_A_TIME = threading.RLock()  # matplotlib's settings belong to the whole process


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _ONE_AT_A_TIME, mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return wrapper


# ---------------------------------------------------------------- files and pages


def save(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
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


def inline_svg(figure: Figure, alt: str, salt: str) -> str:
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


@dataclass(frozen=True, eq=False)
class Series:
    """A line. `low` and `high` bound its band; `last` is a point that stands apart from it, above the last x."""

    label: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    last: float | None = None
    panel: str = ""


def _sheet(height: float, rows: int = 1, columns: int = 1, **how: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDE, height))
    axes = figure.subplots(rows, columns, squeeze=False, **how)
    return figure, list(axes.flat)


def _whole(axis: Any) -> None:
    axis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))


def printable(text: str) -> str:
    """Without what has no glyph of its own: control characters, changes of direction."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)


def _short(name: str, most: int = 14) -> str:
    return printable(name if len(name) <= most else name[: most - 1] + "…")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _name_ticks(axis: Any, names: Sequence[str], most: int = 25) -> None:
    """Every name where there is room, else every n-th."""
    step = max(1, -(-len(names) // most))
    at = range(0, len(names), step)
    axis.set_major_locator(FixedLocator(list(at)))
    labels = [_short(names[i]) for i in at]
    turn = axis.axis_name == "x" and sum(map(len, labels)) > 60
    axis.set_ticklabels(labels, **({"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if turn else {}))
    axis.set_tick_params(length=0, labelsize=8)


def _look(index: int) -> dict[str, Any]:
    return {"color": SERIES[index % len(SERIES)], "linestyle": DASHES[index // len(SERIES) % len(DASHES)]}


def _heat(figure: Figure, ax: Axes, values: Floats, label: str, **how: Any) -> None:
    """A map of numbers, nothing where there is none, and its scale."""
    ax.grid(visible=False)
    image = ax.imshow(np.ma.masked_invalid(values), cmap=HEAT, aspect="auto", interpolation="none", **how)
    over = how.get("vmax") is not None and bool(np.nanmax(values) > how["vmax"])
    bar = figure.colorbar(image, ax=ax, pad=0.015, fraction=0.04, extend="max" if over else "neither")
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def _legend_below(figure: Figure, ax: Axes, columns: int = 4) -> None:
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower left", ncols=min(columns, len(labels)), fontsize=8)


def _rounds_axis(ax: Axes, rounds: Sequence[int]) -> None:
    """Columns of a map are rounds, not always every one; round numbers are labelled first."""
    step = next((s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500) if len(rounds) <= 12 * s), 1000)
    at = [i for i, number in enumerate(rounds) if number % step == 0] or list(range(0, len(rounds), step))
    ax.set_xticks(at, [str(rounds[i]) for i in at])
    ax.set_xlabel("round")


# ---------------------------------------------------------------- curves


@styled
def curves(series: Sequence[Series], x: str, y: str, *, same_scale: bool = True, marks: bool = False) -> Figure:
    """Lines with bands, one panel for each condition; a label has the same colour and dashes in all of them.

    Without `same_scale`, values that lie far apart get a logarithmic scale, and others each panel its own."""
    panels = list(dict.fromkeys(s.panel for s in series))
    values = np.concatenate([s.y for s in series])
    logarithmic = not same_scale and bool(values.min() > 0 and values.max() > FAR * values.min())
    labels = {name: i for i, name in enumerate(dict.fromkeys(s.label for s in series))}
    columns = 1 if len(panels) == 1 else 2 if len(panels) in (2, 4) else 3
    rows = -(-len(panels) // columns)
    names = [_short(n, 34) for n in labels]
    across = max(1, min(len(names), int(120 / (max(map(len, names)) + 8))))
    below = 0.2 * -(-len(names) // across) if len(names) > 1 else 0
    height = (3.3 if columns == 1 else 2.7 if columns == 2 else 2.3) * rows + below
    figure, axes = _sheet(height, rows, columns, sharey=same_scale or logarithmic)
    for ax, panel in zip(axes, panels, strict=False):
        for s in series:
            if s.panel == panel:
                _line(ax, s, _look(labels[s.label]), marks or len(s.x) == 1)
        ax.set_title(_short(panel, 96 // columns))
        if logarithmic:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
        if x == "round":
            _whole(ax.xaxis)
        ax.margins(x=0.02)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[max(0, len(panels) - columns) : len(panels)]:
        ax.set_xlabel(x)
    figure.supylabel(y, fontsize=9)
    if len(names) > 1:
        proxies = [axes[0].plot([], [], label=n, **_look(i))[0] for i, n in enumerate(names)]
        figure.legend(proxies, names, loc="outside lower left", ncols=across, fontsize=8)
    return figure


def _line(ax: Axes, s: Series, look: dict[str, Any], marks: bool) -> None:
    if s.low is not None and s.high is not None:
        ax.fill_between(s.x, s.low, s.high, color=look["color"], alpha=0.18, linewidth=0)
    ax.plot(s.x, s.y, marker="o" if marks else None, markersize=4, **look)
    if s.last is not None and len(s.x):
        ax.plot([s.x[-1]], [s.last], marker="D", markersize=5, color=look["color"], markeredgecolor=PAPER)


# ---------------------------------------------------------------- clients


@styled
def spread(accuracy: Floats, names: Sequence[str], mean: float) -> Figure:
    """Clients from the worst served to the best; the lowest tenth stands out."""
    order = np.argsort(accuracy, kind="stable")
    tenth = max(1, -(-len(order) // 10))
    figure, (ax,) = _sheet(2.9)
    at = np.arange(len(order))
    ax.bar(at[:tenth], accuracy[order][:tenth], 0.85, color=BAD, label="worst decile")
    ax.bar(at[tenth:], accuracy[order][tenth:], 0.85, color=GOOD, label="other clients")
    ax.axhline(mean, color=INK, linewidth=1, linestyle=DASHES[1], label=f"mean {mean:.1f} %")
    _name_ticks(ax.xaxis, [names[i] for i in order], 40)
    ax.set(xlabel="client", ylabel="test accuracy, %", ylim=(0, 100), xlim=(-0.7, len(order) - 0.3))
    ax.grid(visible=False, axis="x")
    _legend_below(figure, ax)
    return figure


@styled
def gains(found: Mapping[str, Floats]) -> Figure:
    """For each label, every client's points above (or below) training alone."""
    figure, (ax,) = _sheet(1.1 + 0.34 * max(2, len(found)))
    for row, values in enumerate(found.values()):
        order = np.sort(values)
        lift = 0.3 * np.sin(np.arange(len(order)) * 2.4)  # apart from each other, the same every time
        for sign, colour in ((order >= 0, GOOD), (order < 0, BAD)):
            ax.scatter(
                order[sign],
                row + lift[sign],
                s=13,
                color=colour,
                alpha=0.75,
                linewidths=0,
                rasterized=len(order) * len(found) > MANY_POINTS,
            )
        ax.plot([np.median(order)] * 2, [row - 0.36, row + 0.36], color=INK, linewidth=2)
    ax.axvline(0, color=MUTED, linewidth=1)
    ax.set_yticks(range(len(found)), [_short(n, 40) for n in found])
    ax.set(xlabel="points above training alone, one dot a client; the bar is the median", ylim=(len(found) - 0.4, -0.6))
    ax.grid(visible=False, axis="y")
    return figure


@styled
def split_map(counts: Floats, names: Sequence[str]) -> Figure:
    """Training samples per class and client."""
    table = counts.T.astype(float)
    few = table.size <= 260
    figure, (ax,) = _sheet(min(7.0, 1.1 + 0.24 * max(6, min(len(table), 24))))
    _heat(figure, ax, np.where(table > 0, table, np.nan), "training samples", vmin=0)
    for (row, column), value in np.ndenumerate(table) if few else ():
        if value > 0:
            ink = "#ffffff" if value < 0.55 * table.max() else "#000000"
            ax.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=ink)
    _name_ticks(ax.xaxis, names, 40)
    _name_ticks(ax.yaxis, [str(i) for i in range(len(table))])
    ax.set(xlabel="client", ylabel="class")
    return figure


# ---------------------------------------------------------------- who learns from whom


@styled
def matrix(weights: Floats, names: Sequence[str], most: float) -> Figure:
    """Row: who learns; column: from whom. Already in the order to be shown."""
    figure = Figure(figsize=(0.78 * WIDE, 0.66 * WIDE))
    ax = figure.subplots()
    _heat(figure, ax, weights, "weight", vmin=0, vmax=most)
    ax.set_aspect("equal")
    _name_ticks(ax.xaxis, names)
    _name_ticks(ax.yaxis, names)
    ax.set(xlabel="learns from", ylabel="client")
    return figure


# ---------------------------------------------------------------- the methods' own


@styled
def committee(
    rounds: Sequence[int],
    scores: Floats,
    accepted: Floats,
    threshold: Floats,
    seats: Floats,
    malicious: Sequence[int],
    names: Sequence[str],
) -> Figure:
    """Votes on each body against the bar, and who sat on the committee. Arrays are [rounds, clients]."""
    figure, (votes, who) = _sheet(5.4, 2, 1, sharex=False, height_ratios=(3, 2))
    apart = np.linspace(-0.25, 0.25, scores.shape[1])  # equal scores of a round, side by side
    when = np.asarray(rounds, float)[:, None] + apart
    bad = np.isin(np.arange(scores.shape[1]), malicious)[None, :] & np.isfinite(scores)
    judged = np.isfinite(scores)
    crowd = judged.sum() > MANY_POINTS
    good, poor = FIXED[:2] if crowd else SERIES[:2]
    for chosen, mark, colour, label in (
        (judged & (accepted > 0), "o", good, "accepted"),
        (judged & ~(accepted > 0), "x", poor, "rejected"),
    ):
        if chosen.any():
            votes.scatter(
                when[chosen],
                100 * scores[chosen],
                s=16,
                marker=mark,
                color=colour,
                alpha=0.75,
                label=label,
                linewidths=1 if mark == "x" else 0,
                rasterized=crowd,
            )
    if bad.any():
        votes.scatter(
            when[bad],
            100 * scores[bad],
            s=44,
            marker="s",
            facecolors="none",
            edgecolors=MUTED,
            linewidths=0.9,
            label="malicious (the truth)",
            rasterized=crowd,
        )
    votes.step(rounds, 100 * threshold, where="mid", color=INK, linestyle=DASHES[1], label="threshold")
    votes.set(ylabel="committee's score, %", xlabel="round")
    _whole(votes.xaxis)
    _picture(who, np.where(seats.T[..., None] > 0, to_rgba(FIXED[2]), (0, 0, 0, 0)))
    _name_ticks(who.yaxis, names, 12)
    _rounds_axis(who, rounds)
    who.set_ylabel("client")
    who.set_title("on the committee")
    _legend_below(figure, votes)
    return figure


def _picture(ax: Axes, pixels: Floats) -> None:
    ax.grid(visible=False)
    ax.imshow(pixels, aspect="auto", interpolation="none")
    for side in ax.spines.values():
        side.set_visible(True)
        side.set_color(GRID)


@styled
def contributions(rounds: Sequence[int], alpha: Floats, personal: Floats | None, names: Sequence[str]) -> Figure:
    """Each client's weight in the average, [rounds, clients], and the share of weights it has made its own."""
    figure, axes = _sheet(5.2 if personal is not None else 3.2, 1 if personal is None else 2, 1)
    _heat(figure, axes[0], alpha.T, "weight in the average", vmin=0)
    _name_ticks(axes[0].yaxis, names, 12)
    _rounds_axis(axes[0], rounds)
    axes[0].set_ylabel("client")
    if personal is not None:
        _range(axes[1], rounds, 100 * personal, GOOD)
        axes[1].set(xlabel="round", ylabel="personal weights, %", ylim=(0, None))
        _legend_below(figure, axes[1])
    return figure


def _range(ax: Axes, rounds: Sequence[int], values: Floats, colour: str) -> None:
    """Median over clients, and from the lowest to the highest; rounds without anybody are left out."""
    there = np.isfinite(values).any(1)
    at, known = np.asarray(rounds)[there], values[there]
    ax.fill_between(
        at,
        np.nanmin(known, 1),
        np.nanmax(known, 1),
        color=colour,
        alpha=0.2,
        linewidth=0,
        label="lowest to highest client",
    )
    ax.plot(at, np.nanmedian(known, 1), color=colour, label="median client", marker="o" if len(at) < 3 else None)
    _whole(ax.xaxis)


@styled
def prototypes(
    rounds: Sequence[int],
    pulls: Floats | None,
    gamma: Floats | None,
    weights: Floats | None,
    classes: Sequence[int],
    names: Sequence[str],
) -> Figure:
    """The two pulls [rounds, 2]; weights in the average [rounds, clients]; of the prototypes [classes, clients]."""
    parts = [part for part in (pulls, gamma, weights) if part is not None]
    figure, axes = _sheet(2.4 * len(parts) + 0.3, len(parts), 1)
    spare = iter(axes)
    if pulls is not None:
        ax = next(spare)
        for column, label in enumerate(("own prototypes", "global prototypes")):
            ax.plot(rounds, pulls[:, column], label=label, marker="o" if len(rounds) < 3 else None, **_look(column))
        ax.set(xlabel="round", ylabel="pull", ylim=(0, None), title="alignment phase")
        _whole(ax.xaxis)
        ax.legend(fontsize=8)
    if gamma is not None:
        ax = next(spare)
        _heat(figure, ax, gamma.T, "weight", vmin=0)
        _name_ticks(ax.yaxis, names, 10)
        _rounds_axis(ax, rounds)
        ax.set(ylabel="client", title="weight of each client's body in the average")
    if weights is not None:
        ax = next(spare)
        _heat(figure, ax, np.where(weights > 0, weights, np.nan), "weight", vmin=0)
        _name_ticks(ax.xaxis, names, 40)
        _name_ticks(ax.yaxis, [str(c) for c in classes], 12)
        ax.set(xlabel="client", ylabel="class", title="weight of each client's prototype, last round")
    return figure


# ---------------------------------------------------------------- attackers

STATES = {
    "left_out": ("left out of an average", FIXED[5]),
    "rejected": ("rejected", FIXED[4]),
    "failed": ("failed", FIXED[3]),
    "removed": ("removed", FIXED[1]),
}


@styled
def timeline(rounds: Sequence[int], states: Sequence[Sequence[str]], names: Sequence[str], bad: int) -> Figure:
    """What happened to each client, [clients][rounds]; the first `bad` clients are malicious in truth."""
    pixels = np.zeros((len(states), len(rounds), 4))
    for row, line in enumerate(states):
        for column, state in enumerate(line):
            if state:
                pixels[row, column] = to_rgba(STATES[state][1])
    figure, (ax,) = _sheet(min(7.0, 1.5 + 0.19 * max(6, len(states))))
    _picture(ax, pixels)
    _name_ticks(ax.yaxis, names, 34)
    _rounds_axis(ax, rounds)
    ax.set_ylabel("client")
    if 0 < bad < len(states):
        ax.axhline(bad - 0.5, color=INK, linewidth=1.2)
    if bad:
        for label in ax.get_yticklabels()[: -(-bad // max(1, -(-len(names) // 34)))]:
            label.set_fontweight("bold")
        ax.set_title(f"bold, above the line: the {bad} malicious clients (the truth)")
    seen = [s for s in STATES if any(s in line for line in states)]
    handles = [Patch(color=STATES[s][1], label=STATES[s][0]) for s in seen]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=8)
    return figure


# ---------------------------------------------------------------- what it cost


@styled
def phases(rows: Sequence[tuple[str, float, float, float]]) -> Figure:
    """(name, bytes down, bytes up, seconds) for each phase."""
    figure, (data, time) = _sheet(1.2 + 0.3 * max(2, len(rows)), 1, 2, sharey=True)
    at = np.arange(len(rows))
    down, up, seconds = (np.array([row[i] for row in rows], float) for i in (1, 2, 3))
    data.barh(at, down / 1e6, 0.7, color=SERIES[0], label="down")
    data.barh(at, up / 1e6, 0.7, left=down / 1e6, color=SERIES[4], label="up")
    time.barh(at, seconds, 0.7, color=SERIES[2])
    data.set_yticks(at, [_short(row[0], 38) for row in rows])
    data.set_ylim(max(len(rows) - 0.4, 1), min(-0.6, len(rows) - 2))
    for ax, label, values, unit in ((data, "megabytes", (down + up) / 1e6, ""), (time, "seconds", seconds, " s")):
        ax.set_xlabel(label)
        ax.grid(visible=False, axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.margins(x=0.16)
        for i, value in zip(at, values, strict=True):
            text = f"{_number(value)}{unit}"
            ax.annotate(text, (value, i), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
    _legend_below(figure, data)
    return figure
