"""A result in memory, read as a run's folder is: the figures of both are the same."""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.report.figures import Floats, Missing
from fedkin.report.gather import RunData
from fedkin.report.queries import FILE, Limits
from fedkin.rounds import Result
from fedkin.runs.database import create_table
from fedkin.runs.entries import Told
from fedkin.runs.folder import RunInfo
from fedkin.sweep.statistics import as_asked


class ResultData(RunData):
    """One result as arrays. Its tables are made when they are asked for."""

    def __init__(self, result: Result, limits: Limits = FILE) -> None:
        self.result, self.limits = result, limits
        self._made: set[str] = set()
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._base.close)
        self._lock = threading.Lock()

    @cached_property
    def info(self) -> RunInfo:
        result, metric = self.result, self.result.prepared.metric
        names = ("split_hash", "eval_point", "device", "precision", "classes", "clients", "parameters")
        what = {"name": metric.name, "unit": metric.unit, "higher": metric.higher}
        return RunInfo(
            id=Path(result.run).name if result.run else result.method,
            path=Path(result.run or "."),
            status="finished",
            created="",
            updated="",
            error=None,
            config=result.config.to_dict(),
            given=as_asked(result.config).to_dict(),
            options=result.options,
            identity="",
            environment={},
            prepared={**{name: getattr(result.prepared, name) for name in names}, "metric": what},
            names=[c.name for c in result.per_client],
            malicious=result.malicious,
            result={"kept": {"round": result.kept.round, "final": result.kept.final}, "diverged": result.diverged},
            progress=None,
            asked=sorted(result.config.asked),
            objects=[],
            rounds_done=result.history[-1].round,
        )

    def select(self, columns: str, table: str, rest: str = "", values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            if table not in self._made:
                create_table(self._base, table, Told.by(self.result).rows(table))
                self._made.add(table)
            return self._base.execute(
                f"SELECT {columns} FROM {table} {rest} LIMIT {self.limits.rows:d}", values
            ).fetchall()

    @cached_property
    def class_counts(self) -> Floats:
        if self.result.class_counts is None:
            raise Missing("its samples have no classes, or only the sites know them")
        return np.asarray(self.result.class_counts)
