"""Progress as text: what is about to run, and a line for each evaluated round.

The command line has these lines in its logs and live screens; `verbose=True` shows them from Python, on standard error,
or in a notebook as one line that is brought up to date."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fedkin.config import Config
from fedkin.rounds import Event, Listener, Prepared, RoundRecord
from fedkin.rounds.footprint import resident
from fedkin.rounds.words import benign_only, printable, seconds, size, threat
from fedkin.sweep.runner import Cell, Quiet, tell_apart

MOST_COLUMNS = 20  # of a table, that are spoken of at the start


# ---------------------------------------------------------------- words


def headline(prepared: Prepared) -> str:
    """What is about to run, in one line."""
    config = prepared.config
    parts = [
        f"{config.method} on {config.data}",
        f"{prepared.clients} clients, {config.partition}",
        f"{config.model}, {prepared.parameters:,} parameters",
        f"{prepared.device} {prepared.precision}",
        f"seed {config.seed}",
        f"split {prepared.split_hash[:12]}",
        threat(config, prepared.clients),
        "" if config.rule == "mean" else f"rule {config.rule}",
        needs(prepared),
    ]
    return " · ".join(part for part in parts if part)


def columns_said(prepared: Prepared) -> tuple[str, ...]:
    """What was done with the columns of a table, a line each."""
    more = len(prepared.columns) - MOST_COLUMNS
    rest = (f"... and {more} more columns; run.json has them all",) if more > 0 else ()
    return (*prepared.columns[:MOST_COLUMNS], *rest)


def needs(prepared: Prepared) -> str:
    """The memory and disk that the run is reckoned to need."""
    if prepared.needed is None:
        return ""
    found = prepared.needed
    parts = [
        f"{size(found.host)} of memory",
        f"{size(found.device)} of {prepared.device}" if found.device else "",
        f"{size(found.disk)} of disk",
    ]
    return "needs about " + ", ".join(part for part in parts if part)


def pace(record: RoundRecord, before: RoundRecord | None = None) -> float:
    """Training steps of all clients in a second, since the record before (or the start)."""
    steps, seconds = record.client_steps, record.seconds
    if before is not None:
        steps, seconds = steps - before.client_steps, seconds - before.seconds
    return steps / seconds if seconds > 0 else 0.0


def coverage(record: RoundRecord) -> str:
    """Of how many clients an accuracy is, where not of all."""
    return "" if record.covers_all else f" ({record.judged} of {record.judgeable} clients)"


def round_line(record: RoundRecord, rounds: int, accuracy: str = "accuracy", before: RoundRecord | None = None) -> str:
    """One round as a plain line for logs; `accuracy`: what to call it; `before`: the record before."""
    name, a = "final tuning" if record.final else f"round {record.round}/{rounds}", record.accuracy
    return (
        f"{name}  loss {record.train_loss:.4f}  {called(accuracy, record)} {a.said(a.macro)}{coverage(record)}  "
        f"worst decile {a.said(a.worst_decile)}  down {size(record.bytes_down)}  "
        f"up {size(record.bytes_up)}  failed {record.failed}  removed {record.removed}  {seconds(record.wall)}  "
        f"{pace(record, before):.0f} steps/s  {size(resident())}"
    )


def called(accuracy: str, record: RoundRecord) -> str:
    """What to call the numbers of a record: another metric than accuracy by its own name."""
    return accuracy.replace("accuracy", record.accuracy.metric)


def accuracy_of(config: Config) -> str:
    return "benign accuracy" if benign_only(config) else "accuracy"


# ---------------------------------------------------------------- lines


class Lines:
    """A listener that says a line for each evaluated round. `say` gets what stays, `show` what is only of now; without
    `show` everything stays."""

    def __init__(self, say: Callable[[str], object], prefix: str = "", show: Callable[[str], object] | None = None):
        self._say, self._show, self._prefix = say, show or say, prefix
        self._rounds, self._accuracy = 0, "accuracy"
        self._before: RoundRecord | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Prepared):
            self._rounds, self._accuracy = event.config.rounds, accuracy_of(event.config)
            for line in (headline(event), *columns_said(event), *event.remarks):
                self._say(line)
        else:
            self._show(self._prefix + round_line(event, self._rounds, self._accuracy, self._before))
            self._before = event


class Place:
    """Where `verbose=True` shows lines: standard error, or the notebook that Python runs in."""

    def __init__(self) -> None:
        self._handle: Any = None

    def say(self, line: str) -> None:
        """A line that stays."""
        print(printable(line), file=sys.stdout if in_notebook() else sys.stderr, flush=True)

    def show(self, line: str) -> None:
        """A line that the next one replaces, where lines can be replaced."""
        if not in_notebook():
            self.say(line)
            return
        text = {"text/plain": printable(line)}
        if self._handle is None:
            self._handle = sys.modules["IPython"].display.display(text, raw=True, display_id=True)
        else:
            self._handle.update(text, raw=True)


def in_notebook() -> bool:
    """Whether Python runs in the kernel of a notebook, where what is shown can be replaced."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def hearing(verbose: bool, on_event: Listener | None) -> Listener | None:
    """Who hears of one run: lines first, where they are wanted, then the user's own listener."""
    if not verbose:
        return on_event
    place = Place()
    lines = Lines(place.say, show=place.show)

    def hear(event: Event) -> None:
        lines(event)
        if on_event is not None:
            on_event(event)

    return hear


class Several(Quiet):
    """Shows the runs of a comparison as they go."""

    def __init__(self, cells: list[Cell]) -> None:
        self._cells, self._place, self._begun = cells, Place(), 0
        tell_apart(cells)
        for cell in (c for c in cells if c.state == "skipped"):
            self._place.say(f"{cell.name}  finished before: {cell.run}")

    def listener(self, cell: Cell) -> Listener:
        cell.state, self._begun = "running", self._begun + 1
        if not in_notebook():
            return Lines(self._place.say, f"{cell.name}  ")
        of = sum(c.state != "skipped" for c in self._cells)
        return Lines(self._place.show, f"run {self._begun} of {of}, {cell.name}  ")

    def say(self, line: str) -> None:
        self._place.say(line)
