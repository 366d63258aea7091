"""More rounds for a run than it was begun with: only where they give what a run with as many from the start gives."""

from __future__ import annotations

from dataclasses import replace

from fedkin.config import Config
from fedkin.errors import DataError, UsageError
from fedkin.rounds import Job
from fedkin.rounds.choices import factors_of
from fedkin.runs.folder import RunFolder, RunInfo
from fedkin.runs.restore import Say, check_same, sound_checkpoints


def longer(info: RunInfo, config: Config, rounds: int) -> Config:
    """The run's configuration with another number of rounds."""
    if rounds <= info.rounds_done:
        raise UsageError(
            f"rounds={rounds}: run {info.id!r} has done {info.rounds_done} rounds, which stay done; give more than that"
        )
    changed = replace(config, rounds=rounds, given={*config.asked, "rounds"})
    before, now = factors_of(config), factors_of(changed)
    for round in range(info.rounds_done):
        if (before.in_round(round) if before else 1.0) != (now.in_round(round) if now else 1.0):
            raise UsageError(_instead(info, rounds, f"its learning rates (lr_schedule={config.lr_schedule}) follow"))
    return changed


def check_longer(job: Job, run: RunFolder, say: Say) -> None:
    """Whether this job, which has another number of rounds, can go on where the run is; nothing changes."""
    check_same(job, run)
    found = next(sound_checkpoints(job, run, say), None)
    if found is None:
        raise DataError(f"run {run.info.id!r} has no sound checkpoint to go on from; start a new run")
    if found.rounds_matter:
        follows = f"its method ({run.info.method}) asks how many rounds there will be, and what it does follows"
        raise UsageError(_instead(run.info, job.config.rounds, follows))


def _instead(info: RunInfo, rounds: int, follows: str) -> str:
    return (
        f"rounds={rounds}: {follows} the number of rounds, so that what run {info.id!r} has done is not what a run of "
        f"{rounds} does; start a new run with rounds={rounds}"
    )
