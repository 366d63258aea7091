"""A run folder as numbers, for the report and for the web page. Whoever wrote the folder is not trusted: what has not
the expected shape counts as not there, and no more is read than the `Limits` allow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.core import notes
from fedkin.core.notes import number, numbers
from fedkin.errors import DataError
from fedkin.report.figures import Floats, Missing
from fedkin.report.queries import FILE, Limits, select
from fedkin.runs.arrays import read_arrays
from fedkin.runs.folder import METRICS, SPLIT, RunFolder, RunInfo
from fedkin.runs.metric import ShownMetric

MOST_CLIENTS = 20_000
MOST_ROUNDS = 200  # columns of a map over rounds; longer runs are thinned
MOST_SPLIT, MOST_COUNTS = 256 << 20, 32 << 20  # bytes of the file, and of the class counts in it when unpacked
CURVES = (
    *("round", "micro", "macro", "worst_decile", "std", "test_loss", "train_loss", "bytes_down", "bytes_up"),
    *("seconds", "participants", "failed", "removed", "training", "evaluating", "writing", "wall"),
    *("validation_macro", "validation_micro", "validation_worst_decile", "validation_std", "validation_loss"),
)
"""Columns of the table of rounds that are shown."""


def thinned(rounds: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly, the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    if most == 1:
        return [rounds[-1]]
    return [rounds[i] for i in np.unique(np.linspace(0, len(rounds) - 1, most).round().astype(int))]


def parsed(value: Any) -> Any:
    """A note's JSON, or None."""
    try:
        return json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return None


def rounds_after(folder: Path, round: int = -1, final: int = 1, **how: Any) -> list[tuple[Any, ...]]:
    """Rows (final, *CURVES) of the table of rounds that come after this one, in order; the one after the last
    fine-tuning, if any, comes last."""
    if not (folder / METRICS).exists():  # so early is it
        return []
    where = "WHERE round > ? OR (round = ? AND final > ?) ORDER BY round, final"
    return select(folder, f"final, {', '.join(CURVES)}", "rounds", where, (round, round, final), **how)


class RunData:
    """One run as arrays."""

    def __init__(self, folder: RunFolder, limits: Limits = FILE) -> None:
        self.folder, self.limits = folder, limits

    @property
    def info(self) -> RunInfo:
        return self.folder.info

    @cached_property
    def names(self) -> list[str]:
        if not 0 < len(self.info.names) <= MOST_CLIENTS:
            raise DataError(f"{self.info.id}: figures take 1 to {MOST_CLIENTS} clients, not {len(self.info.names)}")
        return [name[:200] for name in self.info.names]

    @property
    def metric(self) -> ShownMetric:
        return self.info.metric

    @property
    def few(self) -> range:
        """The clients that have a row in maps."""
        return range(min(len(self.names), self.limits.side))

    @cached_property
    def malicious(self) -> list[int]:
        return [c for c in self.info.malicious if 0 <= c < len(self.names)]

    def marked(self, clients: Sequence[int]) -> list[int]:
        """The places of malicious ones among these."""
        bad = set(self.malicious)
        return [i for i, c in enumerate(clients) if c in bad]

    def select(self, columns: str, table: str, rest: str = "", values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """A question to the run's metrics; before the first round there may be no file yet."""
        if not (self.folder.path / METRICS).exists():
            return []
        return select(self.folder.path, columns, table, rest, values, limits=self.limits)

    # ---------------------------------------------------------------- rounds and clients

    @cached_property
    def rounds(self) -> dict[str, Floats]:
        """The table of rounds, column by column."""
        rows = self.select(f"final, {', '.join(CURVES)}", "rounds", "ORDER BY round, final")
        rows = [row for row in rows if number(row[0]) is not None and number(row[1]) is not None]
        return {name: numbers(row[i] for row in rows) for i, name in enumerate(("final", *CURVES))}

    @property
    def regular(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which rows of `rounds` are not the one after the last fine-tuning."""
        return np.asarray(self.rounds["final"] == 0)

    @property
    def evaluated(self) -> bool:
        return len(self.rounds["round"]) > 0

    @cached_property
    def last(self) -> dict[str, float]:
        """The newest row of `rounds`; NaN before the first."""
        return {k: float(v[-1]) if len(v) else np.nan for k, v in self.rounds.items()}

    @cached_property
    def shown(self) -> dict[str, float]:
        """The row of those models that are the run's result: the newest, unless the best were kept."""
        kept = (self.info.result or {}).get("kept")
        if not isinstance(kept, dict):
            return self.last
        at = (self.rounds["round"] == number(kept.get("round"))) & (self.rounds["final"] == bool(kept.get("final")))
        return {k: float(v[at][0]) for k, v in self.rounds.items()} if at.any() else self.last

    @cached_property
    def best(self) -> dict[str, float]:
        """The row that is best by `best_by`, the earliest of equals."""
        score = self.rounds["validation_macro" if self.best_by == "validation" else "micro"]
        score = score if self.metric.higher else -score
        at = int(np.nanargmax(score)) if np.isfinite(score).any() else -1
        return {k: float(v[at]) if len(v) else np.nan for k, v in self.rounds.items()}

    @property
    def best_by(self) -> str:
        """On which samples the best round is chosen: validation samples (mean over clients) where there are any, else
        test samples."""
        return "validation" if np.isfinite(self.rounds["validation_macro"]).any() else "test"

    @cached_property
    def clients(self) -> dict[str, Floats]:
        """Accuracy and loss of every client's personal model when it was last evaluated; NaN without test samples."""
        if not self.evaluated:
            raise Missing("no round has been evaluated yet")
        now = int(self.shown["round"]), int(self.shown["final"])
        out = {k: np.full(len(self.names), np.nan) for k in ("accuracy", "loss", "correct", "count")}
        rest = "WHERE round = ? AND final = ? ORDER BY client"
        for client, *row in self.select(f"client, {', '.join(out)}", "clients", rest, now):
            if self.has(client):
                for column, value in zip(out.values(), numbers(row), strict=True):
                    column[client] = value
        out["accuracy"][~(out["count"] > 0)] = np.nan
        return out

    @cached_property
    def counted(self) -> Floats:
        """Whose accuracy counts: benign clients with test samples."""
        benign = ~np.isin(np.arange(len(self.names)), self.malicious)
        return benign & np.isfinite(self.clients["accuracy"])

    def has(self, client: Any) -> bool:
        return type(client) is int and 0 <= client < len(self.names)

    @property
    def has_classes(self) -> bool:
        """Whether samples have one of several classes: of numbers and the like there is nothing to count."""
        return self.info.prepared.get("classes") != 0

    @cached_property
    def class_counts(self) -> Floats:
        """Training samples per client and class, from the run itself: a folder must not make us load data it names.
        Only this array is unpacked, and only if it is small when unpacked."""
        if self.info.deployed:
            raise Missing("only the sites know how many samples of each class they have")
        found = read_arrays(self.folder.path / SPLIT, {"class_counts": "iu"}, MOST_SPLIT, MOST_COUNTS)
        counts = found.get("class_counts")
        if counts is None:
            raise Missing("the run's split has no class counts")
        if counts.ndim != 2 or len(counts) != len(self.names) or not counts.size:
            raise Missing("the class counts of the split do not fit the clients")
        return np.asarray(counts)

    def phases(self) -> list[tuple[str, Floats]]:
        """Every kind of exchange, and what all of it cost: bytes down, bytes up, seconds."""
        sums = "phase, sum(bytes_down), sum(bytes_up), sum(seconds)"
        rows = self.select(sums, "exchanges", "GROUP BY phase ORDER BY min(id)")[:100]
        return [(str(phase)[:60], np.nan_to_num(numbers(cost))) for phase, *cost in rows]

    @cached_property
    def events(self) -> list[tuple[int, int, str, str]]:
        """(round, client, kind, reason), as many as the limits allow."""
        rows = self.select("round, client, kind, reason", "events", "ORDER BY rowid")
        return [(r, c, k, str(why)[:200]) for r, c, k, why in rows if type(r) is int and self.has(c) and type(k) is str]

    # ---------------------------------------------------------------- notes

    def rounds_of(self, kind: notes.Kind) -> list[int]:
        """The rounds with this note. Of kinds that share a name, a matrix has two brackets."""
        matrix = {"pairs": "=", "per_client": "!="}.get(kind.shape)
        rest = f"AND substr(value, 1, 2) {matrix} '[['" if matrix else ""
        rows = self.select("DISTINCT round", "notes", f"WHERE name = ? {rest} ORDER BY round", (kind.name,))
        return [r for (r,) in rows if type(r) is int]

    def noted(self, kind: notes.Kind, rounds: Iterable[int] | None = None) -> dict[int, Any]:
        """Values by round, of several in one the last; in these rounds, or in all, thinned."""
        at = thinned(self.rounds_of(kind) if rounds is None else list(rounds), MOST_ROUNDS)
        most = self.limits.matrix if kind.shape == "pairs" else self.limits.vector
        places = ", ".join("?" * len(at))
        rest = f"WHERE name = ? AND round IN ({places}) AND length(value) <= ? GROUP BY round ORDER BY round"
        rows = self.select("round, value, max(rowid)", "notes", rest, (kind.name, *at, most)) if at else []
        return {r: parsed(value) for r, value, _ in rows}

    def whose(self, kind: notes.Kind, rounds: Iterable[int]) -> dict[int, list[int]]:
        """The clients that a note of this kind is about, by round, where another note says so."""
        if not kind.over:
            return {}
        values = self.noted(notes.kind_of(kind.over), rounds)
        named = {r: v.get("clients") if isinstance(v, dict) else v for r, v in values.items()}
        lists = {r: notes.client_list(v, len(self.names)) for r, v in named.items()}
        return {r: ids for r, ids in lists.items() if ids}

    def told(self, kind: notes.Kind, rounds: Iterable[int] | None = None) -> dict[int, Any]:
        """What was noted, in the form of its kind; what does not fit is not there."""
        values = self.noted(kind, rounds)
        whose = self.whose(kind, values)
        found = {r: kind.read(v, len(self.names), whose.get(r)) for r, v in values.items()}
        return {r: v for r, v in found.items() if v is not None}

    def over_rounds(self, kind: notes.Kind) -> tuple[list[int], Floats]:
        """Rounds, and a noted number per client in each, [rounds, N]."""
        found = self.told(kind)
        if not found:
            raise Missing(f"the run has no note {kind.name!r} with a number for each client")
        return list(found), np.array(list(found.values()))
