"""A run as it goes on, as server-sent events: new rounds and changes of status, until the run is over."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from anyio import sleep, to_thread

from fedkin.errors import DataError, FedKinError
from fedkin.report.gather import CURVES, rounds_after
from fedkin.runs.folder import RunFolder
from fedkin.web.values import columns, number, text
from fedkin.web.views import summary

EVERY = 0.5  # seconds between looks
ALIVE = 5.0  # seconds after which silence is broken
LONGEST = 3600.0  # seconds; the browser then asks anew, from where it was
MOST_STREAMS = 32
BATCH = 1000  # rounds in one event

Place = tuple[int, int]  # round, final


class Streams:
    """How many are being watched."""

    def __init__(self, most: int = MOST_STREAMS) -> None:
        self.most, self.now = most, 0

    @property
    def full(self) -> bool:
        return self.now >= self.most

    async def watch(self, run: RunFolder, place: Place) -> AsyncIterator[str]:
        self.now += 1
        try:
            async for line in _watch(run, place):
                yield line
        finally:
            self.now -= 1


def place_of(given: str | None) -> Place:
    """Where a browser was, as it says in Last-Event-ID; the start if it says nothing sensible."""
    round, _, final = (given or "").partition(".")
    if round.isascii() and round.isdigit() and final in ("0", "1") and len(round) < 12:
        return int(round), int(final)
    return -1, 1


async def _watch(run: RunFolder, place: Place) -> AsyncIterator[str]:
    begin = spoke = time.monotonic()
    told: dict[str, Any] | None = None
    while time.monotonic() < begin + LONGEST:
        try:
            status, rows = await to_thread.run_sync(_look, run, place)
        except FedKinError as error:
            yield _event("problem", {"error": text(error, 500)})
            return
        for row in rows:
            place = (int(row[1]), int(row[0]))
        if rows:
            found = columns(("final", *CURVES), rows)
            yield _event("rounds", found, f"{place[0]}.{place[1]}")
        if status != told:
            told = status
            yield _event("status", status)
        if status["status"] != "running" and len(rows) < BATCH:
            yield _event("end", {})
            return
        if rows:
            spoke = time.monotonic()
        elif time.monotonic() > spoke + ALIVE:
            spoke = time.monotonic()
            yield ": still here\n\n"
        if len(rows) < BATCH:
            await sleep(EVERY)


def _look(run: RunFolder, place: Place) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """The status first: rounds written before it changed are then certainly seen."""
    info = RunFolder.open(run.path).info
    status = {**summary(info), "error": None if info.error is None else text(info.error, 5000)}
    try:
        rows = rounds_after(run.path, *place, most=BATCH)
    except DataError as error:
        if "locked" not in str(error):
            raise
        rows = []  # a long commit: next time
    return status, [row for row in rows if number(row[0]) is not None and number(row[1]) is not None]


def _event(name: str, value: Any, id: str | None = None) -> str:
    mark = f"id: {id}\n" if id else ""
    return f"event: {name}\n{mark}data: {json.dumps(value, allow_nan=False)}\n\n"
