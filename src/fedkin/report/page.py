"""Reports: one self-contained HTML page for a run or for many, and the figures as files.

The page needs no network and nothing beside it. Whatever comes from a run folder is text to it, never markup."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from fedkin.config import POINTS
from fedkin.errors import DataError, FedKinError, UsageError, unknown
from fedkin.report import svg as figures
from fedkin.report.gather import (
    Collaboration,
    Floats,
    Group,
    Missing,
    RunData,
    collaboration,
    grouped,
    happenings,
    numbers,
)
from fedkin.report.svg import Series
from fedkin.runs.folder import REPORT, RunFolder

FORMATS = ("html", "png", "svg")
MOST_DETAILED = 6  # groups whose own figures are in the report of many runs
MOST_PANELS = 12
MOST_SPLITS = 3
MOST_ROWS = 40  # of bars
MATRIX_BUDGET = 400_000  # numbers of all collaboration matrices in a page
WIDEST_SLIDER = 300  # clients; above that a picture of the last round has to do
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, eq=False)
class Shown:
    """One figure of a report: its file name, what to say about it, and how to draw it."""

    name: str
    title: str
    caption: str
    alt: str
    draw: Callable[[], Figure]
    frames: Collaboration | None = None  # for the slider
    names: Sequence[str] = ()


@dataclass(frozen=True)
class LeftOut:
    """A figure that cannot be drawn, and why."""

    title: str
    why: str


Part = Shown | LeftOut
Builder = Callable[[], Shown]


def _try(title: str, build: Builder) -> Part:
    try:
        return build()
    except Missing as error:
        return LeftOut(title, str(error))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, DataError) as error:
        return LeftOut(title, f"what the run holds for it cannot be read ({str(error)[:200]})")


# ---------------------------------------------------------------- figures over all runs


def overview(groups: Sequence[Group]) -> list[Part]:
    """What compares the runs, or shows the one run as a whole."""
    parts = [
        _try("Accuracy per round", lambda: accuracy_per_round(groups)),
        _try("Accuracy per megabyte", lambda: accuracy_per_megabyte(groups)),
        _try("Loss per round", lambda: loss_per_round(groups)),
        _try("Spread over clients", lambda: spread_over_clients(groups)),
        _try("Gain over training alone", lambda: gain_over_local(groups)),
        _try("Bytes and seconds per phase", lambda: cost_per_phase(groups)),
    ]
    runs = [run for group in groups for run in group.runs]
    if sum(run.info.attack != "none" for run in runs) > 1:
        parts.append(_try("Accuracy against the share of attackers", lambda: attacker_shares(groups)))
    if sum("epsilon" in run.noted for run in runs) > 1:
        parts.append(_try("Privacy against accuracy", lambda: epsilon_accuracy(groups)))
    return parts + _splits(groups)


def accuracy_per_round(groups: Sequence[Group]) -> Shown:
    series = _series(groups, "macro", lambda run: run.rounds["round"])
    attacked = any(run.malicious for group in groups for run in group.runs)
    caption = f"Mean accuracy over clients{', under attack over the benign ones' if attacked else ''} (macro)."
    if any(s.low is not None for s in series):
        caption += " The band is one standard deviation over seeds to either side."
    if any(s.last is not None for s in series):
        caption += " A diamond stands for the models after the method's last fine-tuning."
    title = "Accuracy per round"
    return Shown(
        "accuracy-per-round",
        title,
        caption + _cut(groups),
        _ends(title, series),
        lambda: figures.curves(series, "round", "test accuracy, %"),
    )


def accuracy_per_megabyte(groups: Sequence[Group]) -> Shown:
    def sent(run: RunData) -> Floats:
        return np.asarray((run.rounds["bytes_down"] + run.rounds["bytes_up"]) / 1e6)

    series = _series(groups, "macro", sent)
    if not any((s.x > 0).any() for s in series):
        raise Missing("nothing was sent")
    caption = "The same accuracy against all that was sent to and from the server until then." + _cut(groups)
    return Shown(
        "accuracy-per-megabyte",
        "Accuracy per megabyte",
        caption,
        _ends("Accuracy per megabyte", series),
        lambda: figures.curves(series, "megabytes, both ways", "test accuracy, %"),
    )


def loss_per_round(groups: Sequence[Group]) -> Shown:
    rounds: Callable[[RunData], Floats] = lambda run: run.rounds["round"]  # noqa: E731
    series, alone = _series(groups, "test_loss", rounds), len({g.condition for g in groups}) == 1
    if alone:
        training = _series(groups, "train_loss", rounds)
        series = [replace(s, panel="test") for s in series] + [replace(s, panel="training") for s in training]
    series = [replace(s, low=_above_zero(s)) for s in series]
    caption = f"Mean over clients{'' if alone else ', on their test samples'}." + _cut(groups)
    return Shown(
        "loss-per-round",
        "Loss per round",
        caption,
        _ends("Loss per round", series, "{:.3g}"),
        lambda: figures.curves(series, "round", "loss", same_scale=False),
    )


def _above_zero(s: Series) -> Floats | None:
    """The lower edge of a band of losses, which are never negative."""
    return None if s.low is None else np.maximum(s.low, s.y / 100)


def _series(groups: Sequence[Group], column: str, x: Callable[[RunData], Floats]) -> list[Series]:
    """A line for each group: the mean over seeds in the rounds that all of them have."""
    out = []
    for group in _shown_in_panels(groups):
        runs = [run for run in group.runs if np.isfinite(run.rounds[column]).any()]
        if not runs:
            continue
        regular = [run.rounds["final"] == 0 for run in runs]
        common = sorted(set.intersection(*({*r.rounds["round"][k]} for r, k in zip(runs, regular, strict=True))))
        if not common:
            continue
        at = [np.flatnonzero(k & np.isin(r.rounds["round"], common)) for r, k in zip(runs, regular, strict=True)]
        values = np.array([r.rounds[column][i] for r, i in zip(runs, at, strict=True)])
        where = np.array([x(r)[i] for r, i in zip(runs, at, strict=True)]).mean(0)
        mean = values.mean(0)
        spread = values.std(0, ddof=1) if len(runs) > 1 else None
        tuned = [r.last[column] for r in runs if r.last["final"]]
        out.append(
            Series(
                group.label,
                where,
                mean,
                None if spread is None else mean - spread,
                None if spread is None else mean + spread,
                float(np.mean(tuned)) if len(tuned) == len(runs) else None,
                group.condition,
            )
        )
    if not out:
        raise Missing("no round has been evaluated yet")
    return out


def _shown_in_panels(groups: Sequence[Group]) -> list[Group]:
    conditions = list(dict.fromkeys(g.condition for g in groups))[:MOST_PANELS]
    return [g for g in groups if g.condition in conditions]


def _cut(groups: Sequence[Group]) -> str:
    more = len({g.condition for g in groups}) - MOST_PANELS
    return f" {more} more conditions are in the tables only." if more > 0 else ""


def _ends(title: str, series: Sequence[Series], form: str = "{:.1f} %") -> str:
    """The text for those who cannot see the curves: where they end."""
    ends = [
        f"{s.label}{f' ({s.panel})' if s.panel else ''} {form.format(s.y[-1] if s.last is None else s.last)}"
        for s in series
    ]
    return f"{title}. At the end: {'; '.join(ends[:20])}{'; ...' if len(ends) > 20 else ''}."


def spread_over_clients(groups: Sequence[Group]) -> Shown:
    title, name = "Spread over clients", "spread-over-clients"
    if len(groups) == 1:
        run = groups[0].runs[0]
        keep = np.flatnonzero(run.counted)
        if not len(keep):
            raise Missing("no benign client has test samples")
        each, names = run.clients["accuracy"][keep], [run.names[c] for c in keep]
        caption = f"Every benign client's accuracy after the last round, sorted. Run {run.info.id}."
        alt = f"{title}: from {each.min():.1f} to {each.max():.1f} %, worst decile {run.last['worst_decile']:.1f} %."
        return Shown(name, title, caption, alt, lambda: figures.spread(each, names, float(each.mean())))
    series = []
    for group in _shown_in_panels(groups):
        sorted_ = [np.sort(r.clients["accuracy"][r.counted]) for r in group.runs if r.evaluated and r.counted.any()]
        if sorted_:
            at = np.linspace(0, 100, 101)
            every = np.array([np.interp(at, np.linspace(0, 100, len(e)) if len(e) > 1 else [50.0], e) for e in sorted_])
            series.append(Series(group.label, at, every.mean(0), panel=group.condition))
    if not series:
        raise Missing("no round has been evaluated yet")
    lows = [f"{s.label}{f' ({s.panel})' if s.panel else ''} {s.y[0]:.1f} %" for s in series[:20]]
    caption = "Benign clients sorted by accuracy, the worst served at the left; mean over seeds." + _cut(groups)
    return Shown(
        name,
        title,
        caption,
        f"{title}. The worst client has: {'; '.join(lows)}.",
        lambda: figures.curves(series, "clients, % (worst first)", "test accuracy, %"),
    )


def gain_over_local(groups: Sequence[Group]) -> Shown:
    alone = [r for g in groups for r in g.runs if r.info.method == "local" and r.evaluated]
    if not alone:
        raise Missing("no run of the method local is among these runs")
    found: dict[str, Floats] = {}
    for group in groups:
        pairs = [
            (r, base)
            for r in group.runs
            if r.evaluated and r.info.method != "local"
            if (base := _alone(r, alone)) is not None
        ]
        each = [(r.clients["accuracy"] - b.clients["accuracy"])[r.counted & b.counted] for r, b in pairs]
        if each and sum(map(len, each)):
            found[group.name] = np.concatenate(each)
    if not found:
        raise Missing("no run of the method local has the same split and seed as another run")
    kept = dict(list(found.items())[:MOST_ROWS])
    caption = "Accuracy of each benign client less what it reaches by training alone on the same split and seed."
    caption += f" The first {MOST_ROWS} of {len(found)}." if len(found) > MOST_ROWS else ""
    without = dict.fromkeys(g.label for g in groups if g.name not in found and g.label != "local")
    caption += f" No run of local has the split and seed of: {', '.join(list(without)[:10])}." if without else ""
    said = [f"{k}: median {np.median(v):+.1f}, {(v < 0).mean():.0%} lose" for k, v in kept.items()]
    return Shown(
        "gain-over-local",
        "Gain over training alone",
        caption,
        "Gain over local. " + "; ".join(said) + ".",
        lambda: figures.gains(kept),
    )


def _alone(run: RunData, alone: Sequence[RunData]) -> RunData | None:
    """Training alone on the same rows; out of attackers' reach, so the attack need not be the same."""
    fit = [
        b
        for b in alone
        if len(b.names) == len(run.names)
        and b.info.seed == run.info.seed
        and b.info.prepared.get("split_hash") == run.info.prepared.get("split_hash")
    ]
    return max(fit, key=lambda b: b.info.attack == run.info.attack, default=None)


def attacker_shares(groups: Sequence[Group]) -> Shown:
    """Accuracy against the share of malicious clients; runs without an attack count as none."""
    points: dict[tuple[str, str, str], dict[float, list[float]]] = {}
    attacks = list(dict.fromkeys(r.info.attack for g in groups for r in g.runs if r.info.attack != "none"))
    for group in groups:
        for run in group.runs:
            share = run.info.config.get("malicious") if run.info.attack != "none" else 0.0
            if isinstance(share, int | float) and np.isfinite(run.last["macro"]):
                for attack in [run.info.attack] if run.info.attack != "none" else attacks:
                    key = (group.label, str(run.info.config.get("rule", "mean"))[:60], attack)
                    points.setdefault(key, {}).setdefault(float(share), []).append(run.last["macro"])
    lines = {key: found for key, found in points.items() if len(found) > 1}
    if not any(len([s for s in found if s > 0]) > 1 for found in lines.values()):
        raise Missing("the runs do not differ in the share of malicious clients")
    rules = {rule for _, rule, _ in lines}
    series = []
    for (label, rule, attack), found in lines.items():
        shares = sorted(found)
        mean = np.array([np.mean(found[s]) for s in shares])
        dev = np.array([np.std(found[s], ddof=1) if len(found[s]) > 1 else 0.0 for s in shares])
        series.append(
            Series(
                f"{label}, {rule}" if len(rules) > 1 else label,
                100 * np.array(shares),
                mean,
                mean - dev,
                mean + dev,
                panel=f"attack {attack}" if len(attacks) > 1 else "",
            )
        )
    title = "Accuracy against the share of attackers"
    return Shown(
        "attacker-shares",
        title,
        "Benign clients' mean accuracy at the end; band: one standard deviation.",
        _ends(title, series),
        lambda: figures.curves(series, "malicious clients, %", "test accuracy, %", marks=True),
    )


def epsilon_accuracy(groups: Sequence[Group]) -> Shown:
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for group in groups:
        spent, macro = (group.over_seeds(value)[0] for value in (_epsilon, lambda run: run.last["macro"]))
        if np.isfinite(spent) and np.isfinite(macro):
            points.setdefault((group.runs[0].info.method[:60], group.condition), []).append((spent, macro))
    points = {key: found for key, found in points.items() if len({e for e, _ in found}) > 1}
    if not points:
        raise Missing("the runs do not differ in epsilon under the same conditions")
    lines = {key: np.array(sorted(found)) for key, found in points.items()}
    series = [Series(m, line[:, 0], line[:, 1], panel=where) for (m, where), line in lines.items()]
    title = "Privacy against accuracy"
    caption = "Epsilon composed over all rounds: lower is more private, and above 10 it promises nothing."
    return Shown(
        "epsilon",
        title,
        caption,
        _ends(title, series),
        lambda: figures.curves(series, "epsilon", "test accuracy, %", marks=True),
    )


def _epsilon(run: RunData) -> float:
    """What the noise of all rounds together promises, where the method says."""
    noted = run.note("epsilon", max(run.noted.get("epsilon", {}), default=0))
    return float(numbers([noted.get("composed") if isinstance(noted, dict) else None])[0])


def cost_per_phase(groups: Sequence[Group]) -> Shown:
    rows: list[tuple[str, float, float, float]] = []
    for group in groups:
        phases: dict[str, Floats] = {}
        for run in group.runs:
            table = run.folder.table("exchanges")
            costs = zip(table["bytes_down"], table["bytes_up"], table["seconds"], strict=True)
            for phase, cost in zip(table["phase"], costs, strict=True):
                phases.setdefault(str(phase)[:60], np.zeros(3))
                phases[str(phase)[:60]] += np.array(cost, float) / len(group.runs)
        prefix = f"{group.name}: " if len(groups) > 1 else ""
        rows += [(f"{prefix}{phase}", *cost.tolist()) for phase, cost in phases.items()]
    if not rows:
        raise Missing("no exchange with the clients has been recorded")
    if len(rows) > MOST_ROWS:
        whole: dict[str, Floats] = {}
        for row in rows:
            key = row[0].rpartition(": ")[0]
            whole[key] = whole.get(key, np.zeros(3)) + np.array(row[1:])
        rows = [(name, *cost.tolist()) for name, cost in whole.items()]
    cut = f" The first {MOST_ROWS} of {len(rows)}." if len(rows) > MOST_ROWS else ""
    rows = rows[:MOST_ROWS]
    said = "; ".join(f"{n} {(d + u) / 1e6:.3g} MB, {s:.3g} s" for n, d, u, s in rows[:20])
    return Shown(
        "cost-per-phase",
        "Bytes and seconds per phase",
        f"Sums over all rounds, mean over seeds.{cut}",
        f"Cost per phase: {said}.",
        lambda: figures.phases(rows),
    )


def _splits(groups: Sequence[Group]) -> list[Part]:
    """One map for each different split."""
    firsts: dict[str, RunData] = {}
    for run in (r for g in groups for r in g.runs):
        firsts.setdefault(_hash(run), run)
    title = "Who has which classes"
    parts = [_try(title, partial(split_of, run, i)) for i, run in enumerate(list(firsts.values())[:MOST_SPLITS])]
    more = len(firsts) - MOST_SPLITS
    if more > 0:
        parts.append(LeftOut(f"{title}, {more} more splits", "the report of a single run shows its own"))
    return parts


def split_of(run: RunData, index: int = 0) -> Shown:
    if run.info.deployed:
        raise Missing("only the sites know how many samples of each class they have")
    counts = run.class_counts
    held = (counts > 0).sum(1)
    caption = f"Training samples of each class per client. Split {_hash(run)[:12]}, seed {run.info.seed}."
    alt = (
        f"{len(counts)} clients hold {int(counts.sum())} training samples of {counts.shape[1]} classes; "
        f"a client has {held.min()} to {held.max()} classes."
    )
    name = "split" + (f"-{index + 1}" if index else "")
    return Shown(name, "Who has which classes", caption, alt, lambda: figures.split_map(counts, run.names))


def _hash(run: RunData) -> str:
    return str(run.info.prepared.get("split_hash", ""))[:64]


# ---------------------------------------------------------------- figures of one run


def details(run: RunData, budget: int = MATRIX_BUDGET) -> list[Part]:
    """What only one run can show: who learned from whom, the method's own figures, attackers."""
    builders: dict[str, Callable[[RunData], Shown]] = {
        "matrix": partial(who_from_whom, budget=budget),
        "committee": committee_votes,
        "contributions": contributions,
        "prototypes": prototypes,
        "removals": removals,
    }
    parts = {name: _try(TITLES[name], partial(build, run)) for name, build in builders.items()}
    expected = {name for name, methods in OWN.items() if run.info.method in methods}
    return [part for name, part in parts.items() if isinstance(part, Shown) or name in {"removals", *expected}]


TITLES = {
    "matrix": "Who learns from whom",
    "committee": "Committee votes and thresholds",
    "contributions": "Contribution weights and mask growth",
    "prototypes": "Alignment phase and prototype weights",
    "removals": "Removed, rejected, failed",
}
OWN = {
    "matrix": ("pfedcs", "fedcap"),
    "committee": ("c-pfl",),
    "contributions": ("co-pfl",),
    "prototypes": ("fedpkda",),
}
"""Whose figure it is: there its absence is worth a sentence. Any method that makes the same notes gets it too."""


def who_from_whom(run: RunData, budget: int = MATRIX_BUDGET) -> Shown:
    found = collaboration(run, budget)
    names = [run.names[c] + "*" * (c in run.malicious) for c in found.order]
    last = found.frames[-1][np.ix_(found.order, found.order)]
    caption = (
        f"Row: a client; column: whose model it takes, by weight. Clients that exchange much stand together "
        f"(hierarchical clustering). {len(found.rounds)} of {found.all_rounds} rounds. The colour scale ends "
        f"at {found.most:.2g}: larger weights have its last colour."
    )
    caption += " A star marks a malicious client (the truth)." if run.malicious else ""
    alt = f"Weights between {len(names)} clients in round {found.rounds[-1]}; similar ones stand together."
    slider = found if len(found.rounds) > 1 and len(names) <= WIDEST_SLIDER else None
    draw = partial(figures.matrix, last, names, found.most)
    return Shown("matrix", TITLES["matrix"], caption, alt, draw, slider, names)


def committee_votes(run: RunData) -> Shown:
    rounds, scores = run.over_rounds("scores")
    clients = range(len(run.names))
    accepted = np.array([np.isin(clients, run.ids("accepted", r)) for r in rounds])
    seats = np.array([np.isin(clients, run.ids("committee", r)) for r in rounds], float)
    bar = [run.note("relaxed", r) if r in run.noted.get("relaxed", {}) else run.note("threshold", r) for r in rounds]
    threshold = np.array([b if isinstance(b, int | float) else np.nan for b in bar], float)
    out = int((np.isfinite(scores) & ~accepted).sum())
    caption = (
        "Each point is one client's body as the committee scored it; bodies below the dashed bar are rejected. "
        "Where nothing passed and the bar was lowered, the lowered one is drawn."
    )
    alt = f"{TITLES['committee']}: {int(accepted.sum())} bodies accepted, {out} rejected in {len(rounds)} rounds."
    draw = partial(figures.committee, rounds, scores, accepted, threshold, seats, run.malicious, run.names)
    return Shown("committee", TITLES["committee"], caption, alt, draw)


def contributions(run: RunData) -> Shown:
    rounds, alpha = run.over_rounds("alpha")
    noted = [run.note("mask", r) for r in rounds]
    shares = [n if isinstance(n, dict) else {} for n in noted]
    mine = np.array([run.per_client(n.get("share"), run.checked(n.get("clients"))) for n in shares])
    there = np.isfinite(mine).any(1)
    caption = "Above: alpha, the weight of what each client shares in the average."
    alt = f"{TITLES['contributions']}: at the end from {np.nanmin(alpha[-1]):.3g} to {np.nanmax(alpha[-1]):.3g}."
    if there.any():
        caption += " Below: the share of its weights that a client has made its own."
        alt += f" {100 * np.nanmedian(mine[there][-1]):.0f} % of the weights are personal for the median client."
    draw = partial(figures.contributions, rounds, alpha, mine if there.any() else None, run.names)
    return Shown("contributions", TITLES["contributions"], caption, alt, draw)


def prototypes(run: RunData) -> Shown:
    rounds = run.rounds_of("pulls")
    if not rounds:
        raise Missing("the run has no note 'pulls'")
    pairs = [run.note("pulls", r) for r in rounds]
    pulls = np.array([numbers(p) if isinstance(p, list) and len(p) == 2 else [np.nan] * 2 for p in pairs])
    gamma = np.array([run.per_client(run.note("weights", r), run.ids("members", r)) for r in rounds])
    last = run.note("prototype_weights", max(run.noted.get("prototype_weights", {}), default=0))
    weights, classes = _prototype_weights(run, last)
    drawn = [part if np.isfinite(part).any() else None for part in (pulls, gamma)]
    if all(part is None for part in (*drawn, weights)):
        raise Missing("its notes hold no numbers for it")
    caption = (
        "The pull towards a client's own class prototypes fades while the pull towards the global ones grows. "
        "Bodies are averaged by their clients' Fisher information, prototypes by how near they are to the rest."
    )
    known = f"; global prototypes of {len(classes)} classes" if weights is not None else ""
    alt = f"Pulls at the end: own {pulls[-1][0]:.2f}, global {pulls[-1][1]:.2f}{known}."
    return Shown(
        "prototypes",
        TITLES["prototypes"],
        caption,
        alt,
        lambda: figures.prototypes(rounds, drawn[0], drawn[1], weights, classes, run.names),
    )


def _prototype_weights(run: RunData, value: Any) -> tuple[Floats | None, list[int]]:
    """From {"clients": [...], "classes": [...], "weights": [[...], ...]}: [classes, N], and which classes."""
    noted = value if isinstance(value, dict) else {}
    classes, rows = noted.get("classes"), noted.get("weights")
    if not isinstance(classes, list) or not isinstance(rows, list) or len(classes) != len(rows):
        return None, []
    table = [run.per_client(row, run.checked(noted.get("clients"))) for row in rows]
    return (np.array(table), [int(c) for c in classes]) if np.isfinite(table).any() else (None, [])


def removals(run: RunData) -> Shown:
    rounds, states, shown = happenings(run)
    bad = len(run.malicious)
    gone = {c for c, line in zip(shown, states, strict=True) if "removed" in line}
    hit = len(gone & set(run.malicious))
    said = f"{hit} of {bad} malicious and {len(gone) - hit} of {len(run.names) - bad} honest clients were removed."
    if not bad:
        said = f"{len(gone)} of {len(run.names)} clients were removed; no client is marked as malicious throughout."
    cut = f" {len(shown)} of {len(run.names)} clients are shown." if len(shown) < len(run.names) else ""
    draw = partial(figures.timeline, rounds, states, [run.names[c] for c in shown], min(bad, len(shown)))
    caption = f"What happened to whom, and when, against the truth. {said}{cut}"
    return Shown("removals", TITLES["removals"], caption, said, draw)


# ---------------------------------------------------------------- the page


def write_report(
    runs: Sequence[RunFolder], to: Path | None = None, formats: Sequence[str] = ("html",)
) -> tuple[list[Path], list[LeftOut]]:
    """The report of one run or of several; returns the files and what was left out.

    `to`: a folder; without it a single run's report goes into its own."""
    if not runs:
        raise UsageError("a report needs at least one run: name it, or say last")
    for name in formats:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    data = [RunData(folder) for folder in {folder.path: folder for folder in runs}.values()]
    if to is None and len(data) > 1:
        raise UsageError("a report of several runs needs a folder to go to: give --to DIR")
    target = data[0].folder.path if to is None else to
    groups, older = grouped(data)
    sections = _sections(groups)
    gaps = [part for _, parts in sections for part in parts if isinstance(part, LeftOut)]
    files: list[Path] = []
    if "html" in formats:
        files.append(_write(target / REPORT, _page(groups, older, sections).encode()))
    pictures = target / "figures" if to is None else target
    for kind in ("png", "svg"):
        if kind in formats:
            files += [_write(pictures / f"{name}.{kind}", content) for name, content in _files(sections, kind)]
    return files, gaps


Sections = list[tuple[Group | None, list[Part]]]


def _sections(groups: Sequence[Group]) -> Sections:
    """First what compares all, then each group's own (of its first seed), as far as there is room."""
    room = MATRIX_BUDGET // min(len(groups), MOST_DETAILED)
    own = ((group, details(group.runs[0], room)) for group in _one_of_each_first(groups))
    if len(groups) > 1:
        own = ((group, parts) for group, parts in own if any(isinstance(part, Shown) for part in parts))
    return [(None, overview(groups)), *islice(own, MOST_DETAILED)]


def _one_of_each_first(groups: Sequence[Group]) -> list[Group]:
    """A group of every method, under attack if there is one, before the second of any."""
    turn: dict[str, int] = {}
    ranked = []
    for group in sorted(groups, key=lambda g: g.runs[0].info.attack == "none"):
        turn[group.label] = turn.get(group.label, -1) + 1
        ranked.append((turn[group.label], groups.index(group), group))
    return [group for _, _, group in sorted(ranked, key=lambda item: item[:2])]


def _files(sections: Sections, kind: Literal["png", "svg"]) -> Iterator[tuple[str, bytes]]:
    for group, parts in sections:
        prefix = "" if group is None or len(sections) == 2 else re.sub(r"[^A-Za-z0-9]+", "-", group.name)[:60] + "-"
        for part in parts:
            if isinstance(part, Shown):
                yield f"{prefix}{part.name}", figures.save(part.draw(), kind)


def _write(path: Path, content: bytes) -> Path:
    """All of it or nothing; a link in the way is replaced, not followed."""
    try:
        if path.parent.is_symlink():
            raise DataError(f"{path.parent} is a link; give --to a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".report-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def _page(groups: Sequence[Group], older: Sequence[RunData], sections: Sections) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: figures.printable(value) if type(value) is str else value,
    )
    script, style = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.js", "report.css"))
    runs = [run for group in groups for run in group.runs]
    blocks, sliders = [], []
    for index, (group, parts) in enumerate(sections):
        shown: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, LeftOut):
                shown.append({"title": part.title, "why": part.why})
                continue
            key = f"s{index}-{part.name}"
            drawing = figures.inline_svg(part.draw(), part.alt, key)
            frames = _frames(part)
            sliders += [frames] if frames else []
            shown.append(
                {
                    "title": part.title,
                    "caption": part.caption,
                    "key": key,
                    "svg": Markup(drawing),
                    "frames": frames,
                    "why": "",
                }
            )
        blocks.append(
            {
                "name": "" if group is None else group.name,
                "run": "" if group is None else group.runs[0].info.id,
                "shown": shown,
            }
        )
    return pages.get_template("report.html").render(
        title=_title(groups),
        blocks=blocks,
        groups=[_summary(g) for g in groups],
        judged=_judged(runs),
        runs=[_row(r) for r in runs],
        older=[r.info.id for r in older],
        clients=_clients(groups),
        cut=len(sections) > MOST_DETAILED,
        settings=_common(runs),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version("fedkin"),
        style=Markup(style),
        script=Markup(script),
        palette=_palette() if sliders else "",
        allowed=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        light=figures.SERIES,
        dark=figures.DARK_SERIES,
    )


def _title(groups: Sequence[Group]) -> str:
    infos = [run.info for group in groups for run in group.runs]
    methods, data = (
        list(dict.fromkeys(str(v)[:60] for v in values))
        for values in ((i.method for i in infos), (i.data for i in infos))
    )
    who = ", ".join(methods[:4]) + (f" and {len(methods) - 4} more methods" if len(methods) > 4 else "")
    return f"{who} on {', '.join(data[:3])}"


def _frames(part: Shown) -> dict[str, Any] | None:
    """A collaboration matrix for the slider: one byte a weight, 255 where there is none."""
    found = part.frames
    if found is None:
        return None
    ordered = found.frames[:, found.order][:, :, found.order]
    scaled = np.clip(np.nan_to_num(ordered / found.most, posinf=1.0), 0, 1)
    bytes_ = np.where(np.isfinite(ordered), np.round(254 * scaled), 255).astype(np.uint8)
    return {
        "rounds": found.rounds,
        "names": [figures.printable(n[:40]) for n in part.names],
        "most": found.most,
        "frames": [base64.b64encode(frame.tobytes()).decode() for frame in bytes_],
    }


def _palette() -> str:
    import matplotlib as mpl

    colours = (255 * np.asarray(mpl.colormaps[figures.HEAT](np.linspace(0, 1, 255)))[:, :3]).round().astype(np.uint8)
    return base64.b64encode(colours.tobytes()).decode()


# ---------------------------------------------------------------- tables


def _text(mean: float, std: float = np.nan, digits: int = 2) -> str:
    if not np.isfinite(mean):
        return "–"
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if np.isfinite(std) else "")


def _summary(group: Group) -> dict[str, Any]:
    def cell(value: Callable[[RunData], float], digits: int = 2) -> str:
        return _text(*group.over_seeds(value), digits=digits)

    points = list(dict.fromkeys(_evaluated(run) for run in group.runs))
    unfinished = [run for run in group.runs if run.info.status != "finished"]
    return {
        "label": group.label,
        "condition": group.condition,
        "seeds": [run.info.seed for run in group.runs],
        "macro": cell(lambda r: r.last["macro"]),
        "micro": cell(lambda r: r.last["micro"]),
        "worst": cell(lambda r: r.last["worst_decile"]),
        "std": cell(lambda r: r.last["std"]),
        "best": cell(lambda r: r.best["micro"]),
        "best_round": ", ".join(_text(r.best["round"], digits=0) for r in group.runs[:10]),
        "megabytes": cell(lambda r: (r.last["bytes_down"] + r.last["bytes_up"]) / 1e6, 1),
        "seconds": cell(lambda r: r.last["wall"] if np.isnan(r.info.wall) else r.info.wall, 1),
        "rounds_seconds": cell(lambda r: r.last["seconds"], 1),
        "diverged": [f"seed {r.info.seed}: {r.info.diverged}" for r in group.runs if r.info.diverged],
        "evaluated": "; ".join(points),
        "splits": list(dict.fromkeys(_hash(run)[:10] for run in group.runs)),
        "unfinished": len(unfinished),
        "runs": [run.info.id for run in group.runs],
    }


def _evaluated(run: RunData) -> str:
    """When a client's model was evaluated, in words."""
    point = str(run.info.prepared.get("eval_point", ""))[:40]
    said = POINTS.get(point, point)
    tuned = " and after the last fine-tuning" if run.last["final"] == 1 else ""
    return f"round {_text(run.last['round'], digits=0)}, {said}{tuned}"


def _judged(runs: Sequence[RunData]) -> str:
    """When the clients' models were evaluated, where it is the same for all."""
    points = {str(run.info.prepared.get("eval_point", ""))[:40] for run in runs}
    if len(points) > 1:
        return "Not all models were evaluated at the same point: see the column Evaluated."
    return f"All models were evaluated {''.join(POINTS.get(p, p) for p in points)}."


def _row(run: RunData) -> dict[str, Any]:
    info, git = run.info, run.info.environment.get("git")
    commit = ""
    if isinstance(git, dict):
        commit = str(git.get("revision") or "")[:12] + (" with changes" if git.get("dirty") else "")
    return {
        "id": info.id,
        "method": info.method,
        "status": info.status,
        "seed": info.seed,
        "created": info.created[:40],
        "rounds": f"{info.rounds_done} of {info.rounds_total}",
        "macro": _text(run.last["macro"]),
        "micro": _text(run.last["micro"]),
        "worst": _text(run.last["worst_decile"]),
        "best": f"{_text(run.best['micro'])} (round {_text(run.best['round'], digits=0)})",
        "split": _hash(run)[:16],
        "commit": commit or "unknown",
        "fedkin": str(info.environment.get("fedkin", ""))[:20],
        "device": f"{info.prepared.get('device', '')} {info.prepared.get('precision', '')}"[:40],
        "clients": len(info.names),
        "malicious": len(run.malicious),
        "error": (info.error or "")[:2000],
    }


def _clients(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Every client of a single run."""
    if len(groups) > 1 or len(groups[0].runs) > 1 or len(groups[0].runs[0].names) > 2000:
        return None
    run = groups[0].runs[0]
    try:
        each = run.clients
        events = run.folder.table("events", columns=["round", "client", "kind"])
    except (Missing, FedKinError):
        return None
    fates: dict[Any, dict[str, list[Any]]] = {}
    for number, client, kind in zip(events["round"], events["client"], events["kind"], strict=True):
        fates.setdefault(client, {}).setdefault(str(kind).replace("_", " ")[:20], []).append(number)
    rows = [
        {
            "name": name[:80],
            "accuracy": _text(each["accuracy"][c]),
            "loss": _text(each["loss"][c], digits=3),
            "tested": _text(each["count"][c], digits=0),
            "fate": "; ".join(
                (["malicious"] if c in run.malicious else [])
                + [
                    f"{kind} in round {when[0]}" if len(when) == 1 else f"{kind} {len(when)} times"
                    for kind, when in fates.get(c, {}).items()
                ]
            ),
        }
        for c, name in enumerate(run.names)
    ]
    return {"run": run.info.id, "rows": rows}


def _common(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """Settings that all runs share, and for a single run all of them."""
    first = {**runs[0].info.config, **{f"options.{k}": v for k, v in runs[0].info.options.items()}}
    shared = []
    for key, value in first.items():
        others = ({**r.info.config, **{f"options.{k}": v for k, v in r.info.options.items()}} for r in runs[1:])
        if key not in ("options", "runs_dir") and all(repr(o.get(key)) == repr(value) for o in others):
            shared.append((str(key)[:60], str(value)[:200]))
    return shared
