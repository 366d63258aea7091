"""What shows that something goes on: at once, all the time, and with the time that is left."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from fedkin.cli import waiting
from fedkin.cli.live import GridScreen, LiveRun
from fedkin.cli.waiting import Remaining, left
from fedkin.config import Config
from fedkin.rounds import run_config
from fedkin.sweep.runner import Cell, run_sweep

SMALL: dict[str, Any] = {"clients": 5, "rounds": 2, "epochs": 1, "model": "mlp", "way": "each"}
STARTING = """
import sys
from fedkin.cli import waiting
started = waiting.Live.start
def start(shown, refresh=False):
    print("torch" in sys.modules, file=sys.stderr)
    started(shown, refresh)
waiting.Live.start = start
waiting.load()
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console() -> Console:
    return Console(file=Terminal(), force_terminal=True, width=140, height=30, legacy_windows=False)


def drawn(shown: Any) -> str:
    to = Console(file=io.StringIO(), width=140, height=30)
    to.print(shown._render())
    return str(to.file.getvalue())  # type: ignore[attr-defined]


def test_time_that_is_left_follows_from_the_rounds_that_were_done(monkeypatch: pytest.MonkeyPatch) -> None:
    remaining = Remaining(before=4, begun=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: 106.0)
    assert remaining(4, 10) is None
    assert remaining(7, 10) == pytest.approx(6.0)  # three rounds in six seconds, three to go
    assert remaining(10, 10) is None
    assert left(None) == ""
    assert left(6.0) == "about 6.0 s left"


def test_a_run_shows_life_before_its_first_round_and_what_is_left_after_it() -> None:
    shown = LiveRun(console())
    assert "loading the data" in drawn(shown)
    seen = []

    def hear(event: Any) -> None:
        shown(event)
        seen.append(drawn(shown))

    run_config(Config(**SMALL), on_event=hear)
    assert "the first round, 0." in seen[0]
    assert " left" in seen[1]
    assert "after the last round" in seen[2]


@pytest.mark.parametrize(("width", "removed"), [(80, 0), (80, 2), (140, 0)])
def test_a_narrow_screen_shows_fewer_numbers_and_each_of_them_whole(width: int, removed: int) -> None:
    narrow = Console(file=Terminal(), force_terminal=True, width=width, height=30, legacy_windows=False)
    shown = LiveRun(narrow)
    run_config(Config(**{**SMALL, "attack": "ipm"}), on_event=shown)
    shown._records[-1] = replace(shown._records[-1], removed=removed)
    to = Console(file=io.StringIO(), width=width, height=30)
    to.print(shown._render())
    lines = str(to.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    assert not any("…" in line for line in lines)
    heads = lines[1]
    assert "benign accuracy" in heads
    assert "worst decile" in heads
    assert ("removed" in heads) is (bool(removed) or width > 110)
    assert ("memory" in heads) is (width > 110)


def test_a_grid_shows_how_far_it_is_and_what_is_left() -> None:
    cells = [Config(**SMALL, seed=seed) for seed in (0, 1)]
    screens: list[GridScreen] = []
    seen: list[str] = []

    class Seen(GridScreen):
        def listener(self, cell: Cell) -> Any:
            hear = super().listener(cell)

            def both(event: Any) -> None:
                hear(event)
                seen.append(drawn(self))

            return both

    def watch(cells: list[Cell]) -> GridScreen:
        screens.append(Seen(cells, console(), "title").__enter__())
        return screens[0]

    sweep = run_sweep(cells, watcher=watch, tracked=False)
    assert "0 of 2 runs" in seen[0]
    assert "about " not in seen[0]
    assert "0 of 2 runs" in seen[1]
    assert "about " in seen[1]  # for all
    assert next(line for line in seen[1].splitlines() if " 1/2 " in line).rstrip().endswith(" s")  # and for the run
    assert "1 of 2 runs" in seen[-1]
    screens[0].__exit__(None, None, None)
    assert "runs," not in drawn(screens[0])
    assert [c.state for c in sweep.cells] == ["done", "done"]


def test_a_command_shows_life_before_torch_is_there() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", STARTING], stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    said = b""
    while True:
        try:
            more = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        said += more
    os.close(ours)
    assert process.wait(60) == 0
    assert said.startswith(b"False")
    assert b"starting" in said


def test_without_a_terminal_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting.waiting("drawing"):
        pass
    assert capsys.readouterr().err == ""
