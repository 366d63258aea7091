"""Draws that a compiled program makes are those that it makes uncompiled: compilers may take counters for addresses."""

from __future__ import annotations

import shutil

import pytest
import torch

from fedkin.compute.batches import normal
from fedkin.compute.program import keyed_uniform

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


def test_noise_and_dropout_draws_survive_the_compiler() -> None:
    key, index = torch.tensor(123456789123456789), torch.arange(50) * 7919

    def draws(key: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return normal(key, index, 200), keyed_uniform(index, 100)

    expected = draws(key, index)
    found = torch.compile(draws, fullgraph=True, dynamic=False)(key, index)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(found[1], expected[1])


def test_draws_look_as_they_should() -> None:
    drawn = normal(torch.tensor(7), torch.arange(400), 300)
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.std()) - 1) < 0.02
    assert float(torch.corrcoef(drawn[:, :50].T).fill_diagonal_(0).abs().max()) < 0.3
    uniform = keyed_uniform(torch.arange(400), 300)
    assert abs(float(uniform.mean()) - 0.5) < 0.01
    assert abs(float(uniform.std()) - 12**-0.5) < 0.01
