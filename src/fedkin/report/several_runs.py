"""The figures that compare runs, for the report and for the page that compares: groups that differ in nothing but the
seed are one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fedkin.core import notes
from fedkin.errors import DataError
from fedkin.report import figures
from fedkin.report.figures import Figure, Floats, LeftOut, Lines, Missing, Series, Strips, attempt, cut, ends, said
from fedkin.report.gather import RunData
from fedkin.report.one_run import FIGURES, LOSS, TUNED, phase_bars, split_of
from fedkin.runs.metric import ShownMetric
from fedkin.sweep import groups as sweep

Group = sweep.Group[RunData]

MOST_PANELS = 12
MOST_SPLITS = 3
MOST_ROWS = 40  # of bars
LONGEST = 200  # characters of a label
ROUND, MEGABYTES = "round", "megabytes, both ways"
MEASURES = {
    "macro": "accuracy, macro",
    "worst_decile": "accuracy, worst decile",
    "micro": "accuracy, micro",
    "test_loss": "test loss",
    "train_loss": "training loss",
    "validation_macro": "validation accuracy, macro",
}
"""Columns of the table of rounds by which runs are compared, and what they are called of runs that accuracy is of."""


# ---------------------------------------------------------------- groups


def grouped(runs: Sequence[RunData]) -> list[Group]:
    """Runs by what they have in common; of two with the same settings and seed the newer counts."""
    for run in runs:
        if not isinstance(run.info.config.get("method"), str):
            raise DataError(f"{run.info.id}: its method is no name")
    rules = {_rule(run) for run in runs}
    by_age = sorted(runs, key=lambda run: run.info.created)
    try:
        made = [_worded(group, len(rules) > 1) for group in sweep.grouped(by_age, lambda run: run.info)]
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"the settings of these runs cannot be read ({str(error)[:200]})") from None
    order = {group.row: i for i, run in reversed([*enumerate(runs)]) for group in made if run in group.members}
    return sorted(made, key=lambda group: order[group.row])


def _worded(group: Group, by_rule: bool) -> Group:
    """The rule is a condition here; the plain mean goes without saying."""
    rule = _rule(group.members[0])
    said = [group.column, *([f"rule {rule}"] if by_rule and rule != "mean" else [])]
    column = ", ".join(part for part in said if part)
    return replace(group, row=group.row[:LONGEST], column=column[:LONGEST])


def _rule(run: RunData) -> str:
    return str(run.info.config.get("rule", "mean"))[:60]


def name_of(group: Group) -> str:
    return f"{group.row}, {group.column}" if group.column else group.row


def of_all(groups: Sequence[Group]) -> list[RunData]:
    return [run for group in groups for run in group.members]


def metrics_of(groups: Sequence[Group]) -> list[ShownMetric]:
    """What the numbers of the runs are; more than one where tasks differ."""
    return list(dict.fromkeys(run.metric for run in of_all(groups)))


def metric_of(groups: Sequence[Group]) -> ShownMetric:
    """The one of all runs: numbers of others do not go on one axis."""
    first, *others = metrics_of(groups)
    if others:
        named = " and ".join(m.name for m in (first, *others))
        raise Missing(f"the runs are measured by {named}, which do not go on one axis")
    return first


# ---------------------------------------------------------------- curves


def series(groups: Sequence[Group], column: str, x: str = ROUND) -> list[Series]:
    """A line for each group: the mean over seeds in the rounds that all of them have, and a band of one standard
    deviation to either side. A label has one colour in all conditions."""
    labels = list(dict.fromkeys(g.row for g in groups))
    lines = [_line(group, column, x) for group in _shown(groups)]
    found = [line.at(labels.index(line.label)) for line in lines if line is not None]
    if not found:
        raise Missing("no round has been evaluated yet")
    return found


def _line(group: Group, column: str, x: str) -> Series | None:
    runs = [run for run in group.members if np.isfinite(run.rounds[column]).any()]
    common = sorted(set.intersection(*({*run.rounds["round"][run.regular]} for run in runs))) if runs else []
    if not common:
        return None
    at = [np.flatnonzero(run.regular & np.isin(run.rounds["round"], common)) for run in runs]
    each = [run.rounds[column][i] for run, i in zip(runs, at, strict=True)]
    where = np.array([_along(run, x)[i] for run, i in zip(runs, at, strict=True)]).mean(0)
    values = np.array(each)
    mean, spread = values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else None
    tuned = [run.last[column] for run in runs if run.last["final"] == 1]
    ending = float(np.mean(tuned)) if len(tuned) == len(runs) else None
    if spread is None:
        return Series(group.row, where, mean, last=ending, panel=group.column)
    beside = figures.band(mean, spread, figures.LOSSES if column.endswith("loss") else runs[0].metric)
    return Series(group.row, where, mean, *beside, ending, group.column)


def _along(run: RunData, x: str) -> Floats:
    if x == ROUND:
        return run.rounds["round"]
    return np.asarray((run.rounds["bytes_down"] + run.rounds["bytes_up"]) / 1e6)


def _shown(groups: Sequence[Group]) -> list[Group]:
    conditions = list(dict.fromkeys(g.column for g in groups))[:MOST_PANELS]
    return [g for g in groups if g.column in conditions]


def _more(groups: Sequence[Group]) -> str:
    more = len({g.column for g in groups}) - MOST_PANELS
    return f" {more} more conditions are in the tables only." if more > 0 else ""


def per_round(groups: Sequence[Group], column: str = "macro") -> Figure:
    return _compared(groups, column, ROUND, "")


def per_megabyte(groups: Sequence[Group], column: str = "macro") -> Figure:
    made = _compared(groups, column, MEGABYTES, " Against all that was sent to and from the server until then.")
    if not any((s.x > 0).any() for panel in made.panels if isinstance(panel, Lines) for s in panel.series):
        raise Missing("nothing was sent")
    return made


def _compared(groups: Sequence[Group], column: str, x: str, along: str) -> Figure:
    metric = figures.LOSSES if column.endswith("loss") else metric_of(groups)
    what, unit = metric.put(MEASURES[column].capitalize()), figures.unit_of(metric)
    y = LOSS if metric is figures.LOSSES else figures.axis(metric)
    lines = series(groups, column, x)
    benign = ", under attack of the benign ones" if any(run.malicious for run in of_all(groups)) else ""
    caption = f"{what}, of the clients' personal models{benign}.{along}"
    if any(s.low is not None for s in lines):
        caption += " The band is one standard deviation over seeds to either side."
    if any(s.last is not None for s in lines):
        caption += TUNED
    panel = Lines(x, y, unit, lines, same_scale=unit == "%")
    return Figure(caption + _more(groups), ends(lines, unit), [panel])


def overlaid(make: Callable[[Sequence[Group], str], Figure], groups: Sequence[Group], column: str) -> Figure:
    """All conditions in one chart."""
    figure = make(groups, column)
    (lines,) = figure.panels
    assert isinstance(lines, Lines)
    named = [(f"{s.label}, {s.panel}" if s.panel else s.label, s) for s in lines.series]
    one = [replace(s, label=name, panel="").at(i) for i, (name, s) in enumerate(named)]
    return replace(figure, panels=[replace(lines, series=one)])


def one_for_each(groups: Sequence[Group]) -> list[Group]:
    """A group for every run, in the same order, the older ones of equal runs among them."""
    alone = []
    for group in groups:
        members = [*group.members, *group.older]
        for run in members:
            row = f"{group.row}, seed {run.info.seed}" if len(members) > 1 else group.row
            twice = sum(other.info.seed == run.info.seed for other in members) > 1
            alone.append(replace(group, row=f"{row} ({run.info.id[-4:]})" if twice else row, members=[run], older=()))
    return alone


# ---------------------------------------------------------------- clients


def spread_over_clients(groups: Sequence[Group]) -> Figure:
    at, lines, metric = np.linspace(0, 100, 101), [], metric_of(groups)
    labels = list(dict.fromkeys(g.row for g in groups))
    for group in _shown(groups):
        evaluated = [r for r in group.members if r.evaluated and r.counted.any()]
        ranked = [np.sort(r.clients["accuracy"][r.counted])[:: 1 if metric.higher else -1] for r in evaluated]
        if ranked:
            every = [np.interp(at, np.linspace(0, 100, len(e)) if len(e) > 1 else [50.0], e) for e in ranked]
            line = Series(group.row, at, np.array(every).mean(0), panel=group.column)
            lines.append(line.at(labels.index(group.row)))
    if not lines:
        raise Missing("no round has been evaluated yet")
    unit = figures.unit_of(metric)
    lows = [f"{s.label}{f' ({s.panel})' if s.panel else ''} {said(float(s.y[0]), unit)}" for s in lines[:20]]
    caption = f"Benign clients sorted by {metric.name}, the worst served at the left; mean over seeds." + _more(groups)
    panel = figures.of_scores("clients, % (worst first)", metric, lines)
    return Figure(caption, f"The worst client has: {'; '.join(lows)}.", [panel])


def gain_over_local(groups: Sequence[Group]) -> Figure:
    alone = [r for r in of_all(groups) if r.info.method == "local" and r.evaluated]
    if not alone:
        raise Missing("no run of the method local is among these runs")
    found: dict[str, Floats] = {}
    metric = metric_of(groups)
    sign = 1 if metric.higher else -1
    for group in groups:
        others = [r for r in group.members if r.evaluated and r.info.method != "local"]
        pairs = [(r, base) for r in others if (base := _alone(r, alone)) is not None]
        each = [sign * (r.clients["accuracy"] - b.clients["accuracy"])[r.counted & b.counted] for r, b in pairs]
        if sum(map(len, each)):
            found[name_of(group)] = np.concatenate(each)
    if not found:
        raise Missing("no run of the method local has the same split and seed as another run")
    kept = dict(list(found.items())[:MOST_ROWS])
    caption = "Accuracy of each benign client less what it reaches by training alone on the same split and seed."
    if metric != ShownMetric():
        less = "" if metric.higher else " with the opposite sign, as less is better"
        caption = (
            f"The {metric.name} of each benign client less that of training alone on the same split and seed{less}."
        )
    caption += cut(len(kept), len(found), "groups")
    without = dict.fromkeys(g.row for g in groups if name_of(g) not in found and g.row != "local")
    caption += f" No run of local has the split and seed of: {', '.join(list(without)[:10])}." if without else ""
    medians = {k: float(np.median(v)) for k, v in kept.items()}
    told = [f"{k}: median {metric.said(medians[k], signed=True)}, {(v < 0).mean():.0%} lose" for k, v in kept.items()]
    better = "points above" if metric.unit == "%" and metric.higher else f"{metric.name} better than"
    panel = Strips(f"{better} training alone, one dot a client; the bar is the median", kept)
    return Figure(caption, f"{'; '.join(told)}.", [panel])


def _alone(run: RunData, alone: Sequence[RunData]) -> RunData | None:
    """Training alone on the same rows; out of attackers' reach, so the attack need not be the same."""
    told = run.info.seed, len(run.names), run.info.prepared.get("split_hash")
    fit = [b for b in alone if (b.info.seed, len(b.names), b.info.prepared.get("split_hash")) == told]
    return max(fit, key=lambda b: b.info.attack == run.info.attack, default=None)


# ---------------------------------------------------------------- attacks and privacy


def attacker_shares(groups: Sequence[Group]) -> Figure:
    """Accuracy against the share of malicious clients; runs without an attack count as none."""
    metric = metric_of(groups)
    runs = [(group.row, run) for group in groups for run in group.members if np.isfinite(run.last["macro"])]
    attacks = list(dict.fromkeys(run.info.attack for _, run in runs if run.info.attack != "none"))
    points: dict[tuple[str, str, str], dict[float, list[float]]] = {}
    for label, run in runs:
        attacked = run.info.attack != "none"
        share = run.info.config.get("malicious") if attacked else 0.0
        for attack in [run.info.attack] if attacked else attacks:
            if isinstance(share, int | float):
                by_share = points.setdefault((label, _rule(run), attack), {})
                by_share.setdefault(float(share), []).append(run.last["macro"])
    lines = {key: found for key, found in points.items() if len(found) > 1}
    if not any(len([s for s in found if s > 0]) > 1 for found in lines.values()):
        raise Missing("the runs do not differ in the share of malicious clients")
    several = len({rule for _, rule, _ in lines}) > 1
    made = []
    for (label, rule, attack), found in lines.items():
        shares = np.array(sorted(found))
        mean = np.array([np.mean(found[s]) for s in shares])
        dev = np.array([np.std(found[s], ddof=1) if len(found[s]) > 1 else 0.0 for s in shares])
        name, panel = f"{label}, {rule}" if several else label, f"attack {attack}" if len(attacks) > 1 else ""
        made.append(Series(name, 100 * shares, mean, mean - dev, mean + dev, panel=panel))
    caption = f"Benign clients' mean {metric.name} at the end; band: one standard deviation."
    return _by_points(made, "malicious clients, %", metric, caption)


def epsilon_accuracy(groups: Sequence[Group]) -> Figure:
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for group in groups:
        spent, macro = (group.over_seeds(value)["mean"] for value in (_epsilon, lambda run: run.last["macro"]))
        if np.isfinite(spent) and np.isfinite(macro):
            points.setdefault((group.members[0].info.method[:60], group.column), []).append((spent, macro))
    lines = {key: np.array(sorted(found)) for key, found in points.items() if len({e for e, _ in found}) > 1}
    if not lines:
        raise Missing("the runs do not differ in epsilon under the same conditions")
    made = [Series(m, line[:, 0], line[:, 1], panel=where) for (m, where), line in lines.items()]
    caption = "Epsilon composed over all rounds: lower is more private, and above 10 it promises nothing."
    return _by_points(made, "epsilon", metric_of(groups), caption)


def _by_points(made: Sequence[Series], x: str, metric: ShownMetric, caption: str) -> Figure:
    labels = list(dict.fromkeys(s.label for s in made))
    lines = [s.at(labels.index(s.label)) for s in made]
    panel = figures.of_scores(x, metric, lines, marks=True)
    return Figure(caption, ends(lines, panel.unit), [panel])


def _epsilon(run: RunData) -> float:
    """What the noise of all rounds together promises, where the method says."""
    for noted in run.told(notes.EPSILON, run.rounds_of(notes.EPSILON)[-1:]).values():
        spent = notes.number(noted.get("composed")) if isinstance(noted, dict) else None
        return np.nan if spent is None else spent
    return np.nan


# ---------------------------------------------------------------- cost, and the splits


def cost_per_phase(groups: Sequence[Group]) -> Figure:
    each: list[tuple[str, Floats]] = []
    whole: list[tuple[str, Floats]] = []
    for group in groups:
        sums: dict[str, Floats] = {}
        for run in group.members:
            for phase, cost in run.phases():
                sums[phase] = sums.get(phase, np.zeros(3)) + cost / len(group.members)
        each += [(f"{name_of(group)}: {phase}", cost) for phase, cost in sums.items()]
        whole += [(name_of(group), sum(sums.values(), np.zeros(3)))] if sums else []
    rows = each if len(each) <= MOST_ROWS else whole
    caption = "Sums over all rounds, mean over seeds." + cut(min(len(rows), MOST_ROWS), len(rows), "groups")
    return phase_bars(rows[:MOST_ROWS], caption)


def split_hash(run: RunData) -> str:
    return str(run.info.prepared.get("split_hash", ""))[:64]


def _splits(groups: Sequence[Group]) -> list[Figure | LeftOut]:
    """One map for each different split into classes."""
    firsts: dict[str, RunData] = {}
    for run in (run for run in of_all(groups) if run.has_classes):
        firsts.setdefault(split_hash(run), run)
    title, parts = FIGURES["split"].title, []
    for i, run in enumerate(list(firsts.values())[:MOST_SPLITS]):
        parts.append(attempt("split" + (f"-{i + 1}" if i else ""), title, partial(split_of, run)))
    more = len(firsts) - MOST_SPLITS
    if more > 0:
        parts.append(LeftOut(f"{title}, {more} more splits", "the report of a single run shows its own"))
    return parts


# ---------------------------------------------------------------- all of them


def compared(groups: Sequence[Group]) -> list[Figure | LeftOut]:
    """What compares the runs, or shows the one run as a whole."""
    runs = of_all(groups)
    left = {
        "attacker-shares": sum(run.info.attack != "none" for run in runs) < 2,
        "epsilon": sum(bool(run.rounds_of(notes.EPSILON)) for run in runs) < 2,
    }
    return [figure_of(name, groups) for name in COMPARED if not left.get(name)] + _splits(groups)


def figure_of(name: str, groups: Sequence[Group], column: str = "macro") -> Figure | LeftOut:
    """One of `COMPARED`; those of accuracy show this measure."""
    title, several = COMPARED[name]
    runs = of_all(groups)

    def build() -> Figure:
        if name in FIGURES and len(runs) == 1:
            if not runs[0].evaluated and name != "cost-per-phase":
                raise Missing("no round has been evaluated yet")
            return FIGURES[name].build(runs[0])
        return several(groups, column) if several in (per_round, per_megabyte) else several(groups)

    found = metrics_of(groups)
    return attempt(name, (found[0] if len(found) == 1 else ShownMetric()).put(title), build)


def _losses(groups: Sequence[Group]) -> Figure:
    """Of runs under one condition the training loss beside the test loss."""
    made = per_round(groups, "test_loss")
    if len({g.column for g in groups}) > 1:
        return made
    both = (("test", series(groups, "test_loss")), ("training", series(groups, "train_loss")))
    lines = [replace(s, panel=name) for name, found in both for s in found]
    return replace(made, panels=[Lines(ROUND, LOSS, "", lines, same_scale=False)])


COMPARED: dict[str, tuple[str, Callable[..., Figure]]] = {
    "accuracy-per-round": (FIGURES["accuracy-per-round"].title, per_round),
    "accuracy-per-megabyte": ("Accuracy per megabyte", per_megabyte),
    "loss-per-round": (FIGURES["loss-per-round"].title, _losses),
    "spread-over-clients": (FIGURES["spread-over-clients"].title, spread_over_clients),
    "gain-over-local": ("Gain over training alone", gain_over_local),
    "cost-per-phase": (FIGURES["cost-per-phase"].title, cost_per_phase),
    "attacker-shares": ("Accuracy against the share of attackers", attacker_shares),
    "epsilon": ("Privacy against accuracy", epsilon_accuracy),
}
"""What compares runs: titles and what makes the figures, by the names of their files."""
