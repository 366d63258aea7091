"""C-PFL. Pan, Guo, Li, "C-PFL: A committee-based personalized federated learning framework", JNCA 243, 2025.

The body learns under one frozen head, as in FedBABU, but is averaged only from bodies that a committee of clients
vouches for on its own hold-out data. The bar tau rises with a lower confidence bound of the scores; who scored well
and has much data sits on the next committee. After the last round each client tunes its head.
Trainers: body down, trained body up. Each committee member: the bodies it judges down, in an order that does not say
who sent them; one accuracy a body up (`score=balanced`: right answers per class and body, and samples per class).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedkin.cohort import Cohort, DataPart, Learn
from fedkin.compute import keys
from fedkin.errors import UsageError
from fedkin.federation import Clients, Federation, Replies, Reply
from fedkin.layout import Layout
from fedkin.methods.base import METHODS, option
from fedkin.methods.finetune import TunedAtTheEnd

CUT = {"mean": 0.0, "trimmed": 1 / 3, "median": 0.5 - 1e-9}  # share of the votes taken off at either end


@dataclass(frozen=True)
class CPFLOptions:
    committee: int | None = option(None, "members, n; none: a tenth of the clients, at least 3", low=1)
    committee_data: Literal["holdout", "train"] = option("holdout", "what members judge on (train: as in eq. 3)")
    committee_trains: bool = option(False, "members train too; nobody judges its own body")
    committee_quorum: int | None = option(None, "members drawn to judge each body; none: all", low=1)
    score: Literal["accuracy", "balanced"] = option("accuracy", "balanced: mean over classes of pooled accuracy")
    vote: Literal["mean", "median", "trimmed"] = option("mean", "how votes become one; trimmed: their middle third")
    threshold: Literal["ci", "fixed"] = option("ci", "tau rises with the scores' lower bound, or stays at tau0")
    tau0: float = option(0.0, "the first threshold", low=0, high=1)
    ci_alpha: float = option(0.05, "significance of the confidence bound", above=0, high=0.5)
    on_empty: Literal["relax", "keep", "top_half"] = option(
        "relax", "when nothing passes: lower tau to this round's bound, keep the old body, or take the better half")
    alpha: float = option(0.5, "share of accuracy (rest: data size) in a client's contribution", low=0, high=1)
    size_norm: Literal["share", "max"] = option("share", "data size relative to all of the round or to the largest")
    finetune_epochs: int = option(10, "epochs of head tuning after the last round, F", low=0)


@METHODS.register("c-pfl")
class CPFL(TunedAtTheEnd):
    Options = CPFLOptions
    about = "a shared body, averaged from what a committee of clients vouches for"
    paper = "Pan et al., JNCA 2025"
    profiles = {"paper": {}, "robust": {"score": "balanced", "vote": "median"}}
    holdout = 0.1
    tune_part: Learn = "head"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.tune_epochs = self.options.finetune_epochs

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        super().start(fed, layout, row)
        clients, wanted = len(fed.all), self.options.committee
        most = clients if self.options.committee_trains else clients - 1
        if clients < 2 or (wanted or 1) > most:
            raise UsageError(f"committee={wanted} of {clients} clients: c-pfl needs somebody to judge and to train")
        self.size = wanted or min(max(3, round(0.1 * clients)), most)
        self.tau = float(self.options.tau0)
        self.contribution = torch.zeros(clients, dtype=torch.float64)
        self.verified = torch.zeros(clients, dtype=torch.bool)
        self.mute: list[int] = []  # had no hold-out samples, or sent impossible votes
        self.committee = self.draw(fed, avoid=[])

    def draw(self, fed: Federation, avoid: list[int]) -> list[int]:
        """A committee by lot: the first one, and the next one when not a single vote came."""
        lot = keys.permutation(keys.key(fed.seed, "committee", fed.round), len(fed.all)).tolist()
        return sorted(sorted((c for c in lot if c in fed.alive), key=avoid.__contains__)[: self.size])

    def round(self, fed: Federation, cohort: Clients) -> None:
        committee = fed.alive & self.committee
        fed.note("committee", committee.ids.tolist())
        replies = fed.ask(cohort if self.options.committee_trains else cohort - committee, self.train, body=self.body)
        if not len(replies):
            return
        ids, scores = torch.from_numpy(replies.clients.ids), self.scores(fed, committee, replies)
        accepted = self.qualified(fed, scores)
        self.body = replies.only(accepted).mean("body", otherwise=self.body)  # eq. 5, by samples of the accepted
        fed.note("scores", torch.full((len(fed.all),), torch.nan).index_copy(0, ids, scores.float()))
        fed.note("accepted", ids[accepted].tolist())
        fed.note("rejected", ids[~accepted].tolist())
        self.renew(fed, ids, replies.samples.double(), scores, accepted)

    def train(self, client: Cohort, body: Tensor) -> Reply:
        return {"body": client.body(client.fit(client.rows(body=body), learn="body"))}

    def validate(self, client: Cohort, bodies: Tensor) -> Reply:
        """Eqs. 2 and 3: each body under the common head on the member's data; -1 from a member that has none."""
        data: DataPart = "train" if self.options.committee_data == "train" else "validation"
        found = [client.evaluate(client.rows(body=body), data) for body in bodies]
        right, count = torch.stack([f.correct for f in found], 1), found[0].count
        if self.options.score == "balanced":
            return {"right": right.int(), "count": count.int()}
        return {"right": (right.sum(2) / count.sum(1, keepdim=True)).nan_to_num(nan=-1.0)}

    def scores(self, fed: Federation, committee: Clients, replies: Replies) -> Tensor:
        """A_i of every body, [M] (eq. 1); NaN where no vote counts."""
        bodies, members, candidates = replies["body"], committee.ids[:, None], replies.clients.ids[None]
        lot = keys.uniform(keys.key(fed.seed, "quorum", fed.round, candidates, members), 1)[..., 0]
        lot[members == candidates] = 1.0  # nobody judges itself
        asked = (lot.argsort(0).argsort(0) < (self.options.committee_quorum or len(committee))) & (lot < 1)
        blind = bodies.sum(1).argsort().cpu().numpy()  # an order by content tells a member nothing it does not see
        right = count = torch.zeros(*asked.shape, 1, dtype=torch.float64)
        for mine in np.unique(asked[asked.any(1)], axis=0):  # members with the same bodies to judge are asked together
            order = torch.from_numpy(blind[mine[blind]])
            votes = fed.ask(committee[(asked == mine).all(1)], self.validate, bodies=bodies[order])
            if len(votes):
                hits, samples = _ballots(votes)
                silent = votes.clients[samples.sum((1, 2)) == 0] - self.mute
                self.mute = [*self.mute, *silent]
                right, count = (t.expand(-1, -1, hits.shape[2]).clone() for t in (right, count))
                at = torch.from_numpy(np.searchsorted(committee.ids, votes.clients.ids))[:, None]
                right[at, order], count[at, order] = hits, samples
        return _tally(right, count, self.options.vote)

    def qualified(self, fed: Federation, scores: Tensor) -> Tensor:
        """Which bodies pass (eq. 4), what to do if none does, and the next tau (Algorithm 3)."""
        seen, o = scores[~scores.isnan()], self.options
        bound = _lower_bound(seen, o.ci_alpha) if len(seen) else 0.0
        fed.note("threshold", self.tau)
        accepted = scores >= self.tau
        relaxed = len(seen) > 0 and not accepted.any() and o.on_empty == "relax"
        if relaxed:
            fed.note("relaxed", bound)
            accepted = scores >= bound
        elif len(seen) and not accepted.any() and o.on_empty == "top_half":
            accepted = scores >= seen.sort(descending=True).values[(len(seen) - 1) // 2]
        if o.threshold == "ci":
            self.tau = bound if relaxed else max(self.tau, bound)
        return accepted

    def renew(self, fed: Federation, ids: Tensor, n: Tensor, scores: Tensor, accepted: Tensor) -> None:
        """Contributions (eqs. 7, 10, 11) and the next committee (eqs. 8, 9)."""
        judged, alpha = ~scores.isnan(), self.options.alpha
        if not judged.any():
            if not len(fed.alive - self.mute):
                raise UsageError("no client has hold-out samples: set validation_share, or committee_data=train")
            self.committee = self.draw(fed, avoid=self.mute + self.committee)
            return
        low, high = scores[judged].aminmax()
        accuracy = (scores - low) / (high - low) if high > low else torch.ones_like(scores)
        size = n / (n.sum() if self.options.size_norm == "share" else n.max())
        self.contribution[ids[judged]] += (alpha * accuracy + (1 - alpha) * size)[judged]
        self.verified[ids[accepted]] = True
        now, old, c = ids[accepted].tolist(), self.committee, self.contribution.tolist()
        known = self.verified.tolist()
        rank = sorted(fed.alive, key=lambda i: (i in self.mute, i not in now, not known[i], i not in old, -c[i]))
        self.committee = sorted(rank[: self.size])


def _ballots(votes: Replies) -> tuple[Tensor, Tensor]:
    """Right answers and samples [K, M, C] (an accuracy is one sample of one class); none from who sent nonsense."""
    right = votes["right"].double().cpu()
    if right.dim() == 2:
        right, count = right.unsqueeze(2), torch.ones(*right.shape, 1, dtype=torch.float64)
    else:
        count = votes["count"].double().cpu().unsqueeze(1).expand_as(right)
    possible = ((right >= 0) & (right <= count)).all(2).all(1)
    return right, count * possible[:, None, None]


def _tally(right: Tensor, count: Tensor, vote: str) -> Tensor:
    """[K, M, C] to [M]: per class the mean of the middle votes, a member weighing no more than the median member that
    has the class; then the mean over the classes that somebody has."""
    cap = count.where(count > 0, torch.nan).nanmedian(0).values  # of an even number, the lower one
    share, weight = right / count.clamp(min=1), count.minimum(cap).nan_to_num(nan=0.0)
    share, order = share.sort(0)
    weight = weight.gather(0, order)
    upto, cut = weight.cumsum(0), CUT[vote] * weight.sum(0)
    kept = (upto.minimum(upto[-1] - cut) - (upto - weight).maximum(cut)).clamp(min=0)
    return ((kept * share).sum(0) / kept.sum(0)).nanmean(1)


def _lower_bound(scores: Tensor, alpha: float) -> float:
    """LB = mean - t_{1-alpha, k-1} s / sqrt(k), one-sided (Algorithm 3); not above the best score, even by rounding."""
    k = len(scores)
    error = scores.std(correction=min(1, k - 1)) / k**0.5
    bound = scores.mean() - float(stats.t.ppf(1 - alpha, max(1, k - 1))) * error
    return min(float(bound), float(scores.max()))
