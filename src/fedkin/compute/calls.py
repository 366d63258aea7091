"""PyTorch's functions as a user's forward pass calls them, carried out for rows and with noise that can be repeated.

While a network runs, `Calls` sees every call of a PyTorch function. Under `vmap`, layers that have a faster form over
rows, or must know which samples count, are computed by that (`over_rows`, `recurrent`, `attention`); everything else is
left to `vmap`. Noise (`noise`), in both forms and row by row, is a function of the row's key and of how many calls drew
noise before this one; numbers that cannot be drawn that way are refused with the line that asked for them.
"""

from __future__ import annotations

import linecache
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedkin.compute import draws
from fedkin.compute.attention import multi_head
from fedkin.compute.forward import Context
from fedkin.compute.noise import NOISE, REFUSED
from fedkin.compute.outside import outside, shared
from fedkin.compute.over_rows import OVER_ROWS
from fedkin.errors import UsageError

COMPOSED: dict[Any, Callable[..., Any]] = {F.multi_head_attention_forward: multi_head}

_TORCH, _OURS = str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parent) + os.sep


@dataclass
class Drawn:
    """What a network was seen to draw: the shape of each call's noise; and, found by comparing two numbers of samples,
    which axis of it are the samples."""

    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    axes: dict[int, int] = field(default_factory=dict)
    normed: bool = False  # statistics over samples


class Calls(TorchFunctionMode):
    """One forward pass: of `rows` rows under `vmap`, or, where `row` is None, of a single one as it is."""

    def __init__(self, network: str, context: Context, drawn: Drawn, row: Tensor | None = None, rows: int = 1) -> None:
        super().__init__()
        self.network, self.context, self.drawn, self.row, self.rows = network, context, drawn, row, rows
        self.noisy = 0  # calls so far

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NOISE:
            return NOISE[func](self, *args, **kwargs)
        if func in REFUSED:
            raise self._refusal(func)
        if func is F.batch_norm and (kwargs.get("training") or any(a is True for a in args[5:6])):
            self.drawn.normed = True
        if func in COMPOSED:
            with self:  # what it calls is seen as well
                return COMPOSED[func](*args, **kwargs)
        if self.row is not None and func in OVER_ROWS:
            return OVER_ROWS[func](self, *args, **kwargs)
        return func(*args, **kwargs)

    # ------------------------------------------------------------ rows

    def over_rows(self, function: Callable[..., Any], *given: Tensor | None) -> Any:
        return outside(self.row, function, *given)  # type: ignore[arg-type]

    def merged(
        self, layer: Callable[[Tensor, list[Tensor | None], int], Tensor], x: Tensor, *own: Tensor | None
    ) -> Any:
        """`layer(x [R*B, ...], own parameters [R, ...], rows)`; one set of parameters for all rows is as one row."""

        def over(x: Tensor, *own: Tensor | None) -> Tensor:
            alone = len(x) > 1 and all(shared(t) for t in own)
            mine = [t[:1] if alone and t is not None else t for t in own]
            y = layer(x.flatten(0, 1), mine, 1 if alone else len(x))
            return y.reshape(*x.shape[:2], *y.shape[1:])

        return self.over_rows(over, x, *own)

    # ------------------------------------------------------------ noise

    def draw(self, like: Tensor, shape: Sequence[int], normal: bool = False) -> Tensor:
        """[*shape] numbers in [0, 1), or from N(0, 1); each row's own under `vmap`. Padded samples change nothing for
        the others: numbers are counted sample by sample."""
        context, call, shape = self.context, self.noisy, tuple(int(n) for n in shape)
        self.noisy += 1
        self.drawn.shapes[call] = shape
        if context.noise is None:
            raise UsageError("a network with dropout needs keys for its noise; train it through a cohort")
        keys, count = context.noise + call, math.prod(shape)
        at = self.drawn.axes.get(call, 0) if shape else 0
        order = (shape[at], *shape[:at], *shape[at + 1 :]) if shape else ()

        def over(_: Tensor) -> Tensor:
            if normal:
                found = draws.normal(torch.zeros((), dtype=torch.int64, device=keys.device), draws.mix(keys), count)
            else:
                found = draws.uniform(keys, count)
            wide = found.view(len(keys), *order)
            return wide.movedim(1, at + 1) if shape else wide

        found: Tensor = over(like)[0] if self.row is None else self.over_rows(over, like)
        return found

    def kept(self, x: Tensor, p: float, shape: Sequence[int]) -> Tensor | None:
        """Which numbers dropout leaves; None: all."""
        if p > 0:
            if not self.context.train:
                raise UsageError(
                    f"{self.network} drops out in evaluation mode ({users_line(sys._getframe())}), so its answers "
                    "could not be repeated: say training=self.training, as F.dropout drops out always unless it is told"
                )
            return self.draw(x, shape) >= p
        self.noisy += 1
        return None

    def _refusal(self, func: Any) -> UsageError:
        return UsageError(
            f"{self.network} draws random numbers with {_name(func)} ({users_line(sys._getframe())}), and they "
            "could not be repeated from a seed: use dropout (F.dropout or a Dropout module), torch.rand, "
            "torch.randn or bernoulli, whose numbers are drawn from the run's seed, or draw them when "
            "the network is made"
        )

    def needs_training(self, func: Any) -> None:
        if not self.context.train:
            raise UsageError(
                f"{self.network} draws random numbers in evaluation mode with {_name(func)} "
                f"({users_line(sys._getframe())}), so its answers could not be repeated: draw only "
                "while self.training"
            )


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def users_line(start: Any) -> str:
    """Where the user's own code stands, of a frame or a traceback: the innermost line that is neither PyTorch's nor
    ours. Nothing where there is none."""
    frames: list[tuple[str, int]] = []
    while start is not None:
        if isinstance(start, TracebackType):
            frames.insert(0, (start.tb_frame.f_code.co_filename, start.tb_lineno))
            start = start.tb_next
        else:
            frames.append((start.f_code.co_filename, start.f_lineno))
            start = start.f_back
    for file, line in frames:
        if not file.startswith((_TORCH, _OURS, "<")):
            return f"{Path(file).name} line {line}: {linecache.getline(file, line).strip()}"
    return ""
