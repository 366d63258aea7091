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
from fedkin.data.sample_keys import Keys
from fedkin.errors import DataError, UsageError
from fedkin.models import Samples
from fedkin.preparation import scaled_otherwise
from fedkin.rounds.seen import Seen, keys_of
from fedkin.rounds.trained import KeptRows, Trained, state_hash

MOST_NAMED = 6
BROUGHT = ("", "natural")
"""Partitions under which clients come with their own samples, and their names say who they are."""


@dataclass(frozen=True, eq=False)
class Taken:
    """What a run takes over from an earlier one. `facts`: from which, and what was and was not, for people.
    `seen`: what that one had trained on."""

    tensors: Mapping[str, Tensor]
    kept: KeptRows
    facts: Mapping[str, Any]
    seen: Seen
    spoilt: int = 0  # samples for validation that were trained on

    def into(self, network: nn.Module) -> None:
        """Put the shared model in place; `DataError`, and nothing changes, if it is of another network."""
        own = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        for name, value in self.tensors.items():
            if name not in own or own[name].shape != value.shape:
                raise DataError(f"what the run began with has a tensor {name!r:.80}, which does not fit its network")
            if isinstance(own[name], nn.Parameter) and not torch.isfinite(value).all():
                raise DataError(f"what the run is to begin with has weights in {name!r:.80} that are not finite")
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
        _check_columns(earlier.samples, self.dataset, run)
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
        names = _class_names(self.dataset) if self.dataset.targets == "classes" else ()
        there, here = earlier.keys(), keys_of(self.source, names)
        kept = self._kept(earlier, head, self._same_clients(earlier, there, here), taken, left)
        if not taken:
            raise UsageError(f"start_from={run!r}: nothing of it can be taken over: {'; '.join(left)}")
        left += self._of_server(earlier)
        digest = state_hash(tensors, kept, self.split.names)
        seen = Seen.by(there, earlier.split, earlier.before)
        said = seen.remarks(run, here, self.split)
        told = {"taken": taken, "left": left, "notes": [*self._notes(earlier, run), *said], "seen": said}
        return Taken(tensors, kept, {**facts, "sha256": digest, **told}, seen, seen.spoils(here, self.split))

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

    def _kept(
        self, earlier: Trained, head: str, same: tuple[dict[int, int], str], taken: list[str], left: list[str]
    ) -> dict[str, dict[str, Tensor]]:
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
        places, strangers = same
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

    def _same_clients(self, earlier: Trained, keys: Keys | None, own: Keys) -> tuple[dict[int, int], str]:
        """The number here of each client that was there, and in words who is not the same."""
        there, here, then = {name: c for c, name in enumerate(earlier.names)}, self.split, earlier.split
        same: dict[int, int] = {}
        if then is not None and _named(then) and _named(here):
            same = {there[name]: c for c, name in enumerate(here.names) if name in there}
        elif then is not None and keys is not None:
            where = {_holds(then, o, keys): o for o in range(then.clients)}
            found = [(where.get(_holds(here, c, own)), c) for c in range(here.clients)]
            same = {o: c for o, c in found if o is not None}
        others = [name for c, name in enumerate(here.names) if c not in same.values()]
        new = sum(name not in there for name in others)
        words = [f"{new} clients that are new"] if new else []
        if new < len(others):
            words.append(f"{len(others) - new} clients that hold other samples than those of this name did")
        return same, " and of ".join(words)

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
        """What is to be said where the earlier run has trained on other inputs."""
        notes = []
        like, pixels = earlier.samples, self.dataset.x.dtype == np.uint8
        if pixels and (like.mean, like.std) != (self.dataset.mean, self.dataset.std):
            notes.append(f"pixels are normalised otherwise here than they were in {run}, which this run begins with")
        if bool(like.columns) != bool(self.dataset.columns):
            notes.append(
                f"only one of this run and {run}, which it begins with, has samples from a table with named columns: "
                "whether its inputs mean the same here cannot be told"
            )
        elif said := scaled_otherwise(like.preparations, self.dataset.preparations):
            notes.append(f"a table is prepared otherwise here than in {run}, which this run begins with: {said}")
        return notes


def _check_columns(like: Samples, dataset: Dataset, run: str) -> None:
    """UsageError if both are tables and an input is another column, or another word of a category."""
    there, here = like.columns, dataset.columns
    if not there or not here or there == here:
        return
    if sorted(there) == sorted(here):
        place = next(i for i, (a, b) in enumerate(zip(there, here, strict=True)) if a != b)
        why = f"the columns stand in another order: input {place + 1} was {there[place]!r} and is {here[place]!r} here"
    else:
        gone, new = ([n for n in a if n not in b] for a, b in ((there, here), (here, there)))
        said = [f"{_listed(names)} {where}" for names, where in ((gone, "only there"), (new, "only here")) if names]
        why = f"the inputs are other columns, or other words of categories: {'; '.join(said)}"
    raise UsageError(
        f"start_from={run!r}: its model does not fit these tables: {why}; bring the tables into the form that run had, "
        "or start without it"
    )


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
    names = _class_names(dataset)
    if dataset.targets == "classes" and like.names() != names:
        return f"its outputs stand for other classes: {_listed(like.names())} there, {_listed(names)} here"
    return ""


def _class_names(dataset: Dataset) -> tuple[str, ...]:
    return tuple(dataset.class_names) or tuple(str(i) for i in range(dataset.classes))


def _columns(layout: Layout, part: str) -> list[tuple[str, torch.Size]]:
    """The tensors of a part of a row, in their order."""
    columns = slice(0, layout.width) if part == "row" else layout.slices[part]  # type: ignore[index]
    return [(s.name, s.shape) for s in layout.slots if columns.start <= s.start < columns.stop]


def _named(split: Split) -> bool:
    """Whether the names of its clients say who they are."""
    return split.partition in BROUGHT and split.named


def _holds(split: Split, client: int, keys: Keys) -> bytes:
    """What a client has, in whatever order."""
    parts = (split.train[client], split.validation[client], split.test[client])
    return np.sort(keys[np.concatenate(parts)]).tobytes()


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
