"""`fedkin compare`: every method under every attack and rule at every seed, then one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from fedkin.cli.console import messages, percent, size, table
from fedkin.cli.live import Cell, GridScreen
from fedkin.cli.outcome import attackers, benign_only, run_facts
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
        failed = [{"method": c.config.method, "attack": c.config.attack, "rule": c.config.rule, "seed": c.config.seed,
                   "error": c.error} for c in self.failed]  # fmt: skip
        return {"cells": [run_facts(r) for r in self.results], "table": self.rows(), "failed": failed}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each attack, rule and method: mean and standard deviation over the seeds."""
        groups: dict[tuple[str, str], list[Result]] = {}
        for result in self.results:
            groups.setdefault((result.config.attack, result.config.rule), []).append(result)
        return [{"attack": a, "rule": r, **row} for (a, r), group in groups.items() for row in summary(group)]


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
        result = run_config(cell.config, on_event=hear, data=shared.of(cell.config))
        grid.results.append(replace(result, _rows=torch.empty(0, 0)))  # the models of all cells would fill the memory
        cell.state = "done"
    except FedKinError as error:
        screen.failed(cell, str(error))
        grid.failed.append(cell)


def summary_table(grid: Grid) -> RenderableType:
    """With one attack, all numbers of a method in one line; with several, one column each."""
    rows = grid.rows()
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    attacks = list(dict.fromkeys(row["attack"] for row in rows))
    return _matrix(grid, rows, attacks, rules) if len(attacks) > 1 else _lines(grid, rows, rules)


def _lines(grid: Grid, rows: list[dict[str, Any]], rules: Sequence[str]) -> Table:
    """One line per method (and rule): the mean over seeds and, where there are several, the standard deviation."""
    right = ("macro", "micro", "worst decile", "best micro", "best round", "sent", "seconds")
    made = table(_title(grid), "method", *_rule_column(rules), *right, "judged", right=right,
                 caption=f"{_over(grid)}; macro: mean over clients, micro: over test samples; sent: down and up, all "
                 "rounds;\njudged: each client's model as received, or after its local training" + _threats(grid)
                 + _one_rule(rules))  # fmt: skip
    best = {k: max(row[k]["mean"] for row in rows) for k in ("macro", "micro", "worst_decile")}
    for row in rows:
        scores = [_score(row, k, row[k]["mean"] == best[k]) for k in best]
        made.add_row(row["method"], *_rule_cell(rules, row["rule"]), *scores,
                     _pair(row["best_micro"], len(row["seeds"])), _best_rounds(grid, row),
                     size(row["megabytes"]["mean"] * 1e6), f"{row['seconds']['mean']:.1f}",
                     row["eval_point"].replace("_", " "))  # fmt: skip
    return made


def _matrix(grid: Grid, rows: list[dict[str, Any]], attacks: Sequence[str], rules: Sequence[str]) -> Group:
    """A line per method (and rule), a column per attack; in the cells the mean over clients, then over seeds."""
    heads = {attack: "no attack" if attack == "none" else escape(attack) for attack in attacks}
    made = table(_title(grid), "method", *_rule_column(rules), *heads.values(), right=list(heads.values()))
    best = {a: max(row["macro"]["mean"] for row in rows if row["attack"] == a) for a in attacks}
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row["method"], row["rule"], repr(row["options"])), {})
        line[row["attack"]] = _score(row, "macro", row["macro"]["mean"] == best[row["attack"]])
    order = list(dict.fromkeys(method for method, _, _ in lines))
    for (method, rule, _), line in sorted(lines.items(), key=lambda item: order.index(item[0][0])):
        made.add_row(method, *_rule_cell(rules, rule), *(line.get(a, "[dim]-[/]") for a in attacks))
    note = f"{_over(grid)}; in the cells the mean over clients (macro) after the last round"
    return Group(made, f"[dim italic]{note}{_threats(grid)}{_one_rule(rules)}[/]\n")  # a caption would be too narrow


def _title(grid: Grid) -> str:
    every = all(benign_only(r.config) for r in grid.results)
    return f"Accuracy of the personal models{' of benign clients' if every else ''}, percent"


def _over(grid: Grid) -> str:
    seeds = {r.seed for r in grid.results}
    return f"mean ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {min(seeds)}"


def _threats(grid: Grid) -> str:
    """A line for the caption: how many are malicious, and whose accuracy is shown."""
    under = next((r for r in grid.results if r.config.attack != "none"), None)
    if under is None:
        return ""
    clients = len(under.per_client)
    bad = attackers(under.config, clients)
    if benign_only(under.config):
        whose = f"accuracy of the {clients - bad} benign ones only"
        if any(r.config.attack == "none" for r in grid.results):
            whose += f" (no attack: of all {clients})"
    else:
        whose = "others every round; accuracy of all clients"
    return f"\nunder attack {bad} of {clients} clients are malicious; {whose}"


def _rule_column(rules: Sequence[str]) -> list[str]:
    return ["rule"] if len(rules) > 1 else []


def _rule_cell(rules: Sequence[str], rule: str) -> list[str]:
    return [escape(rule)] if len(rules) > 1 else []


def _one_rule(rules: Sequence[str]) -> str:
    return f"\nrule: {escape(rules[0])}" if list(rules) != ["mean"] and len(rules) == 1 else ""


def _score(row: dict[str, Any], key: str, is_best: bool) -> str:
    text = _pair(row[key], len(row["seeds"]))
    return f"[bold green]{text}[/]" if is_best else text


def _pair(stats: dict[str, float], seeds: int) -> str:
    return percent(stats["mean"]) + (f" ±{stats['std']:.2f}" if seeds > 1 else "")


def _best_rounds(grid: Grid, row: dict[str, Any]) -> str:
    same = [r for r in grid.results if (r.config.attack, r.config.rule) == (row["attack"], row["rule"])]
    rounds = [r.best.round for r in same if r.method == row["method"] and r.options == row["options"]]
    return str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)}-{max(rounds)}"
