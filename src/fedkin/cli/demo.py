"""`fedkin demo`: what the numbers of the comparison say, in words made from the numbers."""

from __future__ import annotations

from typing import Any

from fedkin.cli.grid import Grid
from fedkin.methods import METHODS

SETTINGS = {"data": "digits", "clients": 20, "partition": "pathological:2", "rounds": 10, "lr": 0.05}


def sentences(grid: Grid) -> list[str]:
    """What one shared model, the best personal models and training alone reach."""
    rows = {row["method"]: row for row in grid.rows()}
    shared, alone = rows.pop("fedavg", None), rows.pop("local", None)
    personal = [row for name, row in rows.items() if METHODS[name].private != "nothing"]
    if shared is None or not personal:
        return []
    best = max(personal, key=lambda row: (row["macro"]["mean"], row["worst_decile"]["mean"]))
    said = [
        f"One model for all (fedavg) is right in {_of(shared, 'macro')} of a client's cases on average and in "
        f"{_of(shared, 'worst_decile')} for the worst-served tenth of the clients; with personal models "
        f"({best['method']}) it is {_of(best, 'macro')} and {_of(best, 'worst_decile')}."
    ]
    if alone is not None:
        samples = sum(c.test_samples for c in grid.results[0].per_client)
        said.append(f"Training alone (local) reaches {_of(alone, 'macro')}, {_against(alone, best)} {best['method']}; "
                    f"one test sample in {samples} is {100 / samples:.1f} points.")  # fmt: skip
    return said


def _of(row: dict[str, Any], key: str) -> str:
    return f"{row[key]['mean']:.1f} %"


def _against(row: dict[str, Any], other: dict[str, Any]) -> str:
    gap = row["macro"]["mean"] - other["macro"]["mean"]
    if abs(gap) < 0.05:
        return "as much as"
    return f"{abs(gap):.1f} points {'more' if gap > 0 else 'less'} than"
