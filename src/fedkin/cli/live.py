"""Progress as it happens: a live screen on a terminal, one plain line per round everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from fedkin.cli.console import ACCENT, on_terminal, sparkline, table
from fedkin.cli.waiting import Remaining, Turning, left
from fedkin.report.progress import Lines, accuracy_of, called, columns_said, headline, pace
from fedkin.rounds import Accuracy, Event, Prepared, RoundRecord
from fedkin.rounds.footprint import resident
from fedkin.rounds.words import seconds, size
from fedkin.sweep.runner import Cell, tell_apart

REFRESH = 8  # times a second
HEADLINE_LINES = 8  # what a live table needs besides its rows
GAP = 3  # columns between two numbers of a run
MATTERS = ("failed", "removed")  # and are told however narrow the screen is, unless there are none
LEAST = ("failed", "removed", "memory", "evaluating", "down", "up", "steps/s", "time")
"""What a screen goes without that has no room for all, in this order."""
OVER = ("done", "failed", "skipped", "interrupted")  # states in which nothing more comes


class PlainRun(Lines):
    """A listener that writes lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(self.say)
        self._console = console

    def __enter__(self) -> PlainRun:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to close."""

    def say(self, line: str) -> None:
        self._console.print(escape(line), soft_wrap=True)


class LiveRun:
    """A listener that keeps one screen up to date: a bar with the time left, and how the clients do."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn(f"[bold {ACCENT}]round"),
            BarColumn(None, complete_style=ACCENT, finished_style="green"),
            MofNCompleteColumn(),
            console=console,
            expand=True,
        )
        self._task: TaskID | None = None
        self._records: list[RoundRecord] = []
        self._failed, self._accuracy = 0, "accuracy"
        self._turning, self._remaining, self._rounds = Turning(), Remaining(), 0
        self._live = Live(console=console, refresh_per_second=REFRESH, get_renderable=self._render, transient=True)

    def __enter__(self) -> LiveRun:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Prepared):
            for line in (headline(event), *columns_said(event)):
                self._console.print(f"[dim]{escape(line)}")
            for remark in event.remarks:
                self.say(remark)
            self._task = self._bar.add_task("rounds", total=event.config.rounds, completed=event.done)
            self._accuracy, self._rounds = accuracy_of(event.config), event.config.rounds
            self._turning, self._remaining = Turning(), Remaining(event.done)
            return
        self._records.append(event)
        self._failed += event.failed
        if self._task is not None:
            self._bar.update(self._task, completed=event.round)

    def say(self, line: str) -> None:
        self._console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)

    def _render(self) -> RenderableType:
        clock = seconds(self._turning.elapsed)
        if self._task is None:
            return self._turning.line(f"loading the data and building the network, {clock}")
        if not self._records:
            return Group(self._bar, self._turning.line(f"the first round, {clock}"))
        last = self._records[-1]
        shown = {
            "loss": f"{last.train_loss:.4f}",
            called(self._accuracy, last): _with_unit(last.accuracy, last.accuracy.macro),
            "worst decile": _with_unit(last.accuracy, last.accuracy.worst_decile),
            "down": size(last.bytes_down),
            "up": size(last.bytes_up),
            "time": seconds(last.wall),
            "evaluating": seconds(last.evaluating),
            "steps/s": f"{pace(*self._records[:-3:-1]):.0f}",
            "memory": size(resident()),
            "failed": _alarm(self._failed),
            "removed": _alarm(last.removed),
            "curve": f"[green]{sparkline([r.accuracy.macro for r in self._records], 20)}[/]",
        }
        for name in LEAST:
            if _width(shown) > self._console.width and (name not in MATTERS or shown[name] == "0"):
                del shown[name]
        grid = Table.grid(padding=(0, GAP))
        grid.add_row(*(f"[dim]{name}[/]" for name in shown))
        grid.add_row(*shown.values())
        rest = left(self._remaining(last.round, self._rounds)) or "after the last round"
        return Group(self._bar, grid, self._turning.line(f"{clock}, {rest}"))


def _width(shown: Mapping[str, str]) -> int:
    """The columns that a screen must have for all of these side by side."""
    return sum(max(len(name), Text.from_markup(value).cell_len) + GAP for name, value in shown.items()) - GAP


def _with_unit(accuracy: Accuracy, value: float) -> str:
    return " ".join(word for word in (accuracy.said(value), accuracy.unit) if word)


def _alarm(count: int) -> str:
    return f"[bold yellow]{count}[/]" if count else "0"


def run_screen(console: Console) -> PlainRun | LiveRun:
    return LiveRun(console) if on_terminal(console) else PlainRun(console)


class GridScreen(AbstractContextManager["GridScreen"]):
    """All runs of a comparison: one line each, kept up to date, or plain lines without a terminal."""

    transient = False  # whether the screen is wiped when all is over

    def __init__(self, cells: Sequence[Cell], console: Console, title: str) -> None:
        self._cells, self._console, self._title = cells, console, title
        self._varied = tell_apart(cells)
        self._live: Live | None = None
        self._ended = False
        self._told = {cell for cell in cells if cell.state == "skipped"}
        self._said: set[str] = set()
        self._turning, self._begun = Turning(), dict[Cell, Remaining]()
        if on_terminal(console):
            self._live = Live(
                console=console, refresh_per_second=REFRESH, get_renderable=self._render, transient=self.transient
            )

    def __enter__(self) -> GridScreen:
        if self._live:
            self._live.start()
        else:
            self._console.print(escape(self._title), soft_wrap=True)
            for cell in (c for c in self._cells if c.state == "skipped"):
                self._console.print(escape(f"{cell.name}  finished before: {cell.run}"), soft_wrap=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._ended = True
            self._live.stop()
        self._tell()

    def listener(self, cell: Cell) -> Callable[[Event], None]:
        note = self._noting(cell)

        def hear(event: Event) -> None:
            note(event)
            self._tell()
            if isinstance(event, Prepared) and not self._live:
                for line in (*columns_said(event), *event.remarks):
                    self._once(line)

        return hear

    def _once(self, line: str) -> None:
        """What holds for many runs is said at the first of them."""
        if line not in self._said:
            self._said.add(line)
            self._console.print(escape(line), soft_wrap=True)

    def _tell(self) -> None:
        """Prints, without a terminal, a line for each run that has ended since the last time."""
        for cell in self._cells:
            if self._live or cell in self._told or cell.state != "done" or not cell.records:
                continue
            self._told.add(cell)
            last, name = cell.records[-1], accuracy_of(cell.config)
            a, odd = last.accuracy, "  diverged" if cell.outcome is not None and cell.outcome.diverged else ""
            self._console.print(
                escape(
                    f"{cell.name}  round {last.round}/{cell.config.rounds}  {called(name, last)} {a.said(a.macro)}  "
                    f"worst decile {a.said(a.worst_decile)}  {seconds(last.wall)}{odd}"
                ),
                soft_wrap=True,
            )

    def _noting(self, cell: Cell) -> Callable[[Event], None]:
        """Keeps what is heard of a run, and when it began."""
        cell.state = "running"

        def note(event: Event) -> None:
            if isinstance(event, RoundRecord):
                cell.records.append(event)
            else:
                self._begun[cell] = Remaining(event.done)

        return note

    def failed(self, cell: Cell, error: str) -> None:
        cell.state, cell.error = "failed", error
        run = f" (run {cell.run})" if cell.run else ""
        self._console.print(f"[bold red]{escape(cell.name)} failed:[/] {escape(error + run)}", soft_wrap=True)

    def say(self, line: str) -> None:
        self._console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)

    def _render(self) -> RenderableType:
        seen = next((c.records[-1].accuracy for c in self._cells if c.records), None)
        numbers = ("seed", "round", seen.metric if seen is not None else "accuracy", "worst decile")
        times = ("wall s",) if self._ended else ("wall s", "left")
        heads = [k.replace("_", " ") for k in self._varied]
        made = table(self._title, "method", *heads, *numbers, "curve", *times, right=(*numbers, *times))
        made.columns[-1 - len(times)].min_width = 16
        room = len(self._cells) if self._ended else max(3, self._console.height - HEADLINE_LINES)
        for cell in window(self._cells, room):
            row = [*self._row(cell), *([] if self._ended else [self._left(cell)])]
            made.add_row(*row, style="dim" if cell.state == "waiting" else "")
        hidden = len(self._cells) - min(room, len(self._cells))
        if hidden:
            made.caption = f"{hidden} more lines"
        return self._alive(made)

    def _left(self, cell: Cell) -> str:
        """How long a run that is under way will take."""
        begun = self._begun.get(cell)
        if cell.state != "running" or begun is None or not cell.records:
            return ""
        rest = begun(cell.records[-1].round, cell.config.rounds)
        return "" if rest is None else seconds(rest)

    def _alive(self, made: Table) -> RenderableType:
        """The table, and below it how far all is, as long as it goes on."""
        if self._ended:
            return made
        over = sum(c.state in OVER for c in self._cells)
        before = sum(c.config.rounds for c in self._cells if c.state == "skipped")
        before += sum(begun.before for begun in self._begun.values())
        rest = Remaining(before, self._turning.begun)(
            sum(self._done(c) for c in self._cells), sum(c.config.rounds for c in self._cells)
        )
        parts = [f"{over} of {len(self._cells)} runs", seconds(self._turning.elapsed), left(rest)]
        return Group(made, self._turning.line(", ".join(filter(None, parts))))

    def _done(self, cell: Cell) -> int:
        """Rounds of a run that are over."""
        if cell.state in OVER:
            return cell.config.rounds
        return cell.records[-1].round if cell.records else self._begun[cell].before if cell in self._begun else 0

    def _row(self, cell: Cell) -> list[str]:
        config = cell.config
        own = escape(" ".join([config.method, *(f"{k}={v}" for k, v in config.options.items())]))
        name = {"running": f"[bold {ACCENT}]{own}[/]", "failed": f"[red]{own}[/]"}
        start = [name.get(cell.state, own), *(escape(str(getattr(config, k))) for k in self._varied), str(config.seed)]
        if cell.state == "skipped" and cell.outcome is not None:
            done = cell.outcome.accuracy
            said = "[red]diverged[/]" if cell.outcome.diverged else ""
            return [*start, "before", done.said(done.macro), done.said(done.worst_decile), said, ""]
        if cell.state == "failed":
            return [*start, "[red]failed[/]", "", "", "", ""]
        if not cell.records:
            return [*start, f"0/{config.rounds}", "", "", "", ""]
        last = cell.records[-1]
        curve = f"[green]{sparkline([r.accuracy.macro for r in cell.records])}[/]"
        if cell.outcome is not None and cell.outcome.diverged:
            curve = "[red]diverged[/]"
        return [
            *start,
            f"{last.round}/{config.rounds}",
            last.accuracy.said(last.accuracy.macro),
            last.accuracy.said(last.accuracy.worst_decile),
            curve,
            f"{last.wall:.1f}",
        ]


def window(cells: Sequence[Cell], room: int) -> Sequence[Cell]:
    """As many cells as fit the screen, those around the one at work."""
    if len(cells) <= room:
        return cells
    at = next((i for i, c in enumerate(cells) if c.state in ("running", "waiting")), len(cells) - 1)
    begin = min(max(0, at - room // 2), len(cells) - room)
    return cells[begin : begin + room]
