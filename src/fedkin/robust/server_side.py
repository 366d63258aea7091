"""What the server itself can tell a rule: where tensors begin, and how it would train on a few samples of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fedkin.compute import keys
from fedkin.compute.choice import Chooser
from fedkin.compute.layout import Part
from fedkin.core.cohort import Cohort, Site
from fedkin.core.store import Store
from fedkin.errors import UsageError

SENT: tuple[Part, ...] = ("model", "body", "head")


@dataclass(frozen=True, eq=False)
class ServerSide:
    """The server of a run as a rule sees it (`rules.Server`). `frozen_head`: bodies learn under the common first head;
    otherwise whoever averages bodies leaves each client, and so the server, a head of its own."""

    site: Site
    now: Callable[[], int]  # the present round
    frozen_head: bool = False
    kept: list[Store] = field(default_factory=list)  # of each trainer: statistics of layers that do not travel

    def state(self) -> list[dict[str, Tensor]]:
        return [dict(store.tensors) for store in self.kept]

    def restore(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        each = zip(self.kept, state, strict=True)
        found = [store.restoring({n: t for n, t in rows.items() if n in store.keeps}) for store, rows in each]
        for put in found:
            put()

    def bounds(self, width: int) -> tuple[int, ...]:
        """The columns at which tensors begin in rows of this width, and the end."""
        columns = self.site.layout.columns(self.part(width))
        slots = [s for s in self.site.layout.slots if columns.start <= s.start < columns.stop]
        return (*(s.start - columns.start for s in slots), width)

    def part(self, width: int) -> Part:
        """Which part of a model rows of this width are; of two that fit, the larger one in `SENT`'s order."""
        for part in SENT:
            if self.site.layout.size(part) == width:
                return part
        sizes = ", ".join(f"{part} {self.site.layout.size(part)}" for part in SENT)
        raise UsageError(f"rows of {width} numbers are no part of this model ({sizes}): choose another rule")

    def _way(self) -> str:
        """One row has no choice of ways worth timing."""
        on_gpu = self.site.source.device.type == "cuda" and self.site.forward.together
        forced = getattr(self.site.chooser, "forced", "auto")
        return ("graph" if on_gpu else "each") if forced == "auto" else forced

    def trainer(self, samples: int) -> Callable[[Tensor], Tensor]:
        """From what the clients start from to the server's own update: trained as clients train, on a root set."""
        chosen = root_set(self.site, samples)
        none = chosen[:0]
        training = self.site.training
        if training.factors is not None:  # as clients train in this round, but nobody's own factor
            training = replace(training, factors=replace(training.factors, clients=()))
        own = replace(
            self.site,
            training=training,
            parts={"train": [chosen], "validation": [none], "test": [none]},
            names=["server"],
            store=Store(1, {}, self.site.layout, self.site.initial),
            chooser=Chooser(self._way()),
            hold=False,
            poisoned=None,
        )
        self.kept.append(own.store)

        def update(start: Tensor) -> Tensor:
            server, part = Cohort(own, np.zeros(1, np.int64), self.now(), "root"), self.part(len(start))
            rows = server.rows(**{part: start.to(self.site.initial)})
            if part == "body" and self.frozen_head:
                rows = server.fit(rows, learn="body")
            else:
                if part != "model":  # what is not sent, the server has to find out for itself
                    rows = server.fit(rows, learn="head" if part == "body" else "body")
                rows = server.fit(rows)
            return rows[0, self.site.layout.columns(part)] - start.to(rows)

        return update


def root_set(site: Site, samples: int) -> keys.I64:
    """Samples of the server's own, as many of each class as there can be: from those that nobody has or, if they are
    too few, copies of clean training samples of the clients. Nothing that anybody is tested on."""
    labels = site.source.y[: site.source.count].cpu().numpy()
    if site.task.targets != "classes":  # no mix to keep
        labels = np.zeros(len(labels), np.int64)
    spare = np.setdiff1d(np.arange(len(labels)), np.concatenate([_all(part) for part in site.parts.values()]))
    pool = spare if len(spare) >= samples else np.unique(_all(site.parts["train"]))
    if samples > len(pool):
        raise UsageError(f"root={samples}: the clients have {len(pool)} training samples to copy; take fewer")
    pool = pool[keys.permutation(keys.key(site.seed, "root"), len(pool))]
    by_class = np.argsort(labels[pool], kind="stable")
    first = np.searchsorted(labels[pool][by_class], labels[pool][by_class])
    turn = np.empty_like(by_class)
    turn[by_class] = np.arange(len(pool)) - first  # how many of its class come before each
    return np.sort(pool[np.argsort(turn, kind="stable")[:samples]])


def _all(parts: Sequence[keys.I64]) -> keys.I64:
    return np.concatenate([*parts, np.zeros(0, np.int64)])
