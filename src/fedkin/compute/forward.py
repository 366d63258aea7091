"""What a forward pass of R rows takes and gives, whatever carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class Out:
    """What a loss sees: features (the head's input) [R, B, F], logits (the network's output) [R, B, C], or [R, B, T, C]
    where it has one for every position, and which samples of a padded batch count [R, B] (none: all)."""

    features: Tensor
    logits: Tensor
    valid: Tensor | None = None


@dataclass(frozen=True)
class Context:
    """How to run: training or not; which samples of a padded batch count; dropout keys [R]; compute precision."""

    train: bool = False
    valid: Tensor | None = None  # bool [R, B]
    noise: Tensor | None = None  # int64 [R]
    dtype: torch.dtype = torch.float32
    salt: int = 0


class Forward(Protocol):
    """Anything that runs R rows of a network on [R*B, ...] inputs."""

    together: bool
    has_dropout: bool
    has_batch_norm: bool  # statistics over the samples of a batch, which one sample has not

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, rows: int, context: Context) -> Out: ...


class Unsupported(Exception):
    """What a form of a network cannot express; in words."""
