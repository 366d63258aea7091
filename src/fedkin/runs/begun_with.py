"""What a run began with that another had learnt, kept in its own folder: it can go on whatever becomes of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkin.errors import DataError
from fedkin.rounds import Job
from fedkin.rounds.seen import Seen
from fedkin.rounds.warm import Taken
from fedkin.runs import checkpoint
from fedkin.runs.folder import CHECKPOINTS, RunInfo

START = "start"
"""What the file is called, among the run's checkpoints."""


def save(folder: Path, job: Job) -> None:
    """Keep what a run begins with in its folder."""
    if job.taken is not None:
        state = {"tensors": dict(job.taken.tensors), "kept": {k: dict(v) for k, v in job.taken.kept.items()}}
        state["seen"] = job.taken.seen.state()
        with checkpoint.writing(folder / CHECKPOINTS / START):
            checkpoint.save(folder / CHECKPOINTS, START, 0, state)


def kept(info: RunInfo) -> Taken | None:
    """What a run began with, from its folder; None if with nothing."""
    facts = info.began_with
    if not facts:
        return None
    try:
        state = checkpoint.load(info.path / CHECKPOINTS, START, torch.device("cpu"), np.zeros(0, np.int64))
        rows = {k: _rows(v) for k, v in state["kept"].items()}
        return Taken(dict(state["tensors"]), rows, facts, Seen.of_state(state.get("seen")))
    except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"run {info.id!r} began with what another had learnt, and its copy of that cannot be read ({error}): "
            f"bring checkpoints/{START}.safetensors and .json back from a backup, or start a new run"
        ) from None


def _rows(saved: Any) -> dict[str, Tensor]:
    return {name: saved[name] for name in ("ids", "rows")}
