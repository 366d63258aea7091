"""Signs of life while something takes long: a line that turns and counts the seconds, and how much time is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module

from rich.console import RenderableType
from rich.live import Live
from rich.spinner import Spinner

from fedkin.cli.console import ACCENT, messages, on_terminal
from fedkin.rounds.words import printable, seconds


class Turning:
    """A line that turns while the process is alive, with the seconds since it began."""

    def __init__(self, text: str = "") -> None:
        self.text, self.begun = text, time.monotonic()
        self._spinner = Spinner("dots", style=ACCENT)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def line(self, text: str) -> RenderableType:
        self._spinner.update(text=f"[dim]{printable(text)}[/]")
        return self._spinner

    def __rich__(self) -> RenderableType:
        return self.line(f"{self.text}, {seconds(self.elapsed)}")


@contextmanager
def waiting(text: str) -> Iterator[Live]:
    """Shows that something is under way, on a terminal only; stop what it gives to end the line before."""
    console = messages()
    shown = Live(Turning(text), console=console, transient=True)
    if on_terminal(console):
        shown.start(refresh=True)
    try:
        yield shown
    finally:
        shown.stop()


def load() -> None:
    """Imports what trains. That takes seconds the first time, in which nothing else can be shown."""
    if "fedkin.sweep.runner" not in sys.modules:
        with waiting("starting"):
            import_module("fedkin.sweep.runner")


@dataclass
class Remaining:
    """How long rounds will still take, by those that were done since `before`."""

    before: int = 0
    begun: float = field(default_factory=time.monotonic)

    def __call__(self, done: int, rounds: int) -> float | None:
        """Seconds; None as long as no round is done, and when all are."""
        since, rest = done - self.before, rounds - done
        return (time.monotonic() - self.begun) / since * rest if since > 0 and rest > 0 else None


def left(remaining: float | None) -> str:
    return "" if remaining is None else f"about {seconds(remaining)} left"
