"""All rows as one CUDA graph: forward, backward and update of a step are replayed without the CPU.

The step reads its samples from a table on the device at a counter that it advances itself, so a whole round is a
sequence of replays. Ragged clients: a graph is captured for a handful of prefix sizes, and a step runs the smallest
one that holds all rows still training; rows resting inside it are gated off, and their share of work is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import keys
from fedkin.compute.stack import Batch, Stack, loss_of, mean_losses, step_rows
from fedkin.compute.work import Work, dropout_keys, on_device

SEGMENT = 256  # steps whose samples lie on the device at once
SIZES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.17, 0.12, 0.08, 0.05)


@dataclass
class Waste:
    """Row-steps asked for and row-steps computed: the price of fixed graph sizes."""

    useful: int = 0
    computed: int = 0


waste = Waste()


class Captured:
    """Static tensors and graphs for one kind of work with room for `rows` rows."""

    def __init__(self, work: Work, rows: int) -> None:
        device = work.rows.device
        self.rows = rows
        self.alive = (work.forward, work.source)  # the graphs point into them, and `_key` goes by their identity
        self.stack = Stack(work, rows)
        batch = work.plan.table.shape[2]
        self.table = torch.zeros(SEGMENT, rows, batch, dtype=torch.int64, device=device)
        self.sizes = torch.zeros(SEGMENT, rows, dtype=torch.int64, device=device)
        self.moves = None if work.plan.moves is None else torch.zeros_like(self.table)
        self.noise = None if work.noise is None else torch.zeros_like(self.sizes)
        gathers = work.plan.share is not None
        self.share = torch.zeros(SEGMENT, rows, device=device) if gathers else None
        self.ends = torch.zeros(SEGMENT, rows, dtype=torch.bool, device=device) if gathers else None
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.sums = torch.zeros(rows, device=device)
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.pool: Any = None

    def graph(self, work: Work, active: int, gated: bool) -> torch.cuda.CUDAGraph:
        key = (active, gated)
        if key not in self.graphs:
            self.graphs[key] = self._capture(work, active, gated)
        return self.graphs[key]

    def _capture(self, work: Work, active: int, gated: bool) -> torch.cuda.CUDAGraph:
        loss = loss_of(work, active)

        def step() -> None:
            def now(table: Tensor | None) -> Tensor | None:
                return None if table is None else table.index_select(0, self.at)[0, :active]

            chosen, size = now(self.table), now(self.sizes)
            assert chosen is not None
            assert size is not None
            batch = Batch(chosen, size, now(self.moves), now(self.noise), now(self.share), now(self.ends))
            self.sums[:active] += step_rows(work, self.stack, active, loss, batch, gated)
            self.at.add_(1)

        # Warm-up must not train: sizes of zero give gradients of zero, and a gated update leaves the rows alone.
        kept = [t.clone() for t in self._all()]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
                self.at.zero_()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step()
        self.pool = graph.pool()
        for t, before in zip(self._all(), kept, strict=True):
            t.copy_(before)
        return graph

    def _all(self) -> list[Tensor]:
        memory = [t for tensors in self.stack.memory for t in tensors]
        return [*self.stack.params.values(), *memory, *self.stack.held, self.stack.taken, self.sums, self.at]

    def fill(self, work: Work, order: keys.I64, begin: int, end: int) -> None:
        """The samples of steps begin..end; places without a row rest."""
        clients = work.client[order]
        count, span = len(order), end - begin
        device = self.table.device
        self.table[:span, :count].copy_(on_device(work.plan.table[begin:end, clients], device))
        self.sizes.zero_()
        self.sizes[:span, :count].copy_(on_device(work.plan.sizes[begin:end, clients], device))
        if self.moves is not None and work.plan.moves is not None:
            self.moves[:span, :count].copy_(on_device(work.plan.moves[begin:end, clients], device))
        for place, given in ((self.share, work.plan.share), (self.ends, work.plan.ends)):
            if place is not None and given is not None:
                place.zero_()
                place[:span, :count].copy_(on_device(given[begin:end, clients], device))
        if self.noise is not None:
            drawn = dropout_keys(work, order.tolist(), end)
            assert drawn is not None
            self.noise[:span, :count].copy_(drawn[begin:end])
        self.at.zero_()


_captured: dict[tuple[Any, ...], Captured] = {}


def forget() -> None:
    """Drop all graphs and their memory (a run does this when it ends)."""
    _captured.clear()


def _key(work: Work) -> tuple[Any, ...]:
    terms = tuple((t.name, tuple((k, v.shape[1:]) for k, v in t.given.items())) for t in work.terms)
    tensors = (work.mask, work.anchor, work.moments, work.noise, work.plan.moves, work.rates, work.plan.share)
    return (
        id(work.forward),
        id(work.source),
        work.plan.table.shape[2],
        work.rule,
        work.learn,
        work.clip,
        terms,
        tuple(t is None for t in tensors),
        work.precision,
        work.rows.device,
        work.measure,
    )


def train(work: Work) -> Tensor:
    """Train all rows through captured graphs. Returns the mean loss, [R]."""
    order = np.argsort(-work.steps, kind="stable").astype(np.int64)
    rows, key = len(order), _key(work)
    found = _captured.get(key)
    if found is None or found.rows < rows:
        found = _captured[key] = Captured(work, rows)
    found.stack.load(work, order.tolist())
    found.sums.zero_()
    counts = (work.plan.sizes[:, work.client[order]] > 0).sum(1)
    grades = sorted({max(1, int(np.ceil(found.rows * share))) for share in SIZES})
    for begin in range(0, len(counts), SEGMENT):
        end = min(begin + SEGMENT, len(counts))
        found.fill(work, order, begin, end)
        for count in counts[begin:end].tolist():
            active = next(g for g in grades if g >= count)
            found.graph(work, active, gated=active != count).replay()
            waste.useful += count
            waste.computed += active
    found.stack.write_back(work, order.tolist())
    return mean_losses(work, order, found.sums)
