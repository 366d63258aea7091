"""A grid of runs on the screen: progress while it goes on, then one table of what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.markup import escape

from fedkin.cli.console import messages, table
from fedkin.cli.live import GridScreen
from fedkin.cli.outcome import run_facts
from fedkin.cli.waiting import waiting
from fedkin.config import Config
from fedkin.errors import FedKinError
from fedkin.report.tables import Entry, Sheet, paired_sheet, sheet
from fedkin.rounds import Result
from fedkin.sweep.runner import Cell, run_sweep
from fedkin.sweep.selection import selected
from fedkin.sweep.statistics import Group, Outcome, groups_of, summary


@dataclass
class Grid:
    """What a comparison gave; `signal` is set when Ctrl-C or SIGTERM ended it early."""

    results: list[Outcome] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    signal: int | None = None
    baseline: str | None = None
    metric: str = "macro"
    select: str | None = None  # one of `selection.WAYS`: of each method the best cell alone

    @property
    def diverged(self) -> list[Cell]:
        """Cells whose numbers are not to be believed although nobody attacked; under attack, breaking is an outcome."""
        return [c for c in self.cells if c.outcome and c.outcome.diverged and c.config.attack == "none"]

    @property
    def failed(self) -> list[Cell]:
        return [c for c in self.cells if c.state == "failed"]

    @property
    def refused(self) -> bool:
        """Whether nothing was trained: the data do not allow any of the runs."""
        return all(c.state == "failed" and c.run is None and isinstance(c.cause, FedKinError) for c in self.cells)

    def groups(self) -> list[Group]:
        found = groups_of((c.config, c.outcome) for c in self.cells)
        return found if self.select is None else selected(found, self.select, self.metric)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each condition, rule and method: mean and standard deviation over the seeds."""
        return summary(self.groups(), self.baseline, self.metric)

    def to_dict(self) -> dict[str, Any]:
        done = [{**facts(c.outcome), "skipped": c.state == "skipped"} for c in self.cells if c.outcome is not None]
        return {
            "cells": done,
            "table": self.rows(),
            "failed": [_told(c) for c in self.failed],
            "interrupted": [_told(c) for c in self.cells if c.state in ("interrupted", "waiting")],
        }


def facts(outcome: Outcome) -> dict[str, Any]:
    """A finished run as `--json` prints it, from its folder if it has one."""
    if isinstance(outcome.source, Result):
        return run_facts(outcome.source)
    found = outcome.source.to_dict()
    prepared = outcome.source.info.prepared
    return {**found, "device": prepared.get("device"), "precision": prepared.get("precision")}


def _told(cell: Cell) -> dict[str, Any]:
    config = cell.config
    return {
        "method": config.method,
        "options": dict(config.options),
        "attack": config.attack,
        "rule": config.rule,
        "seed": config.seed,
        "error": cell.error or None,
        "run": cell.run,
    }


def run_grid(
    configs: Sequence[Config],
    title: str,
    *,
    tracked: bool = True,
    baseline: str | None = None,
    metric: str = "macro",
    select: str | None = None,
    screen: type[GridScreen] = GridScreen,
    **how: Any,
) -> Grid:
    """Runs all cells; one that fails does not stop the others. `how`: see `run_sweep`."""
    screens: list[GridScreen] = []

    def watch(cells: list[Cell]) -> GridScreen:
        before.stop()
        screens.append(screen(cells, messages(), title).__enter__())
        return screens[0]

    try:
        with waiting("looking for runs that are finished, reading data") as before:
            sweep = run_sweep(configs, watcher=watch, signals=tracked, tracked=tracked, **how)
    finally:
        for shown in screens:
            shown.__exit__(None, None, None)
    return Grid(sweep.outcomes, sweep.cells, sweep.signal, baseline, metric, select)


def summary_table(grid: Grid) -> RenderableType:
    """The table, and the tests against the baseline if there is one."""
    groups = grid.groups()
    shown = [rendered(sheet(groups, grid.metric, grid.baseline))]
    if grid.baseline is not None and len(groups) > 1:
        shown.append(rendered(paired_sheet(groups, grid.baseline, grid.metric)))
    return Stack(*shown)


def rendered(made: Sheet) -> RenderableType:
    heads = [escape(h) for h in made.head]
    shown = table(escape(made.title), *heads, right=[h for h in heads[made.left :] if h not in ("evaluated", "over")])
    for row in made.rows:
        shown.add_row(*map(_cell, row))
    notes = "\n".join(made.notes)
    return Stack(shown, f"[dim italic]{escape(notes)}[/]\n" if notes else "")  # a caption would be too narrow


def _cell(entry: Entry) -> str:
    if entry.text == "failed":
        return "[bold red]failed[/]"
    text = escape(entry.plain())
    if "diverged" in entry.mark:
        return f"[red]{text}[/]"
    return f"[bold green]{text}[/]" if entry.best else f"[dim]{text}[/]" if text == "-" else text
