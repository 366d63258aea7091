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

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedkin.compute.layout import Layout
from fedkin.core import notes
from fedkin.core.cohort import Cohort, Model
from fedkin.core.federation import Clients, Federation, Reply, each, weighted_mean
from fedkin.core.store import Keep
from fedkin.methods.base import METHODS, WHOLE, Method, Needs
from fedkin.methods.similarity import FedCAPOptions, Phi, contributions, detect, rows_of, usual
from fedkin.robust import Detector

# Table IV, the ablation: does a row customise, does it calibrate and detect, does it personalise?
TABLE_IV = {"1": (1, 0, 0), "2": (0, 0, 1), "3": (1, 1, 0), "4": (1, 0, 1), "full": (1, 1, 1)}


@METHODS.register("fedcap")
class FedCAP(Method):
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
    profiles = {"paper": {}, "official": {"removal": "flag", "eval_customise_all": True}, "robust": {"t_norm": "auto"}}

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.customises, self.calibrates, self.personalises = map(bool, TABLE_IV[self.options.ablation])
        self.detects = self.calibrates or self.options.detect_raw
        self.uses_own = self.personalises and self.options.output == "personalised"

    @classmethod
    def unused(cls, options: Any) -> Mapping[str, str]:
        customises = TABLE_IV[options.ablation][0]
        mixed = "every client's model is mixed by similarity (eq. 3), and updates are judged by their length"
        return {**WHOLE, "rule": mixed} if customises else WHOLE

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        super().start(fed, layout, row)
        # self.model is w^t, the reference of the coming round t; the updates in the pool refer to w^(t-1)
        self.origin, self.pool = self.model.clone(), self.model.new_zeros(0, len(self.model))
        self.updates = self.pool.clone()
        # members: the last round's survivors, whose models and updates are in the pool; fresh: whose customised model
        # is made of this pool; flagged: detected so far; known: last updates, for collect=last_known
        self.members, self.fresh, self.flagged = list[int](), list[int](), list[int]()
        self.customised, self.known = dict[int, Tensor](), dict[int, Tensor]()

    def round(self, fed: Federation, cohort: Clients) -> None:
        absent = cohort - self.fresh - self.flagged
        cohort = cohort - (absent - self._collect(fed, absent, self.options.collect))
        replies = fed.ask(cohort, self.train, model=each(rows_of(cohort, self.customised, self.model)))
        self._dismiss(fed, replies.not_finite)
        used, clients = replies, replies.clients
        if len(clients):
            recovered = rows_of(clients, self.customised, self.model).add_(replies["update"])  # recover
            updates = recovered - self.model if self.calibrates else replies["update"]  # calibrate
            benign = self._detect(fed, clients, updates)
            if not benign.all():
                used, recovered, updates = replies.only(benign), recovered[benign], updates[benign]
                clients = used.clients
        if not len(clients):
            fed.note(notes.ALARM, "no update is left: all models stay as they were")
            left = [i for i, c in enumerate(self.members) if c not in self.flagged]
            self.members, self.pool, self.updates = [self.members[i] for i in left], self.pool[left], self.updates[left]
            return
        self.members, self.pool, self.updates = list(clients), recovered, updates
        self.origin, weights = self.model, clients.samples.to(recovered.device)
        if self.customises:  # a mere reference: a rule is for a model that clients are given
            self.model = weighted_mean(recovered, weights, self.origin)  # eq. 6
        else:
            self.model = used.combine(recovered, self.origin, weights)
        if self.customises:
            fed.note(notes.MEMBERS, list(clients))
            self._customise(fed, clients, updates, self.options.phi)
            self.fresh = list(clients)
            if self.options.collect == "last_known":
                self.known |= {c: row.clone() for c, row in zip(clients, updates, strict=True)}
            if self.options.eval_customise_all:
                self.fresh += self._collect(fed, fed.alive - self.fresh - self.flagged, self.options.collect)

    def _detect(self, fed: Federation, clients: Clients, updates: Tensor) -> Tensor:
        # whose update counts, [K]; one longer than T_norm removes its client
        longest = self.options.t_norm if self.detects else torch.inf
        benign, norms, limit = detect(updates, [c in self.flagged for c in clients], longest)
        fed.note(notes.NORMS, norms)
        if self.detects:
            fed.note(notes.T_NORM, limit)
            self._remove(fed, clients[~benign])
            fed.note(notes.JUDGED, {"clients": clients.ids.tolist(), "used": benign.tolist()})
        return benign

    def _dismiss(self, fed: Federation, senders: Clients) -> None:
        # what is not finite has no length: the federation refuses it before `_detect` could see it
        if self.detects and len(senders):
            self._remove(fed, senders)
            fed.note(notes.REJECTED, list(senders))

    def _remove(self, fed: Federation, clients: Clients) -> None:
        removed = list(clients - self.flagged)
        self.flagged += removed
        fed.remove(removed if self.options.removal == "leave" else [])
        fed.note(notes.REMOVED, removed)

    def detector(self) -> Detector | None:
        limit, common = self.options.t_norm, self.model if self.calibrates else None
        how = Detector("length", lambda norms: usual(norms) if limit == "auto" else float(limit), common)
        return how if self.detects else None

    def _collect(self, fed: Federation, absent: Clients, how: str) -> Clients:
        # customised models for clients that are not in the pool; returns those whose update could be had
        if not (self.members and self.customises and len(absent)):
            return absent
        if how != "train":
            self._customise(fed, absent, rows_of(absent, self.known, torch.zeros_like(self.origin)))
            return absent
        replies = fed.ask(absent, self.collect, model=self.origin)
        self._dismiss(fed, replies.not_finite)
        if len(replies):
            self._customise(fed, replies.clients, replies["update"])
        return replies.clients

    def _customise(self, fed: Federation, clients: Clients, updates: Tensor, phi: Phi = None) -> None:
        weights = contributions(updates, self.updates, self.options.alpha, phi)
        fed.note(notes.WEIGHTS_ABSENT if phi is None else notes.WEIGHTS, weights)
        self.customised |= {c: row.clone() for c, row in zip(clients, weights @ self.pool, strict=True)}  # eq. 3

    def welcome(self, fed: Federation, newcomers: Clients) -> Clients:
        """Appendix A: clients that come after training get a customised model and train their own from it."""
        newcomers = self._collect(fed, newcomers - self.flagged, "train")
        if self.personalises:
            fed.ask(newcomers, self.settle, model=each(rows_of(newcomers, self.customised, self.model)))
        return newcomers

    def needs(self, cohort: int, seen: int, everybody: int) -> Needs:
        customised = everybody if self.options.eval_customise_all else seen
        known = seen if self.options.collect == "last_known" else 0
        return Needs(cohort, seen, 1 + self.personalises, 2 * cohort + customised + known, 4 * cohort)

    def deliver_to(self, fed: Federation, clients: Clients) -> dict[str, Any]:
        return {"model": each(rows_of(clients, self.customised, self.model))}

    def train(self, client: Cohort, model: Tensor) -> Reply:
        received = client.rows(model=model)
        if not self.personalises:
            return {"update": client.model(client.fit(received)) - model}
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

    def personal(self, client: Cohort, model: Tensor) -> Tensor:
        return self.personalised(client, model) if self.uses_own else client.rows(model=model)

    def after_local(self, client: Cohort, model: Tensor) -> Tensor:
        return self.personal(client, model) if self.uses_own else super().after_local(client, model=model)

    def compare(self, client: Cohort, model: Tensor) -> Reply:
        """Test samples that each of the two outputs gets right, [K]."""
        both = {"customised": client.rows(model=model), "personalised": self.personalised(client, model)}
        return {name: client.evaluate(rows).correct.sum(1) for name, rows in both.items()}
