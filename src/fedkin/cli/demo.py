"""`fedkin demo`: what the numbers of the comparison say, in words made from the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from fedkin.cli.grid import Grid
from fedkin.methods import METHODS
from fedkin.robust import ATTACKS
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
"""As received, where a comparison judges, it is fedavg."""
HOLDS = 5.0
"""A method holds under attack if its benign clients lose less than this many points."""


def report_of(runs_dir: str) -> list[str]:
    """Writes the report of the runs in this folder; the sentence that says where it is."""
    from fedkin.report.page import write_report
    from fedkin.runs.catalogue import Catalogue
    from fedkin.runs.folder import RunFolder

    files, _ = write_report([RunFolder(info) for info in Catalogue(runs_dir).runs()], Path(runs_dir))
    return [f"[bold]The report, figures and all:[/] {escape(str(files[0]))}"]


def sentences(grid: Grid) -> list[str]:
    """Everybody honest, then under each attack."""
    under: dict[str, dict[str, Outcome]] = {}
    for result in grid.results:
        under.setdefault(result.config.attack, {})[result.method] = result
    honest = under.pop("none", {})
    said = _honest(grid, {row["method"]: row for row in grid.rows() if row["attack"] == "none"})
    return said + [line for attack, results in under.items() for line in _attacked(attack, results, honest)]


def _honest(grid: Grid, rows: dict[str, dict[str, Any]]) -> list[str]:
    """What one shared model, the best personal models and training alone reach."""
    shared, alone = rows.pop("fedavg", None), rows.pop("local", None)
    personal = [row for name, row in rows.items() if METHODS[name].private != "nothing"]
    if shared is None or not personal:
        return []
    best = max(personal, key=lambda row: (row["macro"]["mean"], row["worst_decile"]["mean"]))
    said = [
        f"[bold]Everybody honest.[/] One model for all (fedavg) is right in {_of(shared, 'macro')} of a client's cases "
        f"on average and in {_of(shared, 'worst_decile')} for the worst-served tenth of the clients; with personal "
        f"models ({best['method']}) it is {_of(best, 'macro')} and {_of(best, 'worst_decile')}."
    ]
    if alone is not None:
        samples = sum(c.test_samples for c in grid.results[0].per_client)
        said.append(
            f"Training alone (local) reaches {_of(alone, 'macro')}, {_against(alone, best)} {best['method']}; "
            f"one test sample in {samples} is {100 / samples:.1f} points."
        )
    said.append(
        f"All models are judged as received. {LEFT_OUT}, which then is fedavg, is left out; after local "
        f"training: fedkin compare fedavg {LEFT_OUT} {best['method']} --eval-point after_local"
    )
    return said


def _attacked(attack: str, results: dict[str, Outcome], honest: dict[str, Outcome]) -> list[str]:
    """Who holds, who does not: the same benign clients with and without the attackers."""
    any_ = next(iter(results.values()))
    bad, clients = any_.malicious, len(any_.per_client)
    before = {m: benign_macro(honest[m], bad) for m in results if m in honest}
    after = {m: benign_macro(results[m], bad) for m in before}
    first = f"[bold]{len(bad)} of {clients} clients hostile, {attack}[/] ({ATTACKS[attack.split(':')[0]].about})."
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
        said.append(f"  [red]do not[/]: {_listed(lose, after)}")
    if "local" in after:
        above = [m for m in hold if after[m] > after["local"]]
        said.append(
            f"  Training alone, out of the attackers' reach, gives {after['local']:.1f} %; more than that: "
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
