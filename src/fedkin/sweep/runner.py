"""The one runner of grids, under `fedkin compare`, `fedkin reproduce` and `fk.compare`.

Every cell is a run, and what is known of it decides what is done: a finished one is read, one that was cut short goes
on, one at work elsewhere is left alone. The others go into batches (`trainings`): runs that differ only in how they are
evaluated or tuned at the end share a training, and trainings that fit together are rows of one cohort. A batch is
carried out here (`executor`) or in one of several processes, each on its device (`processes`). Both tell the same
things of a run, down to what is kept of it in the end; what fails, fails alone. Nothing new is begun once the budget is
used up or Ctrl-C was heard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from fedkin import plugins
from fedkin.config import Config
from fedkin.errors import DataError, UsageError
from fedkin.methods import METHODS
from fedkin.rounds import Event, Listener, RoundRecord, pick_device
from fedkin.runs.catalogue import Past
from fedkin.runs.folder import RunFolder
from fedkin.runs.start import Stop
from fedkin.sweep.executor import Ended, Executor, Keep, Task, in_words
from fedkin.sweep.groups import said, varied
from fedkin.sweep.loaded import Data
from fedkin.sweep.processes import Batch, Setup, run_in_processes
from fedkin.sweep.statistics import Outcome
from fedkin.sweep.trainings import batches

TOGETHER_ON_GPU = 8
State = Literal["waiting", "running", "done", "skipped", "interrupted", "failed"]


@dataclass(eq=False)
class Cell:
    """One run of a sweep, and how far it is."""

    config: Config
    state: State = "waiting"
    records: list[RoundRecord] = field(default_factory=list)
    error: str = ""
    run: str | None = None  # the folder's name
    outcome: Any = None  # what the sweep keeps of the run
    cause: Exception | None = None  # of its failure
    given: Mapping[str, Any] = field(default_factory=dict)  # as Python objects
    varied: Sequence[str] = ()  # settings, besides attack and rule, that tell it from the others

    @property
    def name(self) -> str:
        config = self.config
        options = "".join(f" {k}={v}" for k, v in config.options.items())
        attack = "" if config.attack == "none" else f" under {config.attack}"
        rule = "" if config.rule == "mean" else f" by {config.rule}"
        more = "".join(f" {said(k, getattr(config, k))}" for k in self.varied if k not in ("attack", "rule"))
        return f"{config.method}{options}{attack}{rule}{more} seed {config.seed}"


Judge = Callable[[Cell, Event], bool]
"""Whether a cell's run is to end where it is, having told this event."""


def tell_apart(cells: Sequence[Cell]) -> Sequence[str]:
    """The settings that differ between cells, which their names then have."""
    rows, columns = varied([cell.config for cell in cells])
    for cell in cells:
        cell.varied = [*columns, *rows]
    return [*columns, *rows]


class Watcher(Protocol):
    """Who shows a sweep while it goes on."""

    def listener(self, cell: Cell) -> Listener: ...

    def failed(self, cell: Cell, error: str) -> None: ...

    def say(self, line: str) -> None: ...


class Quiet:
    """Shows nothing."""

    def listener(self, cell: Cell) -> Listener:
        cell.state = "running"

        def hear(event: Event) -> None:
            if isinstance(event, RoundRecord):
                cell.records.append(event)

        return hear

    def failed(self, cell: Cell, error: str) -> None:
        cell.state, cell.error = "failed", error

    def say(self, line: str) -> None: ...


@dataclass(eq=False)
class Sweep:
    cells: list[Cell]
    signal: int | None = None  # what ended it early

    @property
    def failed(self) -> list[Cell]:
        return [c for c in self.cells if c.state == "failed"]

    @property
    def outcomes(self) -> list[Any]:
        return [c.outcome for c in self.cells if c.outcome is not None]

    @property
    def skipped(self) -> int:
        return sum(c.state == "skipped" for c in self.cells)


def outcome_of(ended: Ended) -> Outcome:
    """What a comparison keeps."""
    if ended.folder is not None:
        return Outcome.read(ended.folder, ended.config)
    assert ended.result is not None
    return Outcome.of(replace(ended.result, _rows=torch.empty(0, 0)), ended.config)  # all models would fill the memory


def together_by_default(device: str) -> int:
    return TOGETHER_ON_GPU if pick_device(device).type == "cuda" else 1


def run_sweep(
    configs: Sequence[Config],
    *,
    watcher: Callable[[list[Cell]], Watcher] | None = None,
    ended: Callable[[Cell], object] = lambda cell: None,
    fresh: bool = False,
    together: int = 1,
    jobs: int = 1,
    devices: Sequence[str] = (),
    budget: float | None = None,
    sinks: Sequence[str] = (),
    signals: bool = False,
    tracked: bool = True,
    keep: Keep = outcome_of,
    data: Data | None = None,
    given: Sequence[Mapping[str, Any]] = (),
    judge: Judge | None = None,
    listened: bool = False,
) -> Sweep:
    """Run all cells, each in its folder (unless not `tracked`), up to `together` at once, in `jobs` processes.

    Finished ones are read, interrupted ones resumed, and so are those that a listener ended before their last round,
    unless there is one here that may do so again; `fresh` begins all anew. `devices`: where, in place of what the
    configurations say, with a process for each at least. `budget`: seconds after which nothing new is begun. With
    `signals`, Ctrl-C and SIGTERM stop after the round, and the same call goes on from there. `ended` is told of every
    cell that is done or has failed. `keep`: what becomes of each, its cell's `outcome`. `data`: where they come from,
    once it is known that they are there. `given`: what each cell is given as Python objects, if anything; such cells
    are always begun anew, in this process. `judge` says of each event whether its run is to end there, interrupted.
    `listened`: somebody hears of each run who may end it, so none shares its training."""
    if not configs:
        raise UsageError("an empty sweep: give at least one method")
    cells = [Cell(config) for config in configs]
    for cell, objects in zip(cells, given, strict=False):
        cell.given = objects
    _check_places(cells, jobs, devices, tracked)
    past = Past(configs[0].runs_dir) if tracked else None
    known, sweep = data or Data(), Sweep(cells)
    if past is not None and not fresh:
        for cell in cells:
            _take(cell, past, keep, known)
    todo = [i for i, c in enumerate(cells) if c.state == "waiting"]
    if todo and data is None:
        known.of(cells[todo[0]].config, cells[todo[0]].given)  # data that are missing end the command, not cell by cell
    shown: Watcher = watcher(cells) if watcher is not None else Quiet()
    end = None if budget is None else time.monotonic() + budget
    stop, heard = Stop(shown.say), _Heard(cells, past, shown, ended, judge)

    def go_on() -> bool:
        return stop.number is None and (end is None or time.monotonic() < end)

    try:
        with stop.listening(signals):
            tasks = heard.tasks(todo, devices[0] if devices else None, fresh, listened)
            watched = bool(sinks or listened or judge)
            apart = [k for k, task in enumerate(tasks) if task.left is not None or task.given or watched]
            found = batches([task.config for task in tasks], together, apart)
            work: list[Batch] = [[[tasks[k] for k in training] for training in batch] for batch in found]
            jobs = min(max(jobs, len(devices)), len(work))
            if jobs > 1:
                brought = plugins.given()
                setup = Setup(keep, known.data_dir, known.download, sinks, brought, judge is not None)
                more: dict[str, Any] = {"started": heard.started, "tell": heard, "go_on": go_on, "stop": stop}
                run_in_processes(work, jobs, devices, setup, **more)
            else:
                executor = Executor(known, keep, heard, stop, sinks, tracked)
                for batch in work:
                    if not go_on():
                        break
                    heard.started(batch)
                    executor.batch(batch)
    except KeyboardInterrupt:
        sweep.signal = 2
    except _Abandoned as error:
        raise error.cause from None
    finally:
        for cell in cells:
            if cell.state == "running":
                cell.state = "interrupted"
    sweep.signal = stop.number or sweep.signal
    return sweep


def _check_places(cells: Sequence[Cell], jobs: int, devices: Sequence[str], tracked: bool) -> None:
    for device in devices:
        pick_device(device)
    named = next((c.config.device for c in cells if devices and c.config.device != "auto"), None)
    if named is not None:
        raise UsageError(f"device={named!r} and devices={','.join(devices)!r}: give one of them")
    if max(jobs, len(devices)) > 1 and not tracked:
        raise UsageError("runs in several processes leave what they give in folders: say where with runs_dir")
    objects = next((sorted(c.given) for c in cells if c.given or _of_this_process(c.config)), None)
    if max(jobs, len(devices)) > 1 and objects is not None:
        raise UsageError(
            f"{', '.join(objects) or 'method'} given as Python objects: these cannot go to other processes; run in "
            "this one (jobs=1, one device at most), or bring a method of your own as a plugin"
        )


def _of_this_process(config: Config) -> bool:
    """Whether the method was registered here, by no file that another process could run too."""
    brought = {name for plugin in plugins.loaded() for name in plugin.names}
    return not METHODS[config.method].__module__.startswith("fedkin.") and config.method not in brought


def _take(cell: Cell, past: Past, keep: Keep, data: Data) -> None:
    """A cell that is finished already is only read."""
    info = None if cell.given else past.finished(cell.config)
    if info is not None:
        with suppress(DataError):  # a result that cannot be read is made again
            cell.outcome = keep(Ended(cell.config, RunFolder(info), data))
            cell.state, cell.run = "skipped", info.id


class _Abandoned(BaseException):
    """What is to be done with a finished run went wrong: no fault of the run, and the end of the sweep."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Heard:
    """Hears what becomes of the cells, wherever they run (`executor.Tell`), and passes it on."""

    def __init__(
        self,
        cells: Sequence[Cell],
        past: Past | None,
        shown: Watcher,
        ended: Callable[[Cell], object],
        judge: Judge | None,
    ) -> None:
        self._cells, self._past, self._shown, self._ended, self._judge = cells, past, shown, ended, judge
        self._listeners: dict[int, Listener] = {}

    def tasks(self, numbers: Sequence[int], device: str | None, fresh: bool, listened: bool) -> list[Task]:
        """What is to be done. A cell at work elsewhere has failed here."""
        made = []
        for i in numbers:
            cell = self._cells[i]
            if fresh or cell.given or self._past is None:
                made.append(Task(i, cell.config, device, given=cell.given))
                continue
            busy, left = self._past.busy(cell.config), self._past.unfinished(cell.config, halted=not listened)
            if busy is not None:
                cell.run = busy.id
                self("failed", i, UsageError("it is at work in another process: wait for that one, or stop it"))
            elif left is not None:
                cell.run = left.id
                made.append(Task(i, cell.config, device, left.path, whole=not listened))
            else:
                made.append(Task(i, cell.config, device))
        return made

    def started(self, batch: Batch) -> None:
        for task in (task for training in batch for task in training):
            cell = self._cells[task.number]
            self._listeners[task.number] = self._shown.listener(cell)
            if task.left is not None:
                done = RunFolder.open(task.left).info.rounds_done
                self._shown.say(f"{cell.name}: going on with {cell.run} after round {done}")

    def __call__(self, kind: str, number: int, value: Any) -> bool:
        cell = self._cells[number]
        if kind == "event":
            self._listeners[number](value)
            return self._judge is not None and self._judge(cell, value)
        if kind == "say":
            self._shown.say(value)
        elif kind == "stopped":
            cell.state, cell.run = "interrupted", value or cell.run or self._made(cell)
        elif kind == "done":
            cell.state, (cell.outcome, cell.run) = "done", value
            self._tell(cell)
        else:
            cell.cause = value
            cell.run = cell.run or self._made(cell)
            self._shown.failed(cell, in_words(value))
            self._tell(cell)
        return False

    def _made(self, cell: Cell) -> str | None:
        """The folder of a run that did not come to its end."""
        made = self._past.newest(cell.config) if self._past is not None else None
        return made.id if made is not None else None

    def _tell(self, cell: Cell) -> None:
        try:
            self._ended(cell)
        except Exception as error:
            raise _Abandoned(error) from error
