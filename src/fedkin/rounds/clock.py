"""Where a run's time goes: every second of the wall clock belongs to one part, or to none in particular."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PARTS = ("preparing", "training", "server", "evaluating", "writing")
"""Loading data and building the network; what clients do when asked; the rest of the rounds; evaluating personal
models; the run's folder, its checkpoints and other sinks."""


class Clock:
    """A stopwatch that also knows what for. A run that is resumed goes on where its checkpoint was."""

    def __init__(self, begun: float | None = None) -> None:
        self._begun = time.perf_counter() if begun is None else begun
        self._before = 0.0  # wall clock of earlier sittings
        self.parts = dict.fromkeys(PARTS, 0.0)

    @property
    def wall(self) -> float:
        return self._before + time.perf_counter() - self._begun

    @property
    def rounds(self) -> float:
        """The rounds themselves: what clients and server did."""
        return self.parts["training"] + self.parts["server"]

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] += seconds

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.parts[part] += time.perf_counter() - begin

    def state(self) -> dict[str, float]:
        return {**self.parts, "wall": self.wall}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Earlier sittings come on top of this one."""
        self._before += float(state["wall"])
        for part in PARTS:
            self.parts[part] += float(state.get(part, 0.0))
