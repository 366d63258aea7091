"""Runs whose clients train as rows of one cohort give what they give one after another."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedkin.compute import lockstep as together
from fedkin.compute.choice import Chooser
from fedkin.compute.work import Work
from fedkin.config import Config, make_config
from fedkin.errors import FedKinError, UsageError
from fedkin.rounds import Prepared, Result, RoundRecord, run_config
from fedkin.sweep.together import run_together

BASE: dict[str, Any] = {
    "data": "digits",
    "clients": 4,
    "partition": "dirichlet:0.5",
    "rounds": 2,
    "epochs": 1,
    "device": "cpu",
    "way": "each",
}


def cell(method: str, **changes: Any) -> Config:
    return make_config({**BASE, "method": method, **changes})


def same(a: Result | Exception, b: Result) -> None:
    assert isinstance(a, Result)
    assert a.method == b.method
    assert torch.equal(a._rows, b._rows)
    assert a.accuracy == b.accuracy
    assert a.bytes == b.bytes
    assert a.removed == b.removed


CELLS = [
    cell("fedavg"),
    cell("fedavg", seed=3, rounds=3),
    cell("fedcap", attack="sf", malicious=0.25),
    cell("fedcap", options={"alpha": 1.0}),
    cell("fedavg", attack="lf", malicious=0.5),
    cell("fedavg", attack="ipm", malicious=0.25, rule="median"),
    cell("co-pfl"),
    cell("co-pfl", seed=1),
    cell("c-pfl", partition="dirichlet:0.3"),
    cell("fedpkda", participation=0.5),
    cell("fedavg", momentum=0.5, augment=True, samples_per_client=21),
    cell("fedavg", momentum=0.5, augment=True, samples_per_client=33),
    cell("fedavg", lr=0.05),
    cell("fedavg", lr=0.05, rounds=3, lr_schedule="step:every=1,gamma=0.5"),
    cell("fedavg", rounds=3, lr_schedule="cosine:warmup=2", lr_factors="1+0.5+2+0.1"),
    cell("co-pfl", options={"lr": 1e-3}, lr_factors="lognormal:0.5"),
]


def test_results_are_those_of_one_after_another() -> None:
    for mine, alone in zip(run_together(CELLS), map(run_config, CELLS), strict=True):
        same(mine, alone)


def test_jobs_of_one_kind_are_trained_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    train = Chooser.train

    def counted(self: Chooser, work: Work) -> torch.Tensor:
        if type(self) is Chooser:
            seen.append(len(work.rows))
        return train(self, work)

    monkeypatch.setattr(Chooser, "train", counted)
    run_together([cell("fedavg", seed=s) for s in range(3)])
    assert seen == [12, 12]
    seen.clear()
    run_together([cell("fedavg", seed=s) for s in range(3)], most_rows=8)
    assert seen == [8, 4, 8, 4]
    seen.clear()
    run_together([cell("fedavg"), cell("fedavg", momentum=0.5), cell("fedavg", attack="lf")])  # nothing in common
    assert seen == [4] * 6
    seen.clear()  # rates are each row's own
    run_together([cell("fedavg"), cell("fedavg", lr=0.5), cell("fedavg", lr_schedule="exponential")])
    assert seen == [12] * 2


def test_a_failing_run_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(config: Config, **given: Any) -> Result:
        if config.seed == 1:
            raise FedKinError("broken")
        return run_config(config, **given)

    configs = [cell("fedavg", seed=s) for s in range(3)]
    first, second, third = run_together(configs, runner=runner)
    assert isinstance(second, FedKinError)
    same(first, run_config(configs[0]))
    same(third, run_config(configs[2]))


def test_an_error_while_training_reaches_those_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    train = together.train_as_one

    def broken(works: list[Work], chooser: Chooser) -> list[torch.Tensor]:
        if works[0].opt.momentum == 0.5:
            raise RuntimeError("out of memory")
        return train(works, chooser)

    monkeypatch.setattr(together, "train_as_one", broken)
    good, bad = run_together([cell("fedavg"), cell("fedavg", momentum=0.5)])
    assert isinstance(bad, RuntimeError)
    same(good, run_config(cell("fedavg")))


def test_an_interrupt_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(number: int, event: object) -> None:
        if number == 1 and isinstance(event, RoundRecord):
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_together([cell("fedavg"), cell("ditto"), cell("fedper")], on_event=stop)

    def broken(works: object, chooser: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(together, "train_as_one", broken)
    with pytest.raises(KeyboardInterrupt):
        run_together([cell("fedavg"), cell("ditto")])
    assert threading.active_count() == before


def test_events_say_whose_they_are() -> None:
    heard: list[tuple[int, str, int]] = []

    def listen(number: int, event: object) -> None:
        if isinstance(event, Prepared):
            heard.append((number, event.config.method, -1))
        elif isinstance(event, RoundRecord):
            heard.append((number, "", event.round))

    run_together([cell("fedavg"), cell("ditto", rounds=1)], on_event=listen)
    assert [h for h in heard if h[0] == 0] == [(0, "fedavg", -1), (0, "", 1), (0, "", 2)]
    assert [h for h in heard if h[0] == 1] == [(1, "ditto", -1), (1, "", 1)]


def test_runs_must_agree_on_the_device() -> None:
    with pytest.raises(UsageError, match="one device"):
        run_together([cell("fedavg"), replace(cell("fedavg"), way="batched")])
    assert run_together([]) == []


def test_shorter_plans_rest_at_the_end() -> None:
    short = together.Plan(np.ones((1, 1, 2), np.int64), np.full((1, 1), 2))
    long = together.Plan(np.ones((3, 2, 2), np.int64), np.full((3, 2), 2))
    both = together._side_by_side([short, long])
    assert both.table.shape == (3, 3, 2)
    assert both.steps.tolist() == [1, 3, 3]
