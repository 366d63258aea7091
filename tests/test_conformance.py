"""Every registered method stands every check of tests/conformance.py; and the checks catch methods that would not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import conformance
import pytest
import torch
from conformance import CHECKS
from torch import Tensor

from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Reply
from fedkin.methods import METHODS
from fedkin.methods.fedavg import FedAvg
from fedkin.methods.fedper import FedPer

OTHER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("fedbabu", {"finetune_epochs": 2, "finetune": "head"}),
    ("fedbabu", {"finetune_epochs": 0}),
    ("fedrep", {"head_epochs": 2, "body_epochs": 2}),
    ("local", {"who": "all"}),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", list(METHODS))
def test_method(name: str, check: Callable[..., None]) -> None:
    check(name)


@pytest.mark.parametrize("check", conformance.every_check())
@pytest.mark.parametrize(("name", "options"), OTHER_OPTIONS, ids=[f"{n}-{o}" for n, o in OTHER_OPTIONS])
def test_method_with_other_options(name: str, options: dict[str, Any], check: Callable[..., None]) -> None:
    check(name, options)


QUICK_IN_OTHER_WORLDS = (conformance.runs_and_serves_every_client,)
"""The others take a minute together: they are for `make test-slow`."""


def in_other_worlds() -> list[Any]:
    """Every method in every world that it can learn, with every check."""
    found = []
    for world in conformance.WORLDS:
        for name in METHODS:
            if world == "classification" or (world == "next-token" and METHODS[name].needs_classes):
                continue
            for check in CHECKS:
                marks = [] if check in QUICK_IN_OTHER_WORLDS else [pytest.mark.slow]
                found.append(pytest.param(world, name, check, id=f"{world}-{name}-{check.__name__}", marks=marks))
    return found


@pytest.mark.parametrize(("world", "name", "check"), in_other_worlds())
def test_method_in_other_worlds(world: str, name: str, check: Callable[..., None]) -> None:
    """Next tokens, rows of low-rank updates, networks of two inputs: the promises are the same."""
    with conformance.inside(world):
        check(name)


def test_worlds_are_what_they_say() -> None:
    assert list(conformance.WORLDS) == ["classification", "next-token", "low-rank", "two-inputs"]
    with conformance.inside("low-rank"):
        job = conformance.job_of("fedavg")
        assert set(job.site.layout.frozen) == {"body.0.base.weight", "body.0.base.bias"}
    with conformance.inside("two-inputs"):
        assert [p.name for p in conformance.federation()[0].parts] == ["values", "kinds"]
    with conformance.inside("next-token"):
        assert conformance.federation()[0].targets == "tokens"
    assert conformance.federation()[0].targets == "classes"


# ---------------------------------------------------------------- methods that must be caught


class Peeking(FedAvg):
    """The client half reads what only the server knows."""

    def train(self, client: Cohort, model: Tensor) -> Reply:
        return {"model": client.model(client.fit(client.rows(model=self.model)))}


class Hoarding(FedAvg):
    """The client half remembers something on itself: lost when the clients are on other machines."""

    def train(self, client: Cohort, model: Tensor) -> Reply:
        self.last = model
        return super().train(client, model)


class Trusting(FedAvg):
    """Averages by hand and forgets that nobody may answer."""

    def round(self, fed: Federation, cohort: Clients) -> None:
        self.model = fed.ask(cohort, self.train, model=self.model)["model"].mean(0)


class Dividing(FedAvg):
    """Divides by the number of clients that came in time."""

    def round(self, fed: Federation, cohort: Clients) -> None:
        replies = fed.ask(cohort, self.train, model=self.model)
        self.model = replies["model"].sum(0) / len(replies) if replies._values else self.model


class Leaking(FedPer):
    """Says that the body travels and sends the head along."""

    def train(self, client: Cohort, body: Tensor) -> Reply:
        rows = client.fit(client.rows(body=body, head=client["head"]))
        client["head"] = client.head(rows)
        return {"body": client.body(rows), "head": client.head(rows)}


class Gambling(FedAvg):
    """Draws from the global generator."""

    def train(self, client: Cohort, model: Tensor) -> Reply:
        return super().train(client, model + 0.01 * torch.randn(model.shape))


class Stubborn(FedAvg):
    """Asks clients that were removed."""

    def round(self, fed: Federation, cohort: Clients) -> None:
        super().round(fed, fed.all)


class Bulky(FedAvg):
    """Remembers an object that no checkpoint can hold."""

    def round(self, fed: Federation, cohort: Clients) -> None:
        super().round(fed, cohort)
        self.cohort = cohort


class Idle(FedAvg):
    def round(self, fed: Federation, cohort: Clients) -> None:
        fed.ask(cohort, self.train, model=self.model)


class Mixing(FedAvg):
    """What a client sends depends on who else is worked on with it."""

    def train(self, client: Cohort, model: Tensor) -> Reply:
        trained = client.model(client.fit(client.rows(model=model)))
        return {"model": trained + 0.1 * trained.mean(0)}


class Sloppy(FedAvg):
    """Measuring has a side effect: looking at the model trains it."""

    def personal(self, client: Cohort, *args: Any, **delivered: Any) -> Tensor:
        rows = client.fit(client["held"])
        client["held"] = rows
        return rows


@pytest.mark.parametrize(
    ("method", "check", "error"),
    [
        (Peeking, conformance.runs_and_serves_every_client, AttributeError),
        (Hoarding, conformance.keeps_its_halves_apart, AssertionError),
        (Trusting, conformance.survives_when_nobody_answers, Exception),
        (Dividing, conformance.survives_when_everybody_is_late, AssertionError),
        (Leaking, conformance.sends_no_more_than_it_says, AssertionError),
        (Gambling, conformance.repeats_itself, AssertionError),
        (Stubborn, conformance.never_asks_the_removed, AssertionError),
        (Bulky, conformance.keeps_a_plain_state, AssertionError),
        (Idle, conformance.learns_something, AssertionError),
        (Mixing, conformance.does_not_depend_on_the_chunk, AssertionError),
        (Sloppy, conformance.measuring_changes_nothing, AssertionError),
    ],
    ids=lambda v: v.__name__,
)
def test_the_checks_catch_what_they_are_for(method: type, check: Callable[..., None], error: type) -> None:
    check("fedavg")
    with pytest.raises(error):
        check(method)
