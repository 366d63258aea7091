"""What one can do next with a run, each with the command to type: by how the run stands, and without what its folder
cannot give."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from fedkin.runs import checkpoint
from fedkin.runs.catalogue import runs_folder
from fedkin.runs.folder import CHECKPOINTS, RunInfo
from fedkin.web.values import text

KEYS = "--keys keys --host 0.0.0.0"


@dataclass(frozen=True)
class Step:
    """Something to do, in words, and how."""

    words: str
    command: str


def next_steps(info: RunInfo) -> list[Step]:
    """The most useful first."""
    return [Step(words, text(f"{command}{_where(info)}", 500)) for words, command in _steps(info)]


def _steps(info: RunInfo) -> Iterator[tuple[str, str]]:
    saved, run = bool(checkpoint.names(info.path / CHECKPOINTS)), info.id
    whole = saved and not info.objects  # what was given as Python objects is not in the folder
    rounds = max(info.rounds_total, info.rounds_done)
    if info.status in ("interrupted", "failed") and not info.objects:
        words = "Go on with it; its sites come back by themselves" if info.deployed else "Go on with it"
        yield words, f"fedkin server --resume {run} {KEYS}" if info.deployed else f"fedkin resume {run}"
    if info.status == "finished" and whole and not info.deployed:
        yield "Train for more rounds", f"fedkin resume {run} --rounds {2 * rounds}"
    if info.status != "running" and saved and info.deployed:
        yield "Give sites that come late a model", f"fedkin server --join {run} {KEYS}"
    if info.status == "finished" and whole and not info.deployed:
        yield "Give new clients a model", f"fedkin join {run} --data NEW.csv"
        yield "Write the clients' models as files", f"fedkin export {run} --client all --to models"
    if info.rounds_done:
        yield "Make a page of its figures to send to others", f"fedkin report {run}"
    yield "See where its numbers come from", f"fedkin show {run}"


def _where(info: RunInfo) -> str:
    """How the command finds the run, if it would not by itself."""
    parent = info.path.parent
    return "" if parent == runs_folder().resolve() else f" --runs-dir {shlex.quote(str(parent))}"
