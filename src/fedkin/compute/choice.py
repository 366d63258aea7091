"""Which way trains fastest here: measured once per kind of work, remembered on this machine.

Ways differ in rounding, so a run that must repeat bit for bit has to repeat the choice too: it is written to a small
file in the user's cache, can be read back from a run, and can be forced with `way=`.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkin.compute.backends import WAYS, cores, run_way
from fedkin.compute.work import Work
from fedkin.errors import UsageError, unknown

CLEARLY = 0.8  # a way must take at most this share of a likelier one's time to be preferred: timings are noisy


def candidates(work: Work) -> list[str]:
    """The ways that can run this work here, likely best first."""
    rows, together = len(work.rows), work.forward.together
    if work.rows.device.type == "cuda":
        return ["graph"] if together else ["each"]
    several = ["threads"] if cores() > 1 and rows > 1 else []
    return [*several, "each", *(["batched"] if together and rows > 1 else [])]


def choose(work: Work, budget: float = 0.8) -> str:
    """The fastest way for work like this, by timing a few steps of a few rows; about a second at most."""
    names = candidates(work)
    if len(names) == 1 or not work.steps.size or work.steps.max() == 0:
        return names[0]
    order = np.argsort(-work.steps, kind="stable").tolist()
    best, fastest, begin = names[0], float("inf"), time.perf_counter()
    for name in names:
        # Row by row, setting up a row must be spread over its steps; together, what counts is the number of rows.
        rows = order[: 16 if name == "batched" else 2 * cores()]
        if time.perf_counter() - begin > budget:
            break
        run_way(name, work.take(rows, 1))  # the first time is always slow
        steps, enough = 1, False
        while time.perf_counter() - begin < budget:
            small = work.take(rows, steps)
            seconds = _seconds(name, small)
            per_step = seconds / max(int(small.steps.sum()), 1)
            if per_step < fastest * (1.0 if name == best else CLEARLY):
                best, fastest = name, per_step
            if enough:
                break
            enough = seconds > 0.05 or steps >= work.steps.max()  # once more at this size: the better one counts
            steps *= 1 if enough else 3
    return best


def _seconds(way: str, work: Work) -> float:
    begin = time.perf_counter()
    run_way(way, work)
    return time.perf_counter() - begin


def cache_file() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    return home / "fedkin" / "ways.json"


class Chooser:
    """Trains work in the best way. `forced` is "auto" or the name of a way."""

    shared = False  # do other runs train through it too?

    def __init__(self, forced: str = "auto", remember: bool = True) -> None:
        if forced == "compiled":
            raise UsageError("way='compiled' was removed (FedKin's own kernels are faster): use way='graph' or auto")
        if forced != "auto" and forced not in WAYS:
            raise unknown("way to train", forced, ["auto", *WAYS])
        self.forced, self._remember = forced, remember
        self.chosen: dict[str, str] = {}
        self.client_steps = 0  # done so far

    def train(self, work: Work) -> Tensor:
        self.client_steps += int(work.steps.sum())
        if self.forced != "auto":
            self._possible(self.forced, work)
            return run_way(self.forced, work)
        kind, names = _signature(work), candidates(work)
        if kind not in self.chosen and len(names) == 1:
            self.chosen[kind] = names[0]
        if kind not in self.chosen:
            known = _read().get(kind) if self._remember else None
            self.chosen[kind] = known if known in names else choose(work)
            if self._remember and known != self.chosen[kind]:
                _write(kind, self.chosen[kind])
        return run_way(self.chosen[kind], work)

    def state(self) -> dict[str, Any]:
        """What makes a resumed run train in the same ways."""
        return {"chosen": dict(self.chosen), "client_steps": self.client_steps}

    def restore(self, state: dict[str, Any]) -> None:
        self.chosen = {str(k): str(v) for k, v in state["chosen"].items() if v in WAYS}
        self.client_steps = int(state["client_steps"])

    @staticmethod
    def _possible(way: str, work: Work) -> None:
        on_gpu = work.rows.device.type == "cuda"
        if way == "graph" and not on_gpu:
            raise UsageError(f"way {way!r} needs a CUDA device; on this one choose each, threads or batched")
        if way in ("batched", "graph") and not work.forward.together:
            why = getattr(work.forward, "why_not", "")
            raise UsageError(f"way {way!r} cannot run this network ({why}); choose each or threads")


def _signature(work: Work) -> str:
    """What decides the speed of a job, as text."""
    frozen = [f"{n}{list(shape)}=" for n, shape in work.layout.frozen.items()]
    shape = ",".join([f"{s.name}{list(s.shape)}" for s in work.layout.slots] + frozen)
    rows = 1 << (len(work.rows) - 1).bit_length()
    terms = "+".join(t.name for t in work.terms)
    parts = [
        platform.node(),
        platform.machine(),
        f"torch{torch.__version__}",
        f"{cores()}c",
        work.rows.device.type,
        f"{rows}rows",
        f"b{work.plan.table.shape[2]}",
        type(work.opt).__name__,
        terms,
        work.precision,
        str(len(work.learn)),
        shape,
    ]
    return "|".join(parts)


def _read() -> dict[str, str]:
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _write(kind: str, way: str) -> None:
    """Best effort: a cache that cannot be written costs the next run a second, nothing else."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**_read(), kind: way}, indent=1))
        os.replace(temporary, path)
    except OSError:
        pass
