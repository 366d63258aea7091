"""Who learns from whom: matrices over the clients that take part, round by round, in one order and on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkin.core import notes
from fedkin.core.notes import numbers
from fedkin.report.figures import Floats, Missing
from fedkin.report.gather import MOST_ROUNDS, RunData, thinned

LATE = 5  # of the last third of the rounds, so many matrices decide about order and scale
MASS = 0.85  # of the weight that clients give to others is within the scale


@dataclass(frozen=True, eq=False)
class Collaboration:
    rounds: list[int]  # of the frames; of one frame, all that there are
    frames: Floats  # [rounds, clients, clients], NaN where one of the two was absent
    clients: list[int]
    order: list[int]  # places in `clients`, similar ones beside each other
    most: float  # where the scale ends: almost all weight that goes to others is in smaller portions
    members: int  # all who ever took part


def collaboration(run: RunData, budget: int = 0, round: int | None = None) -> Collaboration:
    """The matrices of as many rounds as `budget` numbers hold, the last among them; without one that of this round, or
    of the last."""
    for kind in [k for k in notes.KINDS.values() if k.shape == "pairs"]:
        rounds = run.rounds_of(kind)
        whose = run.whose(kind, thinned(rounds, MOST_ROUNDS))
        everybody = sorted({c for ids in whose.values() for c in ids}) or list(range(len(run.names)))
        clients = everybody[: run.limits.side]
        late = _frames(run, kind, thinned(rounds[len(rounds) * 2 // 3 :], LATE), clients)
        if not late:
            continue
        many = max(1, budget // len(clients) ** 2)
        found = _frames(run, kind, thinned(rounds, many) if round is None else [round], clients)
        if not found:
            raise Missing(f"round {rounds[-1] if round is None else round} has no matrix that can be read")
        stack, frames = (np.array(list(part.values())) for part in (late, found))
        shown = list(found) if budget else rounds
        return Collaboration(shown, frames, clients, by_cluster(stack), scale(stack), len(everybody))
    raise Missing("this method notes no weights between clients")


def _frames(run: RunData, kind: notes.Kind, rounds: Sequence[int], clients: Sequence[int]) -> dict[int, Floats]:
    """Matrices over these clients by round; what does not fit is not there."""
    whose, place = run.whose(kind, rounds), {c: i for i, c in enumerate(clients)}
    squares = {
        r: _square(value, whose.get(r) or range(len(run.names)), place) for r, value in run.noted(kind, rounds).items()
    }
    return {r: square for r, square in squares.items() if square is not None}


def _square(value: Any, ids: Sequence[int], place: dict[int, int]) -> Floats | None:
    rows = value if isinstance(value, list) else []
    if len(rows) != len(ids) or not all(isinstance(row, list) and len(row) == len(ids) for row in rows):
        return None
    known = [i for i, c in enumerate(ids) if c in place]
    at = [place[ids[i]] for i in known]
    frame = np.full((len(place), len(place)), np.nan)
    frame[np.ix_(at, at)] = np.array([numbers(rows[i]) for i in known]).reshape(len(known), len(ids))[:, known]
    return frame if np.isfinite(frame).any() else None


def scale(stack: Floats) -> float:
    """Some pairs of attackers with nobody else must not make all others look alike."""
    given = np.sort(stack[:, ~np.eye(stack.shape[1], dtype=bool)].ravel())
    given = given[np.isfinite(given) & (given > 0)]
    if len(given):
        return float(given[np.searchsorted(given.cumsum(), MASS * given.sum())])
    return max(float(np.nanmax(np.where(np.isfinite(stack), stack, 0))), 1e-9)


def by_cluster(stack: Floats) -> list[int]:
    """Leaves of the hierarchical clustering of the mean weights."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    mean = np.nan_to_num(stack, nan=0.0, posinf=0.0, neginf=0.0).mean(0)
    near = (mean + mean.T) / 2
    np.fill_diagonal(near, 0)
    if len(near) < 3 or np.ptp(near[~np.eye(len(near), dtype=bool)]) < 1e-12:
        return list(range(len(near)))
    far = near.max() - near
    np.fill_diagonal(far, 0)
    tree = linkage(squareform(far, checks=False), "average", optimal_ordering=len(near) <= 200)
    return [int(i) for i in leaves_list(tree)]
