"""Several processes that share a device, each running the next cells of a table.

Runs of one kind train as rows of one cohort (`together`); runs of different kinds leave gaps on a device that others
can fill, and only processes of their own let them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

from fedkin.config import Config
from fedkin.errors import FedKinError
from fedkin.papers.measures import Outcome
from fedkin.papers.plan import Data

if TYPE_CHECKING:
    from fedkin.rounds import Event


@dataclass
class _Worker:
    process: SpawnProcess
    line: Connection
    busy: set[int] = field(default_factory=set)  # runs that it has begun and not ended


def run_in_processes(
    groups: Sequence[Sequence[int]],
    configs: Sequence[Config],
    data: Data,
    jobs: int,
    *,
    hear: Callable[[int, Event], None],
    done: Callable[[int, Outcome | Exception], None],
    go_on: Callable[[], bool],
) -> None:
    """Each group in whichever of `jobs` processes is free, in order. The runs of a process that dies have failed; the
    others go on. Whatever ends this (Ctrl-C, say) ends the processes too."""
    waiting = deque(groups)
    workers: list[_Worker] = []
    try:
        while True:
            while len(workers) < min(jobs, len(workers) + len(waiting)) and go_on():
                workers.append(_begin(len(workers), jobs, data))
            if not workers:
                return
            heard = wait([w.line for w in workers])
            for worker in [w for w in workers if w.line in heard]:
                try:
                    what, which, value = worker.line.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    lost = worker.busy or {i for group in waiting for i in group}  # one that cannot even begin
                    if not worker.busy:
                        waiting.clear()
                    for number in sorted(lost):
                        done(number, FedKinError(f"its process ended with status {worker.process.exitcode}"))
                    workers.remove(worker)
                    continue
                if what == "event":
                    hear(which, value)
                elif what == "ready":
                    group = waiting.popleft() if waiting and go_on() else ()
                    worker.busy = set(group)
                    worker.line.send([(i, configs[i]) for i in group])
                    if not group:
                        worker.process.join()
                        workers.remove(worker)
                else:
                    worker.busy.discard(which)
                    done(which, value if what == "done" else FedKinError(value))
            if not go_on():
                waiting.clear()
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


def _begin(number: int, jobs: int, data: Data) -> _Worker:
    context = multiprocessing.get_context("spawn")  # a device that was used cannot be forked
    mine, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, data.data_dir, data.download, number, jobs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, mine)


def _work(line: Connection, data_dir: str | None, download: bool, number: int, jobs: int) -> None:
    """What a process does: ask for runs until there are none."""
    from fedkin.papers.runner import run_batch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the first process ends the others
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number % jobs :: jobs] or cores)
    data, lock = Data(data_dir, download), threading.Lock()

    def send(what: str, which: int = 0, value: Any = None) -> None:
        line.send((what, which, value))

    while True:
        send("ready")
        try:
            task: list[tuple[int, Config]] = line.recv()
        except EOFError:  # the first process is gone
            return
        if not task:
            return
        numbers = [i for i, _ in task]

        def finished(k: int, found: Outcome | Exception, numbers: list[int] = numbers) -> None:
            if isinstance(found, Exception):
                send("failed", numbers[k], f"{found}" or type(found).__name__)
            else:
                send("done", numbers[k], found)

        def tell(k: int, event: Event, numbers: list[int] = numbers) -> None:
            send("event", numbers[k], event)

        run_batch(range(len(task)), [config for _, config in task], data, tell, finished, lock, alone=False)
