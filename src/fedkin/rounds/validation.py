"""What is chosen by validation scores while a run goes on: when to stop, and whose models to keep.

When to stop follows from the records alone, so a run that was resumed stops where it would have stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedkin.config import Config
from fedkin.errors import UsageError
from fedkin.rounds.records import RoundRecord

if TYPE_CHECKING:
    from fedkin.rounds.job import Job


def check(config: Config, validates: bool) -> None:
    """UsageError where a choice on validation samples is asked for and there are none."""
    asked = {"patience": config.patience is not None, "keep": config.keep == "best"}
    for name in (name for name, given in asked.items() if given and not validates):
        raise UsageError(
            f"{name}={getattr(config, name)!r} goes by validation samples, and none are set aside: give "
            "validation_share, for example validation_share=0.2 (--validation-share 0.2)"
        )


def check_scored(config: Config, given: bool = False) -> None:
    """UsageError where a search is to go by validation scores and there are none. `given`: data that may have some."""
    if not config.validation_share and not given:
        raise UsageError(
            "settings are tuned on validation samples, and none are set aside: give validation_share, for example "
            "validation_share=0.2 (--validation-share 0.2)"
        )


def waited(history: Sequence[RoundRecord], min_gain: float = 0.0) -> int:
    """How many evaluations ago the validation score last was better than before by more than `min_gain`. Those whose
    score cannot be computed do not count, nor does what comes after the last round."""
    best, since = -math.inf, 0
    for record in history:
        if record.final or math.isnan(record.choice):
            continue
        better = record.choice > best + min_gain
        best, since = (record.choice, 0) if better else (best, since + 1)
    return since


def stopped(history: Sequence[RoundRecord], config: Config) -> int | None:
    """After which round training has stopped early; None: it has not."""
    if config.patience is None or waited(history, config.min_gain) < config.patience:
        return None
    at = max(record.round for record in history)
    return at if at < config.rounds else None


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that the personal models after a record are made of: what the method's server half remembers, and what
    clients keep."""

    round: int
    final: bool
    method: Mapping[str, Any]
    clients: Mapping[str, Any]

    @classmethod
    def of(cls, job: Job, record: RoundRecord) -> Snapshot:
        return cls(record.round, record.final, deepcopy(job.method.state()), deepcopy(job.site.store.state()))

    def record(self, history: Sequence[RoundRecord]) -> RoundRecord:
        return next(r for r in history if (r.round, r.final) == (self.round, self.final))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return dict(vars(self))
