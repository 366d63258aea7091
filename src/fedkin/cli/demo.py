"""`fedkin demo`: one line per method while it runs; then what the numbers say, and what to try next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.markup import escape

from fedkin.cli.console import percent, table
from fedkin.cli.grid import Grid
from fedkin.cli.live import GridScreen
from fedkin.data import load
from fedkin.methods import METHODS
from fedkin.robust import ATTACKS
from fedkin.rounds.words import seconds
from fedkin.sweep.runner import Cell
from fedkin.sweep.statistics import Outcome

SETTINGS = {
    "data": "digits",
    "clients": 20,
    "partition": "pathological:2",
    "rounds": 8,
    "lr": 0.05,
    "attack": "none,ipm,sf",
    "malicious": 0.3,
}
LEFT_OUT = "fedavg-ft"
"""A comparison evaluates models as received, and there this method is the same as fedavg."""
WHOSE = (
    "In the table the column without an attack is of all clients, and those under an attack are of the benign ones. "
    "Below, both numbers are of the same benign clients."
)
HOLDS = 5.0
"""A method holds under attack if its benign clients lose less than this many points."""


class DemoScreen(GridScreen):
    """One line per method, with a column for each attack: redrawn on a terminal, printed once elsewhere."""

    transient = True  # the table of results takes its place

    def __init__(self, cells: Sequence[Cell], console: Console, title: str) -> None:
        self._methods: dict[str, list[Cell]] = {}
        for cell in cells:
            self._methods.setdefault(cell.config.method, []).append(cell)
        self._over: set[str] = set()
        super().__init__(cells, console, title)

    def _tell(self) -> None:
        """Prints the methods that have finished since the last time."""
        for method, cells in self._methods.items():
            if not self._live and method not in self._over and all(c.state in ("done", "failed") for c in cells):
                self._over.add(method)
                wall = seconds(sum(c.records[-1].wall for c in cells if c.records))
                said = "  ".join(f"{_condition(c.config.attack)} {_reached(c):>6}" for c in cells)
                self._console.print(f"{method:<10} {said}  in {wall}", soft_wrap=True)

    def _render(self) -> RenderableType:
        heads = [_condition(c.config.attack) for c in next(iter(self._methods.values()))]
        made = table(self._title, "method", *heads, right=heads)
        for method, cells in self._methods.items():
            waiting = all(c.state == "waiting" for c in cells)
            made.add_row(method, *map(_reached, cells), style="dim" if waiting else "")
        return self._alive(made)


def _condition(attack: str) -> str:
    return "no attack" if attack == "none" else attack


def _reached(cell: Cell) -> str:
    """The accuracy that a run has reached so far."""
    if cell.state == "failed":
        return "failed"
    return percent(cell.records[-1].accuracy.macro) if cell.records else "-"


def next_steps(folder: Path) -> list[str]:
    """Commands to try after the demo; the last one trains on a file that stands for the user's own data."""
    digits, example = load("digits"), folder / "example.npz"
    np.savez(example, x=digits.x, y=digits.y)
    runs, here = shlex.quote(str(folder)), program()
    needed = "" if find_spec("fastapi") and find_spec("uvicorn") else "; it needs pip install 'fedkin[web]'"
    commands = {
        f"{here} web --runs-dir {runs}": f"look at these runs in your browser{escape(needed)}",
        f"{here} compare local fedavg fedcap --seeds 3": "compare methods of your choice over three seeds",
        f"{here} run fedcap --data {shlex.quote(str(example))} --clients 10": "train on your own data: "
        "put your file, with arrays x and y, in place of this one",
    }
    return ["\n[bold]What to do next[/]", *(f"  {escape(c)}\n      {about}" for c, about in commands.items())]


def program() -> str:
    """How to call FedKin from this shell."""
    called = sys.argv[0]
    if shutil.which("fedkin"):
        return "fedkin"
    return shlex.quote(called) if Path(called).name == "fedkin" else f"{shlex.quote(sys.executable)} -m fedkin"


def report_of(runs_dir: str) -> list[str]:
    """Writes the report of the runs in this folder, and gives the sentence that says where it is."""
    from fedkin.report.page import write_report
    from fedkin.runs.catalogue import Catalogue
    from fedkin.runs.folder import RunFolder

    files, _ = write_report([RunFolder(info) for info in Catalogue(runs_dir).runs()], Path(runs_dir))
    return [f"[bold]The report with all figures:[/] {escape(str(files[0]))}"]


def sentences(grid: Grid) -> list[str]:
    """Everybody honest, then under each attack."""
    under: dict[str, dict[str, Outcome]] = {}
    for result in grid.results:
        under.setdefault(result.config.attack, {})[result.method] = result
    honest = under.pop("none", {})
    said = _honest(grid, {row["method"]: row for row in grid.rows() if row["attack"] == "none"})
    if said and under:
        said.append(WHOSE)
    return said + [line for attack, results in under.items() for line in _attacked(attack, results, honest)]


def _honest(grid: Grid, rows: dict[str, dict[str, Any]]) -> list[str]:
    """What one shared model, the best personal models and training alone reach."""
    shared, alone = rows.pop("fedavg", None), rows.pop("local", None)
    personal = [row for name, row in rows.items() if METHODS[name].private != "nothing"]
    if shared is None or not personal:
        return []
    best = max(personal, key=lambda row: (row["macro"]["mean"], row["worst_decile"]["mean"]))
    said = [
        f"[bold]Everybody honest.[/] One model for all (fedavg) is right in {_of(shared, 'macro')} of a client's "
        f"test samples on average, and in {_of(shared, 'worst_decile')} for the tenth of the clients that it serves "
        f"worst; personal models ({best['method']}) reach {_of(best, 'macro')} and {_of(best, 'worst_decile')}."
    ]
    if alone is not None:
        samples = sum(c.test_samples for c in grid.results[0].per_client)
        said.append(
            f"Training alone (local) reaches {_of(alone, 'macro')}, {_against(alone, best)} {best['method']}; "
            f"with the {samples} test samples that all clients have, one more or less is {100 / samples:.1f} points."
        )
    said.append(
        f"All models are evaluated as received. {LEFT_OUT} is left out, because it is the same as fedavg then; to "
        f"evaluate after local training: fedkin compare fedavg {LEFT_OUT} {best['method']} --eval-point after_local"
    )
    return said


def _attacked(attack: str, results: dict[str, Outcome], honest: dict[str, Outcome]) -> list[str]:
    """Who holds, who does not: the same benign clients with and without the attackers."""
    any_ = next(iter(results.values()))
    bad, clients = any_.malicious, len(any_.per_client)
    before = {m: benign_macro(honest[m], bad) for m in results if m in honest}
    after = {m: benign_macro(results[m], bad) for m in before}
    first = f"[bold]{len(bad)} of {clients} clients are hostile, {attack}[/] ({ATTACKS[attack.split(':')[0]].about})."
    if "fedavg" in after:
        fell = before["fedavg"] - after["fedavg"]
        verb = "collapses" if fell >= before["fedavg"] / 2 else "falls" if fell >= HOLDS else "goes"
        first += (
            f" For the {clients - len(bad)} benign clients fedavg {verb} from {before['fedavg']:.1f} to "
            f"{after['fedavg']:.1f} %."
        )
    said = [first]
    sharing = [m for m in after if m not in ("fedavg", "local")]
    hold = [m for m in sharing if before[m] - after[m] < HOLDS]
    lose = [m for m in sharing if m not in hold]
    if hold:
        said.append(f"  [green]hold[/] (lose less than {HOLDS:g} points): {_listed(hold, after)}")
    if lose:
        said.append(f"  [red]do not hold[/]: {_listed(lose, after)}")
    if "local" in after:
        above = [m for m in hold if after[m] > after["local"]]
        said.append(
            f"  Training alone, which no attacker can reach, gives {after['local']:.1f} %; methods that reach more: "
            f"{', '.join(above) or 'none'}."
        )
    return said


def benign_macro(result: Outcome, malicious: Sequence[int]) -> float:
    """Mean accuracy at the end over the clients that are not in `malicious`."""
    return float(np.nanmean([c.accuracy for c in result.per_client if c.client not in malicious]))


def _listed(methods: Sequence[str], after: dict[str, float]) -> str:
    return ", ".join(f"{m} {after[m]:.1f}" for m in sorted(methods, key=lambda m: -after[m]))


def _of(row: dict[str, Any], key: str) -> str:
    return f"{row[key]['mean']:.1f} %"


def _against(row: dict[str, Any], other: dict[str, Any]) -> str:
    gap = row["macro"]["mean"] - other["macro"]["mean"]
    if abs(gap) < 0.05:
        return "as much as"
    return f"{abs(gap):.1f} points {'more' if gap > 0 else 'less'} than"
