"""What several commands take besides settings: files of the user's own, sinks, and how a grid of runs is spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fedkin.errors import UsageError

Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py[:NAME]",
        help="Run this file of your own first: it registers methods, attacks, "
        "rules, networks, tasks or data; with :NAME, what it calls NAME is a network. Can be repeated. Give only files "
        "that you trust.",
    ),
]
SinkFlags = Annotated[
    list[str] | None,
    typer.Option(
        "--sink",
        metavar="NAME[:WHERE]",
        help="Also send metrics to tensorboard\\[:DIR], mlflow\\[:URI] or wandb\\[:PROJECT]. Can be repeated.",
    ),
]

Together = Annotated[
    int | None,
    typer.Option(
        "--together",
        metavar="N",
        min=1,
        help="The number of runs that train at once on a device. \\[default: 8 on a GPU, else 1]",
    ),
]
Jobs = Annotated[
    int,
    typer.Option("--jobs", metavar="N", min=1, help="The number of processes that share the work and the devices."),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="A,B,...",
        help="Spread the runs over these devices, each with a process of its own. Example: cuda:0,cuda:1",
    ),
]
Budget = Annotated[
    float | None, typer.Option("--budget", metavar="MINUTES", min=0, help="Begin no new run after so many minutes.")
]


def spread(together: int | None, jobs: int, devices: str | None, budget: float | None, device: str) -> dict[str, Any]:
    """These four for the runner of grids; `device` is the one of runs that are not spread."""
    from fedkin.sweep.runner import together_by_default

    places = [word.strip() for word in devices.split(",")] if devices else []
    if "" in places:
        raise UsageError(f"--devices {devices!r}: names with commas between, as in cuda:0,cuda:1")
    return {
        "together": together or together_by_default(places[0] if places else device),
        "jobs": max(jobs, len(places)),
        "devices": places,
        "budget": None if budget is None else 60 * budget,
    }


def use_plugins(files: Sequence[str] | None) -> None:
    """Runs the files given with --plugin."""
    if files:
        from fedkin.plugins import give

        for file in files:
            give(file)


def sinks_of(specs: Sequence[str] | None) -> list[str]:
    """The sinks given with --sink, checked before anything is run."""
    if not specs:
        return []
    from fedkin.runs.sinks import check_sinks

    return check_sinks(specs)
