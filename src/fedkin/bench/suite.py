"""All benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedkin.bench.aggregation import rule_costs
from fedkin.bench.cells import cell_costs
from fedkin.bench.overheads import method_costs, track_costs
from fedkin.bench.speed import CASES, measure
from fedkin.errors import unknown
from fedkin.rounds import pick_device, pick_precision

PRECISIONS = ("auto", "fp32", "tf32", "bf16")
BENCHES: dict[str, str] = {name: case.about for name, case in CASES.items()} | {
    "methods": "what methods cost beside FedAvg and FedBABU in the same run, and their server steps alone",
    "rules": "aggregation rules on 100 rows of 873,408 numbers: time, memory, and wrappers beside their base rule",
    "track": "what a run folder costs: rounds of 20 clients of CNN-512 with and without, a checkpoint every 10 rounds",
    "cells": "a cell of FedCAP's Table I on CIFAR-10 alone, and eighteen of them together",
}
ON_CPU = ("cnn-512", "fedcap-emnist", "emnist-1000", "methods", "rules", "track")
ON_GPU = ("cnn-512", "cnn-512-100", "resnet18", "ragged", "rules", "cells")


def run_bench(
    what: str = "all", device: str = "auto", quick: bool = False, precision: str = "auto", way: str = "auto"
) -> list[dict[str, Any]]:
    """One row per case: seconds, milliseconds per client-step of both, the ratio, peak memory, agreement."""
    chosen = pick_device(device)
    if what != "all" and what not in BENCHES:
        raise unknown("benchmark", what, [*BENCHES, "all"])
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    names = [what] if what != "all" else list(ON_GPU if chosen.type == "cuda" else ON_CPU)
    others: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "methods": lambda: method_costs(chosen, quick),
        "rules": lambda: rule_costs(chosen, quick),
        "track": lambda: track_costs(chosen, quick),
        "cells": lambda: cell_costs(chosen, precision, quick),
    }
    rows: list[dict[str, Any]] = []
    for name in names:
        if name in others:
            rows += others[name]()
        else:
            rows.append(measure(name, chosen, pick_precision(precision, chosen), quick, way))
    return rows
