"""FedCAP. Li et al., "FedCAP: Robust Federated Learning via Customized Aggregation and Personalization", ACSAC 2024.

Each client k receives a customised model (w-hat_k): a mean of all clients' last models, in which those models count
most whose updates are similar to k's. Updates are calibrated, that is, measured from one reference, the global model
w, so that their directions can be compared. A client whose calibrated update is too long, or not finite, is taken for
malicious and removed for good. Each client also trains a personal model v_k, which is pulled towards w-hat_k and never
sent.
Down: w-hat_k. Up: the update d_k. A client that was absent in the last round is first asked for an update (a
collection): down w, up d_k.
`departs` says where the paper and the authors' code differ, and which of them is followed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedkin.compute.layout import Layout
from fedkin.core import notes
from fedkin.core.cohort import Cohort, Model
from fedkin.core.federation import Clients, Federation, Replies, Reply, each, weighted_mean
from fedkin.core.store import Keep
from fedkin.methods.base import Method, Needs
from fedkin.methods.fedcap.options import FedCAPOptions
from fedkin.methods.fedcap.similarity import Phi, contributions, detect, rows_of, usual
from fedkin.robust import Detector


class PaperFedCAP(Method):
    Options = FedCAPOptions
    about = "each client gets a mean of the models that are similar to its own; clients with long updates are removed"
    paper = "Li et al., ACSAC 2024"
    departs = (
        "A client that sends an update that is not finite is removed, like one whose update is too long; this includes "
        "a benign client whose training diverged once. The authors' code does so; the paper speaks of length alone.",
        "A client that is removed is not asked again, as the paper says. The authors' code lets it train on and drops "
        "its updates, which is removal=flag.",
        "Customised models are made for the clients of a round. The authors' code makes them for all clients, for "
        "evaluation, which is eval_customise_all=true.",
        "If no client is left, a case that the paper does not mention, all models stay and the round notes an alarm.",
    )
    private = "the personal model"
    outputs = ("output",)
    keeps = {"personal": Keep("row"), "has_personal": Keep((1,), "zeros")}
    uses_head = False
    profiles = {"paper": {}, "official": {"removal": "flag", "eval_customise_all": True}, "robust": {"t_norm": "auto"}}

    @classmethod
    def unused(cls, options: Any) -> dict[str, str]:
        mixed = (
            "every client's model is mixed by similarity (eq. 3 of Li et al., ACSAC 2024), and updates are judged by "
            "their length"
        )
        return {**super().unused(options), "rule": mixed}

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        super().start(fed, layout, row)
        # self.model is w^t, the reference of the coming round t; the updates in the pool refer to w^(t-1)
        self.origin, self.pool = self.model.clone(), self.model.new_zeros(0, len(self.model))
        self.updates = self.pool.clone()
        # members: the last round's survivors, whose models and updates are in the pool; fresh: whose customised model
        # is made of this pool; flagged: detected so far
        self.members, self.fresh, self.flagged = list[int](), list[int](), list[int]()
        self.customised = dict[int, Tensor]()  # w-hat_k

    def round(self, fed: Federation, cohort: Clients) -> None:
        absent = cohort - self.fresh - self.flagged
        cohort = cohort - (absent - self._collect(fed, absent))
        replies = fed.ask(cohort, self.train, model=each(rows_of(cohort, self.customised, self.model)))
        self._dismiss(fed, replies.not_finite)
        if not len(replies):
            return self._keep(fed)
        recovered = rows_of(replies.clients, self.customised, self.model).add_(replies["update"])  # recover
        updates = self._calibrate(recovered, replies["update"])
        benign = self._detect(fed, replies.clients, updates)
        if not benign.any():
            return self._keep(fed)
        if not benign.all():
            replies, recovered, updates = replies.only(benign), recovered[benign], updates[benign]
        self.origin, self.model = self.model, self._reference(replies, recovered)  # eq. 6
        self.members, self.pool, self.updates = list(replies.clients), recovered, updates
        self._renew(fed, replies.clients, updates)

    def _keep(self, fed: Federation) -> None:
        """Nobody is left in this round: the last one's pool stays, without those who have been found out since."""
        fed.note(notes.ALARM, "no update is left: all models stay as they were")
        left = [i for i, c in enumerate(self.members) if c not in self.flagged]
        self.members, self.pool, self.updates = [self.members[i] for i in left], self.pool[left], self.updates[left]

    def _calibrate(self, recovered: Tensor, updates: Tensor) -> Tensor:
        return recovered - self.model

    def _detect(self, fed: Federation, clients: Clients, updates: Tensor) -> Tensor:
        """Whose update counts, [K]; one longer than T_norm removes its client."""
        benign, norms, limit = detect(updates, [c in self.flagged for c in clients], self.options.t_norm)
        fed.note(notes.NORMS, norms)
        fed.note(notes.T_NORM, limit)
        self._remove(fed, clients[~benign])
        fed.note(notes.JUDGED, {"clients": clients.ids.tolist(), "used": benign.tolist()})
        return benign

    def _reference(self, replies: Replies, recovered: Tensor) -> Tensor:
        """The next w: no client is given it, so that no rule averages here."""
        return weighted_mean(recovered, replies.samples.to(recovered.device), self.model)

    def _renew(self, fed: Federation, clients: Clients, updates: Tensor) -> None:
        fed.note(notes.MEMBERS, list(clients))
        self._customise(fed, clients, updates, self.options.phi)
        self.fresh = list(clients)

    def _customise(self, fed: Federation, clients: Clients, updates: Tensor, phi: Phi = None) -> None:
        weights = contributions(updates, self.updates, self.options.alpha, phi)
        fed.note(notes.WEIGHTS_ABSENT if phi is None else notes.WEIGHTS, weights)
        self.customised |= {c: row.clone() for c, row in zip(clients, weights @ self.pool, strict=True)}  # eq. 3

    def _collect(self, fed: Federation, absent: Clients) -> Clients:
        """Customised models for clients that are not in the pool; returns those whose update could be had."""
        if not (self.members and len(absent)):
            return absent
        replies = fed.ask(absent, self.collect, model=self.origin)
        self._dismiss(fed, replies.not_finite)
        if len(replies):
            self._customise(fed, replies.clients, replies["update"])
        return replies.clients

    def _dismiss(self, fed: Federation, senders: Clients) -> None:
        # what is not finite has no length: the federation refuses it before `_detect` could see it
        if len(senders):
            self._remove(fed, senders)
            fed.note(notes.REJECTED, list(senders))

    def _remove(self, fed: Federation, clients: Clients) -> None:
        removed = list(clients - self.flagged)
        self.flagged += removed
        if self.options.removal == "leave":
            fed.remove(removed)
        fed.note(notes.REMOVED, removed)

    def detector(self) -> Detector | None:
        limit = self.options.t_norm
        return Detector("length", lambda norms: usual(norms) if limit == "auto" else float(limit), self.model)

    def welcome(self, fed: Federation, newcomers: Clients) -> Clients:
        """Appendix A: clients that come after training get a customised model and train their own from it."""
        newcomers = self._collect(fed, newcomers - self.flagged)
        fed.ask(newcomers, self.settle, **self.deliver_to(fed, newcomers))
        return newcomers

    def needs(self, cohort: int, seen: int, everybody: int) -> Needs:
        return Needs(cohort, seen, trained=2, server=2 * cohort + seen, working=4 * cohort)

    def deliver_to(self, fed: Federation, clients: Clients) -> dict[str, Any]:
        return {"model": each(rows_of(clients, self.customised, self.model))}

    def train(self, client: Cohort, model: Tensor) -> Reply:
        received = client.rows(model=model)
        v, w = client.fit_together([Model(client["personal"], self.options.lam, received), Model(received)])  # eq. 7
        client["personal"], client["has_personal"] = v, client["has_personal"] + 1
        return {"update": client.model(w) - model}

    def collect(self, client: Cohort, model: Tensor) -> Reply:
        statistics = client["buffers"]
        trained = client.fit(client.rows(model=model))
        client["buffers"] = statistics  # local ones go with the customised model
        return {"update": client.model(trained) - model}

    def settle(self, client: Cohort, model: Tensor) -> None:
        start, received = self.personalised(client, model), client.rows(model=model)
        client["personal"] = client.fit(start, mu=self.options.lam, anchor=received)
        client["has_personal"] = client["has_personal"] + 1

    def personalised(self, client: Cohort, model: Tensor) -> Tensor:
        return client.rows(model=model).where(client["has_personal"] == 0, client["personal"])

    def uses_own(self) -> bool:
        """Whether a client's model is the personal one."""
        return bool(self.options.output == "personalised")

    def personal(self, client: Cohort, model: Tensor) -> Tensor:
        return self.personalised(client, model) if self.uses_own() else client.rows(model=model)

    def after_local(self, client: Cohort, model: Tensor) -> Tensor:
        return self.personal(client, model) if self.uses_own() else super().after_local(client, model=model)

    def compare(self, client: Cohort, model: Tensor) -> Reply:
        """Test samples that each of the two outputs gets right, [K]."""
        both = {"customised": client.rows(model=model), "personalised": self.personalised(client, model)}
        return {name: client.evaluate(rows).correct.sum(1) for name, rows in both.items()}
