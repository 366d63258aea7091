"""Several runs at once on one device, their clients as more rows of one cohort: what a GPU wants of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedkin.compute import graphs
from fedkin.compute.batches import Source
from fedkin.compute.choice import Chooser
from fedkin.compute.lockstep import MOST_ROWS, Lockstep
from fedkin.config import Config
from fedkin.data import Dataset, Split
from fedkin.errors import UsageError
from fedkin.rounds import Event, Result, pick_device, run_config
from fedkin.sweep.loaded import Data

Runner = Callable[..., Result]


def run_together(
    configs: Sequence[Config],
    *,
    on_event: Callable[[int, Event], None] | None = None,
    runner: Runner = run_config,
    most_rows: int = MOST_ROWS,
    load: Callable[[Config], tuple[Dataset, Split]] | None = None,
) -> list[Result | Exception]:
    """Run all to the end; the results in order, an exception in the place of a run that failed.

    `runner(config, on_event=..., **given)` carries out one run (a tracked one, say) and hands `given` to `prepare`.
    `load`: what gives a run its data; runs that train on one data set need to be given the same object."""
    if not configs:
        return []
    if len({(c.device, c.precision, c.way) for c in configs}) > 1:
        raise UsageError("runs can only train together on one device, in one precision and way")
    device = pick_device(configs[0].device)
    load = load or Data().of
    sources: dict[int, tuple[Dataset, Source]] = {}

    def task(number: int, config: Config) -> Callable[[Chooser], Result]:
        def run(chooser: Chooser) -> Result:
            tell = None if on_event is None else (lambda event: on_event(number, event))
            given: dict[str, Any] = {"data": load(config), "chooser": chooser, "sources": sources}
            return runner(config, on_event=tell, **given)

        return run

    try:
        return Lockstep(Chooser(configs[0].way), most_rows).run([task(i, c) for i, c in enumerate(configs)])
    finally:
        if device.type == "cuda":
            graphs.forget()
            torch.cuda.empty_cache()
