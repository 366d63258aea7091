"""What every command shares: where output goes, how numbers look, and how a failure ends."""

from __future__ import annotations

import functools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedkin.cli.spoken import as_flags
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.options import said
from fedkin.rounds.words import printable, seconds

ACCENT = "cyan"
PLAIN_WIDTH = 160
NARROW = 100
BARS = "▁▂▃▄▅▆▇█"


def screen() -> Console:
    """Standard output: results."""
    return _console(sys.stdout, stderr=False)


def messages() -> Console:
    """Standard error: progress, notes and errors."""
    return _console(sys.stderr, stderr=True)


def on_terminal(console: Console) -> bool:
    """Whether a screen can be redrawn: a real terminal, whatever colours were asked for."""
    return console.file.isatty() and not console.is_dumb_terminal


class Screen(Console):
    """A console on which no text controls the terminal, wherever it came from: a table, a run folder, a site."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)


def _console(stream: Any, stderr: bool) -> Console:
    """A terminal keeps its own width; files and pipes get wide lines, so that tables stay whole."""
    fixed = None if stream.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
    return Screen(emoji=False, stderr=stderr, width=fixed, highlight=False, soft_wrap=False)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Ends a command as documented, with no traceback: 1 for a failure, 2 for what cannot be used, 130 for Ctrl-C."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except FedKinError as error:
            run, code = getattr(error, "run", None), getattr(error, "exit_code", None)
            if run is not None and code is not None:  # asked to stop, and did
                reason = "Ctrl-C" if code == 130 else "SIGTERM"
                messages().print(
                    f"[yellow]{escape(str(error))} by {reason}.[/] Continue with: {resume_command(run)}", soft_wrap=True
                )
                raise typer.Exit(code) from None
            complain(as_flags(str(error)))
            raise typer.Exit(2 if isinstance(error, UsageError | DataError) else 1) from None
        except KeyboardInterrupt:
            messages().print("\n[yellow]Stopped by Ctrl-C.[/] Nothing is left running.")
            raise typer.Exit(130) from None

    return wrapper


def resume_command(run: Path) -> str:
    """What to type to go on with a run, from here."""
    from fedkin.runs.catalogue import runs_folder

    same = runs_folder().resolve() == run.parent.resolve()
    return f"fedkin resume {run.name}" + ("" if same else f" --runs-dir {shlex.quote(str(run.parent))}")


def safe(text: str) -> str:
    """Text of unknown origin: neither markup nor control characters take effect."""
    return escape(printable(text))


def complain(text: str) -> None:
    messages().print(f"[bold red]Error:[/] {safe(text)}", soft_wrap=True)


def print_json(value: Any) -> None:
    """Exactly one JSON document on standard output; what is not a number becomes null."""
    sys.stdout.write(json.dumps(plain(value), allow_nan=False, default=str) + "\n")


def plain(value: Any) -> Any:
    """Nested values as JSON has them."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Titled(Table):
    """A table whose title and caption may be wider than the table."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title, caption = self.title, self.caption
        self.title = self.caption = None
        try:
            if title:
                yield console.render_str(title, style="bold") if isinstance(title, str) else title
            yield from super().__rich_console__(console, options)
            if caption:
                yield console.render_str(caption, style="dim italic") if isinstance(caption, str) else caption
        finally:
            self.title, self.caption = title, caption


def table(title: str | None, *columns: str, right: Sequence[str] = (), caption: str | None = None) -> Table:
    """An empty table in the house style; the columns in `right` hold numbers. Narrow screens get it without padding."""
    made = Titled(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        header_style=f"bold {ACCENT}",
        border_style="dim",
        box=box.SIMPLE_HEAD,
        padding=(0, 0 if screen().width < NARROW else 1),
    )
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=name == columns[0])
    return made


def scores(whose: str, lines: Iterable[tuple[str, Sequence[float]]], unit: str = "%") -> Table:
    """Accuracies of a run (or another metric): for each line the macro and micro means, the worst decile, the deviation
    over clients."""
    columns = ("macro", "micro", "worst decile", "std over clients")
    made = table(None, f"{whose}{', percent' if unit == '%' else ''}", *columns, right=columns)
    for name, values in lines:
        made.add_row(name, *(said(value, unit) for value in values))
    return made


def percent(value: float) -> str:
    return said(value)


def spent(wall: float, times: Mapping[str, float]) -> str:
    """The wall clock and where it went; what is below a twentieth of a second is not worth a word."""
    parts = ", ".join(f"{name} {value:.1f}" for name, value in times.items() if value >= 0.05)
    return f"{seconds(wall)} wall clock" + (f" ({parts})" if parts else "")


def sparkline(values: Sequence[float], width: int = 16, low: float = 0.0, high: float = 100.0) -> str:
    """A curve in one line of text; longer series are thinned to `width`, the last value always kept."""
    known = [v for v in values if not math.isnan(v)]
    if len(known) > width:
        known = [known[round(i * (len(known) - 1) / (width - 1))] for i in range(width)]
    top = len(BARS) - 1
    return "".join(BARS[min(top, max(0, round((v - low) / (high - low) * top)))] for v in known)
