"""Draws that are made on the device: keyed like those of NumPy, and distributed as they should be."""

from __future__ import annotations

import numpy as np
import torch

from fedkin.compute import draws, keys


def test_words_are_mixed_as_numpy_mixes_them() -> None:
    words = keys.mix(np.arange(1000, dtype=np.uint64))  # also such as are negative as signed numbers
    mixed = draws.mix(torch.from_numpy(words.view(np.int64)))
    assert np.array_equal(mixed.numpy().view(np.uint64), keys.mix(words))


def test_draws_look_as_they_should() -> None:
    drawn = draws.normal(torch.tensor(7), torch.arange(400), 300)
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.std()) - 1) < 0.02
    assert float(torch.corrcoef(drawn[:, :50].T).fill_diagonal_(0).abs().max()) < 0.3
    uniform = draws.uniform(torch.arange(400), 300)
    assert abs(float(uniform.mean()) - 0.5) < 0.01
    assert abs(float(uniform.std()) - 12**-0.5) < 0.01
