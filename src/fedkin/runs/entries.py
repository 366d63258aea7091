"""What a run knows as rows of the tables of its metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from fedkin.core.federation import Exchange, Failure, Note, Traffic
from fedkin.core.notes import HAS_FAILED, WAS_REMOVED, kind_of
from fedkin.rounds import Job, Result, RoundRecord
from fedkin.runs.database import ACCURACIES, TABLES

Row = tuple[Any, ...]


def of_columns(table: str, values: Mapping[str, Any]) -> Row:
    return tuple(values[column] for column in TABLES[table])


def round_row(record: RoundRecord) -> Row:
    plainly = {"final": int(record.final), "metrics": _metrics(record.metrics)}
    aside = {name: None if record.validation is None else getattr(record.validation, name) for name in ACCURACIES}
    plainly |= {f"validation_{name}": value for name, value in aside.items()}
    plainly["validation_metrics"] = _metrics(record.validation_metrics)
    plainly["validated"] = None if record.validation is None else record.validated
    return of_columns("rounds", {**vars(record), **asdict(record.accuracy), **plainly})


def _metrics(values: Mapping[str, float]) -> str | None:
    """Those beside the main one as JSON; None where there are none."""
    return json.dumps(plain(values)) if values else None


def client_rows(job: Job, record: RoundRecord) -> Iterator[Row]:
    """How each client's personal model did when it was evaluated for this record."""
    if job.measured is None:
        return
    found, metric, names = job.measured, job.prepared.metric, [m.name for m in job.prepared.extra]
    arrays = (found.correct, found.total, found.loss, found.shown(metric.scale), found.extra)
    aside = found.on_validation(metric.scale)
    columns = zip(job.site.names, *(column.tolist() for column in arrays), strict=True)
    for client, (name, right, of, loss, value, extra) in enumerate(columns):
        hits = int(right) if job.prepared.counts_right else 0  # other metrics than accuracy count no right answers
        others = _metrics(dict(zip(names, extra, strict=True)))
        loss = loss if of else math.nan
        yield record.round, int(record.final), client, name, hits, int(of), value, loss, others, float(aside[client])


def exchange_row(number: int, exchange: Exchange, last: int) -> Row:
    return of_columns("exchanges", {**vars(exchange), "id": number, "round": min(exchange.round + 1, last)})


def traffic_rows(number: int, exchange: Exchange, traffic: Traffic, last: int) -> Iterator[Row]:
    at, columns = min(exchange.round + 1, last), (traffic.bytes_down, traffic.bytes_up, traffic.seconds)
    for row in zip(traffic.clients.tolist(), *columns, strict=True):
        yield at, exchange.phase, number, *row


def note_row(note: Note, last: int) -> Row:
    return min(note.round + 1, last), note.name, json.dumps(plain(note.value))


def verdict_rows(note: Note, last: int) -> list[Row]:
    return [(min(note.round + 1, last), "", *found) for found in kind_of(note.name).events(note.value)]


def removal_row(job: Job, client: int, round: int) -> Row:
    return _removal_row(client, round, job.fed.why_removed, job.config.method, job.last_round)


def _removal_row(client: int, round: int, why: Mapping[int, str], method: str, last: int) -> Row:
    return min(round + 1, last), "", client, WAS_REMOVED.kind, why.get(client, f"by {method}")


def failure_row(failure: Failure, last: int) -> Row:
    return min(failure.round + 1, last), failure.phase, failure.client, HAS_FAILED.kind, failure.reason


@dataclass(frozen=True, eq=False)
class Told:
    """What tables are made of."""

    method: str
    last: int  # the last round
    history: Sequence[RoundRecord]
    exchanges: Sequence[Exchange]
    failures: Sequence[Failure]
    notes: Sequence[Note]
    removed: Mapping[int, int]
    why_removed: Mapping[int, str]
    clients: Sequence[Row] = ()

    @classmethod
    def of(cls, job: Job) -> Told:
        """As far as the job itself remembers: not how each client did in past rounds, nor its traffic."""
        fed = job.fed
        happened = fed.exchanges, fed.failures, fed.notes, fed.removed, fed.why_removed
        return cls(job.config.method, job.last_round, job.history, *happened)

    @classmethod
    def by(cls, result: Result) -> Told:
        """As far as a result says it: of the clients how its models do."""
        when, last = (result.kept.round, int(result.kept.final)), result.stopped or result.config.rounds
        clients = [
            (*when, c.client, c.name, c.correct, c.test_samples, c.accuracy, c.loss, _metrics(c.metrics), c.validation)
            for c in result.per_client
        ]
        happened = result.exchanges, result.failures, result.notes, result.removed, result.why_removed
        return cls(result.config.method, last, result.history, *happened, clients)

    def rows(self, table: str) -> list[Row]:
        """All rows of one of the tables."""
        match table:
            case "rounds":
                return [round_row(r) for r in self.history]
            case "clients":
                return list(self.clients)
            case "exchanges":
                return [exchange_row(i, e, self.last) for i, e in enumerate(self.exchanges, start=1)]
            case "notes":
                return [note_row(note, self.last) for note in self.notes]
            case "events":
                found = [failure_row(f, self.last) for f in self.failures]
                found += [row for note in self.notes for row in verdict_rows(note, self.last)]
                gone = self.removed.items()
                found += [_removal_row(c, at, self.why_removed, self.method, self.last) for c, at in gone]
                return sorted(found, key=lambda row: row[0])
        return []


def tables_of(job: Job) -> dict[str, list[Row]]:
    """The tables as far as the job itself remembers them."""
    told = Told.of(job)
    return {name: told.rows(name) for name in ("rounds", "exchanges", "notes", "events")}


def plain(value: Any) -> Any:
    """As JSON has it: tensors and arrays as nested lists, what is not a number as null."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().tolist()
    elif isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(v) for v in value]
    return str(value)
