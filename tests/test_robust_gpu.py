"""Hostile clients on a GPU: the same noise in every way of training, the same rules. Skipped without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkin.config import make_config
from fedkin.robust import RULES, make_rule
from fedkin.robust.rules import FLTrust, apply
from fedkin.rounds import prepare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model_after(way: str, rule: str = "mean") -> Tensor:
    config = make_config(
        {
            "clients": 6,
            "partition": "iid",
            "rounds": 2,
            "epochs": 2,
            "samples_per_client": 40,
            "attack": "input-noise:sigma=0.5",
            "malicious": 0.5,
            "device": "cuda",
            "precision": "fp32",
            "way": way,
            "rule": rule,
        }
    )
    job = prepare(config)
    for _ in range(2):
        job.advance()
    return job.method.model.cpu()


@pytest.mark.parametrize("way", ["batched", "graph"])
def test_noise_is_the_same_in_every_way(way: str) -> None:
    """Two rounds, so that a captured program has to take up the second round's noise."""
    assert torch.allclose(model_after(way), model_after("each"), atol=1e-4)


def test_the_server_trains_on_its_root_set() -> None:
    assert torch.allclose(model_after("graph", "fltrust:root=20"), model_after("each", "fltrust:root=20"), atol=1e-4)


@pytest.mark.parametrize("name", [n for n in RULES if n != "bucketing"])
def test_rules_give_what_they_give_on_a_cpu(name: str) -> None:
    """Bucketing deals rows at random, on each device in its own way."""
    rng = np.random.default_rng(0)
    rows, start = (torch.from_numpy(rng.normal(size=size)).float() for size in ((20, 40_000), (40_000,)))
    if name == "fltrust":
        rules = [FLTrust(update=rows[0].to(d)) for d in ("cpu", "cuda")]
    else:
        rules = [make_rule(name, {"parts": 40_000, "base": "median"} if name == "gas" else {})] * 2
    weights = torch.arange(1.0, 21)
    here, there = (
        apply(rule, rows.to(d), weights.to(d), start.to(d)) for rule, d in zip(rules, ("cpu", "cuda"), strict=True)
    )
    assert torch.allclose(there.row.cpu(), here.row, atol=1e-4)
    assert there.used.cpu().tolist() == here.used.tolist()
