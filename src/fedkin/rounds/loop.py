"""A job to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fedkin.compute import graphs
from fedkin.config import Config
from fedkin.errors import UsageError
from fedkin.rounds.assemble import prepare
from fedkin.rounds.job import Job
from fedkin.rounds.records import Listener, RoundRecord, StopTraining
from fedkin.rounds.result import Result

AfterRound = Callable[[Job, RoundRecord | None], None]
"""Told after every round, evaluated or not, before anybody else; it may end the run by raising."""


def run_config(config: Config, *, on_event: Listener | None = None, **given: Any) -> Result:
    """Run to the end. `given`: see `prepare`."""
    return drive(prepare(config, **given), on_event)


def drive(
    job: Job,
    on_event: Listener | None = None,
    after_round: AfterRound | None = None,
    on_halt: Callable[[Job], None] = lambda job: None,
) -> Result:
    """The rounds that are left of a job, and its result. `on_halt` is told where a listener ended the training."""
    notify = on_event or (lambda event: None)
    try:
        notify(replace(job.prepared, done=job.fed.round))
    except StopTraining:
        raise UsageError(
            "StopTraining before a round: there is nothing to keep; raise it after an evaluated round"
        ) from None
    try:
        while not job.finished:
            record = job.advance() if not job.no_rounds_left else job.finish()
            if after_round is not None:
                with job.clock.counting("writing"):
                    after_round(job, record)
            if record is None:
                continue
            try:
                notify(record)
            except StopTraining as stop:
                if job.halt(str(stop)):
                    with job.clock.counting("writing"):
                        on_halt(job)
        return job.result()
    finally:
        if torch.device(job.prepared.device).type == "cuda" and not job.site.chooser.shared:
            graphs.forget()
