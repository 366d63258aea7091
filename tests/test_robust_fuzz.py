"""Any method under any attack behind any rule: no crash, and nothing broken in a benign client's model or the server.

A failing case is told by its number: `drawn(17)` is always the same run, `pytest -k "fuzz and 17"` repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from conformance import CLASSES, Network, federation, finished, tensors_in

from fedkin.compute import keys
from fedkin.config import make_config
from fedkin.methods import METHODS
from fedkin.robust import ATTACKS, RULES
from fedkin.rounds import Job, prepare

T = TypeVar("T")
FAST, ALL = 40, 540

VARIANTS = {  # attacks and rules that another option turns into another one
    "garbage": ["garbage", "garbage:kind=shape", "garbage:size=1e30", "garbage:size=3e38"],
    "backdoor": ["backdoor", "backdoor:scale=0,distributed=true"],
    "lf": ["lf", "lf:labels=random", "lf:lie_about_votes=true"],
    "input-noise": ["input-noise", "input-noise:sigma=1e20", "input-noise:sigma=3"],
    "fltrust": ["fltrust:root=3", "fltrust:root=5,first_tensor_only=true"],
    "rfa": ["rfa", "rfa:per_tensor=true"],
    "mr": ["mr", "mr:factor=1e20"],
    "min-sum": ["min-sum", "min-sum:bound=min", "min-sum:squared=false"],
    "adaptive": [
        "adaptive",
        "adaptive:direction=spread",
        "adaptive:against=norm,t_norm=2",
        "adaptive:against=clustered,direction=spread",
        "adaptive:against=committee",
        "adaptive:against=gas:parts=5;base=median",
    ],
    "bucketing": ["bucketing", "bucketing:base=median", "bucketing:base=krum"],
    "gas": ["gas:parts=5", "gas:parts=7,base=median"],
    "krum": ["krum", "krum:malicious=2"],
    "trimmed-mean": ["trimmed-mean", "trimmed-mean:malicious=0.5,cut=0.5"],
    "centred-clip": ["centred-clip", "centred-clip:radius=0.1"],
}


def one_of(rng: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(rng.integers(len(choices)))]


def drawn(index: int) -> dict[str, Any]:
    """The settings of case `index`. Method, attack and rule take turns, so that a few hundred cases meet them all."""
    rng = keys.generator(index, "fuzz")
    method = list(METHODS)[index % len(METHODS)]
    attack = one_of(rng, ["none", *ATTACKS, "garbage", "garbage", "mr", "mr"])  # more of what goes furthest,
    rule = one_of(rng, [*RULES, *["mean"] * 5])  # and of what lets it through
    return {
        "method": method,
        "options": {"profile": one_of(rng, list(METHODS[method].profiles))},
        "attack": one_of(rng, VARIANTS.get(attack, [attack])),
        "rule": one_of(rng, VARIANTS.get(rule, [rule])),
        "participation": one_of(rng, [0.2, 0.5, 1.0]),
        "malicious": one_of(rng, [0.2, 0.4, 0.8, 1.0]),
        "knowledge": one_of(rng, ["own", "full"]),
        "attackers": one_of(rng, ["fixed", "redrawn"]),
        "drop": one_of(rng, [0.0, 0.3, 0.7]),
        "straggle": one_of(rng, [0.0, 0.3]),
        "eval_point": one_of(rng, ["auto", "received", "after_local", "last_round"]),
        "rounds": int(rng.integers(2, 4)),
        "epochs": 1,
        "batch": 4,
        "lr": one_of(rng, [0.01, 0.1, 1.0]),
        "device": "cpu",
        "way": "each",
        "seed": index,
    }


def job_of(settings: dict[str, Any]) -> Job:
    rng = keys.generator(settings["seed"], "sizes")
    sizes = tuple(rng.integers(1, 10, int(rng.integers(5, 7))).tolist())
    # drawn, not asked for: what is idle in a case is not refused
    config = make_config(settings, given=())
    return prepare(config, model=Network(), data=federation(sizes, seed=settings["seed"]))


def check(index: int) -> None:
    settings = drawn(index)
    job = finished(job_of(settings))
    rows, benign = job.rows(), np.ones(len(job.fed.all), bool)
    if job.adversary is not None and not job.adversary.redraw:
        benign = ~job.adversary.malicious()
    assert torch.isfinite(rows[torch.from_numpy(benign)]).all(), "a benign client's model holds NaN or infinity"
    for name, value in job.method.state().items():
        for tensor in tensors_in(value):
            assert not tensor.is_floating_point() or torch.isfinite(tensor).all(), f"the server's {name} is not finite"
    result = job.result()
    assert len(result.to_dict()["per_client"]) == len(job.fed.all)
    assert result.personal(0)(torch.zeros(2, 6)).shape == (2, CLASSES)


@pytest.mark.parametrize("index", range(FAST))
def test_fuzz(index: int) -> None:
    check(index)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(FAST, ALL))
def test_fuzz_at_length(index: int) -> None:
    check(index)


def test_the_cases_repeat_and_meet_everything() -> None:
    assert drawn(7) == drawn(7)
    cases = [drawn(i) for i in range(ALL)]
    assert {c["method"] for c in cases} == set(METHODS)
    assert {c["attack"].partition(":")[0] for c in cases} == {"none", *ATTACKS}
    assert {c["rule"].partition(":")[0] for c in cases} == set(RULES)


@pytest.mark.parametrize("method", ["fedper", "lg-fedavg", "ditto", "fedrep"])
def test_a_client_keeps_what_it_has_when_training_diverges(method: str) -> None:
    """The mean lets an enormous model through; training from it gives NaN, which is a failure and is not kept."""
    settings = {
        **drawn(0),
        "method": method,
        "options": {},
        "attack": "garbage:size=1e30",
        "rule": "mean",
        "participation": 1.0,
        "malicious": 0.4,
        "attackers": "fixed",
        "drop": 0.0,
        "straggle": 0.0,
        "rounds": 3,
        "lr": 0.1,
    }
    job = finished(job_of(settings))
    assert any("not finite" in f.reason for f in job.fed.failures)
    for name, kept in job.site.store.tensors.items():
        assert torch.isfinite(kept).all(), name
