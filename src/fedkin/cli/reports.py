"""`fedkin report`: what was run, as a page and as figures."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedkin.cli.application import RUNS, Json, RunsDir, command
from fedkin.cli.console import messages, print_json, screen
from fedkin.errors import UsageError

if TYPE_CHECKING:
    from fedkin.runs.catalogue import Catalogue
    from fedkin.runs.folder import RunFolder


@command(
    "report",
    """
    fedkin report last
    fedkin report fedavg-20261115-171502-a3f9 fedcap-20261115-171730-09bc --to comparison
    fedkin report 'fedcap-*' --to fedcap --format html,png
    """,
    RUNS,
)
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Runs: a name or its beginning, a pattern, a folder of runs, last, or all."
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="The folder to write to (default: the run's own folder; for several runs ./fedkin-report).",
        ),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", metavar="LIST", help="The formats, with commas between: html, png, svg.")
    ] = "html",
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Write a report: one HTML page that needs nothing beside it, and the figures as PNG or SVG.

    Several runs make one report; those that differ only in the seed are averaged. If a run of the
    method local is among them, the report also shows what each client gains over training alone.
    """
    formats = [part.strip() for part in format.split(",") if part.strip()]
    if not formats:
        raise UsageError("format is empty: accepts html, png, svg, with commas between")

    from fedkin.report.page import write_report
    from fedkin.runs.catalogue import Catalogue

    catalogue = Catalogue(runs_dir)
    folders = [folder for word in runs for folder in _named(catalogue, word)]
    target = to if to is not None or len({f.path for f in folders}) == 1 else Path("fedkin-report")
    files, gaps = write_report(folders, target, formats)
    if json:
        print_json(
            {
                "files": [str(f) for f in files],
                "runs": [f.info.id for f in folders],
                "left_out": [{"figure": g.title, "why": g.why} for g in gaps],
            }
        )
        return
    for sentence in dict.fromkeys(f"{gap.title} is left out: {gap.why}" for gap in gaps):
        messages().print(f"[dim]{escape(sentence)}[/]", soft_wrap=True)
    for file in files:
        screen().print(escape(str(file)), soft_wrap=True)


def _named(catalogue: Catalogue, word: str) -> list[RunFolder]:
    """The runs that a word means: one, or all that a pattern or a folder of runs holds."""
    from fedkin.runs.catalogue import Catalogue
    from fedkin.runs.folder import RUN, RunFolder

    if os.sep in word and Path(word).is_dir() and not (Path(word) / RUN).exists():
        inside = Catalogue(word).runs()
        if not inside:
            raise UsageError(f"{word}: neither a run nor a folder with runs in it")
        return [RunFolder(info) for info in inside]
    if word == "all" or any(c in word for c in "*?["):
        found = [RunFolder(info) for info in catalogue.runs() if word == "all" or fnmatchcase(info.id, word)]
        if not found:
            raise UsageError(f"no run in {catalogue.path} fits {word!r}; fedkin runs lists them")
        return found
    return [catalogue.locate(word)]
