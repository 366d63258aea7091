"""What figures need, read from run folders and put in order. Whoever wrote the folders is not trusted: what has not
the expected shape counts as not there, and `Missing` says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedkin.errors import DataError
from fedkin.runs.folder import RunFolder, RunInfo

Floats = np.ndarray[Any, np.dtype[Any]]

MOST_CLIENTS = 20_000
MOST_ROUNDS = 200  # columns of a map over rounds; longer runs are thinned
SAID_OTHERWISE = ("seed", "options", "method")
"""Settings that make no condition of their own."""
LONGEST = 200  # characters of a label


class Missing(Exception):
    """There is nothing to draw; the text says why."""


def numbers(values: Iterable[Any]) -> Floats:
    """Floats; whatever is no finite number becomes NaN."""
    found = (v if isinstance(v, float) or (isinstance(v, int) and abs(v) < 1 << 62) else np.nan for v in values)
    array = np.fromiter(found, float)
    return np.where(np.isfinite(array), array, np.nan)


def thinned(rounds: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly, the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[i] for i in np.unique(np.linspace(0, len(rounds) - 1, most).round().astype(int))]


class RunData:
    """One run as arrays."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @property
    def info(self) -> RunInfo:
        return self.folder.info

    @cached_property
    def names(self) -> list[str]:
        if not 0 < len(self.info.names) <= MOST_CLIENTS:
            raise DataError(f"{self.info.id}: a report takes 1 to {MOST_CLIENTS} clients, not {len(self.info.names)}")
        return self.info.names

    @property
    def malicious(self) -> list[int]:
        return [c for c in self.info.malicious if 0 <= c < len(self.names)]

    @cached_property
    def rounds(self) -> dict[str, Floats]:
        """The table of rounds; the one after the last fine-tuning, if any, comes last."""
        table = {k: numbers(v) for k, v in self.folder.table("rounds").items()}
        order = np.lexsort((table["final"], table["round"]))
        order = order[np.isfinite(table["final"] + table["round"])[order]]
        return {k: v[order] for k, v in table.items()}

    @property
    def evaluated(self) -> bool:
        return len(self.rounds["round"]) > 0

    @cached_property
    def last(self) -> dict[str, float]:
        """The newest row of `rounds`; NaN before the first."""
        return {k: float(v[-1]) if len(v) else np.nan for k, v in self.rounds.items()}

    @cached_property
    def best(self) -> dict[str, float]:
        """The row with the highest micro accuracy, the earliest of equals."""
        micro = self.rounds["micro"]
        at = int(np.nanargmax(micro)) if np.isfinite(micro).any() else -1
        return {k: float(v[at]) if len(v) else np.nan for k, v in self.rounds.items()}

    @cached_property
    def clients(self) -> dict[str, Floats]:
        """Accuracy and loss of every client's personal model when it was last evaluated; NaN without test samples."""
        if not self.evaluated:
            raise Missing("no round has been evaluated yet")
        now = {"round": int(self.last["round"]), "final": int(self.last["final"])}
        table = self.folder.table("clients", now)
        out = {k: np.full(len(self.names), np.nan) for k in ("accuracy", "loss", "correct", "count")}
        for key, column in out.items():
            for client, value in zip(table["client"], numbers(table[key]), strict=True):
                if isinstance(client, int) and 0 <= client < len(column):
                    column[client] = value
        out["accuracy"][~(out["count"] > 0)] = np.nan
        return out

    @cached_property
    def counted(self) -> Floats:
        """Whose accuracy counts: benign clients with test samples."""
        benign = ~np.isin(np.arange(len(self.names)), self.malicious)
        return benign & np.isfinite(self.clients["accuracy"])

    @cached_property
    def class_counts(self) -> Floats:
        """Training samples per client and class, from the run itself: a folder must not make us load data it names."""
        found = self.folder.split().get("class_counts")
        if found is None:
            raise Missing("the run's split has no class counts")
        if found.ndim != 2 or len(found) != len(self.names) or not found.size:
            raise Missing("the class counts of the split do not fit the clients")
        return np.asarray(found)

    # ---------------------------------------------------------------- notes

    @cached_property
    def noted(self) -> dict[str, dict[int, str]]:
        """JSON texts of notes by name and round; of several in a round the last."""
        table = self.folder.table("notes")
        found: dict[str, dict[int, str]] = {}
        for number, name, value in zip(table["round"], table["name"], table["value"], strict=True):
            if isinstance(number, int) and isinstance(name, str) and isinstance(value, str):
                found.setdefault(name, {})[number] = value
        return found

    def note(self, name: str, round: int) -> Any:
        try:
            return json.loads(self.noted.get(name, {}).get(round, "null"))
        except (ValueError, RecursionError):
            return None

    def rounds_of(self, name: str) -> list[int]:
        """The rounds with this note, thinned."""
        return thinned(sorted(self.noted.get(name, {})), MOST_ROUNDS)

    def ids(self, name: str, round: int) -> list[int]:
        """A noted list of clients."""
        return self.checked(self.note(name, round))

    def checked(self, ids: Any) -> list[int]:
        """The list of clients that this should be; empty if it is none."""
        fine = isinstance(ids, list) and all(type(c) is int and 0 <= c < len(self.names) for c in ids)
        return ids if fine else []

    def per_client(self, value: Any, ids: Sequence[int] | None) -> Floats:
        """A row [N]: a noted vector over all clients, or over these; NaN elsewhere."""
        row = np.full(len(self.names), np.nan)
        if isinstance(value, list):
            at = range(len(row)) if ids is None else ids
            if len(value) == len(at):
                row[list(at)] = numbers(value)
        return row

    def over_rounds(self, name: str, ids: str | None = None) -> tuple[list[int], Floats]:
        """Rounds, and a noted vector per client in each, [rounds, N]; `ids` names the note that says whose."""
        rounds = self.rounds_of(name)
        rows = [self.per_client(self.note(name, r), None if ids is None else self.ids(ids, r)) for r in rounds]
        table = np.array(rows).reshape(len(rows), len(self.names))
        if not np.isfinite(table).any():
            raise Missing(f"the run has no note {name!r} with a number for each client")
        return rounds, table


# ---------------------------------------------------------------- who learns from whom

MATRICES = {"collaborators": "participants", "weights": "members"}
"""Notes that hold a weight for every pair of the clients that the other note names."""


@dataclass(frozen=True, eq=False)
class Collaboration:
    rounds: list[int]
    frames: Floats  # [rounds, clients, clients], NaN where one of the two was absent
    order: list[int]  # clients, similar ones beside each other
    most: float  # where the scale ends: almost all weight that goes to others is in smaller portions
    all_rounds: int


def collaboration(run: RunData, budget: int) -> Collaboration:
    """The matrices of as many rounds as `budget` numbers hold."""
    for name, ids in MATRICES.items():
        rounds = [r for r in sorted(run.noted.get(name, {})) if r in run.noted.get(ids, {})]
        kept = thinned(rounds, max(1, budget // len(run.names) ** 2))
        found = [(r, _square(run, r, name, ids)) for r in (kept if len(kept) > 1 else rounds[-1:])]
        frames = [(r, frame) for r, frame in found if frame is not None]
        if frames:
            stack = np.array([frame for _, frame in frames])
            return Collaboration([r for r, _ in frames], stack, _by_cluster(stack), _scale(stack), len(rounds))
    raise Missing("this method notes no weights between clients")


def _square(run: RunData, round: int, name: str, ids: str) -> Floats | None:
    clients, value = run.ids(ids, round), run.note(name, round)
    rows = value if isinstance(value, list) else []
    if not clients or len(rows) != len(clients) or not all(isinstance(r, list) and len(r) == len(rows) for r in rows):
        return None
    frame = np.full((len(run.names), len(run.names)), np.nan)
    frame[np.ix_(clients, clients)] = [numbers(r) for r in rows]
    return frame


MASS = 0.85  # of the weight that clients give to others is within the scale


def _scale(stack: Floats) -> float:
    """Some pairs of attackers with nobody else must not make all others look alike."""
    given = np.sort(stack[:, ~np.eye(stack.shape[1], dtype=bool)].ravel())
    given = given[np.isfinite(given) & (given > 0)]
    if len(given):
        return float(given[np.searchsorted(given.cumsum(), MASS * given.sum())])
    return max(float(np.nanmax(np.where(np.isfinite(stack), stack, 0))), 1e-9)


def _by_cluster(stack: Floats) -> list[int]:
    """Leaves of the hierarchical clustering of the later frames' mean weights."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    late = np.nan_to_num(stack[len(stack) * 2 // 3 :], nan=0.0, posinf=0.0, neginf=0.0).mean(0)
    near = (late + late.T) / 2
    np.fill_diagonal(near, 0)
    if len(near) < 3 or np.ptp(near[~np.eye(len(near), dtype=bool)]) < 1e-12:
        return list(range(len(near)))
    far = near.max() - near
    np.fill_diagonal(far, 0)
    tree = linkage(squareform(far, checks=False), "average", optimal_ordering=len(near) <= 200)
    return [int(i) for i in leaves_list(tree)]


# ---------------------------------------------------------------- what happened to whom

RANK = ("left_out", "failed", "rejected", "removed")


def happenings(run: RunData, most: int = 120) -> tuple[list[int], list[list[str]], list[int]]:
    """Rounds; the gravest thing that happened to each client in each; and the clients, malicious ones first."""
    events = run.folder.table("events", columns=["round", "client", "kind"])
    rows = [
        (r, c, RANK.index(k) + 1)
        for r, c, k in zip(events["round"], events["client"], events["kind"], strict=True)
        if isinstance(r, int) and isinstance(c, int) and 0 <= c < len(run.names) and k in RANK
    ]
    if not rows:
        raise Missing("nobody failed, was rejected, left out or removed")
    last = min(max(run.info.rounds_done, max(r for r, _, _ in rows)), 1_000_000)
    wide = -(-last // MOST_ROUNDS)  # rounds in a column
    table = np.zeros((len(run.names), -(-last // wide)), int)
    for r, c, rank in rows:
        at = min(max(r - 1, 0), last - 1) // wide
        table[c, at] = max(table[c, at], rank)
        if rank == len(RANK):
            table[c, at:] = rank
    touched = np.flatnonzero(table.any(1)).tolist()
    honest = [c for c in (range(len(run.names)) if len(run.names) <= most else touched) if c not in run.malicious]
    shown = [*sorted(run.malicious), *honest][:most]
    states = [["" if not v else RANK[v - 1] for v in table[c]] for c in shown]
    return list(range(wide, table.shape[1] * wide + 1, wide)), states, shown


# ---------------------------------------------------------------- several runs


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in nothing but the seed."""

    label: str  # the method, and those of its options that differ
    condition: str  # other settings that differ
    runs: list[RunData]

    @property
    def name(self) -> str:
        return f"{self.label}, {self.condition}" if self.condition else self.label

    def over_seeds(self, value: Callable[[RunData], float]) -> tuple[float, float]:
        """Mean and standard deviation over seeds (NaN for a single one)."""
        each = np.array([value(run) for run in self.runs], float)
        each = each[np.isfinite(each)]
        mean = float(each.mean()) if len(each) else np.nan
        return mean, float(each.std(ddof=1)) if len(each) > 1 else np.nan


def grouped(runs: Sequence[RunData]) -> tuple[list[Group], list[RunData]]:
    """Runs by what they have in common, and those left out because a newer run has the same settings and seed."""
    settings = [_settings(run.info) for run in runs]
    varying = [
        key
        for key in dict.fromkeys(k for s in settings for k in s)
        if any(
            len({repr(s[key]) for r, s in zip(runs, settings, strict=True) if r.info.method == m and key in s}) > 1
            for m in {r.info.method for r in runs}
        )
    ]
    found: dict[tuple[str, str], dict[int, RunData]] = {}
    older = []
    for run, own in sorted(zip(runs, settings, strict=True), key=lambda pair: pair[0].info.created):
        same = found.setdefault((_label(run, runs), _condition(own, varying)), {})
        if run.info.seed in same:
            older.append(same[run.info.seed])
        same[run.info.seed] = run
    order = {_label(run, runs): i for i, run in reversed(list(enumerate(runs)))}
    groups = [Group(label, where, [by[s] for s in sorted(by)]) for (label, where), by in found.items()]
    return sorted(groups, key=lambda g: order[g.label]), older


def _settings(info: RunInfo) -> dict[str, Any]:
    return {k: v for k, v in info.settings().items() if k not in SAID_OTHERWISE}


def _label(run: RunData, runs: Sequence[RunData]) -> str:
    peers = [r.info.options for r in runs if r.info.method == run.info.method]
    differing = [k for k in run.info.options if len({repr(p.get(k)) for p in peers}) > 1]
    return " ".join([run.info.method, *(f"{k}={run.info.options[k]}" for k in differing)])[:LONGEST]


def _condition(own: Mapping[str, Any], varying: Sequence[str]) -> str:
    """The settings that vary, in words; the plain mean goes without saying."""
    said = [
        f"{key.replace('_', ' ')} {own[key]}"
        for key in varying
        if key in own and key not in ("attack", "malicious") and (key, own[key]) != ("rule", "mean")
    ]
    attack, share = own.get("attack", "none"), own.get("malicious")
    if "attack" in varying or "malicious" in varying:
        many = f" {100 * share:g} %" if "malicious" in varying and isinstance(share, int | float) else ""
        said.insert(0, "no attack" if attack == "none" else f"{attack}{many}")
    return ", ".join(said)[:LONGEST]
