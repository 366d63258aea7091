"""Many runs at once: their training meets here and goes on as more rows of one program.

A GPU is mostly idle with twenty small clients. Each run is a thread, but only one of them moves at a time: it goes on
until it wants to train or is done. When all have come to that point, jobs of the same kind are laid together, trained
as one, and handed back. Nothing else is shared, so a run gets the rows it would have got alone (up to rounding where
the number of rows changes how a device computes).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkin.compute.batches import Plan
from fedkin.compute.choice import Chooser
from fedkin.compute.optim import Moments
from fedkin.compute.program import Program
from fedkin.compute.work import Work

T = TypeVar("T")
MOST_ROWS = 1024  # trained as one


class Stopped(BaseException):
    """All runs were called off while this one was waiting."""


class _Member(Generic[T]):
    """One run: its thread, what it wants trained, and what came of it."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.work: Work | None = None
        self.losses: Tensor | None = None
        self.error: Exception | None = None  # of the training it asked for
        self.outcome: T | Exception | None = None
        self.fatal: BaseException | None = None  # an interrupt: it ends them all
        self.done = False


class _SharedChooser(Chooser):
    """The chooser that a run is given: it waits for the others, and the real one trains for all."""

    shared = True

    def __init__(self, lockstep: Lockstep, member: _Member[object]) -> None:
        super().__init__(lockstep.chooser.forced)
        self._lockstep, self._member = lockstep, member
        self.chosen = lockstep.chooser.chosen

    def train(self, work: Work) -> Tensor:
        self.client_steps += int(work.steps.sum())
        return self._lockstep.wait(self._member, work)


class Lockstep:
    """Runs that train together. `chooser` says how; `most_rows` bounds what is laid together."""

    def __init__(self, chooser: Chooser, most_rows: int = MOST_ROWS) -> None:
        self.chooser, self._most = chooser, most_rows
        self._back = threading.Semaphore(0)
        self._called_off = False

    def run(self, tasks: Sequence[Callable[[Chooser], T]]) -> list[T | Exception]:
        """Each task with its chooser, to the end; a task's exception is its outcome and does not stop the others."""
        members: list[_Member[T]] = [_Member() for _ in tasks]
        threads = [
            threading.Thread(target=self._live, args=(member, task), daemon=True)
            for member, task in zip(members, tasks, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            moving = members
            while moving:
                for member in moving:
                    self._let_go(member)
                moving = [m for m in moving if not m.done]
                self._train([m for m in moving if m.work is not None])
        except BaseException:
            self._called_off = True
            for member in members:
                if not member.done:
                    self._let_go(member)
            raise
        return [m.outcome for m in members if m.outcome is not None]

    def wait(self, member: _Member[object], work: Work) -> Tensor:
        """Called by a run: hand in a job and sleep until it is done."""
        member.work = work
        self._back.release()
        member.go.acquire()
        if self._called_off:
            raise Stopped
        member.work, losses, error = None, member.losses, member.error
        member.losses = member.error = None
        if error is not None:
            raise error
        assert losses is not None
        return losses

    def _live(self, member: _Member[T], task: Callable[[Chooser], T]) -> None:
        member.go.acquire()
        try:
            if not self._called_off:
                member.outcome = task(_SharedChooser(self, member))  # type: ignore[arg-type]
        except Stopped:
            pass
        except Exception as error:
            member.outcome = error
        except BaseException as error:
            member.fatal = error
        finally:
            member.done = True
            self._back.release()

    def _let_go(self, member: _Member[T]) -> None:
        member.go.release()
        self._back.acquire()
        if member.fatal is not None and not self._called_off:
            raise member.fatal

    def _train(self, members: Sequence[_Member[T]]) -> None:
        groups: dict[Hashable, list[_Member[T]]] = {}
        for member in members:
            assert member.work is not None
            groups.setdefault(_signature(member.work), []).append(member)
        for group in groups.values():
            for some in _portions(group, self._most):
                try:
                    works = [m.work for m in some if m.work is not None]
                    for member, losses in zip(some, train_as_one(works, self.chooser), strict=True):
                        member.losses = losses
                except Exception as error:  # the runs that asked for this get to know, the others go on
                    for member in some:
                        member.error = error


def _portions(group: Sequence[_Member[T]], most: int) -> list[list[_Member[T]]]:
    portions: list[list[_Member[T]]] = [[]]
    rows = 0
    for member in group:
        assert member.work is not None
        if portions[-1] and rows + len(member.work.rows) > most:
            portions.append([])
            rows = 0
        portions[-1].append(member)
        rows += len(member.work.rows)
    return portions


def _signature(work: Work) -> Hashable:
    """Jobs of the same kind can be laid together: same network, data, optimiser (but for its rate), losses, parts."""
    network = work.forward.signature if isinstance(work.forward, Program) else id(work.forward)
    terms = tuple((t.name, t.value, tuple((k, v.shape[1:], v.dtype) for k, v in t.given.items())) for t in work.terms)
    parts = (work.mask is None, work.mu is None, work.moments is None, work.noise is None, work.plan.moves is None)
    shape = tuple((s.name, s.shape) for s in work.layout.slots)
    return (
        network,
        shape,
        id(work.source),
        work.plan.table.shape[2],
        replace(work.opt, lr=1.0),
        work.learn,
        (work.clip, work.plan.share is None),
        terms,
        parts,
        work.precision,
        work.rows.device,
    )


def train_as_one(works: Sequence[Work], chooser: Chooser) -> list[Tensor]:
    """Lay jobs of one kind together, train, and put rows and memories back. Returns each job's losses."""
    if len(works) == 1:
        return [chooser.train(works[0])]
    whole = _joined(works)
    losses = chooser.train(whole)
    ends = np.cumsum([len(w.rows) for w in works]).tolist()
    spans = [slice(end - len(w.rows), end) for end, w in zip(ends, works, strict=True)]
    for work, span in zip(works, spans, strict=True):
        work.rows.copy_(whole.rows[span])
        if work.moments is not None and whole.moments is not None:
            for mine, all_rows in zip(work.moments.buffers, whole.moments.buffers, strict=True):
                mine.copy_(all_rows[span])
            work.moments.steps.copy_(whole.moments.steps[span])
    return [losses[span] for span in spans]


def _joined(works: Sequence[Work]) -> Work:
    first = works[0]

    def cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
        found = [t for t in tensors if t is not None]
        return torch.cat(found) if found else None

    offsets = np.cumsum([0, *(w.plan.table.shape[1] for w in works)])
    terms = [
        replace(term, given={k: torch.cat([w.terms[i].given[k] for w in works]) for k in term.given})
        for i, term in enumerate(first.terms)
    ]
    moments = None
    if first.moments is not None:
        memories = [w.moments for w in works if w.moments is not None]
        buffers = [torch.cat([m.buffers[b] for m in memories]) for b in range(len(first.moments.buffers))]
        moments = Moments(buffers, torch.cat([m.steps for m in memories]))
    rows = torch.cat([w.rows for w in works])
    return replace(
        first,
        rows=rows,
        client=np.concatenate([w.client + o for w, o in zip(works, offsets, strict=False)]),
        plan=_side_by_side([w.plan for w in works]),
        terms=terms,
        mask=_cat_masks(works),
        mu=cat([w.mu for w in works]),
        anchor=cat([w.anchor for w in works]),
        rates=_rates(works),
        moments=moments,
        noise=None if first.noise is None else np.concatenate([w.noise for w in works if w.noise is not None]),
    )


def _rates(works: Sequence[Work]) -> Tensor | None:
    """Each run's own, where they differ."""
    if all(w.rates is None and w.opt == works[0].opt for w in works):
        return None
    own = (torch.full((len(w.rows),), w.opt.lr, device=w.rows.device) if w.rates is None else w.rates for w in works)
    return torch.cat(list(own))


def _cat_masks(works: Sequence[Work]) -> Tensor | None:
    if works[0].mask is None:
        return None
    return torch.cat([w.mask.expand(len(w.rows), -1) for w in works if w.mask is not None])


def _side_by_side(plans: Sequence[Plan]) -> Plan:
    """The clients of all plans; those of shorter plans rest at the end."""
    steps = max(len(p.table) for p in plans)

    def together(arrays: Iterable[NDArray[Any] | None]) -> Any:
        found = [np.pad(a, [(0, steps - len(a)), *[(0, 0)] * (a.ndim - 1)]) for a in arrays if a is not None]
        return np.concatenate(found, 1) if found else None

    return Plan(*(together(getattr(p, f.name) for p in plans) for f in fields(Plan)))
