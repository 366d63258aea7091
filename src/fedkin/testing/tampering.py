"""Clients that answer with NaN, or with something of another shape, type or name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkin.core.federation import Answer, Masked, Tamper


def poison(client: int) -> Tamper:
    """Everything this client sends is NaN."""

    def tamper(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        for k in np.flatnonzero(answer.ids == client):
            answer.replies = {n: _with_nan(v, int(k)) for n, v in answer.replies.items()}
        return answer

    return tamper


def _with_nan(value: Tensor | Masked, k: int) -> Tensor | Masked:
    if isinstance(value, Masked):
        return Masked(_with_nan(value.values, k), value.mask)  # type: ignore[arg-type]
    if not value.is_floating_point():
        return value
    value = value.clone()
    value[k] = float("nan")
    return value


def misshape(client: int, how: str) -> Tamper:
    """This client sends a tensor of another shape, another type, or under another name."""

    def tamper(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        at = answer.ids == client
        if not at.any() or not answer.replies:
            return answer
        k, keep = int(np.flatnonzero(at)[0]), torch.from_numpy(~at)
        plain = {n: v.values if isinstance(v, Masked) else v for n, v in answer.replies.items()}
        wrong = {
            "shape": {n: torch.cat([v[k].flatten(), v[k].flatten()[:1]]) for n, v in plain.items()},
            "type": {n: v[k].to(torch.complex64) for n, v in plain.items()},
            "name": {f"{n}-2": v[k] for n, v in plain.items()},
        }
        rest = {
            n: Masked(v.values[keep], v.mask[keep]) if isinstance(v, Masked) else v[keep]
            for n, v in answer.replies.items()
        }
        return Answer(answer.ids[~at], rest, {client: wrong[how]}, answer.failed)

    return tamper
