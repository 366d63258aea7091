"""What only FedCAP's Table IV and the profile of the authors' code need: parts that are left out, absent clients served
without asking them, customised models for everybody after each round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedkin.core import notes
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Replies, Reply
from fedkin.methods.base import METHODS, Needs
from fedkin.methods.fedcap import method
from fedkin.methods.fedcap.method import PaperFedCAP
from fedkin.methods.fedcap.similarity import detect, rows_of
from fedkin.robust import Detector

# Table IV: does a row customise, does it calibrate and detect, does it personalise?
TABLE_IV = {"1": (1, 0, 0), "2": (0, 0, 1), "3": (1, 1, 0), "4": (1, 0, 1), "full": (1, 1, 1)}


@METHODS.register("fedcap")
class FedCAP(PaperFedCAP):
    __doc__ = method.__doc__  # as the paper has it, unless an option says otherwise

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.customises, self.calibrates, self.personalises = map(bool, TABLE_IV[self.options.ablation])
        self.detects = self.calibrates or self.options.detect_raw

    @classmethod
    def unused(cls, options: Any) -> dict[str, str]:
        customises = TABLE_IV[options.ablation][0]
        return {k: why for k, why in super().unused(options).items() if customises or k != "rule"}

    def start(self, *given: Any) -> None:
        super().start(*given)
        self.known = dict[int, Tensor]()  # last updates, for collect=last_known

    def _calibrate(self, recovered: Tensor, updates: Tensor) -> Tensor:
        return super()._calibrate(recovered, updates) if self.calibrates else updates

    def _detect(self, fed: Federation, clients: Clients, updates: Tensor) -> Tensor:
        if self.detects:
            return super()._detect(fed, clients, updates)
        benign, norms, _ = detect(updates, [False] * len(clients), torch.inf)
        fed.note(notes.NORMS, norms)
        return benign

    def _dismiss(self, fed: Federation, senders: Clients) -> None:
        if self.detects:
            super()._dismiss(fed, senders)

    def _reference(self, replies: Replies, recovered: Tensor) -> Tensor:
        if self.customises:
            return super()._reference(replies, recovered)
        return replies.combine(recovered, self.model, replies.samples)  # here w is what clients are given

    def _renew(self, fed: Federation, clients: Clients, updates: Tensor) -> None:
        if not self.customises:
            return
        super()._renew(fed, clients, updates)
        if self.options.collect == "last_known":
            self.known |= {c: row.clone() for c, row in zip(clients, updates, strict=True)}
        if self.options.eval_customise_all:
            self.fresh += self._collect(fed, fed.alive - self.fresh - self.flagged)

    def _collect(self, fed: Federation, absent: Clients) -> Clients:
        if not self.customises:
            return absent
        if self.options.collect == "train":
            return super()._collect(fed, absent)
        if self.members and len(absent):
            self._customise(fed, absent, rows_of(absent, self.known, torch.zeros_like(self.origin)))
        return absent

    def detector(self) -> Detector | None:
        if not self.detects:
            return None
        found = super().detector()
        return found if self.calibrates or found is None else replace(found, reference=None)

    def welcome(self, fed: Federation, newcomers: Clients) -> Clients:
        """Newcomers are asked for an update, whatever is done for absent clients."""
        newcomers = newcomers - self.flagged
        if self.customises:
            newcomers = super()._collect(fed, newcomers)
        if self.personalises:
            fed.ask(newcomers, self.settle, **self.deliver_to(fed, newcomers))
        return newcomers

    def needs(self, cohort: int, seen: int, everybody: int) -> Needs:
        found = super().needs(cohort, seen, everybody)
        known = seen if self.options.collect == "last_known" else 0
        others = everybody - seen if self.options.eval_customise_all else 0
        return replace(found, trained=1 + self.personalises, server=found.server + known + others)

    def train(self, client: Cohort, model: Tensor) -> Reply:
        if self.personalises:
            return super().train(client, model)
        return {"update": client.model(client.fit(client.rows(model=model))) - model}

    def uses_own(self) -> bool:
        return self.personalises and super().uses_own()
