"""What a run begins with that another has learnt: what of it fits, and in words what was taken over and what not.

The shared model goes by the names of the network's tensors, into the network that the new run begins with. What clients
keep goes by client, and only to the same clients: where both runs have data that clients brought themselves, these are
those of one name, and otherwise those that hold the same samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkin.compute.batches import Source
from fedkin.compute.layout import Layout, inside
from fedkin.core.store import Keep
from fedkin.data import Dataset, Split
from fedkin.errors import DataError, UsageError
from fedkin.models import Samples
from fedkin.rounds.trained import KeptRows, Trained, fingerprint, state_hash

MOST_NAMED = 6
BROUGHT = ("", "natural")
"""Partitions under which clients come with their own samples, and their names say who they are."""


@dataclass(frozen=True, eq=False)
class Taken:
    """What a run takes over from an earlier one. `facts`: from which, and what was and was not, for people."""

    tensors: Mapping[str, Tensor]
    kept: KeptRows
    facts: Mapping[str, Any]

    def into(self, network: nn.Module) -> None:
        """Put the shared model in place; `DataError`, and nothing changes, if it is of another network."""
        own = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        for name, value in self.tensors.items():
            if name not in own or own[name].shape != value.shape:
                raise DataError(f"what the run began with has a tensor {name!r:.80}, which does not fit its network")
        with torch.no_grad():
            for name, value in self.tensors.items():
                own[name].copy_(value)

    @property
    def remarks(self) -> list[str]:
        """What was taken over, and what is to be known of it, in sentences."""
        facts = self.facts
        which = f"{facts['run']} ({facts['method']}, after round {facts['round']})"
        left = f"; not taken over: {'; '.join(facts['left'])}" if facts["left"] else ""
        return [f"begins with {which}: taken over: {'; '.join(facts['taken'])}{left}", *facts["notes"]]


@dataclass(frozen=True, eq=False)
class Beginning:
    """A run that is about to begin, as far as it matters for what it can take over."""

    method: str
    keeps: Mapping[str, Keep]
    network: nn.Module
    layout: Layout
    dataset: Dataset
    split: Split
    source: Source

    def take(self, earlier: Trained, run: str) -> Taken:
        """What of an earlier run, which is called `run`, fits here; UsageError if it is another network's, or if there
        is nothing."""
        others = _others(earlier, self.layout, self.network)
        head = _reason_of_head(others, earlier.samples, self.dataset)
        facts = {"run": run, "method": earlier.config.method, "round": earlier.round}
        body = {n: why for n, why in others.items() if _in_a_body(n, earlier.layout) or _in_a_body(n, self.layout)}
        if body:
            raise UsageError(
                f"start_from={run!r}: it trained another network, so its model does not fit here: {_some(body)}; give "
                "the network that it had (model), or start without it"
            )
        taken, left = list[str](), list[str]()
        tensors = self._shared(earlier, head, taken, left)
        kept = self._kept(earlier, head, taken, left)
        if not taken:
            raise UsageError(f"start_from={run!r}: nothing of it can be taken over: {'; '.join(left)}")
        left += self._of_server(earlier)
        digest = state_hash(tensors, kept, self.split.names)
        told = {"taken": taken, "left": left, "notes": self._notes(earlier, run)}
        return Taken(tensors, kept, {**facts, "sha256": digest, **told})

    def _shared(self, earlier: Trained, head: str, taken: list[str], left: list[str]) -> dict[str, Tensor]:
        there, name = earlier.handed_on(), earlier.config.method
        here = [*(s.name for s in self.layout.slots), *self.layout.frozen]
        found = {n: there[n] for n in here if n in there and not (head and _in_a_head(n, self.layout, earlier.layout))}
        if not there:
            left.append(f"a shared model ({name} has none)")
            return found
        if found:
            what = "the shared model" if len(found) == len(here) else f"{len(found)} of {len(here)} tensors"
            numbers = sum(t.numel() for t in found.values())
            taken.append(f"{what} ({numbers:,} numbers)")
        missing = [n for n in here if n not in found]
        if head and any(_in_a_head(n, self.layout, earlier.layout) for n in missing):
            left.append(f"the head ({head})")
        elif missing:
            left.append(f"{_listed(missing)} (what {name} shares: {earlier.method.shares})")
        return found

    def _kept(self, earlier: Trained, head: str, taken: list[str], left: list[str]) -> dict[str, dict[str, Tensor]]:
        there, theirs = earlier.kept, {**type(earlier.method).keeps, "buffers": Keep("buffers")}
        wanted = {**self.keeps}
        if self.layout.buffers_policy == "local" and self.layout.size("buffers"):
            wanted["buffers"] = Keep("buffers")
        both = {n: keep for n, keep in wanted.items() if n in there and n in theirs and len(there[n]["ids"])}
        if not wanted:
            if [n for n in there if n in type(earlier.method).keeps]:
                left.append(f"what clients keep ({self.method} keeps nothing with them)")
            return {}
        if not both:
            left.append(f"what clients keep (they have no {_listed(list(wanted))} from {earlier.config.method})")
            return {}
        passing = [n for n, keep in both.items() if not (keep.lasts and theirs[n].lasts)]
        why = {n: self._unfit(keep, theirs[n], earlier.layout, head) for n, keep in both.items() if n not in passing}
        unfit = {n: reason for n, reason in why.items() if reason}
        if passing:
            left.append(f"{_listed(passing)} of clients (made anew at the end of a run)")
        if unfit:  # what a client keeps belongs together
            left.append(f"what clients keep ({_some(unfit)})")
        places, strangers = self._same_clients(earlier)
        names = [n for n in why if not unfit]
        rows = {n: _of_clients(there[n], places) for n in names}
        rows = {n: found for n, found in rows.items() if len(found["ids"])}
        if rows:
            who = np.unique(np.concatenate([found["ids"].numpy() for found in rows.values()]))
            taken.append(f"{_listed(list(rows))} of {len(who)} of {self.split.clients} clients")
        if names and strangers:
            left.append(f"{_listed(names)} of {strangers}")
        return rows

    def _unfit(self, here: Keep, there: Keep, layout: Layout, head: str) -> str:
        """Why what clients keep under a name does not fit; empty: it does."""
        if (here.what, here.dtype) != (there.what, there.dtype):
            return "the methods keep different things under this name"
        if isinstance(here.what, tuple):
            return ""
        if head and here.what not in ("body", "buffers"):
            return f"it has a head: {head}"
        return "" if _columns(self.layout, here.what) == _columns(layout, here.what) else "its tensors are others"

    def _same_clients(self, earlier: Trained) -> tuple[dict[int, int], str]:
        """The number here of each client that was there, and in words who is not the same."""
        there, here = {name: c for c, name in enumerate(earlier.names)}, self.split
        named = [(c, there[name]) for c, name in enumerate(here.names) if name in there]
        new = here.clients - len(named)
        same = named
        if earlier.split is None or not {here.partition, earlier.split.partition} <= {*BROUGHT}:
            alike = earlier.split is not None and earlier.fingerprint() == fingerprint(self.source)
            then = earlier.split
            same = [(c, o) for c, o in named if alike and then is not None and _holds(here, c) == _holds(then, o)]
        words = [f"{new} clients that are new"] if new else []
        if len(same) < len(named):
            words.append(f"{len(named) - len(same)} clients that hold other samples than those of this name did")
        return {o: c for c, o in same}, " and of ".join(words)

    def _of_server(self, earlier: Trained) -> list[str]:
        """What the server of a run of the same method remembers besides, which begins anew."""
        if earlier.config.method != self.method:
            return []
        server = earlier.method
        shared = [id(value) for value in server.shared().values()]
        own = vars(type(server)(server.options))
        names = [n for n, value in server.state().items() if n not in own and id(value) not in shared]
        return [f"the server's {_listed(names)}"] if names else []

    def _notes(self, earlier: Trained, run: str) -> list[str]:
        """What is to be said where the earlier run has trained on what is tested on here, or on other inputs."""
        notes = []
        like, pixels = earlier.samples, self.dataset.x.dtype == np.uint8
        if pixels and (like.mean, like.std) != (self.dataset.mean, self.dataset.std):
            notes.append(f"pixels are normalised otherwise here than they were in {run}, which this run begins with")
        if earlier.split is not None and earlier.fingerprint() == fingerprint(self.source):
            train, test = np.concatenate(earlier.split.train), np.concatenate(self.split.test)
            seen = int(np.isin(test, train).sum())
            if seen:
                notes.append(
                    f"{seen} of the {len(test)} test samples were training samples of {run}, which this run begins "
                    "with: the accuracy is not one on unseen samples; take the seed and the split of that run"
                )
        return notes


def _others(earlier: Trained, layout: Layout, network: nn.Module) -> dict[str, str]:
    """Tensors in which two networks differ, and how."""
    there, here = ({**{s.name: s.shape for s in of.slots}, **of.frozen} for of in (earlier.layout, layout))
    found = {n: f"{_shape(there[n])} there, {_shape(here[n])} here" for n in there if n in here and there[n] != here[n]}
    found |= {n: f"{_shape(there[n])} there, missing here" for n in there if n not in here}
    return found | {n: f"missing there, {_shape(here[n])} here" for n in here if n not in there}


def _in_a_body(name: str, layout: Layout) -> bool:
    there = name in layout.frozen or any(s.name == name for s in layout.slots)
    return there and not inside(name, layout.head_name)


def _in_a_head(name: str, *layouts: Layout) -> bool:
    return any(inside(name, layout.head_name) for layout in layouts)


def _reason_of_head(others: Mapping[str, str], like: Samples, dataset: Dataset) -> str:
    """Why the head does not fit; empty: it does."""
    if others:
        return _some(others)
    if like.targets != dataset.targets:
        return f"its outputs are for {like.targets}, and these data have {dataset.targets}"
    names = tuple(dataset.class_names) or tuple(str(i) for i in range(dataset.classes))
    if dataset.targets == "classes" and like.names() != names:
        return f"its outputs stand for other classes: {_listed(like.names())} there, {_listed(names)} here"
    return ""


def _columns(layout: Layout, part: str) -> list[tuple[str, torch.Size]]:
    """The tensors of a part of a row, in their order."""
    columns = slice(0, layout.width) if part == "row" else layout.slices[part]  # type: ignore[index]
    return [(s.name, s.shape) for s in layout.slots if columns.start <= s.start < columns.stop]


def _holds(split: Split, client: int) -> frozenset[int]:
    parts = (split.train[client], split.validation[client], split.test[client])
    return frozenset(np.concatenate(parts).tolist())


def _of_clients(found: Mapping[str, Tensor], places: Mapping[int, int]) -> dict[str, Tensor]:
    """The rows of those clients that have a place here, under their numbers here."""
    chosen = [(i, places[c]) for i, c in enumerate(found["ids"].tolist()) if c in places]
    rows = found["rows"][torch.tensor([i for i, _ in chosen], dtype=torch.int64, device=found["rows"].device)]
    return {"ids": torch.tensor([c for _, c in chosen], dtype=torch.int64), "rows": rows.detach().cpu().clone()}


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _some(reasons: Mapping[str, str]) -> str:
    named = [f"{name} ({why})" for name, why in list(reasons.items())[:MOST_NAMED]]
    more = len(reasons) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
