"""C-PFL's arithmetic: who sits on the committee, who tests which body, and what votes are worth.

K members, M bodies, C classes; numbers of equations and algorithms are those of Pan et al., JNCA 243, 2025. A vote is
right answers out of samples, per class; in the paper's score, an accuracy, it is one sample of one class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkin.compute import keys
from fedkin.core.federation import Clients, Federation, Replies
from fedkin.errors import UsageError

Vote = Literal["mean", "median", "trimmed"]
Bools = NDArray[np.bool_]

CUT: dict[Vote, float] = {"mean": 0.0, "trimmed": 1 / 3, "median": 0.5 - 1e-9}  # of the votes, off at either end


def committee_size(clients: int, wanted: int | None, trains: bool) -> int:
    """How many sit on the committee; unless said, a tenth of the clients and at least three, as far as there are."""
    most = clients if trains else clients - 1
    if clients < 2 or (wanted or 1) > most:
        raise UsageError(f"committee={wanted} of {clients} clients: c-pfl needs somebody to judge and to train")
    return wanted or min(max(3, round(0.1 * clients)), most)


def drawn_by_lot(fed: Federation, size: int, avoid: Sequence[int] = ()) -> list[int]:
    """A committee drawn by lot: the first one, and the next one when not a single vote came."""
    lot = keys.permutation(keys.key(fed.seed, "committee", fed.round), len(fed.all)).tolist()
    there, last = set(fed.alive), set(avoid)
    return sorted(sorted((c for c in lot if c in there), key=last.__contains__)[:size])


def panels(
    fed: Federation, committee: Clients, authors: Clients, bodies: Tensor, quorum: int | None
) -> Iterator[tuple[Clients, Tensor]]:
    """Members that test the same bodies, and which: for each body, `quorum` members by lot (none: all), never its
    author. Bodies come in an order by content, which tells a member nothing it does not see."""
    members, candidates = committee.ids[:, None], authors.ids[None]
    lot = keys.uniform(keys.key(fed.seed, "quorum", fed.round, candidates, members), 1)[..., 0]
    lot[members == candidates] = 1.0
    asked: Bools = (lot.argsort(0).argsort(0) < (quorum or len(committee))) & (lot < 1)
    blind = bodies.sum(1).argsort().cpu().numpy()
    for mine in np.unique(asked[asked.any(1)], axis=0):
        yield committee[(asked == mine).all(1)], torch.from_numpy(blind[mine[blind]])


def ballots(
    committee: Clients, bodies: int, polls: Iterable[tuple[Tensor, Replies]]
) -> tuple[Tensor, Tensor, list[int]]:
    """All votes of a round (eqs. 2 and 3): right answers and samples, [K, M, C] each, and who has none that count.

    A poll is the bodies tested, in the order shown, and what a panel answered. No samples: no vote."""
    right = count = torch.zeros(len(committee), bodies, 1, dtype=torch.float64)
    void: list[int] = []
    for order, votes in polls:
        if len(votes):
            hits, samples = _possible(votes)
            void += votes.clients[samples.sum((1, 2)) == 0]
            right, count = (t.expand(-1, -1, hits.shape[2]).clone() for t in (right, count))
            at = torch.from_numpy(np.searchsorted(committee.ids, votes.clients.ids))[:, None]
            right[at, order], count[at, order] = hits, samples
    return right, count, void


def _possible(votes: Replies) -> tuple[Tensor, Tensor]:
    """Right answers and samples of one panel; no samples from who claims to have more right than it has, or fewer
    than none."""
    right = votes["right"].double().cpu()
    if right.dim() == 2:
        right, count = right.unsqueeze(2), torch.ones(*right.shape, 1, dtype=torch.float64)
    else:
        count = votes["count"].double().cpu().unsqueeze(1).expand_as(right)
    possible = ((right >= 0) & (right <= count)).all(2).all(1)
    return right, count * possible[:, None, None]


def tally(right: Tensor, count: Tensor, vote: Vote) -> Tensor:
    """A_i (eq. 1), [M]: the mean of the middle votes; NaN where there is none.

    Balanced: that for each class, a member weighing no more than the median member that has the class, then the mean
    over the classes that somebody has."""
    cap = count.where(count > 0, torch.nan).nanmedian(0).values  # of an even number, the lower one
    share, weight = right / count.clamp(min=1), count.minimum(cap).nan_to_num(nan=0.0)
    share, order = share.sort(0)
    weight = weight.gather(0, order)
    upto, cut = weight.cumsum(0), CUT[vote] * weight.sum(0)
    kept = (upto.minimum(upto[-1] - cut) - (upto - weight).maximum(cut)).clamp(min=0)
    return ((kept * share).sum(0) / kept.sum(0)).nanmean(1)


def lower_bound(scores: Tensor, alpha: float) -> float:
    """LB = mean - t_{1-alpha, k-1} s / sqrt(k), one-sided, of the k scores there are (Algorithm 3); 0 if there are
    none, and not above the best one, even by rounding."""
    scores = scores[~scores.isnan()]
    k = len(scores)
    if not k:
        return 0.0
    from scipy.special import stdtrit  # here: whoever only lists the methods need not wait for it

    error = scores.std(correction=min(1, k - 1)) / k**0.5
    bound = scores.mean() - float(stdtrit(max(1, k - 1), 1 - alpha)) * error
    return min(float(bound), float(scores.max()))


def better_half(scores: Tensor) -> Tensor:
    """Which scores are in the upper half, bool [M]: with an odd number, the middle one is."""
    return scores >= -(-scores).nanmedian()


def contribution(scores: Tensor, n: Tensor, alpha: float, size_norm: Literal["share", "max"]) -> Tensor:
    """What a round adds to c_i, [M]: alpha AccN_i + (1 - alpha) NN_i (eq. 7); NaN without a score.

    AccN is the score between the round's worst, 0, and best, 1 (eq. 10), and 1 for all if they are equal; NN is the
    number of samples n, as a share of the round's (eq. 11) or of the largest."""
    low, high = scores[~scores.isnan()].aminmax()
    accuracy = (scores - low) / (high - low) if high > low else torch.ones_like(scores)
    size = n / (n.sum() if size_norm == "share" else n.max())
    return alpha * accuracy + (1 - alpha) * size
