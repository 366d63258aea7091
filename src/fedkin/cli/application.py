"""The application, and how a command joins it: with an example in its help, errors in words, flags for settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from fedkin.cli.console import guarded
from fedkin.cli.flags import with_settings
from fedkin.cli.spoken import Spoken

app = typer.Typer(
    name="fedkin",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)

TRAIN, LOOK, RUNS, USE = "Train", "Look at what there is", "Look at what was run", "Use personal models"
MAKE, DEPLOY = "Make your own", "Deploy"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="One of the method's own options; can be repeated."),
]
RunsDir = Annotated[
    str | None,
    typer.Option("--runs-dir", metavar="DIR", help="Where runs are kept (default: FEDKIN_RUNS, else ./runs)."),
]


def command(
    name: str,
    example: str,
    panel: str | None = None,
    settings: Callable[[], set[str] | None] | None = None,
    within: typer.Typer = app,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command (`within`: below which other); one that was registered under this name before gives way."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        lines = "\n\n".join(f"[cyan]{line.strip()}[/]".replace("[:", "\\[:") for line in example.strip().splitlines())
        ready = guarded(function) if settings is None else with_settings(settings())(guarded(function))
        prose = paragraphs(function.__doc__ or "")
        about = "\n\n".join([*prose, "[bold]Example[/]", lines])
        within.registered_commands[:] = [c for c in within.registered_commands if c.name != name]
        within.command(name, cls=Spoken, rich_help_panel=panel, short_help=prose[0], help=about)(ready)
        return function

    return add


def paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split("\n\n")]


def everything() -> None:
    """All settings."""
    return None
