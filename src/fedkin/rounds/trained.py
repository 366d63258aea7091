"""What a run has trained and its server has: the models of those who come late begin with it, and so do other runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedkin.compute.layout import Layout
from fedkin.config import Config
from fedkin.errors import UsageError
from fedkin.methods import Method
from fedkin.models import Samples
from fedkin.tasks import Task

if TYPE_CHECKING:
    from fedkin.rounds.job import Job


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
    _method: Callable[[], Method]

    @classmethod
    def of(cls, job: Job) -> Trained:
        then, fed, server = (job.fed.round, len(job.fed.exchanges)), job.fed, job.method

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
            method,
        )

    @property
    def method(self) -> Method:
        return self._method()

    def first(self) -> Tensor:
        """What a client begins with that comes now: what is shared, and otherwise the first model, [D]."""
        return self._row(self.method.shared())[0]

    def shared(self) -> dict[str, Tensor]:
        """What the server has for everybody, by the names of the network's tensors."""
        row, known = self._row(self.method.shared())
        found = self.layout.tensors(row.cpu())
        return {s.name: found[s.name] for s in self.layout.slots if known[s.start : s.stop].all()}

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
