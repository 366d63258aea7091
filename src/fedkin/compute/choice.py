"""Which way trains fastest here: measured once per kind of work, remembered on this machine.

Ways differ in rounding, so a run that must repeat bit for bit has to repeat the choice too: it is written to a small
file in the user's cache, can be read back from a run, and can be forced with `way=`.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedkin.compute.backends import WAYS, Work, candidates, choose, cores, run_way
from fedkin.errors import UsageError, unknown


def cache_file() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    return home / "fedkin" / "ways.json"


class Chooser:
    """Trains work in the best way. `forced` is "auto" or the name of a way."""

    shared = False  # do other runs train through it too?

    def __init__(self, forced: str = "auto", remember: bool = True) -> None:
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
        if way in ("graph", "compiled") and not on_gpu:
            raise UsageError(f"way {way!r} needs a CUDA device; on this one choose each, threads or batched")
        if way in ("batched", "graph", "compiled") and not work.forward.together:
            raise UsageError(f"way {way!r} cannot run this network (it cannot be traced); choose each or threads")


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
