"""What a run has trained and its server has: the models of those who come late begin with it, and so do other runs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedkin.compute.batches import Source
from fedkin.compute.layout import Layout
from fedkin.config import Config
from fedkin.data import Split
from fedkin.data.sample_keys import Keys
from fedkin.errors import UsageError
from fedkin.methods import Method
from fedkin.models import Samples
from fedkin.rounds.seen import Seen, keys_of
from fedkin.tasks import Task

if TYPE_CHECKING:
    from fedkin.rounds.job import Job

FINGERPRINT = 1000  # samples whose values are looked at to tell whether the data are still the same
KeptRows = Mapping[str, Mapping[str, Tensor]]
"""For each thing that clients keep, who has written it (`ids`), and their `rows`."""


def fingerprint(source: Source) -> str:
    """Of the samples themselves: all labels, and the values of some hundred samples spread over the set."""
    digest, step = hashlib.sha256(), max(1, source.count // FINGERPRINT)
    digest.update(str(tuple(source.x.shape[1:])).encode())
    digest.update(source.y[: source.count].cpu().numpy().tobytes())
    digest.update(source.x[: source.count : step].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def state_hash(tensors: Mapping[str, Tensor], kept: KeptRows, names: Sequence[str]) -> str:
    """sha256 over tensors by name, and over what clients of these names keep."""
    digest = hashlib.sha256()

    def add(name: str, tensor: Tensor) -> None:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    for name, tensor in sorted(tensors.items()):
        add(name, tensor)
    for name, found in sorted(kept.items()):
        digest.update(" ".join(names[c] for c in found["ids"].tolist()).encode())
        add(name, found["rows"])
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Trained:
    """A run's server half as it is after a round, and what there has to be known of the run to use it."""

    config: Config
    network: nn.Module
    layout: Layout
    samples: Samples
    task: Task
    initial: Tensor  # [D], the first model that all clients had
    names: Sequence[str]
    sizes: Sequence[int]  # training samples of each client
    round: int
    eval_point: str
    device: torch.device
    precision: str
    split_hash: str
    split: Split | None  # None: only the clients know which samples they have
    _method: Callable[[], Method]
    _kept: Callable[[], KeptRows]
    before: Seen | None  # what the run had seen that it began with
    _keys: Callable[[], Keys]

    @classmethod
    def of(cls, job: Job) -> Trained:
        then, fed, server = (job.fed.round, len(job.fed.exchanges)), job.fed, job.method
        site = job.site

        def method() -> Method:
            if then != (fed.round, len(fed.exchanges)):
                raise UsageError(
                    f"this result is of round {then[0]}, and its run has gone on since: use it before, or call "
                    "result() again"
                )
            return server

        return cls(
            job.config,
            job.model,
            job.site.layout,
            job.samples,
            job.site.task,
            job.site.initial,
            job.site.names,
            [train for train, _ in job.sizes],
            fed.round,
            job.prepared.eval_point,
            job.site.source.device,
            job.site.training.precision,
            job.prepared.split_hash,
            job.split,
            method,
            lambda: site.store.state(),
            None if job.taken is None else job.taken.seen,
            lambda: keys_of(site.source, job.samples.names() if job.samples.targets == "classes" else ()),
        )

    @property
    def method(self) -> Method:
        return self._method()

    def first(self) -> Tensor:
        """What a client begins with that comes now: what is shared, and otherwise the first model, [D]."""
        return self._row(self.method.shared())[0]

    @property
    def kept(self) -> KeptRows:
        """What each client keeps."""
        self._method()  # which may be of a later round by now
        return self._kept()

    def keys(self) -> Keys | None:
        """What tells its samples from each other; None where only the clients know them."""
        return None if self.split is None else self._keys()

    def handed_on(self) -> dict[str, Tensor]:
        """What all have in common and another run can begin with, by the names of the network's tensors: the shared
        model, or the part that is shared; and what is frozen."""
        common = self.method.common()
        row, known = self._row(common or self.method.shared())
        if common:  # the rest of a common model is that of the first one
            known[self.layout.columns("model")] = True
        found = self.layout.tensors(row.cpu())
        shared = {s.name: found[s.name].clone() for s in self.layout.slots if known[s.start : s.stop].all()}
        own = dict(self.network.named_parameters())
        return {**shared, **({n: own[n].detach().cpu().clone() for n in self.layout.frozen} if shared else {})}

    def state_hash(self) -> str:
        """Of all that another run can begin with."""
        return state_hash(self.handed_on(), self.kept, self.names)

    def model(self) -> nn.Module | None:
        """The network with the model that all share; None if the method has none."""
        common = self.method.common()
        return self.network_with(self._row(common)[0]) if common else None

    def network_with(self, row: Tensor) -> nn.Module:
        """The run's network with the weights of a row."""
        return self.layout.load(copy.deepcopy(self.network), row.cpu())

    def _row(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The first model with these parts in place, and which of its columns they are."""
        row, known = self.initial.clone(), torch.zeros(self.layout.width, dtype=torch.bool)
        for part, values in parts.items():
            columns = self.layout.columns(part)  # type: ignore[arg-type]
            row[columns], known[columns] = values.to(row), True
        return row, known
