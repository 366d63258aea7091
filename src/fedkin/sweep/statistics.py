"""What a sweep says: mean and standard deviation over seeds, and whether a difference to a baseline is more than luck.

Accuracies are those of the runs: of benign clients only where the same clients attack all along. Nothing here is
filled in: a seed that failed is missing, and a test that would compare different things is not made."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fedkin.config import Config
from fedkin.errors import DataError, unknown
from fedkin.rounds import Accuracy, ClientRecord, Result
from fedkin.rounds.clock import PARTS
from fedkin.runs.folder import ACCURACIES, RunFolder, number
from fedkin.runs.metric import ShownMetric
from fedkin.sweep import groups

SEEDS_FOR_A_TEST = 6  # below, a signed-rank test over seeds cannot reach p < 0.05
METRICS: dict[str, tuple[str, str]] = {
    "macro": ("last", "macro"),
    "micro": ("last", "micro"),
    "worst-decile": ("last", "worst_decile"),
    "best-macro": ("best", "macro"),
    "best-micro": ("best", "micro"),
    "best-worst-decile": ("best", "worst_decile"),
}


@dataclass(frozen=True, eq=False)
class Outcome:
    """A finished run as a table needs it, whether it was done now or is read from its folder."""

    config: Config  # as asked for, before anything was filled in
    options: Mapping[str, Any]
    accuracy: Accuracy
    best: Accuracy
    best_round: int
    per_client: Sequence[ClientRecord]
    malicious: Sequence[int]
    sent: int  # bytes, both ways
    seconds: float  # of the rounds
    split: str
    eval_point: str
    source: Result | RunFolder
    wall: float = math.nan  # seconds by the wall clock, and where they went
    times: Mapping[str, float] = field(default_factory=dict)
    diverged: str | None = None
    validation: Accuracy | None = None  # as `accuracy` and `best`, on validation samples
    best_validation: Accuracy | None = None
    stopped: int | None = None  # after which round training ended early
    seen: Sequence[str] = ()  # samples for tests and choices that the run which it began with had trained on, in words

    @property
    def best_by(self) -> str:
        """On which samples the best round was chosen."""
        known = self.best_validation is not None and not math.isnan(self.best_validation.macro)
        return "validation" if known else "test"

    @property
    def score(self) -> ShownMetric:
        """What its numbers are."""
        return ShownMetric(self.accuracy.metric, self.accuracy.unit, self.accuracy.higher)

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def seed(self) -> int:
        return self.config.seed

    @classmethod
    def of(cls, result: Result, config: Config | None = None) -> Outcome:
        asked = config or as_asked(result.config)
        return cls(
            asked,
            result.options,
            result.accuracy,
            result.best.accuracy,
            result.best.round,
            result.per_client,
            result.malicious,
            sum(result.bytes.values()),
            result.seconds,
            result.prepared.split_hash,
            result.prepared.eval_point,
            result,
            result.wall,
            result.times,
            result.diverged,
            result.validation,
            result.best.validation,
            result.stopped,
            result.prepared.seen,
        )

    @classmethod
    def read(cls, folder: RunFolder, config: Config | None = None) -> Outcome:
        """Of a finished run."""
        info, found = folder.info, folder.info.result or {}
        try:
            best = dict(found["best"])
            at = int(best["round"])
            return cls(
                config or info.configuration(),
                info.options,
                _accuracy(found["accuracy"]),
                _accuracy(best),
                at,
                [_client(c) for c in folder.per_client()],
                info.malicious,
                info.bytes,
                info.seconds,
                str(info.prepared["split_hash"]),
                str(info.prepared["eval_point"]),
                folder,
                info.wall,
                info.times,
                info.diverged,
                _accuracy(found["validation"]) if found.get("validation") else None,
                _accuracy(best["validation"]) if best.get("validation") else None,
                None if found.get("stopped") is None else int(found["stopped"]),
                info.began_with.get("seen", []),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"run {info.id!r} has no result that can be read ({error!r})") from None

    @cached_property
    def tested_on(self) -> str:
        """Hash of who is tested on which samples, where the run kept its split; else that of the whole split."""
        if not isinstance(self.source, RunFolder):
            return self.split
        digest = hashlib.sha256()
        for rows in self.source.split()["test"]:
            digest.update(np.sort(rows).tobytes() + b"|")
        return digest.hexdigest()

    def by_client(self) -> dict[int, float]:
        """Accuracy of the clients that count: benign, with test samples."""
        return {
            c.client: c.accuracy
            for c in self.per_client
            if c.client not in self.malicious and not math.isnan(c.accuracy)
        }


def as_asked(config: Config) -> Config:
    """Without the share for validation that the method itself needs: nobody asked for it."""
    return config if "validation_share" in config.asked else replace(config, validation_share=None)


def _accuracy(values: Mapping[str, Any]) -> Accuracy:
    numbers: dict[str, Any] = {name: number(values.get(name)) for name in ACCURACIES}
    what = {f.name: values[f.name] for f in fields(Accuracy) if f.name in values and f.name not in numbers}
    return Accuracy(**{**numbers, **what})


def _client(values: Mapping[str, Any]) -> ClientRecord:
    return ClientRecord(
        int(values["client"]),
        str(values["name"]),
        number(values["accuracy"]),
        number(values["loss"]),
        int(values["train_samples"]),
        int(values["test_samples"]),
        int(values["correct"]),
        values.get("metrics") or {},
        number(values.get("validation")),
    )


# ---------------------------------------------------------------- the seeds of one cell of a table


@dataclass(frozen=True, eq=False)
class Group(groups.Group[Outcome]):
    """The runs of a sweep that differ in nothing but the seed. `asked`: all seeds that were wanted."""

    config: Config = field(kw_only=True)  # of the first
    asked: Sequence[int] = field(kw_only=True)
    choice: Mapping[str, Any] | None = field(default=None, kw_only=True)  # how it was picked, as `selection.Choice`

    @property
    def outcomes(self) -> Sequence[Outcome]:
        return self.members

    @property
    def seeds(self) -> list[int]:
        return [o.seed for o in self.outcomes]

    @property
    def score(self) -> ShownMetric:
        """What the numbers are."""
        return self.outcomes[0].score if self.outcomes else ShownMetric()

    @property
    def diverged(self) -> dict[int, str]:
        """Seeds whose numbers are not to be believed, and why."""
        return {o.seed: o.diverged for o in self.outcomes if o.diverged is not None}

    @property
    def stopped(self) -> dict[int, int]:
        """Seeds whose training ended early, and after which round."""
        return {o.seed: o.stopped for o in self.outcomes if o.stopped is not None}

    @property
    def seen(self) -> dict[int, str]:
        """Seeds that began with a run which had trained on samples for tests or choices, and which."""
        return {o.seed: "; ".join(o.seen) for o in self.outcomes if o.seen}

    @property
    def points(self) -> list[str]:
        """When models were evaluated."""
        return list(dict.fromkeys(o.eval_point for o in self.outcomes))

    def metric(self, name: str) -> dict[str, float]:
        return self.over_seeds(lambda o: measure(o, name))

    def validation(self) -> dict[str, float]:
        """The score on validation samples after the last round, the mean over clients."""
        return self.over_seeds(lambda o: math.nan if o.validation is None else o.validation.macro)

    def time(self, part: str) -> dict[str, float]:
        """Seconds of the wall clock that went into one of `clock.PARTS`."""
        return self.over_seeds(lambda o: o.times.get(part, math.nan))

    def to_dict(self) -> dict[str, Any]:
        """A line of `compare --json`."""
        first = self.outcomes[0] if self.outcomes else None
        return {
            "method": self.config.method,
            "attack": self.config.attack,
            "rule": self.config.rule,
            "options": dict(first.options if first else self.config.options),
            "row": self.row,
            "column": self.column,
            "settings": dict(self.settings),
            "seeds": self.seeds,
            "missing": [s for s in self.asked if s not in self.seeds],
            "eval_point": first.eval_point if first else None,
            "score": first.score.facts() if first else None,
            "benign_only": self.config.attack != "none" and self.config.attackers != "redrawn",
            **{name.replace("-", "_"): self.metric(name) for name in METRICS},
            "std": self.over_seeds(lambda o: o.accuracy.std),
            "best_rounds": [o.best_round for o in self.outcomes],
            "best_by": list(dict.fromkeys(o.best_by for o in self.outcomes)),
            "validation": self.validation(),
            "megabytes": self.over_seeds(lambda o: o.sent / 1e6),
            "seconds": self.over_seeds(lambda o: o.seconds),
            "wall": self.over_seeds(lambda o: o.wall),
            "times": {part: self.time(part) for part in PARTS},
            "diverged": {str(seed): why for seed, why in self.diverged.items()},
            "stopped": {str(seed): round for seed, round in self.stopped.items()},
            "seen": {str(seed): said for seed, said in self.seen.items()},
            "splits": [o.split for o in self.outcomes],
            "select": self.choice,
        }


def measure(outcome: Outcome, name: str) -> float:
    """One of `METRICS` of one run."""
    if name not in METRICS:
        raise unknown("metric", name, METRICS)
    when, key = METRICS[name]
    found: float = getattr(outcome.accuracy if when == "last" else outcome.best, key)
    return found


def groups_of(cells: Iterable[tuple[Config, Outcome | None]]) -> list[Group]:
    """Cells by what they have in common, in the order they came; a cell without an outcome leaves its seed missing."""
    made = []
    for same in groups.grouped(cells, lambda cell: cell[0]):
        done = [outcome for _, outcome in same.members if outcome is not None]
        config, seeds = same.members[0][0], [config.seed for config, _ in same.members]
        made.append(Group(same.row, same.column, same.settings, done, config=config, asked=seeds))
    return made


# ---------------------------------------------------------------- against a baseline


@dataclass(frozen=True)
class Paired:
    """Wilcoxon's signed-rank test, two-sided. `over` is None where none was made, and `why` says why."""

    baseline: str
    over: Literal["clients", "seeds"] | None = None
    n: int = 0
    p: float = math.nan
    p_holm: float = math.nan  # corrected for all tests of the sweep
    difference: float = math.nan  # median of the paired differences, in the unit of the metric
    why: str = ""
    metric: str = "macro"  # what was compared

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def paired(group: Group, baseline: Group, metric: str = "macro") -> Paired:
    """Over seeds where six or more are common to both, else over clients, each client's mean over the seeds: that is a
    test of `macro`, their mean, and of no other metric."""
    return replace(_paired(group, baseline, metric), metric=metric)


def _paired(group: Group, baseline: Group, metric: str) -> Paired:
    name = baseline.row
    mine, theirs = ({o.seed: o for o in g.outcomes} for g in (group, baseline))
    seeds = [s for s in mine if s in theirs]
    if not seeds:
        return Paired(name, why="no seed that both have finished")
    remark = ""
    for s in seeds:
        if mine[s].split != theirs[s].split:
            if mine[s].tested_on != theirs[s].tested_on:
                return Paired(
                    name,
                    why=f"the splits differ at seed {s} ({mine[s].split[:12]} and "
                    f"{theirs[s].split[:12]}): other clients, other test samples",
                )
            remark = "the same test samples; training samples differ by what is set aside for validation"
    if len(seeds) >= SEEDS_FOR_A_TEST:
        differences = [measure(mine[s], metric) - measure(theirs[s], metric) for s in seeds]
        return _signed_rank(name, "seeds", differences, remark)
    if metric != "macro":
        return Paired(
            name,
            why=f"{metric} is one number a seed, and a test over seeds needs {SEEDS_FOR_A_TEST} that "
            f"both have finished, not {len(seeds)}; over clients only macro can be tested",
        )
    each: dict[int, list[float]] = {}
    for s in seeds:
        a, b = mine[s].by_client(), theirs[s].by_client()
        for client in a.keys() & b.keys():
            each.setdefault(client, []).append(a[client] - b[client])
    return _signed_rank(name, "clients", [float(np.mean(v)) for v in each.values()], remark)


def _signed_rank(name: str, over: Literal["clients", "seeds"], differences: Sequence[float], remark: str) -> Paired:
    from scipy.stats import wilcoxon

    found = np.array(differences, float)
    found = found[np.isfinite(found)]
    if len(found) < 2:
        return Paired(name, n=len(found), why=f"fewer than two {over} to pair")
    p = float(wilcoxon(found).pvalue) if (found != 0).any() else 1.0
    return Paired(name, over, len(found), p, p, float(np.median(found)), remark)


def compared(groups: Sequence[Group], baseline: str, metric: str = "macro") -> dict[int, Paired]:
    """Every group against the baseline's under the same conditions and rule, by its position in `groups`."""
    rows = list(dict.fromkeys(g.row for g in groups))
    chosen = baseline if baseline in rows else next((g.row for g in groups if g.config.method == baseline), None)
    if chosen is None:
        raise unknown("baseline", baseline, {*rows, *(g.config.method for g in groups)})
    found: dict[int, Paired] = {}
    for i, group in enumerate(groups):
        if group.row == chosen:
            continue
        same = [g for g in groups if (g.row, g.column, g.config.rule) == (chosen, group.column, group.config.rule)]
        missing = Paired(chosen, why="the baseline has no run like this", metric=metric)
        found[i] = paired(group, same[0], metric) if same else missing
    return _holm(found)


def _holm(found: Mapping[int, Paired]) -> dict[int, Paired]:
    """Holm's correction for having made several tests."""
    tests = sorted((i for i, t in found.items() if t.over is not None), key=lambda i: found[i].p)
    corrected, most = dict(found), 0.0
    for rank, i in enumerate(tests):
        most = max(most, min(1.0, found[i].p * (len(tests) - rank)))
        corrected[i] = replace(found[i], p_holm=most)
    return corrected


def summary(groups: Sequence[Group], baseline: str | None = None, metric: str = "macro") -> list[dict[str, Any]]:
    """One entry per group, as `compare --json` has it under `table`; tests against the baseline are of `metric`."""
    tests = compared(groups, baseline, metric) if baseline is not None else {}
    return [
        {**g.to_dict(), **({"paired": tests[i].to_dict() if i in tests else None} if baseline is not None else {})}
        for i, g in enumerate(groups)
    ]
