"""FedCAP. Li et al., "FedCAP: Robust Federated Learning via Customized Aggregation and Personalization", ACSAC 2024.

Each client k gets a customised model (w-hat_k): a mean of all clients' last models, where those count most that move
like k. Updates are calibrated against one reference, the global model w, so that directions compare and lengths give
malicious clients away, who are removed for good. A personal model v_k is trained beside it, drawn to it, never sent.
Down: w-hat_k. Up: the update d_k. A client absent in the last round first answers a collection: down w, up d_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedkin.cohort import Cohort, Keep, Model
from fedkin.federation import Clients, Federation, Reply, each
from fedkin.layout import Layout
from fedkin.methods.base import METHODS, Method, option


@dataclass(frozen=True)
class FedCAPOptions:
    alpha: float = option(10.0, "how much similar clients are preferred; 0: all alike", low=0)
    phi: float | Literal["equal"] = option(0.3, "a client's weight in its own model; equal: 1/n", low=0, high=1)
    lam: float = option(0.1, "strength of the pull of the personal model towards the customised one", low=0)
    t_norm: float | Literal["auto"] = option(10.0, "longest calibrated update; auto: median + 6 MAD a round", above=0)
    collect: Literal["train", "zero", "last_known"] = option("train", "the update of a client absent in the last round")
    output: Literal["personalised", "customised"] = option("personalised", "which of its two models a client uses")
    removal: Literal["leave", "flag"] = option("leave", "the removed leave, or train on and their updates are dropped")
    eval_customise_all: bool = option(False, "collect from all absent clients after every round")
    ablation: Literal["full", "1", "2", "3", "4"] = option(
        "full", "row of Table IV; 1: customise, 2: personalise, 3: customise, calibrate and detect, 4: 1 and 2"
    )


@METHODS.register("fedcap")
class FedCAP(Method):
    Options = FedCAPOptions
    about = "models customised by similar calibrated updates; long updates remove their client"
    paper = "Li et al., ACSAC 2024"
    private = "the personal model"
    keeps = {"personal": Keep("row"), "has_personal": Keep((1,), "zeros")}
    profiles = {"paper": {}, "official": {"removal": "flag", "eval_customise_all": True}, "robust": {"t_norm": "auto"}}

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.customises, self.calibrates = self.options.ablation != "2", self.options.ablation in ("full", "3")
        self.personalises = self.options.ablation in ("full", "2", "4")
        self.uses_own = self.personalises and self.options.output == "personalised"

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
        replies = fed.ask(cohort, self.train, model=each(_rows(self.customised, cohort, self.model)))
        clients = replies.clients
        if len(clients):
            recovered = _rows(self.customised, clients, self.model).add_(replies["update"])
            updates = recovered - self.model if self.calibrates else replies["update"]
            benign = self._detect(fed, clients, updates)
            if not benign.all():
                clients, recovered, updates = clients[benign], recovered[benign], updates[benign]
        if not len(clients):
            fed.note("alarm", "no update is left: all models stay as they were")
            left = [i for i, c in enumerate(self.members) if c not in self.flagged]
            self.members, self.pool, self.updates = [self.members[i] for i in left], self.pool[left], self.updates[left]
            return
        self.members, self.pool, self.updates = list(clients), recovered, updates
        self.origin, self.model = self.model, replies.combine(recovered, self.model, clients.samples)  # eq. 6
        if self.customises:
            phi = 1 / len(clients) if self.options.phi == "equal" else self.options.phi
            self._customise(fed, clients, updates, phi)
            self.fresh = list(clients)
            if self.options.collect == "last_known":
                self.known |= {c: row.clone() for c, row in zip(clients, updates, strict=True)}
            if self.options.eval_customise_all:
                self.fresh += self._collect(fed, fed.alive - self.fresh - self.flagged, self.options.collect)

    def _detect(self, fed: Federation, clients: Clients, updates: Tensor) -> Tensor:
        # whose update counts, [K]; a calibrated one longer than T_norm removes its client
        norms = torch.linalg.vector_norm(updates, dim=1)
        fed.note("norms", norms.clone())
        norms[[c in self.flagged for c in clients]] = math.nan
        limit = usual(norms) if self.options.t_norm == "auto" else float(self.options.t_norm)
        benign: Tensor = norms.isfinite() & (norms <= (limit if self.calibrates else math.inf))
        if self.calibrates:
            removed = [c for c in clients[~benign] if c not in self.flagged]
            self.flagged += removed
            fed.remove(removed if self.options.removal == "leave" else [])
            fed.note("t_norm", limit)
            fed.note("removed", removed)
        return benign

    def _collect(self, fed: Federation, absent: Clients, how: str) -> Clients:
        # customised models for clients that are not in the pool; returns those whose update could be had
        if not (self.members and self.customises and len(absent)):
            return absent
        if how != "train":
            self._customise(fed, absent, _rows(self.known, absent, torch.zeros_like(self.origin)))
            return absent
        replies = fed.ask(absent, self.collect, model=self.origin)
        if len(replies):
            self._customise(fed, replies.clients, replies["update"])
        return replies.clients

    def _customise(self, fed: Federation, clients: Clients, updates: Tensor, phi: float | None = None) -> None:
        weights = contributions(updates, self.updates, self.options.alpha, phi)
        fed.note("weights_absent" if phi is None else "weights", weights)
        self.customised |= {c: row.clone() for c, row in zip(clients, weights @ self.pool, strict=True)}  # eq. 3

    def welcome(self, fed: Federation, newcomers: Clients) -> Clients:
        """Appendix A: clients that come after training get a customised model and train their own from it."""
        newcomers = self._collect(fed, newcomers - self.flagged, "train")
        if self.personalises:
            fed.ask(newcomers, self.settle, model=each(_rows(self.customised, newcomers, self.model)))
        return newcomers

    def deliver_to_all(self, fed: Federation) -> dict[str, Any]:
        return {"model": each(_rows(self.customised, fed.all, self.model))}

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


def contributions(updates: Tensor, pool: Tensor, alpha: float, phi: float | None = None) -> Tensor:
    """How much each in the pool counts for each client (eqs. 4, 5), [K, M]; with phi, the clients are the pool."""
    cosine = (updates @ pool.T) / torch.outer(updates.norm(dim=1), pool.norm(dim=1))
    logits = alpha * cosine.nan_to_num(-1.0)
    if phi is None or len(pool) == 1:
        return logits.softmax(1)
    return logits.fill_diagonal_(-math.inf).softmax(1).mul_(1 - phi).fill_diagonal_(phi)


def usual(norms: Tensor) -> float:
    """Median + 6 MAD of what is not NaN; a spread below one percent is taken for one."""
    middle = norms.nanquantile(0.5)
    return float(middle + 6 * (norms - middle).abs().nanquantile(0.5).clamp(min=0.01 * middle))


def _rows(of: dict[int, Tensor], clients: Clients, otherwise: Tensor) -> Tensor:
    return torch.stack([of.get(c, otherwise) for c in clients]) if len(clients) else otherwise[None][:0]
