"""A sweep as a table; `written` makes it LaTeX, Markdown, HTML, text or CSV.

Rows are methods (with the rule, where there are several), columns the conditions that vary. With a single condition
the columns are the measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedkin.methods import METHODS
from fedkin.report import measured
from fedkin.sweep.selection import Choice
from fedkin.sweep.statistics import METRICS, Group, Paired, compared

SIGNIFICANT = 0.05
TITLES = {name: name.replace("-", " ") for name in METRICS}
SHORT = ("macro", "micro", "worst-decile", "best-micro")
ASIDE = "validation"
FACTS = ("best round", "sent", "wall s", "rounds s")


@dataclass(frozen=True)
class Entry:
    """One field: text, or a number with its spread. `best` of its column; `mark` after it (a footnote's sign)."""

    text: str
    spread: str = ""
    best: bool = False
    mark: str = ""
    number: bool = False

    def plain(self) -> str:
        return f"{self.text}{f' ±{self.spread}' if self.spread else ''}{self.mark}"


@dataclass
class Sheet:
    title: str
    head: list[str]
    rows: list[list[Entry]]
    notes: list[str] = field(default_factory=list)
    left: int = 1  # so many columns from the left are words
    label: str = "comparison"


NONE = Entry("-")


def sheet(groups: Sequence[Group], metric: str = "macro", baseline: str | None = None) -> Sheet:
    """With one condition, all measures of a method in one line; with several, one column each."""
    tests = compared(groups, baseline, metric) if baseline is not None else {}
    columns = list(dict.fromkeys(g.column for g in groups))
    mixed = len(measured.metrics(groups)) > 1
    rules = list(dict.fromkeys(g.config.rule for g in groups))
    validated = any(o.validation is not None for g in groups for o in g.outcomes)
    wide = metric != "macro" or len(columns) > 1
    middle = (
        [c or TITLES[metric] for c in columns]
        if wide
        else [*(TITLES[m] for m in SHORT), *_if(validated, ASIDE), *FACTS]
    )
    lines: dict[tuple[str, str], dict[str, Entry]] = {}
    for i, group in enumerate(groups):
        first = {"method": Entry(group.row), "rule": Entry(group.config.rule)}
        line = lines.setdefault((group.row, group.config.rule), first)
        here = (group.column or TITLES[metric]) if wide else TITLES[SHORT[0]]
        if not group.outcomes:
            line[here] = Entry("failed")
            continue
        line |= {here: _score(group, metric, groups)} if wide else _measures(group, groups)
        line |= {here: _marked(line[here], group, tests.get(i), mixed), "evaluated": Entry(measured.judged(group))}
    head = ["method", *_if(len(rules) > 1, "rule"), *middle, *_if(len(measured.points(groups)) > 1, "evaluated")]
    order = list(dict.fromkeys(row for row, _ in lines))
    ordered = [line for (row, _), line in sorted(lines.items(), key=lambda item: order.index(item[0][0]))]
    rows = [[line.get(name, NONE) for name in head] for line in ordered]
    notes = _notes(groups, rules, tests, metric if wide else None)
    return Sheet(measured.title(groups), head, rows, notes, left=1 + (len(rules) > 1))


def _if(needed: bool, name: str) -> list[str]:
    return [name] if needed else []


def _measures(group: Group, groups: Sequence[Group]) -> dict[str, Entry]:
    """All of a group: of the best micro accuracy none stands out."""
    sent, wall, seconds = (
        group.over_seeds(of)["mean"] for of in (lambda o: o.sent, lambda o: o.wall, lambda o: o.seconds)
    )
    facts = (Entry(_rounds(group)), Entry(megabytes(sent), number=True), _seconds(wall), _seconds(seconds))
    scores = {TITLES[m]: _score(group, m, groups if m != "best-micro" else ()) for m in SHORT}
    scores[ASIDE] = _score(group, ASIDE, ())
    return {**scores, **dict(zip(FACTS, facts, strict=True))}


def _score(group: Group, metric: str, groups: Sequence[Group]) -> Entry:
    """The best of those under the same conditions stands out."""
    stats = group.metric(metric) if metric in METRICS else group.validation()
    peers = [g for g in groups if (g.column, g.score) == (group.column, group.score) and not g.diverged]
    best = stats["mean"] == group.score.best(g.metric(metric)["mean"] for g in peers)
    mean, spread = (group.score.said(stats[part]) for part in ("mean", "std"))
    return Entry(mean, "" if math.isnan(stats["std"]) else spread, best, number=True)


def _marked(entry: Entry, group: Group, test: Paired | None, named: bool) -> Entry:
    mark = "*" if test is not None and test.p_holm < SIGNIFICANT else ""
    mark += f" {group.score.name}" if named else ""
    if group.diverged:
        all_ = len(group.diverged) == len(group.outcomes)
        mark += " (diverged)" if all_ else f" ({len(group.diverged)} of {len(group.outcomes)} diverged)"
    if len(group.outcomes) < len(group.asked):
        mark += f" ({len(group.outcomes)} of {len(group.asked)} seeds)"
    return Entry(entry.text, entry.spread, entry.best and not group.diverged, mark, True)


def paired_sheet(groups: Sequence[Group], baseline: str, metric: str = "macro") -> Sheet:
    """Every row against the baseline, test by test."""
    tests = compared(groups, baseline, metric)
    wide = len({g.column for g in groups}) > 1
    several = len({g.config.rule for g in groups}) > 1
    left = ["method", *_if(several, "rule"), *_if(wide, "condition")]
    head = [*left, "median difference", "p", "p (Holm)", "n", "over"]
    rows = []
    for i, test in tests.items():
        g = groups[i]
        line = {
            "method": Entry(g.row),
            "rule": Entry(g.config.rule),
            "condition": Entry(g.column),
            "n": Entry(str(test.n)),
        }
        if test.over is None:
            line["median difference"] = Entry("no test")
        else:
            numbers = (g.score.said(test.difference, signed=True), p_text(test.p), p_text(test.p_holm), str(test.n))
            line |= {name: Entry(v, number=True) for name, v in zip(head[len(left) :], numbers, strict=False)}
            line["over"] = Entry(test.over)
        rows.append([line.get(name, NONE) for name in head])
    name = next(iter(tests.values())).baseline if tests else baseline
    title = f"Against {name}, {measured.differences(groups, TITLES[metric])}, {measured.when(groups)}"
    return Sheet(title, head, rows, _test_notes(groups, tests), left=len(left), label="comparison-tests")


def p_text(p: float) -> str:
    return "<0.0001" if p < 0.0001 else f"{p:.4f}"


def _rounds(group: Group) -> str:
    rounds = [o.best_round for o in group.outcomes]
    return str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)}-{max(rounds)}"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB" if count else "0 B"


def _seconds(value: float) -> Entry:
    return Entry("-" if math.isnan(value) else f"{value:.1f}", number=True)


# ---------------------------------------------------------------- what the numbers are numbers of


def _notes(groups: Sequence[Group], rules: Sequence[str], tests: dict[int, Paired], metric: str | None) -> list[str]:
    seeds = sorted({s for g in groups for s in g.asked})
    over = f"mean ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    if metric is None:
        notes = [
            f"{over}; macro: mean over clients, micro: over test samples; sent: down and up, all rounds",
            "wall s: seconds from preparing a run to its result, evaluation and writing included; rounds s: of "
            "those, training and the server's work",
        ]
    else:
        when, key = METRICS[metric]
        what = {
            "macro": "the mean over clients (macro)",
            "micro": f"{measured.by_samples(groups)} (micro)",
            "worst_decile": "the mean of the worst tenth of the clients",
        }[key]
        at = "after the last round" if when == "last" else "at the best round"
        notes = [f"{over}; in the cells {what} {at}"]
    if metric is None or METRICS[metric][0] == "best":
        notes += _chosen(groups)
    notes += [
        f"{g.row}{f' ({g.column})' if g.column else ''}: {Choice(**g.choice).words(g.score)}"
        for g in groups
        if g.choice
    ]
    notes += [*_threat(groups), *_elsewhere(groups), *_stopped(groups), *_broken(groups), *_seen(groups)]
    if len(rules) == 1 and rules[0] != "mean":
        notes.append(f"rule: {rules[0]}")
    if metric not in (None, "macro"):
        notes += [f"no stars: {why}" for why in dict.fromkeys(t.why for t in tests.values() if t.over is None)]
    if any(t.p_holm < SIGNIFICANT for t in tests.values()):
        notes.append(f"* differs from {next(iter(tests.values())).baseline}, p < {SIGNIFICANT:g} (Wilcoxon, Holm)")
    return notes


def _chosen(groups: Sequence[Group]) -> list[str]:
    """By what the best round is the best."""
    found, name = {o.best_by for g in groups for o in g.outcomes}, measured.name(groups)
    how = {
        "validation": "the best round is that with the best validation score (mean over clients)",
        "test": f"the best round was chosen on test data, by micro {name} (--validation-share chooses without them)",
    }
    return [words + (" where there is one" if len(found) > 1 else "") for by, words in how.items() if by in found]


def _elsewhere(groups: Sequence[Group]) -> list[str]:
    """Methods whose models are what local training makes of them, evaluated before it."""
    own = dict(METHODS.items())
    found = dict.fromkeys(
        g.config.method
        for g in groups
        if g.points == ["received"] and g.config.method in own and own[g.config.method].eval_point != "received"
    )
    said = {"fedavg-ft": "fedavg-ft as received is fedavg"}
    before = "is evaluated before the local training that makes its models"
    return [
        f"{said.get(m, f'{m} {before}')}: --eval-point after_local evaluates all methods after local training, auto "
        "each at its own point"
        for m in found
    ]


def _named(group: Group) -> str:
    """A row and its conditions."""
    rule = "" if group.config.rule == "mean" else group.config.rule
    where = ", ".join(part for part in (group.column, rule) if part)
    return f"{group.row}{f' ({where})' if where else ''}"


def _stopped(groups: Sequence[Group]) -> list[str]:
    """Which runs have fewer rounds than they were to have."""
    return [
        f"{_named(group)} stopped early: "
        + ", ".join(f"seed {seed} after round {round}" for seed, round in group.stopped.items())
        + f" of {group.config.rounds}"
        for group in groups
        if group.stopped
    ]


def _broken(groups: Sequence[Group]) -> list[str]:
    """Which runs diverged, by reason."""
    who: dict[str, list[str]] = {}
    for group in groups:
        for seed, why in group.diverged.items():
            who.setdefault(why, []).append(f"{_named(group)} seed {seed}")
    return [f"diverged: {', '.join(names)}: {why}" for why, names in who.items()]


def _seen(groups: Sequence[Group]) -> list[str]:
    """Which runs began with one that had trained on their samples for tests or choices, by what there is to say."""
    who: dict[str, list[str]] = {}
    for group in groups:
        for seed, said in group.seen.items():
            who.setdefault(said, []).append(f"{group.row}{f' ({group.column})' if group.column else ''} seed {seed}")
    return [f"seen before: {', '.join(names)}: {said}" for said, names in who.items()]


def _threat(groups: Sequence[Group]) -> list[str]:
    """How many are malicious, and whose accuracy is shown."""
    found = []
    for group in groups:
        if group.config.attack == "none" or not group.outcomes:
            continue
        clients = len(group.outcomes[0].per_client)
        if measured.benign(group):
            bad = len(group.outcomes[0].malicious)
            whose = f"{group.score.name} of the {clients - bad} benign ones only"
            if any(g.config.attack == "none" for g in groups):
                whose += f" (no attack: of all {clients})"
        else:
            bad = int(group.config.malicious * clients + 1e-9)
            whose = f"others every round; {group.score.name} of all clients"
        found.append(f"under attack {bad} of {clients} clients are malicious; {whose}")
    return list(dict.fromkeys(found))


def _test_notes(groups: Sequence[Group], tests: dict[int, Paired]) -> list[str]:
    if not tests:
        return []
    made = [t for t in tests.values() if t.over is not None]
    notes = []
    for over in dict.fromkeys(t.over for t in made):
        counts = sorted({t.n for t in made if t.over == over})
        n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
        mine = f"{TITLES[made[0].metric]} {measured.name(groups)} of each seed"
        how = f"each client's {measured.name(groups)} averaged over the seeds" if over == "clients" else mine
        notes.append(
            f"against {made[0].baseline}: Wilcoxon signed-rank test over {over}, two-sided, {n} pairs "
            f"({how}); p (Holm): corrected for {len(made)} tests"
        )
    notes += list(dict.fromkeys(t.why for t in made if t.why))
    for why in dict.fromkeys(t.why for t in tests.values() if t.over is None):
        who = [
            f"{groups[i].row}{f' ({groups[i].column})' if groups[i].column else ''}"
            for i, t in tests.items()
            if t.over is None and t.why == why
        ]
        notes.append(f"no test for {', '.join(who)}: {why}")
    return notes
