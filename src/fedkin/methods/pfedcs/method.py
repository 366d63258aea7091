"""PFedCS. Wu et al., "PFedCS: A Personalized Federated Learning Method for Enhancing Collaboration among Similar
Classifiers", AAAI 2025.

Clients with similar data get similar heads. In the first stage the server compares the heads and mixes, for each
client, a teacher from the heads that are near its own. The client tunes the teacher to its data and then learns from
it as well as from its labels. From round beta on, the method is FedPer.
Stage 1, down: the body and the client's teacher; up: the trained body and head. Stage 2: the body both ways.
`departs` says where this differs from the paper.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedkin.compute.layout import Layout, inside
from fedkin.compute.losses import Term, guide
from fedkin.core import notes
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Replies, Reply, each
from fedkin.errors import UsageError
from fedkin.methods.fedper import FedPer
from fedkin.methods.pfedcs.mixture import Bools, Clustering, Floats, distances, lower_group
from fedkin.methods.pfedcs.options import PFedCSOptions


class PaperPFedCS(FedPer):
    Options = PFedCSOptions
    about = "a shared body; similar heads teach each other"
    paper = "Wu et al., AAAI 2025"
    departs = (
        "The teacher's prediction in the divergence (eq. 12) is held fixed. It comes from the body that is being "
        "trained, so that eq. 11, read to the letter, passes gradients through it, which is teacher_gradient=true.",
        "The weights of eq. 7 are made over the collaborators and the client itself, so that they sum to 1. With "
        "literal=true they are made over the collaborators alone and then scaled.",
        "Heads are compared by the weights of all classes (the index c of the printed distance is free), and without "
        "their biases; bias=true includes the biases.",
        "In the first round, when all heads are the same, a teacher is the plain mean of all heads.",
        "The paper does not print lam and beta; 0.5 and 100 are FedKin's choices.",
    )
    shares = "body, and the head before round beta"
    needs_classes = "learns from the class scores of a teacher"
    private = "the head from round beta on"

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        super().start(fed, layout, row)
        self.compared = max(math.prod(classifier(layout)), self.options.bias * layout.size("head"))  # columns of a head
        self.heads = layout.head(row).repeat(len(fed.all), 1)  # w_g of every client, as last uploaded
        self.known: list[int] = []  # who has uploaded one

    def round(self, fed: Federation, cohort: Clients) -> None:
        if fed.round + 1 >= self.options.beta:  # stage 2
            self.heads, self.known = self.heads[:0], []
            return super().round(fed, cohort)
        pool = self._pool(fed, cohort)
        heads = self.heads[torch.from_numpy(pool.ids).to(self.heads.device)]
        weights = self.weights(fed, pool, heads)
        fed.note(notes.PARTICIPANTS, pool.ids.tolist())
        fed.note(notes.COLLABORATORS, weights)
        teachers = weights[torch.from_numpy(np.isin(pool.ids, cohort.ids))].to(heads) @ heads  # v_g, eq. 6
        replies = fed.ask(cohort, self.learn, body=self.body, teacher=each(teachers))
        self.body = replies.mean("body", otherwise=self.body)
        self._store(replies)

    def _pool(self, fed: Federation, cohort: Clients) -> Clients:
        """Whose heads may make teachers."""
        return cohort

    def weights(self, fed: Federation, pool: Clients, heads: Tensor) -> Tensor:
        """Row k: the weights p of everybody's head in the teacher of client k, [P, P]."""
        distance = distances(heads[:, : self.compared])
        chosen = self._chosen(fed, pool, distance)
        if chosen is None:
            return torch.full((len(pool), len(pool)), 1 / len(pool))
        samples = pool.samples.double().numpy()
        return torch.from_numpy(mixing(distance, chosen, samples, self.options.lam, self.options.literal)).float()

    def _chosen(self, fed: Federation, pool: Clients, distance: Floats) -> Bools | None:
        """Row k: the collaborators of client k; None where all heads are the same (first round, or a single client)."""
        if not distance.any():
            return None
        return collaborators(distance, (fed.round + 1) / self.options.beta, self.options.clustering)

    def _store(self, replies: Replies) -> None:
        if len(replies):
            self.heads[torch.from_numpy(replies.clients.ids).to(self.heads.device)] = replies["head"]
            self.known = sorted({*self.known, *replies.clients})

    def learn(self, client: Cohort, body: Tensor, teacher: Tensor) -> Reply:
        start = client.rows(body=body, head=client["head"])
        rows = client.fit(start, loss=[client.objective(), self.tuned(client, body, teacher)])  # eqs. 11-13
        client["head"] = client.head(rows)
        return {"body": client.body(rows), "head": client.head(rows)}

    def welcome(self, fed: Federation, newcomers: Clients) -> Clients:
        """A head as in FedPer; while heads teach each other, it then learns from those near its own, too."""
        welcomed = super().welcome(fed, newcomers)
        if self.known and fed.round + 1 < self.options.beta:
            replies = fed.ask(welcomed, self.show)
            for place, head in enumerate(replies["head"] if len(replies) else ()):
                one = replies.clients[[place]]
                heads = torch.cat([self.heads[self.known], head[None]])
                teacher = self.weights(fed, one | self.known, heads)[-1].to(heads) @ heads
                fed.ask(one, self.study, body=self.body, teacher=teacher)
        return welcomed

    def show(self, client: Cohort) -> Reply:
        return {"head": client["head"]}

    def study(self, client: Cohort, body: Tensor, teacher: Tensor) -> None:
        start = client.rows(body=body, head=client["head"])
        terms = [client.objective(), self.tuned(client, body, teacher.expand(len(client), -1))]
        client["head"] = client.head(client.fit(start, learn="head", loss=terms))

    def tuned(self, client: Cohort, body: Tensor, teacher: Tensor) -> Term:
        """The teacher after rho epochs on the client's data, the body fixed (eqs. 9-10), as a guide."""
        o, rows, opt = self.options, client.rows(body=body, head=teacher), client.training.opt
        if o.rho:
            rows = client.fit(rows, learn="head", epochs=o.rho, opt=replace(opt, lr=o.teacher_lr or opt.lr))
        tensors, name = client.layout.tensors(rows), client.layout.head_name
        weight = tensors[f"{name}.weight"].clone()
        bias = tensors.get(f"{name}.bias", weight.new_zeros(weight.shape[:2])).clone()
        return guide(weight, bias, o.teacher_gradient)


def classifier(layout: Layout) -> tuple[int, int]:
    """Outputs and inputs of a linear head; its weight comes first, then its bias if it has one."""
    slots, name = [s for s in layout.slots if s.kind == "head"], layout.head_name
    still = [n for n in layout.frozen if inside(n, name)]
    if still:
        raise UsageError(
            f"method 'pfedcs' compares whole classifiers, but {still[0]!r} of the head is frozen "
            "(requires_grad=False): let it learn, or take another method"
        )
    if [len(s.shape) for s in slots] not in ([2], [2, 1]) or slots[0].name != f"{name}.weight":
        raise UsageError(f"method 'pfedcs' compares linear classifiers: head {name!r} is not a linear layer")
    return slots[0].shape[0], slots[0].shape[1]


def collaborators(distance: Floats, progress: float, clustering: Clustering) -> Bools:
    """Row k: who is a candidate of client k and within its threshold; progress is t / beta."""
    chosen, others = np.zeros(distance.shape, bool), ~np.eye(len(distance), dtype=bool)
    rest = distance[others].reshape(len(distance), -1)
    mean, least = rest.mean(1, keepdims=True), rest.min(1, keepdims=True)
    tau = mean + progress * (least - mean)  # eq. 4
    chosen[others] = (lower_group(rest, clustering) & (rest <= tau + 1e-12)).ravel()  # eq. 5
    return chosen


def mixing(distance: Floats, chosen: Bools, samples: Floats, lam: float, literal: bool) -> Floats:
    """Row k: the weight p of each head in client k's teacher (eqs. 7-8), over its collaborators and itself."""
    team = chosen | np.eye(len(chosen), dtype=bool)
    over = np.where(chosen.any(1, keepdims=True) & literal, chosen, team)
    size, far = over.sum(1, keepdims=True), np.where(over, distance, 0).max(1, keepdims=True)
    gap = far - np.where(over, distance, 0).sum(1, keepdims=True) / size
    near = np.where(gap < 1e-12, 1 / team.sum(1, keepdims=True), (far - distance) / (size * np.maximum(gap, 1e-12)))
    p = np.where(team, lam * near + (1 - lam) * samples / (over @ samples)[:, None], 0.0)
    return np.asarray(p / p.sum(1, keepdims=True), np.float64)
