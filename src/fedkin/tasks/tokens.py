"""The token that comes next, at every position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute.forward import Out
from fedkin.compute.losses import Value
from fedkin.errors import UsageError
from fedkin.tasks.task import TASKS, Metric, Task, named

IGNORED = -100  # the id of a position that does not count, as in PyTorch


def _next(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """A sample's sum over its positions, in such units that the mean over samples is that over all positions."""
    each = _losses(out.logits, y).sum(-1)
    tokens = (y != IGNORED).sum(-1)
    counts = torch.ones_like(tokens) if out.valid is None else out.valid.to(tokens)
    total = (tokens * counts).sum(1, keepdim=True).clamp(min=1)
    return each * counts.sum(1, keepdim=True) / total


def _losses(logits: Tensor, y: Tensor) -> Tensor:
    flat = F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view(y.shape)


def _accuracy(kept: Tensor, y: Tensor) -> Tensor:
    return kept[:, 0].sum() / (y != IGNORED).sum()


def _perplexity(kept: Tensor, y: Tensor) -> Tensor:
    return (kept[:, 1].sum() / (y != IGNORED).sum()).exp()


@TASKS.register("next-token")
@dataclass(frozen=True)
class NextToken(Task):
    """Cross-entropy of the scores that a network gives every token at every position, [samples, length, tokens]; the
    mean is over the positions that count."""

    name = "next-token"
    about = "the token that comes next, at every position of a sequence"
    targets = "tokens"
    main = "accuracy"
    extra = ("perplexity",)
    metrics = named(
        [
            Metric("accuracy", "share of positions whose token is predicted", _accuracy, "%", share=True),
            Metric("perplexity", "exp of the mean cross-entropy over positions", _perplexity, higher=False, low=1.0),
        ]
    )

    @property
    def value(self) -> Value:
        return _next

    def counted(self, y: Tensor) -> Tensor:
        return (y != IGNORED).sum(-1)

    def keep(self, outputs: Tensor, y: Tensor) -> Tensor:
        right = (outputs.argmax(-1) == y).sum(-1).double()
        return torch.stack([right, _losses(outputs, y).double().sum(-1)], 1)

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def check_outputs(self, shape: Sequence[int], wanted: int, network: str) -> None:
        if len(shape) != 3 or shape[-1] < wanted:
            raise UsageError(
                f"{network} returns shape {tuple(shape)}: for {self.name} it must return a score for each of {wanted} "
                f"tokens at every position, [samples, length, {wanted}]"
            )
