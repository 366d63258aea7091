"""Batches of a sweep in several processes, on one device or on several.

Runs of one kind train as rows of one cohort; runs of different kinds leave gaps on a device that others can fill, and
only processes of their own let them. A process that dies takes only its own runs along."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from fedkin.errors import FedKinError

if TYPE_CHECKING:
    from fedkin.runs.start import Stop
    from fedkin.sweep.executor import Keep, Task, Tell

Batch = Sequence[Sequence["Task"]]
POLL = 0.2  # seconds in which Ctrl-C and a used-up budget are noticed


@dataclass(frozen=True)
class Setup:
    """What a process has to know besides its tasks."""

    keep: Keep
    data_dir: str | None
    download: bool
    sinks: Sequence[str]
    plugins: Sequence[str]
    asks: bool = False  # after every event, whether the run is to go on
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), init=False)


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    line: Connection
    place: int  # which of the devices
    ready: bool = False
    begun: bool = False  # whether it was ever ready
    stopping: bool = False
    busy: set[int] = field(default_factory=set)  # runs that it has begun and not ended

    def stop(self) -> None:
        """After the round that it is in."""
        if not self.stopping:
            self.stopping = True
            self.process.terminate()


def run_in_processes(
    batches: Sequence[Batch],
    jobs: int,
    devices: Sequence[str],
    setup: Setup,
    *,
    started: Callable[[Batch], None],
    tell: Tell,
    go_on: Callable[[], bool],
    stop: Stop,
) -> None:
    """Each batch, in order, in whichever of `jobs` processes is free on the least loaded device. Whatever ends this
    early ends the processes too; `stop` lets them finish their round."""
    waiting, workers, number = deque(batches), list[_Worker](), 0
    places: Sequence[str | None] = devices or [None]
    try:
        while True:
            if not go_on():
                waiting.clear()
            if stop.number is not None:
                for worker in workers:
                    worker.stop()
            while waiting and len(workers) < min(jobs, len(waiting) + sum(bool(w.busy) for w in workers)):
                workers.append(_begin(number, jobs, least_loaded(len(places), [w.place for w in workers]), setup))
                number += 1
            while idle := [w for w in workers if w.ready]:
                at = least_loaded(len(places), [w.place for w in workers if w.busy], [w.place for w in idle])
                worker = next(w for w in idle if w.place == at)
                batch = waiting.popleft() if waiting else ()
                worker.ready, worker.busy = False, {task.number for training in batch for task in training}
                started(batch)
                placed = [[replace(t, device=places[at]) for t in training] for training in batch]
                with suppress(OSError):  # it died meanwhile, which is noticed below
                    worker.line.send(placed)
                if not batch:
                    worker.process.join()
                    workers.remove(worker)
            if not workers:
                return
            for line in wait([w.line for w in workers], POLL):
                worker = next(w for w in workers if w.line is line)
                try:
                    kind, which, value = worker.line.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    workers.remove(worker)
                    lost = worker.busy
                    if not worker.begun and not workers:  # none can even begin
                        lost = {task.number for batch in waiting for training in batch for task in training}
                        waiting.clear()
                    jobs -= not worker.begun
                    for one in sorted(lost):
                        tell("failed", one, FedKinError(f"its process ended with status {worker.process.exitcode}"))
                    continue
                if kind == "ready":
                    worker.ready = worker.begun = True
                else:
                    worker.busy -= {which} if kind in ("done", "failed", "stopped") else set()
                    enough = tell(kind, which, value)
                    if setup.asks and kind == "event":
                        with suppress(OSError):
                            worker.line.send(enough)
    finally:
        for worker in workers:
            worker.process.kill()  # what runs in it has its checkpoints
        for worker in workers:
            worker.process.join()


def least_loaded(places: int, taken: Sequence[int], among: Sequence[int] | None = None) -> int:
    """The first of the places, or of those `among` them, that is taken least often."""
    return min(range(places) if among is None else sorted(among), key=taken.count)


def _context() -> Any:
    """Where new processes come from. Not from this one: a device that was used cannot be forked. On Linux it is a
    process that has imported what each of them needs, and done nothing else."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["fedkin.sweep.executor", "fedkin.sweep.loaded"])
    return made


def _begin(number: int, jobs: int, place: int, setup: Setup) -> _Worker:
    context = _context()
    mine, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, number, jobs), daemon=True)
    process.start()
    theirs.close()
    mine.send(setup)
    return _Worker(process, mine, place)


def _work(line: Connection, number: int, jobs: int) -> None:
    """What a process does: ask for batches until there are none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the first process tells the others
    setup: Setup = line.recv()
    os.environ.clear()
    os.environ.update(setup.environment)
    if hasattr(os, "sched_setaffinity"):  # before anything counts the cores
        cores = sorted(os.sched_getaffinity(0))
        mine = cores[number % jobs :: jobs] or cores
        os.sched_setaffinity(0, mine)
        import torch

        torch.set_num_threads(min(torch.get_num_threads(), len(mine)))
    from fedkin import plugins
    from fedkin.runs.start import Stop, silent
    from fedkin.sweep.executor import Executor, in_words
    from fedkin.sweep.loaded import Data

    for path in setup.plugins:
        plugins.give(path)

    one = threading.Lock()  # runs that train together tell of themselves in threads of their own

    def tell(kind: str, which: int, value: Any) -> bool:
        with one:
            line.send((kind, which, FedKinError(in_words(value)) if kind == "failed" else value))
            return bool(line.recv()) if setup.asks and kind == "event" else False

    stop = Stop(silent)
    executor = Executor(Data(setup.data_dir, setup.download), setup.keep, tell, stop, setup.sinks, alone=False)
    with stop.listening(True):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with suppress(EOFError):  # the first process is gone
            while True:
                line.send(("ready", 0, None))
                batch: Batch = line.recv()
                if not batch:
                    return
                _use(batch[0][0].device)
                executor.batch(batch)


def _use(device: str | None) -> None:
    """The device of this process is also that of what names none."""
    if device is not None and device.startswith("cuda"):
        import torch

        torch.cuda.set_device(torch.device(device))
