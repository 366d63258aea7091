"""What several commands take besides settings: files of the user's own, and sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        help="Run this file of your own first: it registers methods, attacks "
        "or rules. Can be repeated. Give only files that you trust.",
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


def use_plugins(files: Sequence[str] | None) -> None:
    """Runs the files given with --plugin."""
    if files:
        from fedkin.plugins import load

        for file in files:
            load(file)


def sinks_of(specs: Sequence[str] | None) -> list[str]:
    """The sinks given with --sink, checked before anything is run."""
    if not specs:
        return []
    from fedkin.runs.sinks import check_sinks

    return check_sinks(specs)
