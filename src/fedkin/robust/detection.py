"""How well hostile clients were found: what a method or rule decided, against the truth.

DAcc = (attackers found + benign clients left alone) / all, FPR over benign clients, FNR over attackers (FedCAP,
section V). A client counts as found if it was removed, or was left out the last time it took part: by a rule, by
FedCAP's norm detection or by C-PFL's committee. Where others are malicious in every round, every verdict counts by
itself, against the truth of its round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedkin.core import notes as kinds
from fedkin.core.federation import Note
from fedkin.robust.rules import Outcome, Rule, Server, apply

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
    (removed, or never used again); None for those who were used to the end. Rounds count from 0."""

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


def verdicts_of(notes: Iterable[Note]) -> list[Verdict]:
    """What rules and methods have noted about whose reply they used; who is left out once in a round is out."""
    rounds: dict[int, dict[int, bool]] = {}
    for note in notes:
        for client, used in kinds.kind_of(note.name).verdicts(note.value):
            mine = rounds.setdefault(note.round, {})
            mine[client] = mine.get(client, True) and used
    return [Verdict(r, np.array(sorted(by)), np.array([by[c] for c in sorted(by)])) for r, by in sorted(rounds.items())]


def detection(
    malicious: Bools | Callable[[int], Bools], verdicts: Sequence[Verdict], removed: Mapping[int, int] | None = None
) -> Detection | None:
    """`malicious`: the truth, [N], or that of a round; `verdicts`: in order of rounds; `removed`: client to the round
    of its removal. None where the truth changes and there is no verdict."""
    if not callable(malicious):
        return _against(malicious, verdicts, removed or {})
    rounds = {v.round: Rates.of(~v.used, malicious(v.round)[v.clients]) for v in verdicts}
    truth = [malicious(v.round)[v.clients] for v in verdicts]
    found = [~v.used for v in verdicts]
    return Detection(Rates.of(np.concatenate(found), np.concatenate(truth)), rounds, {}) if verdicts else None


def _against(malicious: Bools, verdicts: Sequence[Verdict], out: Mapping[int, int]) -> Detection:
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


@dataclass(frozen=True, eq=False)
class Detector:
    """A method's own check, as attackers know it that know the method: what is measured of a row, and the bar: a length
    from `reference` at most, given the lengths of all, or an accuracy at least."""

    measures: Literal["length", "accuracy"]
    bar: Callable[[Tensor], float]
    reference: Tensor | None = None


class StatefulServer(Server, Protocol):
    """A server that remembers something for its rule from round to round, as a checkpoint holds it."""

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class Watched:
    """A rule that remembers its last outcome, for whoever knows which clients the rows came from."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.last: Outcome | None = None
        self._server: StatefulServer | None = None

    def connect(self, server: StatefulServer) -> None:
        """Gives the rule what only a run can."""
        self.rule, self._server = self.rule.given(server), server

    def state(self) -> Any:
        """What the server keeps for the rule from round to round."""
        return None if self._server is None else self._server.state()

    def restore(self, state: Any) -> None:
        if self._server is not None:
            self._server.restore(state)

    def __call__(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        self.last = apply(self.rule, rows, weights, start)
        return self.last.row
