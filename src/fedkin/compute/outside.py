"""A way out of `torch.func.vmap`: code run under it hands its tensors to a function that sees all rows at once.

`vmap` runs a user's forward pass as if there were one row. Some layers have to know that there are many: they have a
faster program for it, or statistics to update, or samples that do not count. Such a function is called one level
below `vmap`, on ordinary tensors with the rows in front, and autograd records what it does as it records anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Outside(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(function: Callable[..., Any], row: Tensor, *given: Tensor | None) -> Any:
        raise RuntimeError("this is only ever called under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        raise RuntimeError("this is only ever called under vmap")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        function: Callable[..., Any],
        row: Tensor,
        *given: Tensor | None,
    ) -> tuple[Any, Any]:
        wide = [
            None if t is None else t.expand(info.batch_size, *t.shape) if at is None else t.movedim(at, 0)
            for t, at in zip(given, in_dims[2:], strict=True)
        ]
        found = function(*wide)
        return found, 0 if isinstance(found, Tensor) else (0,) * len(found)


def outside(row: Tensor, function: Callable[..., Any], *given: Tensor | None) -> Any:
    """`function` of these tensors as they are outside of `vmap`, [R, ...] each; its results, [R, ...] too, inside.

    `row`: any tensor that differs from row to row. A tensor that is the same for all rows is a view, stride 0."""
    return _Outside.apply(function, row, *given)  # type: ignore[no-untyped-call]


def shared(t: Tensor | None) -> bool:
    """Is there one such tensor for all rows?"""
    return t is None or (len(t) > 1 and t.stride(0) == 0)
