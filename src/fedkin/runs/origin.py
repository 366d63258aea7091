"""The run that another begins with: found by its name, and fixed by the hash of its state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedkin.config import STATE_MARK, Config
from fedkin.errors import DataError, UsageError
from fedkin.rounds.trained import Trained
from fedkin.runs import checkpoint
from fedkin.runs.catalogue import Catalogue
from fedkin.runs.folder import CHECKPOINTS, RunFolder, read_json
from fedkin.runs.restore import as_it_was, check_readable

SHOWN = 16  # digits of the hash that stand beside the name


def resolved(config: Config) -> Config:
    """The configuration with the full name of the run that it starts from, and the hash of the state to begin with."""
    said = config.start_from
    if said is None or STATE_MARK in said:
        return config
    run = Catalogue(config.runs_dir).locate(said)
    check_readable(run)
    found = checkpoint.names(run.path / CHECKPOINTS)[0]
    where = run.info.id if os.sep not in said else str(run.path)
    return replace(config, start_from=_named(where, _hash(run, found)), given=config.asked)


def check_repeatable(said: Any) -> None:
    """UsageError for `last`, where the same call is to go on with its runs: they would be the last ones then."""
    if said == "last":
        raise UsageError(
            "start_from='last': given again, the same call would begin with the last of its own runs, and not go on; "
            "give the run's name (fedkin runs lists them)"
        )


def name_of(config: Config) -> str:
    """The run that it starts from, without the hash; empty if it starts from none."""
    return (config.start_from or "").partition(STATE_MARK)[0]


def of_result(trained: Trained, run: str | None) -> str:
    """What `start_from` says of a result in memory."""
    return _named(Path(run).name if run else f"a result of {trained.config.method}", trained.state_hash())


def with_origin(config: Config, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` as Python objects, and with it what the run is to begin with, if its settings name an earlier one."""
    if config.start_from is None or "begin_with" in given:
        return dict(given)
    config = resolved(config)
    name, _, digest = str(config.start_from).rpartition(STATE_MARK)
    run = Catalogue(config.runs_dir).locate(name)
    check_readable(run)
    newest = checkpoint.names(run.path / CHECKPOINTS)[0]
    if _hash(run, newest)[:SHOWN] != digest:
        raise DataError(
            f"start_from={config.start_from!r}: run {run.info.id!r} has gone on since, or is another; give its name "
            "alone to begin with what it has now"
        )
    device = config.device if "device" in config.asked else None
    return {**given, "begin_with": Trained.of(as_it_was(run, device, only=newest).as_kept())}


def _named(name: str, digest: str) -> str:
    return f"{name}{STATE_MARK}{digest[:SHOWN]}"


def _hash(run: RunFolder, name: str) -> str:
    return str(read_json(run.path / CHECKPOINTS / f"{name}.json", 1 << 16).get("sha256"))
