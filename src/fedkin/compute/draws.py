"""Random numbers made where they are used, on any device: functions of keys alone, like those of `keys`."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


def mix(z: Tensor) -> Tensor:
    """`keys.mix` of 64-bit integers; shifts of tensors carry the sign along, which is masked away."""
    z = z + _signed(0x9E3779B97F4A7C15)
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return z ^ (z >> 31 & (1 << 33) - 1)


def _words(keys: Tensor, count: int) -> Tensor:
    """[N, count] words for keys [N]."""
    return mix(mix(keys).unsqueeze(1) ^ torch.arange(1, count + 1, device=keys.device))


def uniform(keys: Tensor, count: int) -> Tensor:
    """[R, count] numbers in [0, 1), a function of each row's key alone."""
    return (_words(keys, count) >> 40 & (1 << 24) - 1).float() / float(1 << 24)


def normal(key: Tensor, index: Tensor, width: int) -> Tensor:
    """N(0, 1) numbers [N, width] for samples [N]: a function of the key, the sample and the position (Box-Muller)."""
    word = _words(index ^ key, (width + 1) // 2)
    high, low = (word >> 40 & (1 << 24) - 1).float(), (word & (1 << 24) - 1).float()
    radius, angle = (-2 * ((high + 0.5) / (1 << 24)).log()).sqrt(), low * (2 * torch.pi / (1 << 24))
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :width]
