"""FedPKDA. Zeng et al., "FedPKDA: Personalized Federated Learning with Privacy-Preserving Knowledge Dynamic
Alignment", AAAI 2026. The profile `official` follows the authors' code: the whole model is shared, and an epoch of
alignment comes before training.

A prototype is the mean of a class's features. Clients send prototypes that are clipped and noised; the server combines
them into global prototypes p_G^k, weighted by Mahalanobis distance. In training, features are pulled towards the
client's own prototypes p_i^k at first and towards the global ones later. The body theta is averaged by gamma_i, the
trace of each client's Fisher matrix; the head eta_i is private.
Up: the noised prototypes of the classes that a client has, which classes these are, and the size of the smallest; then
theta_i and gamma_i. Down: theta, the global prototypes, which classes they are of, and t/T. The noise gives little
privacy: each round notes its epsilon.
`departs` says where this differs from the paper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedkin.compute.layout import Layout
from fedkin.compute.losses import Term, align
from fedkin.core import notes
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Masked, Replies, Reply
from fedkin.core.store import Keep
from fedkin.methods.base import Method
from fedkin.methods.fedpkda.options import FedPKDAOptions
from fedkin.methods.fedpkda.prototypes import global_prototypes, phase, remember, spread


class PaperFedPKDA(Method):
    Options = FedPKDAOptions
    about = "features pulled towards own and global prototypes, under private heads"
    paper = "Zeng et al., AAAI 2026"
    departs = (
        "A feature is pulled towards the prototype of its own class, by mean squared difference, as in the authors' "
        "code. Eqs. 8 and 9 add up squared distances to the prototypes of all classes, which is pull=printed.",
        "A client's own prototypes are means of features that are not clipped, as in the authors' code. Eq. 2 clips "
        "them, which is own_clip=true.",
        "A class has a global prototype if at least three clients sent one, as in the authors' code; the paper names "
        "no least number. Prototypes sent in earlier rounds count as well. Algorithm 1 uses those of the present round "
        "alone, which is proto_cache=false.",
        "0.1, which the paper calls an initial value, is added to the strength of both pulls, as in the authors' code; "
        "the option is offset. Eq. 11 does not have it.",
        "gamma_i is made of mini-batch gradients, as in the authors' code. With fim=full it is made of the gradient of "
        "the whole likelihood.",
        "With profile=official, every client aligns a copy of the model. In the authors' code the next client of a "
        "round receives the model that the one before it has aligned, and there is one round more, at t/T = 1.",
    )
    shares = "body, noised class prototypes"
    private = "the head, exact prototypes"
    needs_classes = "makes a prototype of each class"
    keeps = {"local": Keep("row")}  # the model after the last training
    profiles = {
        "paper": {},
        "robust": {"cov": "diag", "gamma_clip": 5.0},
        "official": {
            "omega_local": 0.3,
            "omega_global": 0.5,
            "phi_scale": 5.0,
            "first_t": 0,
            "align": "before",
            "pull": "class_means",
            "share": "model",
            "senders": "all",
            "proto_cache": False,
        },
    }

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        self.theta = row[layout.columns(self.options.share)].clone()
        self.senders: list[int] = []  # M clients whose prototypes are here
        self.prototypes = row.new_zeros(0, 0, 0)  # [M, C, F]
        self.present = self.prototypes.bool().any(2)  # [M, C]
        self.spent = torch.zeros(len(fed.all), dtype=torch.float64)  # epsilon of each client so far

    def round(self, fed: Federation, cohort: Clients) -> None:
        progress = (fed.round + self.options.first_t) / fed.rounds
        goals, known = self.theta.new_zeros(0, 0), self.present.flatten()[:0]
        if self.pulls(progress)[1] > 0:
            goals, known = self.collect(fed, cohort)
        fed.note(notes.PULLS, list(self.pulls(progress)))
        replies = fed.ask(cohort, self.train, theta=self.theta, goals=goals, known=known, progress=progress)
        self.theta = replies.mean("theta", otherwise=self.theta, weights=self.weights(fed, replies))

    def collect(self, fed: Federation, clients: Clients) -> tuple[Tensor, Tensor]:
        """Ask for prototypes; the global ones p_G (eqs. 4-7), and of which classes they are."""
        replies = fed.ask(clients, self.observe)
        if len(replies):
            came = list(replies.clients)
            self.prototypes = remember(self.prototypes, self.senders, came, replies["prototypes"])
            self.present = remember(self.present, self.senders, came, replies["present"])
            self.senders += sorted({*came} - {*self.senders})
            ids = torch.from_numpy(replies.clients.ids)
            fed.note(notes.EPSILON, self.options.spend(self.spent, ids, replies["fewest"], self.prototypes.shape[2]))
        alive = sorted((c, k) for k, c in enumerate(self.senders) if c not in fed.removed)
        whose, at = [c for c, _ in alive], [k for _, k in alive]
        goals, known, weights = global_prototypes(self.prototypes[at], self.present[at], self.options.cov)
        classes = torch.nonzero(known).flatten().tolist()
        fed.note(notes.PROTOTYPE_WEIGHTS, {"clients": whose, "classes": classes, "weights": weights.tolist()})
        return goals, known

    def weights(self, fed: Federation, replies: Replies) -> Tensor | None:
        """gamma_i / sum gamma; by samples if no gradient is left anywhere."""
        if not len(replies):
            return None
        gamma = replies["gamma"].double().clamp(min=0)
        if self.options.gamma_clip is not None:
            gamma = gamma.clamp(max=self.options.gamma_clip * float(gamma.median()))
        gamma = gamma if gamma.sum() > 0 else replies.samples.to(gamma)
        fed.note(notes.MEMBERS, list(replies.clients))
        fed.note(notes.SHARES, gamma / gamma.sum())
        return gamma / gamma.sum()

    def pulls(self, progress: float) -> tuple[float, float]:
        """lam_L and lam_G at t/T: first the own prototypes, then the global ones (eqs. 10, 11)."""
        o, phi = self.options, phase(self.options.phi_scale * progress)
        return o.offset + o.omega_local * (1 - phi), o.offset + o.omega_global * phi

    def observe(self, client: Cohort) -> Reply:
        """Noised prototypes (eqs. 2, 3), by the body the client still has from its last training."""
        sent, has, fewest = self.options.noised(client, client["local"])
        return {"prototypes": Masked(sent, has.unsqueeze(2).expand_as(sent)), "present": has, "fewest": fewest}

    def train(self, client: Cohort, theta: Tensor, goals: Tensor, known: Tensor, progress: float) -> Reply:
        terms = self.alignment(client, goals, known, progress)
        client["local"] = rows = self.fitted(client, self.personal(client, theta), terms)
        return {"theta": rows[:, client.layout.columns(self.options.share)], **self.importance(client, rows)}

    def fitted(self, client: Cohort, rows: Tensor, terms: list[Term]) -> Tensor:
        return client.fit(rows, loss=[client.objective(), *terms])  # eq. 13

    def alignment(self, client: Cohort, goals: Tensor, known: Tensor, progress: float) -> list[Term]:
        """Eqs. 8, 9, 11. The client's own prototypes are exact and stay here."""
        o, terms, (own, others) = self.options, [], self.pulls(progress)
        if own > 0:
            means, count = client.prototypes(client["local"], clip=o.bounded if o.own_clip else None)
            terms.append(align(means, count > 0, own, len(client), "own prototypes", o.pull))
        if others > 0 and len(goals):
            terms.append(align(spread(goals, known), known, others, len(client), "global prototypes", o.pull))
        return terms

    def importance(self, client: Cohort, rows: Tensor) -> Reply:
        return {"gamma": self.fisher(client, rows)}

    def fisher(self, client: Cohort, rows: Tensor) -> Tensor:
        """gamma_i: the trace of the empirical Fisher matrix after training; `full` is of the whole likelihood."""
        o, n = self.options, client.samples()
        size = {"per_sample": 1, "batch": client.training.batch, "full": int(n.max())}[o.fim]
        gamma = client.gradient_norms(rows, o.share if o.fim_params == "shared" else "model", batch=size)
        if o.fim == "full":
            return gamma * n.square() if o.fim_norm == "sum" else gamma
        return gamma / (n / size).ceil() if o.fim_norm == "mean" else gamma

    def settle(self, client: Cohort, theta: Tensor) -> None:
        """A head on theta as it is, whose features are what the client's own prototypes are made of."""
        if self.options.share == "body":
            client["local"] = client.fit(client.rows(body=theta), learn="head")
        else:
            client["local"] = client.fit(client.rows(model=theta))

    def shared(self) -> dict[str, Tensor]:
        return {self.options.share: self.theta}

    def common(self) -> dict[str, Tensor]:
        return self.shared() if self.options.share == "model" else {}

    def deliver(self) -> dict[str, Any]:
        return {"theta": self.theta}

    def personal(self, client: Cohort, theta: Tensor) -> Tensor:
        return client.rows(body=theta, head=client.head(client["local"]))
