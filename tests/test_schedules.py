"""Learning rates by round and by client: held against torch.optim.lr_scheduler in a plain loop, and against runs that
say the same in other words."""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance import every_method
from reference import OPTIMISERS, distance, torch_optimiser, train_client
from test_core_training import CLOSE, RAGGED, small_bench, ways
from test_track_resume import TINY, alone, only_run, same, stop_after
from torch import Tensor, nn

from fedkin import api
from fedkin.compute.optim import SGD, Moments
from fedkin.config import LATER, Config, effective, make_config
from fedkin.core.schedules import SCHEDULES, Factors, Schedule, client_factors, make_schedule, parse_factors
from fedkin.errors import UsageError
from fedkin.options import named_spec
from fedkin.rounds import RoundRecord, prepare
from fedkin.runs.database import TABLES
from fedkin.runs.folder import RunFolder
from fedkin.sweep.groups import same_but_seed
from fedkin.testing import finished, job_of

ROUNDS = 7
Scheduler = Callable[[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]


def warmed(rounds: int, after: Scheduler) -> Scheduler:
    """With a warm-up on top: all of a list of schedulers take a step after each round."""

    def both(o: torch.optim.Optimizer) -> list[torch.optim.lr_scheduler.LRScheduler]:
        return [torch.optim.lr_scheduler.LinearLR(o, 1 / rounds, 1.0, rounds - 1), *after(o)]

    return both


SPECS: dict[str, Scheduler] = {
    "constant": lambda o: [torch.optim.lr_scheduler.ConstantLR(o, 1.0)],
    "step:every=2,gamma=0.5": lambda o: [torch.optim.lr_scheduler.StepLR(o, 2, 0.5)],
    "step:after=1+4": lambda o: [torch.optim.lr_scheduler.MultiStepLR(o, [1, 4], 0.1)],
    "exponential:gamma=0.8": lambda o: [torch.optim.lr_scheduler.ExponentialLR(o, 0.8)],
    "cosine": lambda o: [torch.optim.lr_scheduler.CosineAnnealingLR(o, ROUNDS)],
    "constant:warmup=3": warmed(3, lambda o: []),
    "step:every=2,gamma=0.5,warmup=4": warmed(4, lambda o: [torch.optim.lr_scheduler.StepLR(o, 2, 0.5)]),
    "exponential:gamma=0.8,warmup=3": warmed(3, lambda o: [torch.optim.lr_scheduler.ExponentialLR(o, 0.8)]),
}


def schedule(spec: str) -> Schedule:
    return make_schedule(*named_spec(spec))


def torch_rates(make: Scheduler, lr: float, rounds: int) -> list[float]:
    """The rates of a loop that takes a step of its schedulers after each round."""
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr)
    schedulers, rates = make(optimiser), []
    for _ in range(rounds):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        for scheduler in schedulers:
            scheduler.step()
    return rates


# ---------------------------------------------------------------- what the rates are


@pytest.mark.parametrize("spec", SPECS)
def test_rates_are_those_of_torch(spec: str) -> None:
    found = [schedule(spec).rate(0.05, r, ROUNDS) for r in range(ROUNDS)]
    assert found == pytest.approx(torch_rates(SPECS[spec], 0.05, ROUNDS), rel=1e-12)


def test_a_cosine_ends_at_its_minimum() -> None:
    make: Scheduler = lambda o: [torch.optim.lr_scheduler.CosineAnnealingLR(o, ROUNDS, 0.01)]  # noqa: E731
    cosine = schedule("cosine:minimum=0.01")
    found = [cosine.rate(0.05, r, ROUNDS) for r in range(ROUNDS)]
    assert found == pytest.approx(torch_rates(make, 0.05, ROUNDS), rel=1e-12)
    assert min(found) > 0.01 == pytest.approx(cosine.rate(0.05, ROUNDS, ROUNDS))


def test_a_warm_up_reaches_the_whole_rate_in_its_last_round() -> None:
    assert [schedule("constant:warmup=4").rate(1.0, r, 9) for r in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_after_the_last_round_its_rate_goes_on() -> None:
    found = Factors.of(schedule("step:every=1,gamma=0.5"), 0.1, 3)
    assert found is not None
    assert [found.in_round(r) for r in range(5)] == [1.0, 0.5, 0.25, 0.25, 0.25]


def test_what_changes_nothing_is_nothing() -> None:
    assert Factors.of(schedule("constant"), 0.1, 5) is None
    assert Factors.of(schedule("step:every=5"), 0.1, 5) is None
    assert Factors.of(schedule("constant"), 0.1, 5, (1.0, 1.0)) is None
    assert Factors.of(schedule("constant"), 0.1, 5, (1.0, 2.0)) is not None


# ---------------------------------------------------------------- training as in the plain loop


@ways
@pytest.mark.parametrize(
    ("name", "spec"),
    list(zip(OPTIMISERS, itertools.cycle(["step:every=2,gamma=0.5", "exponential:gamma=0.8,warmup=3", "cosine"]))),
)
def test_clients_train_as_in_a_plain_loop_with_a_scheduler(way: str, tape: bool, name: str, spec: str) -> None:
    """One optimiser and its schedulers for each client over all rounds; clients have rates of their own besides."""
    opt, own = OPTIMISERS[name], (1.0, 0.5, 2.0, 0.25)
    bench = small_bench(way=way, tape=tape, opt=opt)
    factors = Factors.of(schedule(spec), opt.lr, ROUNDS, own)
    bench.site.training = replace(bench.site.training, factors=factors)
    start = bench.starts()
    moments = Moments.zeros(opt, len(RAGGED), bench.layout.width, torch.device("cpu"))
    found = start
    for r in range(ROUNDS):
        found = bench.cohort(round=r).fit(found, moments=moments)
    expected = []
    for k in range(len(RAGGED)):
        module = bench.module(start[k])
        one = torch_optimiser(replace(opt, lr=opt.lr * own[k]), list(module.parameters()))
        schedulers = SPECS[spec](one)
        for r in range(ROUNDS):
            train_client(module, bench.batches(k, bench.plan(r)), opt, optimiser=one)
            for scheduler in schedulers:
                scheduler.step()
        expected.append(bench.layout.row(module))
    assert distance(found, torch.stack(expected), start) < CLOSE


@ways
def test_a_rate_of_a_methods_own_is_multiplied_too(way: str, tape: bool) -> None:
    bench = small_bench(way=way, tape=tape)
    factors = Factors.of(schedule("exponential:gamma=0.5"), bench.opt.lr, 3, (1.0, 2.0, 3.0, 4.0))
    bench.site.training = replace(bench.site.training, factors=factors)
    start = bench.starts()
    found = bench.cohort(round=2).fit(start, opt=SGD(0.02))
    for k, own in enumerate((1.0, 2.0, 3.0, 4.0)):
        right = bench.reference(start, opt=SGD(0.02 * 0.25 * own), steps=bench.plan(2))
        assert distance(found[k : k + 1], right[k : k + 1], start[k : k + 1]) < CLOSE


def test_both_models_of_a_client_have_its_rate() -> None:
    from fedkin.core.cohort import Model

    bench = small_bench(way="batched", tape=False)
    factors = Factors.of(schedule("constant"), bench.opt.lr, 1, (1.0, 2.0, 3.0, 4.0))
    bench.site.training = replace(bench.site.training, factors=factors)
    v, w = bench.starts(), bench.starts(0.5)
    for found, start in zip(bench.cohort().fit_together([Model(v), Model(w)]), (v, w), strict=True):
        for k, own in enumerate((1.0, 2.0, 3.0, 4.0)):
            right = bench.reference(start, opt=SGD(bench.opt.lr * own))
            assert distance(found[k : k + 1], right[k : k + 1], start[k : k + 1]) < CLOSE


# ---------------------------------------------------------------- whole runs, every method


CASES = every_method(("fedpkda", {"profile": "official"}), ("fedbabu", {"finetune_epochs": 2}), options={})


@pytest.mark.parametrize(("method", "options"), CASES)
def test_half_the_rate_in_every_phase_of_a_method(method: str, options: dict[str, Any]) -> None:
    """A warm-up of two rounds in a run of one, and a factor of a half for each client, say what half the rate says."""
    own = {"align_lr": 0.001} if options.get("profile") == "official" else {}  # a rate of its own: 0.002
    half = finished(job_of(method, {**options, **own}, rounds=1, lr=0.05)).rows()
    assert torch.equal(half, finished(job_of(method, options, rounds=1, lr_schedule="constant:warmup=2")).rows())
    assert torch.equal(half, finished(job_of(method, options, rounds=1, lr_factors="0.5+0.5+0.5")).rows())
    assert not torch.equal(half, finished(job_of(method, options, rounds=1)).rows())


@pytest.mark.parametrize("name", ["co-pfl", "pfedcs"])
def test_rates_that_methods_have_as_options(name: str) -> None:
    option = {"co-pfl": "lr", "pfedcs": "teacher_lr"}[name]
    half = finished(job_of(name, {option: 0.01}, rounds=1, lr=0.05)).rows()
    whole = finished(job_of(name, {option: 0.02}, rounds=1, lr=0.1, lr_schedule="constant:warmup=2")).rows()
    assert torch.equal(half, whole)


def test_the_servers_own_training_follows_the_schedule_and_no_client() -> None:
    def trained(**settings: Any) -> Tensor:
        job = prepare(make_config({**TINY, "rounds": 1, "rule": "fltrust:root=20", **settings}))
        job.advance()
        return job.rows()

    half = trained(lr=0.05)
    assert torch.equal(half, trained(lr=0.1, lr_schedule="constant:warmup=2"))
    by_client = trained(lr=0.1, lr_factors="+".join(["0.5"] * 6))  # the server's own update is a whole step
    assert not torch.equal(half, by_client)


@dataclass(frozen=True)
class Inverse(Schedule):
    """One of a user's own."""

    def decayed(self, lr: float, round: int, rounds: int) -> float:
        return lr / (round + 1)


def test_a_schedule_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES._entries, "inverse", Inverse)
    result = api.run("fedavg", clients=5, rounds=3, epochs=1, lr=0.06, lr_schedule="inverse")
    assert [r.lr for r in result.history] == pytest.approx([0.06, 0.03, 0.02])


def test_a_schedule_that_gives_no_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Negative(Schedule):
        def decayed(self, lr: float, round: int, rounds: int) -> float:
            return lr - round

    monkeypatch.setitem(SCHEDULES._entries, "negative", Negative)
    with pytest.raises(UsageError, match=r"the rate of round 2 would be -0\.9"):
        api.run("fedavg", rounds=3, lr=0.1, lr_schedule="negative")


# ---------------------------------------------------------------- what is written down


def test_the_rate_of_a_round_is_in_its_record_and_in_the_table(tmp_path: Path) -> None:
    settings = {**TINY, "rounds": 4, "lr": 0.08, "lr_schedule": "step:every=1,gamma=0.5", "eval_every": 2}
    result = api.run("fedbabu", **settings, runs_dir=str(tmp_path))
    rates = [0.04, 0.01, 0.01]  # of rounds 2 and 4, and of the tuning after it
    assert [r.lr for r in result.history] == pytest.approx(rates)
    run = only_run(tmp_path)
    assert run.table("rounds")["lr"] == pytest.approx(rates)
    assert [r["lr"] for r in run.history()] == pytest.approx(rates)
    assert run.info.config["lr_schedule"] == settings["lr_schedule"]


def test_a_folder_from_before_there_was_a_rate_is_read_and_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        api.run("fedavg", **TINY, runs_dir=str(tmp_path), on_event=stop_after(3))
    run = only_run(tmp_path)
    with sqlite3.connect(run.path / "metrics.sqlite") as base:
        columns = list(TABLES["rounds"])
        for column in reversed(columns[columns.index("lr") :]):
            base.execute(f"ALTER TABLE rounds DROP COLUMN {column}")
    base.close()
    facts = json.loads((run.path / "run.json").read_text())
    for part in ("config", "given"):
        for name in LATER:
            del facts[part][name]
    (run.path / "run.json").write_text(json.dumps(facts))
    old = RunFolder.open(run.path)
    assert old.table("rounds")["lr"] == [None] * 3
    config = Config(**{**TINY, "method": "fedavg"})
    assert same_but_seed(old.info) == same_but_seed(only_run(tmp_path).info)
    assert config.identity() == make_config({**TINY, "method": "fedavg", **LATER}).identity()
    same(alone("fedavg", **TINY), api.resume(str(run.path)))
    assert only_run(tmp_path).table("rounds")["lr"][-1] == 0.01


def test_identities_of_runs_that_use_neither_are_what_they_were() -> None:
    import hashlib

    from fedkin.config import NOT_IDENTITY
    from fedkin.version import VERSION

    config = Config(method="ditto", rounds=3)
    before = {k: v for k, v in config.to_dict().items() if k not in (*NOT_IDENTITY, *LATER)}
    text = json.dumps([VERSION, before], sort_keys=True, default=str)
    assert config.identity() == hashlib.sha256(text.encode()).hexdigest()
    assert replace(config, lr_schedule="cosine").identity() != config.identity()
    assert not LATER.keys() & effective(config.to_dict()).keys()
    assert effective(replace(config, lr_factors="1+2").to_dict())["lr_factors"] == "1+2"


# ---------------------------------------------------------------- exactly as if it had not been interrupted


@pytest.mark.parametrize(
    "more",
    [
        {"lr_schedule": "cosine:warmup=2"},
        {"lr_schedule": "step:after=3,gamma=0.5", "lr_factors": "lognormal:0.7", "optimiser": "adam"},
        {"lr_schedule": "exponential:gamma=0.7", "momentum": 0.9, "participation": 0.5},
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "ditto", "co-pfl"])
def test_resumed_in_the_middle_equals_uninterrupted(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    if method == "co-pfl":
        more = {k: v for k, v in more.items() if k not in ("optimiser", "momentum")}
    settings = {**TINY, **more}
    with pytest.raises(KeyboardInterrupt):
        api.run(method, **settings, runs_dir=str(tmp_path), on_event=stop_after(3))
    same(alone(method, **settings), api.resume(str(only_run(tmp_path).path)))


# ---------------------------------------------------------------- single clients


def test_factors_as_they_are_written() -> None:
    names = ["client-0", "client-1", "client-2"]
    assert client_factors("same", names, 0) == []
    assert client_factors("1+0.5+2e-1", names, 0) == [1.0, 0.5, 0.2]
    assert client_factors("client-2=0.1+client-0=4", names, 0) == [4.0, 1.0, 0.1]
    assert parse_factors("a=b=2") == {"a=b": 2.0}
    drawn = np.log(client_factors("lognormal:0.5", [str(i) for i in range(4000)], 1))
    assert (abs(drawn.mean()), drawn.std()) == (pytest.approx(0, abs=0.03), pytest.approx(0.5, abs=0.03))
    assert client_factors("lognormal:0.5", names, 1) != client_factors("lognormal:0.5", names, 2)
    assert client_factors("lognormal:0.5", names, 1) == client_factors("lognormal:0.5", ["", "x", ""], 1)


def test_lists_and_tables_are_one_text(tmp_path: Path) -> None:
    assert make_config({"lr_factors": [1, 0.5, 1e20]}).lr_factors == "1+0.5+1e20"
    assert make_config({"lr_factors": {"paris": 0.1, "lima": 2}}).lr_factors == "paris=0.1+lima=2"
    assert parse_factors("1+0.5+1e20") == [1.0, 0.5, 1e20]
    file = tmp_path / "one.toml"
    file.write_text("rounds = 2\nepochs = 1\nclients = 3\n[lr_factors]\nclient-1 = 0.5\n")
    from fedkin.cli.flags import run_config_of

    assert run_config_of(str(file), {}, []).lr_factors == "client-1=0.5"


def test_a_client_with_a_smaller_rate_moves_less() -> None:
    settings = {**TINY, "rounds": 1, "clients": 3}
    usual = alone("local", **settings)._rows
    given = alone("local", **settings, lr_factors={"client-1": 0.01})._rows
    first = prepare(make_config(settings)).site.initial
    assert torch.equal(usual[[0, 2]], given[[0, 2]])
    assert (given[1] - first).norm() < 0.1 * (usual[1] - first).norm()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_schedule": "cosin"}, "did you mean 'cosine'"),
        ({"lr_schedule": "step"}, "say every=10"),
        ({"lr_schedule": "step:every=2,after=3"}, "one of the two"),
        ({"lr_schedule": "step:every=0"}, "every='0': accepts a whole number"),
        ({"lr_schedule": "step:after=0+3"}, "accepts rounds from 1 on"),
        ({"lr_schedule": "exponential:gamma=2"}, "gamma='2': accepts a number above 0 up to 1"),
        ({"lr_schedule": "cosine:minimum=0.5"}, "minimum=0.5 is above the learning rate, lr=0.01"),
        ({"lr_schedule": "cosine:minimum"}, "'minimum' has no value"),
        ({"lr_schedule": "step:every=5", "rounds": 5}, "in 5 rounds the rate stays the same"),
        ({"lr_factors": "1+2"}, "2 factors for 20 clients"),
        ({"lr_factors": "0"}, "'0' is no number above 0"),
        ({"lr_factors": "lognormal:-1"}, "'-1' is no number above 0"),
        ({"lr_factors": "client-1=2+client-1=3"}, "named twice"),
        ({"lr_factors": "cleint-1=2"}, "did you mean 'client-"),
        ({"lr_factors": {"client-1": math.inf}}, "'inf' is no number above 0"),
    ],
)
def test_mistakes_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as error:
        api.run("fedavg", **settings)
    assert words in str(error.value)


def test_records_of_older_runs_have_no_rate() -> None:
    result = alone("fedavg", **{**TINY, "rounds": 1})
    values = result.to_dict()["history"][0]
    del values["lr"]
    assert math.isnan(RoundRecord.of(values).lr)
