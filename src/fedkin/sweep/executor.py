"""Trainings carried out in this process: one, or several as rows of one cohort.

A training may be of several runs. Those that differ in how models are evaluated are evaluated each in its own way as
it goes; those that differ in the tuning after the last round are tuned each from the same state. Every one of them is
told of as if it had been alone and, where runs are kept, has a folder of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedkin.config import Config
from fedkin.data import Dataset, Split
from fedkin.errors import FedKinError
from fedkin.rounds import Event, Job, Listener, Result, RoundRecord, drive, prepare
from fedkin.runs.database import salvage
from fedkin.runs.entries import Row, client_rows, tables_of
from fedkin.runs.folder import METRICS, RunFolder
from fedkin.runs.origin import with_origin
from fedkin.runs.recorder import Recorder
from fedkin.runs.sinks import make_sinks
from fedkin.runs.start import Interrupted, Stop, begin, follow, resume, start
from fedkin.sweep.loaded import Data
from fedkin.sweep.together import run_together
from fedkin.sweep.trainings import tunes

Loaded = tuple[Dataset, Split]
Tell = Callable[[str, int, Any], bool]
"""Hears what becomes of a task: "event" (the event; true if the run is to end with it), "say" (a sentence), and at its
end "done" (what is kept of it, and its folder's name), "failed" (the exception) or "stopped" (its folder's name)."""


@dataclass(frozen=True, eq=False)
class Ended:
    """A finished run, for whoever makes of it what a sweep keeps."""

    config: Config  # as it was asked for
    folder: RunFolder | None  # if it has one
    data: Data
    result: Result | None = None  # if it was carried out here and now
    wall: float = math.nan  # seconds from asking for it to its result, its share of them if there were several
    alone: bool = False  # nothing else ran meanwhile, from its first round on


Keep = Callable[[Ended], Any]
"""What a sweep keeps of a run: a function of a module, which other processes find by its name."""


@dataclass(frozen=True, eq=False)
class Task:
    """One run that is to be carried out."""

    number: int
    config: Config
    device: str | None = None  # in place of the configuration's
    left: Path | None = None  # the folder to go on from
    whole: bool = False  # although a listener ended its training
    given: Mapping[str, Any] = field(default_factory=dict)  # as Python objects

    @property
    def placed(self) -> Config:
        return self.config if self.device is None else replace(self.config, device=self.device)


@dataclass(eq=False)
class Executor:
    data: Data
    keep: Keep
    tell: Tell
    stop: Stop
    sinks: Sequence[str] = ()
    tracked: bool = True
    alone: bool = True  # nothing else runs at the same time

    def batch(self, trainings: Sequence[Sequence[Task]]) -> None:
        """All of them to their ends, each told as soon as it comes; what fails ends alone."""
        since, over = time.perf_counter(), set[int]()

        def one(training: Sequence[Task], loaded: Loaded, **shared: Any) -> Result:
            way = self._one if len(training) == 1 else self._tuned if tunes(training[0].config) else self._evaluated
            for task, result in way(training, loaded, **shared):
                wall = (time.perf_counter() - since) / len(trainings)
                alone = self.alone and len(trainings) == 1 and task.left is None
                folder = None if result.run is None else RunFolder.open(result.run)
                kept = self.keep(Ended(task.config, folder, self.data, result, wall, alone))
                over.add(task.number)
                self.tell("done", task.number, (kept, folder and folder.info.id))
            return result

        found: Any
        if len(trainings) == 1:
            found = [_attempt(lambda: one(trainings[0], self._load(trainings[0][0])))]
        else:
            found = _attempt(lambda: self._together(trainings, one))
        outcomes = found if isinstance(found, list) else [found] * len(trainings)
        for training, outcome in zip(trainings, outcomes, strict=True):
            left = [task for task in training if task.number not in over]
            for task in left:
                if isinstance(outcome, Interrupted):
                    self.tell("stopped", task.number, outcome.run.name if task is left[0] else None)
                else:
                    self.tell("failed", task.number, outcome)

    def _together(self, trainings: Sequence[Sequence[Task]], one: Callable[..., Result]) -> list[Result | Exception]:
        configs = [training[0].placed for training in trainings]
        by_config = {id(config): training for config, training in zip(configs, trainings, strict=True)}

        def runner(config: Config, *, data: Loaded, on_event: object, **shared: Any) -> Result:
            return one(by_config[id(config)], data, **shared)

        return run_together(configs, runner=runner, load=lambda config: self._load(by_config[id(config)][0]))

    def _load(self, task: Task) -> Loaded:
        return self.data.of(task.config, task.given)

    def _run(
        self,
        task: Task,
        loaded: Loaded,
        hear: Listener,
        ready: Callable[[Job], object] = lambda job: None,
        **shared: Any,
    ) -> Result:
        """A run from where it is to its end, in its folder if it has one."""
        given = {**task.given, **shared}
        if not self.tracked:
            job = prepare(task.placed, **with_origin(task.placed, {**given, "data": loaded}))
            ready(job)
            return drive(job, hear)
        given |= {"stop": self.stop, "sinks": make_sinks(self.sinks), "say": partial(self.tell, "say", task.number)}
        if task.left is not None:
            given |= {"device": task.device, "rounds": task.config.rounds if task.whole else None}
            return resume(RunFolder.open(task.left), on_event=hear, data=loaded, **given)
        given["data" if "data" in task.given else "loaded"] = loaded
        return start(task.placed, on_event=hear, ready=ready, **given)

    # ------------------------------------------------------------ one training, and its runs

    def _one(self, training: Sequence[Task], loaded: Loaded, **shared: Any) -> Iterator[tuple[Task, Result]]:
        (task,) = training

        def hear(event: Event) -> None:
            if self.tell("event", task.number, event):
                raise Interrupted("it was to end here", Path(), 0)

        yield task, self._run(task, loaded, hear, **shared)

    def _evaluated(self, training: Sequence[Task], loaded: Loaded, **shared: Any) -> Iterator[tuple[Task, Result]]:
        """One training, evaluated as each run says."""
        first, *others = training
        jobs: list[Job] = []
        rows: dict[int, list[Row]] = {task.number: [] for task in others}

        def ready(job: Job) -> None:
            jobs.extend([job, *(job.evaluated_as(task.config) for task in others)])
            for task, other in zip(others, jobs[1:], strict=True):
                self.tell("event", task.number, other.prepared)

        def hear(event: Event) -> None:
            self.tell("event", first.number, event)
            if isinstance(event, RoundRecord):
                for task, other in zip(others, jobs[1:], strict=True):
                    self.tell("event", task.number, other.evaluate_with(jobs[0], event))
                    rows[task.number] += client_rows(other, event)

        result = self._run(first, loaded, hear, ready, **shared)
        yield first, result
        for task, other in zip(others, jobs[1:], strict=True):
            other.engine.losses, other.engine.client_steps = jobs[0].engine.losses, jobs[0].engine.client_steps
            other.finished = True
            found = other.result()
            if result.run is not None:
                with _recorder(other, task, result.run, rows[task.number]) as recorder:
                    recorder.after_round(other, None)
                    found = replace(found, run=str(recorder.folder))
                    recorder.finished(found)
            yield task, found

    def _tuned(self, training: Sequence[Task], loaded: Loaded, **shared: Any) -> Iterator[tuple[Task, Result]]:
        """One training, then the tuning of each run from the same state."""
        first, *others = training
        jobs: list[Job] = []
        states: list[dict[str, Any]] = []

        def hear(event: Event) -> None:
            final = isinstance(event, RoundRecord) and event.final
            for task in [first] if final else training:
                self.tell("event", task.number, event)
            if isinstance(event, RoundRecord) and jobs[0].no_rounds_left and not final:
                states.append(deepcopy(jobs[0].state()))

        result = self._run(first, loaded, hear, jobs.append, **shared)
        yield first, result
        for task in others:
            job = prepare(task.placed, data=loaded, begin_with=jobs[0].taken, **shared)
            own = {k: v for k, v in job.method.state().items() if k.startswith("tune_")}
            job.restore({**deepcopy(states[0]), "method": {**deepcopy(states[0]["method"]), **own}})

            def listen(event: Event, number: int = task.number) -> None:
                self.tell("event", number, event)

            if result.run is None:
                yield task, drive(job, listen)
            else:
                before = [row for row in salvage(Path(result.run) / METRICS, "clients") if not row[1]]  # not final
                with _recorder(job, task, result.run, before) as recorder:
                    yield task, follow(job, recorder, listen, stop=self.stop)


def _recorder(job: Job, task: Task, first: str, clients: Iterable[Row]) -> Recorder:
    """The folder of a run whose rounds were those of another, which has `first`. Its job remembers them, but for how
    `clients` did and for the traffic, which was the other's."""
    recorder, exchanges = begin(job, task.placed), len(job.fed.exchanges)
    traffic = [row for row in salvage(Path(first) / METRICS, "traffic") if row[2] <= exchanges]
    for table, rows in {**tables_of(job), "clients": clients, "traffic": traffic}.items():
        recorder.base.add(table, rows)
    return recorder


def in_words(error: Exception) -> str:
    """What goes wrong on purpose says it all; what does not is named too."""
    text = str(error) if isinstance(error, FedKinError) else f"{type(error).__name__}: {error}"
    return text or type(error).__name__


def _attempt(work: Callable[[], Any]) -> Any:
    """What the work gives, or the exception that it ended with; Ctrl-C still stops everything."""
    try:
        return work()
    except Exception as error:
        return error
