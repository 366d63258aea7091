"""`fedkin compare`: every method at every seed, then one line per method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from fedkin.cli.console import messages, percent, size, table
from fedkin.cli.live import Cell, GridScreen
from fedkin.config import Config
from fedkin.data import Dataset, Split, load
from fedkin.errors import FedKinError
from fedkin.methods import METHODS
from fedkin.rounds import Result, load_data, run_config, split_of, summary


@dataclass
class Grid:
    """What a comparison gave; `complete` is false when Ctrl-C ended it early."""

    results: list[Result] = field(default_factory=list)
    failed: list[Cell] = field(default_factory=list)
    complete: bool = True

    def to_dict(self) -> dict[str, Any]:
        failed = [{"method": c.config.method, "seed": c.config.seed, "error": c.error} for c in self.failed]
        return {"cells": [r.to_dict() for r in self.results], "table": self.rows(), "failed": failed}

    def rows(self) -> list[dict[str, Any]]:
        return summary(self.results)


class Shared:
    """The data of a comparison: read once, split once per seed and share set aside for validation."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._splits: dict[tuple[int, float], tuple[Dataset, Split]] = {}

    @cached_property
    def _dataset(self) -> Dataset:
        return load(self._config.data, self._config.data_dir)

    def of(self, config: Config) -> tuple[Dataset, Split]:
        share = config.validation_share
        share = METHODS[config.method].holdout if share is None else share
        key = (config.seed, share)
        if key not in self._splits:
            config = replace(config, validation_share=share)
            whole = config.shift or Path(config.data).is_dir()
            self._splits[key] = load_data(config) if whole else (self._dataset, split_of(config, self._dataset))
        return self._splits[key]


def run_grid(by_seed: Sequence[Sequence[Config]], title: str) -> Grid:
    """Runs all cells, seed by seed. A cell that fails does not stop the others."""
    rows = [[Cell(config) for config in configs] for configs in by_seed]
    order = [cell for of_method in zip(*rows, strict=True) for cell in of_method]
    grid, shared = Grid(), Shared(by_seed[0][0])
    shared.of(by_seed[0][0])  # data that are missing end the command here, not cell by cell
    try:
        with GridScreen(order, messages(), title) as screen:
            for cell in (cell for row in rows for cell in row):
                _run_cell(cell, shared, screen, grid)
    except KeyboardInterrupt:
        grid.complete = False
    return grid


def _run_cell(cell: Cell, shared: Shared, screen: GridScreen, grid: Grid) -> None:
    hear = screen.listener(cell)
    try:
        grid.results.append(run_config(cell.config, on_event=hear, data=shared.of(cell.config)))
        cell.state = "done"
    except FedKinError as error:
        screen.failed(cell, str(error))
        grid.failed.append(cell)


def summary_table(grid: Grid) -> Table:
    """One line per method: the mean over seeds and, where there are several, the standard deviation."""
    rows = grid.rows()
    seeds = len({r.seed for r in grid.results})
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else f"seed {grid.results[0].seed}"
    right = ("macro", "micro", "worst decile", "best micro", "best round", "sent", "seconds")
    made = table("Accuracy of the personal models, percent", "method", *right, "judged", right=right,
                 caption=f"{over}; macro: mean over clients, micro: over test samples; sent: down and up, all rounds;\n"
                 "judged: each client's model as received, or after its local training")
    best = {k: max(row[k]["mean"] for row in rows) for k in ("macro", "micro", "worst_decile")}
    for row in rows:
        scores = [_score(row, k, row[k]["mean"] == best[k]) for k in best]
        made.add_row(row["method"], *scores, _pair(row["best_micro"], len(row["seeds"])), _best_rounds(grid, row),
                     size(row["megabytes"]["mean"] * 1e6), f"{row['seconds']['mean']:.1f}",
                     row["eval_point"].replace("_", " "))  # fmt: skip
    return made


def _score(row: dict[str, Any], key: str, is_best: bool) -> str:
    text = _pair(row[key], len(row["seeds"]))
    return f"[bold green]{text}[/]" if is_best else text


def _pair(stats: dict[str, float], seeds: int) -> str:
    return percent(stats["mean"]) + (f" ±{stats['std']:.2f}" if seeds > 1 else "")


def _best_rounds(grid: Grid, row: dict[str, Any]) -> str:
    rounds = [r.best.round for r in grid.results if r.method == row["method"] and r.options == row["options"]]
    return str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)}-{max(rounds)}"
