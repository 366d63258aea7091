"""C-PFL. Pan, Guo, Li, "C-PFL: A committee-based personalized federated learning framework", JNCA 243, 2025.

The body learns under one frozen head, as in FedBABU. A committee of clients tests every trained body on hold-out data
of its own, and only bodies whose score reaches the threshold tau are averaged. Tau rises with a lower confidence bound
of the scores. Clients that scored well and have much data form the next committee. After the last round each client
tunes its head.
Down: a client that trains receives the body; a committee member receives the bodies that it tests, in an order that
does not say who sent them. Up: a client that trains sends its trained body; a member sends one accuracy for each body
(with `score=balanced` the right answers per class and body, and the samples per class).
`departs` says where this differs from the paper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkin.compute.layout import Layout
from fedkin.core import notes
from fedkin.core.cohort import Cohort, DataPart, Learn
from fedkin.core.federation import Clients, Federation, Replies, Reply
from fedkin.errors import UsageError
from fedkin.methods.base import METHODS
from fedkin.methods.c_pfl.committee import (
    ballots,
    better_half,
    committee_size,
    contribution,
    drawn_by_lot,
    lower_bound,
    panels,
    tally,
)
from fedkin.methods.c_pfl.options import CPFLOptions
from fedkin.methods.finetune import TunedAtTheEnd
from fedkin.robust import Detector
from fedkin.tasks import Task


@METHODS.register("c-pfl")
class CPFL(TunedAtTheEnd):
    Options = CPFLOptions
    about = "a shared body, averaged from the bodies that pass a committee of clients"
    paper = "Pan et al., JNCA 2025"
    departs = (
        "The average is divided by the samples of the accepted clients; eq. 5 divides by those of all clients, which "
        "shrinks the body.",
        "Members test bodies under the common first head, on samples that were set aside for this. Eq. 3 can also be "
        "read as their training data, which is committee_data=train.",
        "If no body passes, a case that the paper leaves open, tau falls to the round's lower bound; the option is "
        "on_empty.",
        "Algorithm 3, line 8, puts the clients with the highest contributions on the committee; section 4.3 only those "
        "of them that are verified. Here the clients that passed in this round come first, then those that passed "
        "before, then old members, then the others, each group by contribution.",
        "The paper does not print the first tau, the size of the committee and alpha; 0, a tenth of the clients and "
        "0.5 are FedKin's choices. score=balanced and vote=median are FedKin's additions.",
    )
    profiles = {"paper": {}, "robust": {"score": "balanced", "vote": "median"}}
    holdout = 0.1
    tune_part: Learn = "head"

    @classmethod
    def unfit(cls, options: Any, task: Task) -> str | None:
        if options.score == "balanced" and task.targets != "classes":
            return "score=balanced takes right answers by class; leave it out"
        if not task.metric.share:
            return f"its committee scores models between 0 and 1, which {task.main} is not"
        return super().unfit(options, task)

    @classmethod
    def looks_at_validation(cls, options: Any) -> str:
        return "its committee judges models on them" if options.committee_data == "holdout" else ""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.tune_epochs = self.options.finetune_epochs

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        super().start(fed, layout, row)
        self.size = committee_size(len(fed.all), self.options.committee, self.options.committee_trains)
        self.tau = float(self.options.tau0)
        self.contribution = torch.zeros(len(fed.all), dtype=torch.float64)
        self.verified = torch.zeros(len(fed.all), dtype=torch.bool)
        self.mute: list[int] = []  # had no hold-out samples, or sent impossible votes
        self.committee = drawn_by_lot(fed, self.size)

    def round(self, fed: Federation, cohort: Clients) -> None:
        committee = fed.alive & self.committee
        fed.note(notes.COMMITTEE, committee.ids.tolist())
        trainers = cohort if self.options.committee_trains else cohort - committee
        replies = fed.ask(trainers, self.train, body=self.body)
        if not len(replies):  # no trainer is there: let others train
            self.committee = drawn_by_lot(fed, self.size, avoid=self.committee)
            return
        scores = self.scores(fed, committee, replies)
        accepted = self.qualified(fed, scores)
        self.body = replies.only(accepted).mean("body", otherwise=self.body)  # eq. 5, by samples of the accepted
        ids = torch.from_numpy(replies.clients.ids)
        fed.note(notes.SCORES, torch.full((len(fed.all),), torch.nan).index_copy(0, ids, scores.float()))
        fed.note(notes.ACCEPTED, ids[accepted].tolist())
        fed.note(notes.REJECTED, ids[~accepted].tolist())
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
        bodies, quorum = replies["body"], self.options.committee_quorum
        polls = [
            (order, fed.ask(panel, self.validate, bodies=bodies[order]))
            for panel, order in panels(fed, committee, replies.clients, bodies, quorum)
        ]
        right, count, void = ballots(committee, len(bodies), polls)
        self.mute = [*self.mute, *(c for c in void if c not in self.mute)]
        return tally(right, count, self.options.vote)

    def qualified(self, fed: Federation, scores: Tensor) -> Tensor:
        """Which bodies pass (eq. 4), what to do if none does, and the next tau (Algorithm 3)."""
        o, accepted = self.options, scores >= self.tau
        bound = lower_bound(scores, o.ci_alpha)
        fed.note(notes.THRESHOLD, self.tau)
        none = not accepted.any() and not scores.isnan().all()
        relaxed = none and o.on_empty == "relax"
        if relaxed:
            fed.note(notes.RELAXED, bound)
            accepted = scores >= bound
        elif none and o.on_empty == "top_half":
            accepted = better_half(scores)
        if o.threshold == "ci":
            self.tau = bound if relaxed else max(self.tau, bound)
        return accepted

    def detector(self) -> Detector:
        return Detector("accuracy", lambda scores: self.tau)

    def renew(self, fed: Federation, ids: Tensor, n: Tensor, scores: Tensor, accepted: Tensor) -> None:
        """Contributions (eqs. 7, 10, 11) and the next committee (eqs. 8, 9)."""
        scored, o = ~scores.isnan(), self.options
        if not scored.any():
            if not len(fed.alive - self.mute):
                raise UsageError("no client has hold-out samples: set validation_share, or committee_data=train")
            self.committee = drawn_by_lot(fed, self.size, avoid=self.mute + self.committee)
            return
        self.contribution[ids[scored]] += contribution(scores, n, o.alpha, o.size_norm)[scored]
        self.verified[ids[accepted]] = True
        now, ever = ids[accepted].tolist(), self.verified.tolist()
        old, c = self.committee, self.contribution.tolist()
        # Algorithm 3, line 8: by contribution, among who passed now, then who ever did; old members before strangers
        tier = {i: 0 if i in now else 1 if ever[i] else 2 if i in old else 3 for i in fed.alive}
        self.committee = sorted(sorted(fed.alive, key=lambda i: (i in self.mute, tier[i], -c[i]))[: self.size])
