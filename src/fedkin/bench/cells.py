"""What a cell of a table costs alone, and what many cost together: FedCAP's CIFAR-10 setting on random images."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from fedkin.config import Config, make_config
from fedkin.data import Dataset
from fedkin.rounds import Event, RoundRecord, run_config, split_of
from fedkin.sweep.together import run_together

ATTACKS = ("sf", "mr", "lie", "min-max", "min-sum", "ipm")
ROUNDS = 100  # of a whole cell


class _Enough(Exception):
    """Raised by the listener when the time of a round is known."""


class _Clock:
    """Stops a cell after `last` rounds, and knows when the first `warm` and all of them were done."""

    def __init__(self, warm: int, last: int) -> None:
        self.warm, self.last, self.begin = warm, last, time.perf_counter()
        self.at: dict[int, float] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundRecord):
            self.at[event.round] = time.perf_counter() - self.begin
            if event.round >= self.last:
                raise _Enough

    @property
    def row(self) -> dict[str, float]:
        a_round = (self.at[self.last] - self.at[self.warm]) / (self.last - self.warm)
        return {
            "warm_up_s": self.at[self.warm],
            "round_s": a_round,
            "hundred_rounds_s": self.at[self.warm] + (ROUNDS - self.warm) * a_round,
        }


def cell_costs(device: torch.device, precision: str, quick: bool) -> list[dict[str, Any]]:
    """One cell, then eighteen (six attacks, three seeds) as rows of one cohort. The rounds after warm-up are timed and
    taken for the rest; with `quick` two cells of a twentieth of the data."""
    warm, last = (2, 4) if quick else (10, 20)
    rng = np.random.default_rng(0)
    count = 20 * (15 if quick else 300)
    data = Dataset("bench", rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), np.arange(count) % 10, 10)

    def cell(attack: str, seed: int) -> Config:
        return make_config(
            {
                "method": "fedcap",
                "model": "fedcap-cifar",
                "clients": 20,
                "partition": "pathological:2",
                "batch": 10,
                "lr": 0.01,
                "epochs": 5,
                "rounds": ROUNDS,
                "attack": attack,
                "seed": seed,
                "eval_every": warm,
                "device": str(device),
                "precision": precision,
                "options": {"alpha": 10, "phi": 0.3, "lam": 1.0},
            }
        )

    def run_cell(config: Config, **given: Any) -> Any:
        return run_config(config, **{**given, "data": (data, split_of(config, data))})

    alone = _Clock(warm, last)
    with suppress(_Enough):
        run_cell(cell("sf", 0), on_event=alone)
    cells = [cell(a, s) for a in ATTACKS[: 2 if quick else None] for s in range(1 if quick else 3)]
    together = _Clock(warm, last)
    run_together(cells, on_event=lambda number, event: together(event), runner=run_cell)
    return [
        {"case": "one cell", "about": "FedCAP, 20 clients, 5 epochs, both models", **alone.row},
        {
            "case": f"{len(cells)} cells",
            "about": "the same, together",
            **together.row,
            "times_one": together.row["round_s"] / alone.row["round_s"],
        },
    ]
