"""Runs that leave a folder: `start` one, `resume` one. What is computed is the same as without."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from fedkin import plugins
from fedkin.compute.lockstep import Stopped
from fedkin.config import Config
from fedkin.data import Dataset, Split
from fedkin.errors import FedKinError, UsageError
from fedkin.methods import METHODS
from fedkin.rounds import Job, Listener, Result, RoundRecord, drive, prepare
from fedkin.rounds.footprint import check_disk
from fedkin.runs import begun_with, checkpoint
from fedkin.runs.catalogue import runs_folder
from fedkin.runs.checkpoint import DiskFull
from fedkin.runs.extension import check_longer, longer
from fedkin.runs.folder import CHECKPOINTS, SITES, RunFolder
from fedkin.runs.origin import resolved, with_origin
from fedkin.runs.recorder import Recorder
from fedkin.runs.restore import Say, restore
from fedkin.runs.sinks import Sinks

NOT_OBJECTS = ("chooser", "sources", "begin_with")
"""What runs that train together have in common, no part of what they are; and what the folder has itself."""


class Interrupted(FedKinError):
    """A run was asked to stop and did so after a round. `exit_code`: 130 after Ctrl-C, 143 after SIGTERM."""

    def __init__(self, text: str, run: Path, number: int) -> None:
        super().__init__(text)
        self.run, self.exit_code = run, 128 + number


def start(
    config: Config,
    *,
    on_event: Listener | None = None,
    loaded: tuple[Dataset, Split] | None = None,
    signals: bool = False,
    say: Say | None = None,
    stop: Stop | None = None,
    sinks: Sinks | None = None,
    ready: Callable[[Job], object] | None = None,
    **given: Any,
) -> Result:
    """Run to the end in a new folder under the configuration's `runs_dir`; the result's `run` is its path.

    `loaded`: the data the configuration names, where they are in memory already. `given`: see `rounds.prepare`; what
    is given as a Python object has to be given again to resume. `signals`: Ctrl-C and SIGTERM stop after a round.
    `stop`: what to heed instead, for several runs that stop together. `sinks`: who else hears of the run. `ready` is
    given the job before its first round."""
    data = {"data": loaded} if loaded is not None else {}
    config = resolved(config)
    job = prepare(config, **with_origin(config, {**data, **given}))
    if ready is not None:
        ready(job)
    with begin(job, config, _objects(config, given)) as recorder:
        return follow(job, recorder, on_event, signals, say, stop, sinks)


def resume(
    run: RunFolder,
    *,
    on_event: Listener | None = None,
    signals: bool = False,
    say: Say | None = None,
    stop: Stop | None = None,
    sinks: Sinks | None = None,
    device: str | None = None,
    rounds: int | None = None,
    **given: Any,
) -> Result:
    """Go on from the newest sound checkpoint to the result that an uninterrupted run has; of a finished run, only the
    result. `say` hears what is worth knowing: damaged checkpoints, other versions. `device`: in place of the run's.
    `rounds`: so many in all, finished or not; the result is that of a run that had as many from the start, or it is
    refused. That a listener ended the training counts no more then."""
    info = run.info
    if info.deployed:
        raise UsageError(f"run {info.id!r} was of real sites: its server goes on, fedkin server --resume {info.id}")
    missing = [name for name in info.objects if name not in given]
    if missing:
        raise UsageError(
            f"run {info.id!r} was given its {', '.join(missing)} as Python objects, which are not in its folder: "
            f"resume it from Python, fedkin.resume({info.id!r}, {', '.join(f'{m}=...' for m in missing)})"
        )
    plugins.require(info.id, info.raw.get("plugins"), info.config.get("model"))
    config = info.configuration(runs_dir=str(info.path.parent), **({} if device is None else {"device": device}))
    longer_now = rounds is not None and rounds != config.rounds
    more = longer_now or (rounds is not None and info.halted)
    if more:
        config = longer(info, config, rounds or 0)
    with Recorder(info.path, dict(info.raw), config.checkpoint_every) as recorder:
        job = prepare(config, **given, begin_with=begun_with.kept(info), admitted=not more)
        if longer_now:
            check_longer(job, run, say or silent)
        if more:
            recorder.extended(config, info.rounds_done)
            run = RunFolder.open(info.path)
            info = run.info
        restore(job, run, recorder, say or silent, go_on=rounds is not None)
        if info.status == "finished":
            return replace(job.result(), run=str(info.path))
        return follow(job, recorder, on_event, signals, say, stop, sinks)


def begin(job: Job, config: Config, objects: Sequence[str] = ()) -> Recorder:
    """A new folder for a job that has not begun, and a recorder that listens to it. `config` is what was asked for;
    `objects` names what was given as Python objects."""
    if not config.force and job.prepared.needed is not None:
        check_disk(job.prepared.needed, runs_folder(config.runs_dir))
    with job.clock.counting("writing"):
        recorder = Recorder.create(runs_folder(config.runs_dir), job, config, objects)
        recorder.attach(job)
    return recorder


def silent(text: str) -> None:
    """Says nothing."""


def _objects(config: Config, given: dict[str, Any]) -> list[str]:
    known = given.get("method") is not None and dict(METHODS.items()).get(config.method) is given["method"]
    skipped = {*NOT_OBJECTS, *(["method"] if known else [])}
    return sorted(name for name, value in given.items() if value is not None and name not in skipped)


# ---------------------------------------------------------------- from start or checkpoint to the end


def follow(
    job: Job,
    recorder: Recorder,
    on_event: Listener | None = None,
    signals: bool = False,
    say: Say | None = None,
    stop: Stop | None = None,
    sinks: Sinks | None = None,
) -> Result:
    """A job to its end, written down by a recorder that listens to it; however it ends, the folder says so."""
    stop, others = stop or Stop(say or silent), sinks or Sinks([])

    def after(job: Job, record: RoundRecord | None) -> None:
        stopping = stop.number is not None and not job.finished
        recorder.after_round(job, record, save=stopping)
        others.round(job, record)
        if stopping and stop.number is not None:
            done = f"stopped after round {job.fed.round} of {job.config.rounds}"
            raise Interrupted(done, recorder.folder, stop.number)

    try:
        others.start(job, recorder.folder, say or silent)
        with stop.listening(signals):
            result = drive(job, on_event, after, lambda job: recorder.after_round(job, None, save=True))
        result = replace(result, run=str(recorder.folder))
        recorder.finished(result)
        others.finish(result)
        return result
    except Interrupted as error:
        recorder.stopped("interrupted", error)
        raise
    except (KeyboardInterrupt, Stopped) as error:
        recorder.stopped("interrupted", f"in round {job.fed.round + 1}")
        if not signals:
            raise
        text = f"stopped in round {job.fed.round + 1} of {job.config.rounds}, which will be done again,"
        raise Interrupted(text, recorder.folder, stop.number or signal.SIGINT) from error
    except DiskFull as error:
        kept = next(iter(checkpoint.names(recorder.folder / CHECKPOINTS)), None)
        last = f"the checkpoint {kept} is kept" if kept else "no checkpoint had been written yet"
        how = "fedkin server --resume" if (recorder.folder / SITES).exists() else "fedkin resume"
        full = DiskFull(f"{error}; {last}. Make room, then: {how} {recorder.folder.name}")
        recorder.stopped("failed", full)
        raise full from error
    except BaseException as error:
        recorder.stopped("failed", error)
        raise
    finally:
        others.close()


SAME_REQUEST = 1.0  # seconds in which a signal of the same kind says nothing new: `timeout` sends its own twice


class Stop:
    """Ctrl-C and SIGTERM ask for a stop after the round; a second one stops now."""

    def __init__(self, say: Say) -> None:
        self.number: int | None = None
        self._say, self._heard = say, 0.0

    @contextmanager
    def listening(self, wanted: bool) -> Iterator[None]:
        if not wanted or threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(kind, self._on_signal) for kind in kinds]
        try:
            yield
        finally:
            for kind, handler in zip(kinds, before, strict=True):
                signal.signal(kind, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            if number == self.number and time.monotonic() < self._heard + SAME_REQUEST:
                return
            raise KeyboardInterrupt
        self.number, self._heard = number, time.monotonic()
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        with suppress(RuntimeError):  # the signal came in the middle of writing a line
            self._say(f"{name}: stopping after this round; once more to quit now")
