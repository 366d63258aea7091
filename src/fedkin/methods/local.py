"""Local training: nothing is sent. Every personalised method is compared with it.

Each client trains its own model on, for E epochs in each round, so that the work equals that of the other methods.
Down: nothing. Up: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation
from fedkin.core.store import Keep
from fedkin.methods.base import METHODS, Method, Needs, option


@dataclass(frozen=True)
class LocalOptions:
    who: Literal["participants", "all"] = option("participants", "clients that train in a round: those drawn, or all")


@METHODS.register("local")
class Local(Method):
    Options = LocalOptions
    about = "every client trains alone"
    paper = "baseline"
    shares, shared_part = "nothing", None
    private = "the whole model"
    keeps = {"own": Keep("row")}
    uses_head = False

    @classmethod
    def unused(cls, options: Any) -> dict[str, str]:
        rule = {"rule": "every client trains alone, so nothing is averaged"}
        all_train = {"participation": "all clients train in every round (option who=all)"}
        return {**super().unused(options), **rule, **(all_train if options.who == "all" else {})}

    def round(self, fed: Federation, cohort: Clients) -> None:
        fed.ask(cohort if self.options.who == "participants" else fed.alive, self.train)

    def train(self, client: Cohort) -> None:
        client["own"] = client.fit(client["own"])

    def needs(self, cohort: int, seen: int, everybody: int) -> Needs:
        return Needs(everybody, everybody) if self.options.who == "all" else Needs(cohort, seen)

    def personal(self, client: Cohort) -> Tensor:
        return client["own"]
