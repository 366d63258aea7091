"""The figures of one run. A figure needs a function here and a line in `FIGURES`: the report and the web page then have
it, with the same words, numbers, order and colours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedkin.core import notes
from fedkin.core.notes import numbers
from fedkin.report import figures, palette
from fedkin.report.figures import Figure, Floats, Heat, LeftOut, Lines, Missing, Panel, Series, cut, ends, said
from fedkin.report.gather import RunData
from fedkin.report.matrix import collaboration

MATRIX_BUDGET = 400_000  # numbers of all collaboration matrices in a page
MOST_CELLS = 500_000  # of the map of a split
MOST_TIMELINES = 120
LOSS = "loss"
TRUTH = "malicious (the truth)"
TUNED = " A point apart from its line stands for the models after the method's last fine-tuning."
DOWN, UP = "to clients", "to the server"


# ---------------------------------------------------------------- curves, as a run goes on


@dataclass(frozen=True)
class Curves:
    """A figure of columns of the table of rounds: on the page it grows with every round. Without a name of its own and
    a unit it is of the run's metric."""

    about: str
    columns: tuple[tuple[str, str, str], ...]  # what it is called, the column, and the column with its spread
    y: str = ""
    unit: figures.Unit = ""

    def __call__(self, run: RunData) -> Figure:
        series = [_curve(run, i, *column) for i, column in enumerate(self.columns)]
        if not np.isfinite(run.rounds["validation_macro"]).any():
            series = [s for s in series if not s.column.startswith("validation")]
        tuned = TUNED if any(s.last is not None for s in series) else ""
        about = self.about.format(who="benign clients" if run.malicious else "clients")
        panel = figures.of_scores("round", run.metric, series, whole=True)
        if self.y:
            panel = Lines("round", self.y, self.unit, series, same_scale=self.unit != "", low=0.0)
        return Figure(about + tuned, ends(series, panel.unit), [panel])


def _curve(run: RunData, place: int, label: str, column: str, spread: str) -> Series:
    regular, last = run.regular, run.last
    y = run.rounds[column][regular]
    ending = last[column] if last["final"] == 1 and np.isfinite(last[column]) else None
    aside = run.rounds[spread][regular] if spread else None
    low, high = (None, None) if aside is None else figures.band(y, aside, run.metric)
    x = run.rounds["round"][regular]
    return Series(label, x, y, low, high, ending, colour=place, dash=place, column=column, spread=spread)


ACCURACY_CURVES = Curves(
    "Of the personal models of {who}: the mean over clients (macro), with one standard deviation over clients to "
    "either side, and the mean of the worst tenth.",
    (("macro", "macro", "std"), ("worst decile", "worst_decile", ""), ("validation, macro", "validation_macro", "")),
)
LOSS_CURVES = Curves(
    "Mean test loss of the personal models of {who}, and training loss of those who trained.",
    (("test", "test_loss", ""), ("training", "train_loss", ""), ("validation", "validation_loss", "")),
    LOSS,
)
TRAFFIC = Curves("All that was sent since the start.", ((DOWN, "bytes_down", ""), (UP, "bytes_up", "")), "sent", "B")


# ---------------------------------------------------------------- clients


def spread_over_clients(run: RunData) -> Figure:
    each, bad, metric, unit = run.clients["accuracy"], set(run.malicious), run.metric, figures.unit_of(run.metric)
    ranked = [int(c) for c in np.argsort(each if metric.higher else -each, kind="stable") if np.isfinite(each[c])]
    benign, hostile = [c for c in ranked if c not in bad], [c for c in ranked if c in bad]
    if not benign:
        raise Missing("no benign client has test samples")
    tenth = max(1, -(-len(benign) // 10))
    of = [0] * tenth + [1] * (len(benign) - tenth) + [2] * len(hostile)
    groups = [("worst decile", palette.ODD), ("other clients", palette.GOOD), (TRUTH, palette.BAD)]
    mean, low = float(each[benign].mean()), float(each[benign[:tenth]].mean())
    when = f"after round {run.last['round']:.0f}, from worst to best"
    caption = f"Every {'benign ' if bad else ''}client's {metric.name} {when}."
    if hostile:
        caption += " Malicious ones stand apart at the right, and count in no mean."
    panel = figures.Columns(
        "client",
        figures.axis(metric),
        unit,
        [run.names[c] for c in [*benign, *hostile]],
        each[[*benign, *hostile]],
        groups[: 2 + bool(hostile)],
        of,
        [figures.Across("mean", mean, len(benign)), figures.Across("worst decile", low, len(benign))],
        100.0 if unit == "%" else None,
    )
    first, last, mean_, low_ = (said(float(v), unit) for v in (each[benign[0]], each[benign[-1]], mean, low))
    return Figure(caption, f"From {first} to {last}, mean {mean_}, worst decile {low_}.", [panel])


def split_of(run: RunData) -> Figure:
    counts = run.class_counts
    held = (counts > 0).sum(1)
    few = counts[: max(1, MOST_CELLS // counts.shape[1])]
    hash_ = str(run.info.prepared.get("split_hash", ""))[:12]
    caption = f"Training samples of each class per client. Split {hash_}, seed {run.info.seed}."
    alt = (
        f"{len(counts)} clients hold {int(counts.sum())} training samples of {counts.shape[1]} classes; "
        f"a client has {held.min()} to {held.max()} classes."
    )
    panel = Heat(
        "class",
        "client",
        "training samples",
        run.names[: len(few)],
        [str(c) for c in range(few.shape[1])],
        np.where(few > 0, few.astype(float), np.nan),
        float(max(1, counts.max())),
        marked=run.marked(range(len(few))),
        written=few.size <= 260,
    )
    return Figure(caption + cut(len(few), len(counts)), alt, [panel])


# ---------------------------------------------------------------- who learns from whom


def who_from_whom(run: RunData, budget: int = MATRIX_BUDGET, round: int | None = None) -> Figure:
    """With frames for as many rounds as the budget allows; without one, as it was in this round or the last."""
    found = collaboration(run, budget, round)
    names = [run.names[c] for c in found.clients]
    caption = (
        "Row: a client; column: whose model it takes, by weight. Clients that exchange much stand together "
        f"(hierarchical clustering). The colour scale ends at {found.most:.2g}: larger weights have its last colour."
    )
    caption += f" Marked: {TRUTH}." if run.marked(found.clients) else ""
    caption += cut(len(names), found.members)
    when = found.rounds[-1] if round is None else round
    alt = f"Weights between {len(names)} clients in round {when}; similar ones stand together."
    panel = Heat(
        "learns from",
        "client",
        "weight",
        names,
        names,
        found.frames[-1],
        found.most,
        order=found.order,
        marked=run.marked(found.clients),
    )
    return Figure(caption, alt, [panel], found.rounds, found.frames)


# ---------------------------------------------------------------- the methods' own


def _over_rounds(rounds: Sequence[int], values: Floats, run: RunData, what: str, title: str) -> Heat:
    """A map with a row for each client and a column for each round, of values [rounds, N]."""
    few = values[:, : len(run.few)].T
    most = float(np.nanmax(few)) if np.isfinite(few).any() else 0.0
    names, columns = run.names[: len(few)], [str(r) for r in rounds]
    return Heat("round", "client", what, names, columns, few, max(most, 1e-9), title, marked=run.marked(run.few))


Group = tuple[
    str, figures.Mark, int, Floats
]  # what points are called, how they are drawn, and which they are: [rounds, N]


def _against(
    run: RunData,
    rounds: Sequence[int],
    values: Floats,
    y: str,
    unit: figures.Unit,
    groups: Sequence[Group],
    bar: Floats,
) -> Lines:
    """Points by round, those of one round beside each other, against a bar."""
    few, x = len(run.few), np.asarray(rounds, float)
    where = x[:, None] + np.linspace(-0.25, 0.25, few)
    series = []
    for label, mark, colour, chosen in groups:
        fits = (chosen & np.isfinite(values))[:, :few]
        if fits.any():
            series.append(Series(label, where[fits], values[:, :few][fits], mark=mark, colour=colour))
    line = Series("threshold", x, bar, colour=palette.THIRD, dash=1, step=True)
    return Lines("round", y, unit, [*series, line], low=0.0)


def _which(run: RunData, clients: Iterable[Sequence[int]]) -> Floats:
    """Of whom it is true, [rounds, N], by lists of clients."""
    return np.array([np.isin(np.arange(len(run.names)), ids) for ids in clients])


def committee_votes(run: RunData) -> Figure:
    rounds, scores = run.over_rounds(notes.SCORES)
    used, seats, bar, lowered = (
        run.told(kind, rounds) for kind in (notes.ACCEPTED, notes.COMMITTEE, notes.THRESHOLD, notes.RELAXED)
    )
    accepted = _which(run, (used.get(r, []) for r in rounds))
    groups: list[Group] = [
        (notes.ACCEPTED.name, "dot", palette.GOOD, accepted),
        (notes.WAS_REJECTED.words, "cross", palette.BAD, ~accepted),
        (TRUTH, "square", len(palette.SERIES) - 1, _which(run, [run.malicious] * len(rounds))),
    ]
    threshold = 100 * np.array([{**bar, **lowered}.get(r, np.nan) for r in rounds], float)
    votes = _against(run, rounds, 100 * scores, "committee's score, %", "%", groups, threshold)
    sat = np.where(_which(run, (seats.get(r, []) for r in rounds)), 1.0, np.nan)
    seen = replace(_over_rounds(rounds, sat, run, "seat", "on the committee"), colour=palette.THIRD)
    out = int((np.isfinite(scores) & ~accepted).sum())
    caption = (
        "Each point is one client's body as the committee scored it; bodies below the dashed bar are rejected. "
        "Where nothing passed and the bar was lowered, the lowered one is drawn. Below: who was on the committee."
    )
    alt = f"{int(accepted.sum())} bodies accepted, {out} rejected in {len(rounds)} rounds."
    return Figure(caption + _few(run), alt, [votes, seen])


def lengths(run: RunData) -> Figure:
    rounds, norms = run.over_rounds(notes.NORMS)
    limits, bad = run.told(notes.T_NORM, rounds), _which(run, [run.malicious] * len(rounds))
    benign = "benign" if run.malicious else "each update"
    groups: list[Group] = [(benign, "dot", palette.GOOD, ~bad), (TRUTH, "cross", palette.BAD, bad)]
    limit = np.array([limits.get(r, np.nan) for r in rounds], float)
    over = int((norms > limit[:, None]).sum())
    caption = "The length of every calibrated update; longer than the threshold, and its client is removed."
    alt = f"Lengths of {int(np.isfinite(norms).sum())} updates in {len(rounds)} rounds, {over} above the threshold."
    return Figure(caption + _few(run), alt, [_against(run, rounds, norms, "length", "", groups, limit)])


def _few(run: RunData) -> str:
    return cut(len(run.few), len(run.names))


def contributions(run: RunData) -> Figure:
    rounds, alpha = run.over_rounds(notes.ALPHA)
    caption = "Alpha, the weight of what each client shares in the average."
    alt = f"At the end from {np.nanmin(alpha[-1]):.3g} to {np.nanmax(alpha[-1]):.3g}."
    panels: list[Panel] = [_over_rounds(rounds, alpha, run, "weight in the average", "")]
    mine = {r: _shares(run, value) for r, value in run.told(notes.MASK, rounds).items()}
    at = [r for r, shares in mine.items() if shares is not None]
    if at:
        shares = 100 * np.array([mine[r] for r in at])
        middle, low, high = (how(shares, 1) for how in (np.nanmedian, np.nanmin, np.nanmax))
        line = Series("median client", np.asarray(at, float), middle, low, high)
        panels.append(Lines("round", "personal weights, %", "%", [line], low=0.0))
        caption += (
            " Below: the share of its weights that a client has made its own: the median client, lowest and highest."
        )
        alt += f" {middle[-1]:.0f} % of the weights are personal for the median client."
    return Figure(caption + _few(run), alt, panels)


def _shares(run: RunData, noted: Any, column: str = "share", row: int | None = None) -> Floats | None:
    """From {"clients": [...], column: [...]}, or of one row of its table: an array [N]."""
    told = noted if isinstance(noted, dict) else {}
    ids, values = notes.client_list(told.get("clients"), len(run.names)), told.get(column, [])
    return None if ids is None else notes.spread_out(values if row is None else values[row], len(run.names), ids, 1)


def prototypes(run: RunData) -> Figure:
    noted, gamma = run.told(notes.PULLS), run.told(notes.SHARES)
    pairs = {r: numbers(p) for r, p in noted.items() if isinstance(p, list) and len(p) == 2}
    pulls = {r: pair for r, pair in pairs.items() if np.isfinite(pair).any()}
    panels: list[Panel] = []
    alt = ""
    if pulls:
        x, table = np.array(list(pulls), float), np.array(list(pulls.values()))
        labels = enumerate(("own prototypes", "global prototypes"))
        series = [Series(label, x, table[:, i], colour=i, dash=i) for i, label in labels]
        panels.append(Lines("round", "pull", "", series, "alignment phase", low=0.0))
        alt = f"Pulls at the end: own {table[-1, 0]:.2f}, global {table[-1, 1]:.2f}."
    if gamma:
        words = "weight of each client's body in the average"
        panels.append(_over_rounds(list(gamma), np.array(list(gamma.values())), run, "weight", words))
    last = run.told(notes.PROTOTYPE_WEIGHTS, run.rounds_of(notes.PROTOTYPE_WEIGHTS)[-1:])
    panels += [panel for value in last.values() if (panel := _prototype_weights(run, value)) is not None]
    if not panels:
        raise Missing("its notes hold no numbers for it")
    caption = (
        "The pull towards a client's own class prototypes fades while the pull towards the global ones grows. "
        "Bodies are averaged by their clients' Fisher information, prototypes by how near they are to the rest."
    )
    return Figure(caption + _few(run), alt, panels)


def _prototype_weights(run: RunData, noted: Any) -> Heat | None:
    """From {"clients": [...], "classes": [...], "weights": [[...], ...]}: a row for each class."""
    classes, rows = (noted.get(k) if isinstance(noted, dict) else None for k in ("classes", "weights"))
    if not isinstance(classes, list) or not isinstance(rows, list) or len(classes) != len(rows):
        return None
    absent = np.full(len(run.names), np.nan)
    found = (_shares(run, noted, "weights", i) for i in range(min(len(rows), run.limits.side)))
    table = np.array([absent if row is None else row for row in found]).reshape(-1, len(run.names))
    table = np.where(table > 0, table, np.nan)[:, : len(run.few)]
    if not np.isfinite(table).any():
        return None
    title, names = "weight of each client's prototype, last round", run.names[: len(run.few)]
    most = float(np.nanmax(table))
    return Heat("client", "class", "weight", [str(c)[:20] for c in classes[: len(table)]], names, table, most, title)


# ---------------------------------------------------------------- attackers, and what it cost


def removals(run: RunData) -> Figure:
    """Malicious clients first, and the others as far as there is room: with many, those to whom something happened."""
    kinds = notes.EVENTS
    happened = [event for event in run.events if event[2] in kinds]
    if not happened:
        raise Missing("nobody failed, was rejected, left out or removed")
    bad, touched = set(run.malicious), sorted({client for _, client, _, _ in happened})
    others = range(len(run.names)) if len(run.names) <= MOST_TIMELINES else touched
    shown = [*sorted(bad), *(c for c in others if c not in bad)][:MOST_TIMELINES]
    place = {c: i for i, c in enumerate(shown)}
    events = [figures.Happening(place[c], r, kind, why) for r, c, kind, why in happened if c in place]
    last = min(max(run.info.rounds_done, *(r for r, _, _, _ in happened), 1), 1_000_000)
    gone = {client for _, client, kind, _ in happened if kinds[kind].lasting}
    hit = len(gone & bad)
    benign = len(run.names) - len(bad)
    told = f"{hit} of {len(bad)} malicious and {len(gone) - hit} of {benign} honest clients were removed."
    if not bad:
        told = f"{len(gone)} of {len(run.names)} clients were removed; no client is marked as malicious throughout."
    seen = {k: kind for k, kind in kinds.items() if any(event.kind == k for event in events)}
    panel = figures.Timeline(
        "round", "client", [run.names[c] for c in shown], run.marked(shown), events, seen, last, TRUTH
    )
    more = f" Only the first {len(happened)} events are drawn." if len(run.events) >= run.limits.rows else ""
    caption = f"What happened to whom, and when, against the truth. {told}{cut(len(shown), len(run.names))}{more}"
    return Figure(caption, told, [panel])


def cost_per_phase(run: RunData) -> Figure:
    return phase_bars(run.phases(), "Each kind of exchange between server and clients, summed over all rounds.")


def phase_bars(costs: Sequence[tuple[str, Floats]], caption: str) -> Figure:
    """Of what is called so, bytes down, bytes up and seconds."""
    if not costs:
        raise Missing("no exchange with the clients has been recorded")
    rows, table = [name for name, _ in costs], np.array([cost for _, cost in costs])
    sent = [figures.Part(DOWN, palette.GOOD, table[:, 0]), figures.Part(UP, palette.ODD, table[:, 1])]
    told = (f"{n} {said(float(c[0] + c[1]), 'B')}, {said(float(c[2]), 's')}" for n, c in costs[:20])
    panels = [
        figures.Bars("bytes", "B", rows, sent),
        figures.Bars("seconds", "s", rows, [figures.Part("time", palette.THIRD, table[:, 2])]),
    ]
    return Figure(caption, f"{'; '.join(told)}.", panels)


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Plan:
    title: str
    build: Callable[..., Figure]
    own: tuple[str, ...] | None = ()  # whose it is: there its absence is worth a sentence; None: everybody's
    wide: bool = False  # on the page


FIGURES = {
    "accuracy-per-round": Plan("Accuracy per round", ACCURACY_CURVES, None),
    "bytes-per-round": Plan("Traffic", TRAFFIC),
    "loss-per-round": Plan("Loss per round", LOSS_CURVES, None),
    "spread-over-clients": Plan("Spread over clients", spread_over_clients, None),
    "split": Plan("Who has which classes", split_of, None),
    "matrix": Plan("Who learns from whom", who_from_whom, ("pfedcs", "fedcap")),
    "committee": Plan("Committee votes and thresholds", committee_votes, ("c-pfl",), wide=True),
    "lengths": Plan("Update lengths and threshold", lengths, wide=True),
    "contributions": Plan("Contribution weights and mask growth", contributions, ("co-pfl",), wide=True),
    "prototypes": Plan("Alignment phase and prototype weights", prototypes, ("fedpkda",), wide=True),
    "removals": Plan("Removed, rejected, failed", removals, None, wide=True),
    "cost-per-phase": Plan("Bytes and seconds per phase", cost_per_phase, None, wide=True),
}
"""By the names of their files and of their places on the page. Any method that makes the same notes has a figure."""
OF_ONE_RUN_ONLY = ("matrix", "committee", "lengths", "contributions", "prototypes", "removals")


def details(run: RunData, budget: int = MATRIX_BUDGET) -> list[Figure | LeftOut]:
    """What only one run can show: who learned from whom, the method's own figures, attackers."""
    parts = {name: figure(name, run, **({"budget": budget} if name == "matrix" else {})) for name in OF_ONE_RUN_ONLY}
    told = {name for name in parts if (own := FIGURES[name].own) is None or run.info.method in own}
    return [part for name, part in parts.items() if isinstance(part, Figure) or name in told]


def figure(name: str, run: RunData, **how: Any) -> Figure | LeftOut:
    plan = FIGURES[name]
    return figures.attempt(name, run.metric.put(plan.title), lambda: plan.build(run, **how))
