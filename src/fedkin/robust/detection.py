"""How well hostile clients were found: what a method or rule decided, against the truth.

DAcc = (attackers found + benign clients left alone) / all, FPR over benign clients, FNR over attackers (FedCAP,
section V). A client counts as found if it was removed, or was left out the last time it took part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedkin.robust.rules import Outcome, Rule, apply

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Rates:
    """Shares from 0 to 1; NaN where there was nobody to find or to spare."""

    accuracy: float
    false_positive: float
    false_negative: float

    @classmethod
    def of(cls, found: Bools, malicious: Bools) -> Rates:
        def share(of: Bools) -> float:
            return float(of.mean()) if len(of) else float("nan")

        return cls(share(found == malicious), share(found[~malicious]), share(~found[malicious]))


@dataclass(frozen=True, eq=False)
class Verdict:
    """Who took part in a round, and whose row was used."""

    round: int
    clients: NDArray[np.int64]
    used: Bools


@dataclass(frozen=True)
class Detection:
    """The end result, every round's (over its participants), and the round by which each attacker was gone for good
    (removed, or never used again); None for those who were used to the end."""

    overall: Rates
    rounds: Mapping[int, Rates]
    gone: Mapping[int, int | None]

    def table(self) -> list[dict[str, Any]]:
        """One row per round and one for the whole run, in percent."""
        lines = [*((str(r), rates) for r, rates in self.rounds.items()), ("all", self.overall)]
        return [
            {"round": r, "DAcc": 100 * v.accuracy, "FPR": 100 * v.false_positive, "FNR": 100 * v.false_negative}
            for r, v in lines
        ]


def detection(malicious: Bools, verdicts: Sequence[Verdict], removed: Mapping[int, int] | None = None) -> Detection:
    """`malicious`: the truth, [N]; `verdicts`: in order of rounds; `removed`: client to the round of its removal."""
    out = dict(removed or {})
    found = np.zeros(len(malicious), bool)
    left: dict[int, int] = {}
    rounds: dict[int, Rates] = {}
    for verdict in verdicts:
        found[verdict.clients] = ~verdict.used
        rounds[verdict.round] = Rates.of(~verdict.used, malicious[verdict.clients])
        for client, used in zip(verdict.clients.tolist(), verdict.used.tolist(), strict=True):
            if used:
                left.pop(client, None)
            else:
                left.setdefault(client, verdict.round)
    found[list(out)] = True
    gone = {c: min((r[c] for r in (out, left) if c in r), default=None) for c in np.flatnonzero(malicious).tolist()}
    return Detection(Rates.of(found, malicious), rounds, gone)


class Watched:
    """A rule that remembers its last outcome, for whoever knows which clients the rows came from."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.last: Outcome | None = None

    def __call__(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        self.last = apply(self.rule, rows, weights, start)
        return self.last.row
