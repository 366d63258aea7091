"""Which cell of a grid is picked for each method, and by what: by scores on validation samples or, said aloud, by test
data.

How a method trains is what there is to pick from: its options and the settings of training. What the problem is (data,
who attacks, by which rule the server averages) is a condition: under each there is a choice of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fedkin.config import MODEL, TRAINING, Config
from fedkin.errors import UsageError, unknown
from fedkin.runs.metric import ShownMetric
from fedkin.sweep.groups import OPTION, said, said_of, settings_of
from fedkin.sweep.statistics import METRICS, Group, Outcome, measure

WAYS = {"val": "validation", "test": "test"}
"""What a choice can go by, and the samples that this means."""
NEVER = ("method", "participation", "task", "metrics", "head")  # conditions, although they are about training
PICKED = {f.name for f in fields(Config) if f.metadata.get("group") in (TRAINING, MODEL) and f.name not in NEVER}
PICKED |= {"patience", "min_gain", "keep"}
"""Settings that one picks from."""


@dataclass(frozen=True)
class Choice:
    """What was picked, for one method under one condition."""

    on: str  # "validation" or "test"
    metric: str
    tried: int
    picked: str  # the settings that were picked from, in words
    mean: float  # the score that it was picked by, over seeds
    std: float
    passed_over: tuple[str, ...] = ()  # cells that could not be picked, and why

    def words(self, score: ShownMetric) -> str:
        spread = "" if math.isnan(self.std) else f" ± {score.said(self.std)}"
        by = f"{self.metric} {score.said(self.mean)}{spread}"
        found = f"{self.picked or 'its only cell'}, chosen on {self.on} data ({by})"
        left = f"; never chosen: {'; '.join(self.passed_over)}" if self.passed_over else ""
        return f"{found} among {self.tried}{left}"


def check_way(way: str | None, configs: Sequence[Config], given: bool = False) -> None:
    """UsageError unless one can choose in this way among such runs. `given`: they bring validation samples."""
    if way is None:
        return
    if way not in WAYS:
        raise unknown("way to select", way, WAYS)
    without = [c.method for c in configs if not c.validation_share]
    if way == "val" and without and not given:
        raise UsageError(
            f"select='val' goes by validation samples, and {without[0]} sets none aside: give validation_share, for "
            "example validation_share=0.2 (--validation-share 0.2)"
        )


def selected(groups: Sequence[Group], way: str, metric: str = "macro") -> list[Group]:
    """Of each method, under each condition and rule, the group with the best mean over seeds; the first of equals. One
    that misses a seed, has diverged or has no score is never picked."""
    cells: dict[tuple[tuple[str, str], ...], list[Group]] = {}
    for group in groups:
        told = settings_of(group.config)
        fixed = {k: v for k, v in told.items() if not k.startswith(OPTION) and k not in PICKED and k != "seed"}
        cells.setdefault(tuple(sorted((k, repr(v)) for k, v in fixed.items())), []).append(group)
    return [_picked(same, WAYS[way], metric) for same in cells.values()]


def _picked(groups: Sequence[Group], on: str, metric: str) -> Group:
    why = {i: reason for i, g in enumerate(groups) if (reason := _unfit(g, on, metric)) is not None}
    stats = [g.over_seeds(lambda o: _score(o, on, metric)) for g in groups]
    left = [i for i in range(len(groups)) if i not in why]
    higher = all(g.score.higher for g in groups)
    best = max(left, key=lambda i: stats[i]["mean"] if higher else -stats[i]["mean"], default=0)
    out = tuple(f"{_settings(groups[i], groups) or groups[i].row} ({reason})" for i, reason in why.items())
    chosen = groups[best]
    if not left:
        chosen = replace(chosen, members=[])
    choice = Choice(
        on, metric, len(groups), _settings(chosen, groups) if left else "none", **stats[best], passed_over=out
    )
    conditions = {k: v for k, v in chosen.settings.items() if k not in PICKED}
    return replace(
        chosen, row=chosen.config.method, column=said_of(conditions), settings=conditions, choice=asdict(choice)
    )


def _unfit(group: Group, on: str, metric: str) -> str | None:
    """Why a group cannot be picked."""
    missing = [s for s in group.asked if s not in group.seeds]
    unknown_at = [o.seed for o in group.outcomes if not math.isfinite(_score(o, on, metric))]
    for seeds, what in ((missing, "no result"), (list(group.diverged), "diverged"), (unknown_at, f"no {on} score")):
        if seeds:
            return f"{what} at seed {', '.join(map(str, seeds))}"
    return None


def _score(outcome: Outcome, on: str, metric: str) -> float:
    if on == "test":
        return measure(outcome, metric)
    when, key = METRICS[metric]
    found = outcome.validation if when == "last" else outcome.best_validation
    return math.nan if found is None else float(getattr(found, key))


def _settings(group: Group, groups: Sequence[Group]) -> str:
    """What tells a group from those that one picks from, in words."""
    own, all_ = settings_of(group.config), [settings_of(g.config) for g in groups]
    keys = dict.fromkeys(k for told in all_ for k in told)
    differing = [k for k in keys if k in own and len({repr(told.get(k)) for told in all_}) > 1 and k != "seed"]
    return ", ".join(_word(k, own[k]) for k in differing)


def _word(key: str, value: Any) -> str:
    return f"{key.removeprefix(OPTION)}={value}" if key.startswith(OPTION) else said(key, value)
