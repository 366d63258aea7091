"""What stays with clients between rounds: one row each, and only for those that have written one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import keys
from fedkin.compute.layout import Layout
from fedkin.errors import DataError, UsageError


@dataclass(frozen=True)
class Keep:
    """A tensor that stays with each client between rounds: an entry of a method's `keeps`.

    `what` is a part of the model ("model", "body", "head", or "row" for all columns) or a shape. `start` says whether
    it begins as that part of the common first model or as zeros (a shape always does); `dtype` is its type. `lasts`:
    whether it means anything beyond its run; with what does not, a run that starts from another begins anew."""

    what: str | tuple[int, ...] = "row"
    start: Literal["model", "zeros"] = "model"
    dtype: torch.dtype = torch.float32
    lasts: bool = True

    def initial(self, layout: Layout, row: Tensor) -> Tensor:
        """What a client has before it has written; `row` is the common first model, [D]."""
        if isinstance(self.what, tuple):
            value = torch.zeros(self.what, device=row.device)
        else:
            value = row if self.what == "row" else row[layout.columns(self.what)]  # type: ignore[arg-type]
        return (torch.zeros_like(value) if self.start == "zeros" else value).to(self.dtype)


@dataclass
class Kept:
    """The rows of those clients that have written one: client c has row `slots[c]`, -1 where it has none."""

    slots: keys.I64  # [N]
    rows: Tensor  # [room, ...], of which the first `used` count
    used: int = 0

    def at(self, slots: keys.I64) -> Tensor:
        return torch.from_numpy(slots).to(self.rows.device)

    def make_room(self, ids: keys.I64) -> None:
        """A slot for each of these clients. Room grows by half, so that what is copied stays in proportion."""
        new = ids[self.slots[ids] < 0]
        needed = self.used + len(new)
        if needed > len(self.rows):
            room = min(len(self.slots), max(needed, 3 * len(self.rows) // 2))
            wider = self.rows.new_empty(room, *self.rows.shape[1:])
            wider[: self.used] = self.rows[: self.used]
            self.rows = wider
        self.slots[new] = np.arange(self.used, needed)
        self.used = needed


class Store:
    """What clients keep, one row each, and only for those that have written: whoever has not, has the first value.

    A row that is not finite is not kept: whoever sends a model on which training diverges cannot break what a client
    has."""

    def __init__(self, clients: int, keeps: Mapping[str, Keep], layout: Layout, initial: Tensor) -> None:
        self.clients, self.keeps, self._layout, self._initial = clients, dict(keeps), layout, initial
        self._kept: dict[str, Kept] = {}

    def read(self, name: str, ids: keys.I64) -> Tensor:
        first, kept = self.first(name), self._kept.get(name)
        if kept is None:
            return first.expand(len(ids), *first.shape).clone()
        slots = kept.slots[ids]
        if (slots >= 0).all():
            return kept.rows[kept.at(slots)]
        rows = first.expand(len(ids), *first.shape).clone()
        has = np.flatnonzero(slots >= 0)
        rows[kept.at(has)] = kept.rows[kept.at(slots[has])]
        return rows

    def write(self, name: str, ids: keys.I64, rows: Tensor) -> None:
        first = self.first(name)
        if rows.shape != (len(ids), *first.shape):
            raise UsageError(f"kept {name!r} has shape {tuple(first.shape)} per client, got {tuple(rows.shape)}")
        new = rows.detach().to(first.dtype)
        if new.is_floating_point() and new.numel():
            low, high = new.reshape(len(ids), -1).aminmax(dim=1)
            sound = (low.isfinite() & high.isfinite()).cpu()
            if not sound.all():
                new, ids = new[sound.to(new.device)], ids[sound.numpy()]
        if name not in self._kept:
            self._kept[name] = Kept(np.full(self.clients, -1, np.int64), first.new_empty(0, *first.shape))
        kept = self._kept[name]
        kept.make_room(ids)
        kept.rows[kept.at(kept.slots[ids])] = new

    def first(self, name: str) -> Tensor:
        """What a client has that has not written yet."""
        if name not in self.keeps:
            known = ", ".join(sorted(self.keeps)) or "nothing"
            raise UsageError(f"this method keeps {known}; declare {name!r} in its `keeps`")
        return self.keeps[name].initial(self._layout, self._initial)

    # ------------------------------------------------------------ as a whole

    def state(self) -> dict[str, dict[str, Tensor]]:
        """For each thing kept: the clients that have written it, and their rows."""
        return {
            name: {
                "ids": torch.from_numpy(np.argsort(kept.slots)[self.clients - kept.used :]),
                "rows": kept.rows[: kept.used],
            }
            for name, kept in self._kept.items()
        }

    def restore(self, state: Mapping[str, Mapping[str, Tensor] | Tensor]) -> None:
        self.restoring(state)()

    def restoring(self, state: Mapping[str, Mapping[str, Tensor] | Tensor]) -> Callable[[], None]:
        """What puts in place what `state` gave, or every client's row as older versions kept them; `DataError` if it
        is of something else."""
        found: dict[str, Kept] = {}
        for name, saved in state.items():
            if name not in self.keeps:
                raise DataError(f"the saved state keeps {name!r} with each client; this method has no such thing")
            if isinstance(saved, Tensor):
                saved = {"ids": torch.arange(len(saved)), "rows": saved}
            ids, rows, first = saved["ids"].cpu().numpy(), saved["rows"], self.first(name)
            fits = len(ids) == len(rows) == len(np.unique(ids)) and np.isin(ids, np.arange(self.clients)).all()
            if not fits or rows.shape[1:] != first.shape or rows.dtype != first.dtype:
                raise DataError(f"the saved state's {name!r} is not one row of shape {tuple(first.shape)} a client")
            slots = np.full(self.clients, -1, np.int64)
            slots[ids] = np.arange(len(ids))
            found[name] = Kept(slots, rows.to(first.device), len(rows))
        return lambda: vars(self).update(_kept=found)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every client's row, written or not, [N, ...]: for a site's one client, and for looking at small runs."""
        return {name: self.read(name, np.arange(self.clients)) for name in self._kept}
