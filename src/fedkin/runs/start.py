"""Runs that leave a folder: `start` one, `resume` one. What is computed is the same as without."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from fedkin import plugins
from fedkin.compute.lockstep import Stopped
from fedkin.config import Config
from fedkin.data import Dataset, Split
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.methods import METHODS
from fedkin.rounds import Job, Listener, Result, RoundRecord, drive, prepare
from fedkin.rounds.footprint import check_disk
from fedkin.runs import checkpoint, database
from fedkin.runs.catalogue import runs_folder
from fedkin.runs.checkpoint import DiskFull, writing
from fedkin.runs.folder import CHECKPOINTS, METRICS, SITES, RunFolder
from fedkin.runs.recorder import Recorder, fingerprint, first_weights, remembered
from fedkin.runs.sinks import Sinks
from fedkin.version import VERSION

Say = Callable[[str], None]
SHARED = ("chooser", "sources")  # what runs that train together have in common, and no part of what they are


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
    job = prepare(config, **{**data, **given})
    if ready is not None:
        ready(job)
    if not config.force and job.prepared.needed is not None:
        check_disk(job.prepared.needed, runs_folder(config.runs_dir))
    with job.clock.counting("writing"):
        created = Recorder.create(runs_folder(config.runs_dir), job, config, _objects(config, given))
    with created as recorder:
        with job.clock.counting("writing"):
            recorder.attach(job)
        return follow(job, recorder, on_event, signals, say, stop, sinks)


def resume(
    run: RunFolder,
    *,
    on_event: Listener | None = None,
    signals: bool = False,
    say: Say | None = None,
    stop: Stop | None = None,
    sinks: Sinks | None = None,
    **given: Any,
) -> Result:
    """Go on from the newest sound checkpoint to the result that an uninterrupted run has; of a finished run, only the
    result. `say` hears what is worth knowing: damaged checkpoints, other versions."""
    info, tell = run.info, say or (lambda text: None)
    if info.deployed:
        raise UsageError(f"run {info.id!r} was of real sites: its server goes on, fedkin server --resume {info.id}")
    missing = [name for name in info.objects if name not in given]
    if missing:
        raise UsageError(
            f"run {info.id!r} was given its {', '.join(missing)} as Python objects, which are not in its folder: "
            f"resume it from Python, fedkin.resume({info.id!r}, {', '.join(f'{m}=...' for m in missing)})"
        )
    plugins.require(info.id, info.raw.get("plugins"))
    config = info.configuration(runs_dir=str(info.path.parent))
    with Recorder(info.path, dict(info.raw), config.checkpoint_every) as recorder:
        job = prepare(config, **given, admitted=True)
        check_same(job, run)
        _check_versions(run, tell)
        samples = np.array([len(p) for p in job.site.parts["train"]], np.int64)
        marks = restore(job, run, tell, samples)
        if info.status == "finished":
            if not job.finished:
                raise DataError(f"run {info.id!r} is finished, but the models in its last checkpoint are gone")
            return replace(job.result(), run=str(info.path))
        with job.clock.counting("writing"):
            recorder.resumed(job.fed.round)
            recorder.attach(job, marks)
        return follow(job, recorder, on_event, signals, say, stop, sinks)


def _objects(config: Config, given: dict[str, Any]) -> list[str]:
    known = given.get("method") is not None and dict(METHODS.items()).get(config.method) is given["method"]
    skipped = {*SHARED, *(["method"] if known else [])}
    return sorted(name for name, value in given.items() if value is not None and name not in skipped)


# ---------------------------------------------------------------- from start or checkpoint to the end


def follow(
    job: Job,
    recorder: Recorder,
    on_event: Listener | None = None,
    signals: bool = False,
    say: Say | None = None,
    heed: Stop | None = None,
    sinks: Sinks | None = None,
) -> Result:
    """A job to its end, written down by a recorder that listens to it; however it ends, the folder says so."""
    tell = say or (lambda text: None)
    stop, others = heed or Stop(tell), sinks or Sinks([])

    def after(job: Job, record: RoundRecord | None) -> None:
        stopping = stop.number is not None and not job.finished
        recorder.after_round(job, record, save=stopping)
        others.round(job, record)
        if stopping and stop.number is not None:
            done = f"stopped after round {job.fed.round} of {job.config.rounds}"
            raise Interrupted(done, recorder.folder, stop.number)

    try:
        others.start(job, recorder.folder, tell)
        with stop.listening(signals):
            result = drive(job, on_event, after)
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
        before = [signal.signal(kind, self._hear) for kind in kinds]
        try:
            yield
        finally:
            for kind, handler in zip(kinds, before, strict=True):
                signal.signal(kind, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            if number == self.number and time.monotonic() < self._heard + SAME_REQUEST:
                return
            raise KeyboardInterrupt
        self.number, self._heard = number, time.monotonic()
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        with suppress(RuntimeError):  # the signal came in the middle of writing a line
            self._say(f"{name}: stopping after this round; once more to quit now")


# ---------------------------------------------------------------- back to where it was


def check_same(job: Job, run: RunFolder) -> None:
    """An error that names what differs, unless this job is the one that the run is of."""
    before, now = run.info.prepared, job.prepared
    if before.get("split_hash") != now.split_hash:
        raise DataError(
            f"run {run.info.id!r} cannot go on: its data or their split changed (split {now.split_hash[:12]} now, "
            f"{str(before.get('split_hash'))[:12]} then); restore the data, or start a new run"
        )
    if before.get("parameters") != now.parameters:
        raise DataError(
            f"run {run.info.id!r} cannot go on: the model has {now.parameters} parameters, not "
            f"{before.get('parameters')} as then"
        )
    first = before.get("model_hash")
    if first is not None and first != first_weights(job):
        raise DataError(
            f"run {run.info.id!r} cannot go on: the network's first weights are not those it began with; "
            "give the network as it was given then"
        )
    known = before.get("data_hash")
    if known is not None and known != fingerprint(job):
        raise DataError(f"run {run.info.id!r} cannot go on: the samples of {job.config.data!r} changed since it began")


def _check_versions(run: RunFolder, say: Say) -> None:
    then = run.info.environment
    now = {"fedkin": VERSION, "torch": torch.__version__}
    other = [f"{k} {then.get(k)} then, {v} now" for k, v in now.items() if then.get(k) not in (None, v)]
    if other:
        say(f"other versions ({'; '.join(other)}): the result may differ in the last digits")
    if run.info.config.get("way") == "compiled":
        say("the run was begun with way=compiled, which was removed: it goes on with way=auto")


def restore(job: Job, run: RunFolder, say: Say, samples: np.ndarray[Any, Any]) -> dict[str, int]:
    """Put the job into the newest sound state there is; returns where its tables end then.

    A damaged checkpoint is passed over for the one before it; a sound one that is not of this run is an error that
    changes nothing in the folder. Metrics that are damaged, or behind every checkpoint, are written anew from what the
    job remembers."""
    folder, reached = run.path / CHECKPOINTS, _reached(run, say)
    passed: list[str] = []  # damaged, or ahead of the metrics
    ahead: str | None = None
    for name in checkpoint.names(folder):
        try:
            state = _load(job, folder, name, samples)
        except (DataError, KeyError, TypeError, ValueError) as error:
            say(f"checkpoint {name} is damaged ({error}): going back to the one before")
            passed.append(name)
            continue
        if reached is None or all(reached[t] >= state["marks"][t] for t in database.TABLES):
            break
        say(f"checkpoint {name} is ahead of the metrics database, which misses rows: going back to the one before")
        ahead = ahead or name
        passed.append(name)
    else:
        if ahead is None:
            return _from_the_first_round(run, passed, reached is None, say)
        state, reached = _load(job, folder, ahead, samples), None
        passed.remove(ahead)
    _put(job, run, state)
    marks: dict[str, int] = state["marks"] if reached is not None else _repair(job, run, say)
    for name in passed:
        checkpoint.remove(folder, name)
    checkpoint.tidy(folder)
    return marks


def _load(job: Job, folder: Path, name: str, samples: np.ndarray[Any, Any]) -> dict[str, Any]:
    state = checkpoint.load(folder, name, job.site.source.device, samples)
    if not isinstance(state["job"], dict):
        raise DataError("it holds no state")
    return {**state, "name": name, "marks": {t: int(state["marks"][t]) for t in database.TABLES}}


def _put(job: Job, run: RunFolder, state: dict[str, Any]) -> None:
    """A sound state into the job it is of; an error that names what differs if it is of another."""
    where, of = f"run {run.info.id!r} cannot go on from its checkpoint {state['name']}", state.get("run")
    if of is not None and of != run.info.raw.get("id"):
        raise DataError(f"{where}: that is of run {str(of)[:100]!r}; nothing was changed")
    try:
        found = len(state["job"]["losses"])
        if found != len(job.site.names):
            raise DataError(f"it is of {found} clients, the run has {len(job.site.names)}")
        _check_widths(job, state["job"]["method"])
        job.restore(state["job"])
    except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        raise DataError(f"{where}, which does not fit ({what}): nothing was changed; start a new run") from None


def _check_widths(job: Job, saved: Mapping[str, Any]) -> None:
    """What is as wide as a part of the network when a run begins stays so."""
    layout = job.site.layout
    widths = {layout.width, *(layout.size(part) for part in ("model", "body", "head"))}
    for name, value in job.method.state().items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) in widths and len(value) > 1:
            found = saved.get(name)
            if not isinstance(found, torch.Tensor) or found.shape != value.shape:
                shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
                raise DataError(f"its {name!r} is {shape} where this run has {list(value.shape)}")


def _from_the_first_round(run: RunFolder, damaged: list[str], no_metrics: bool, say: Say) -> dict[str, int]:
    if damaged and run.info.deployed:
        raise DataError(
            f"run {run.info.id!r}: no checkpoint is sound, and sites that begin again would lose what they "
            "keep; bring the files back from a backup, or start a new run"
        )
    for name in damaged:
        checkpoint.remove(run.path / CHECKPOINTS, name)
    checkpoint.tidy(run.path / CHECKPOINTS)
    if no_metrics:
        database.rewrite(run.path / METRICS, {})
    say("no sound checkpoint: starting again from the first round")
    return dict.fromkeys(database.TABLES, 0)


def _reached(run: RunFolder, say: Say) -> dict[str, int] | None:
    """How far the tables go; None: the metrics are damaged or gone."""
    try:
        base = database.Database(run.path / METRICS)
        try:
            base.check()
            return base.marks()
        finally:
            base.close()
    except sqlite3.Error as error:
        say(f"the metrics database is damaged ({error}): it is written anew")
        return None


def _repair(job: Job, run: RunFolder, say: Say) -> dict[str, int]:
    """New metrics: what the job remembers, and of the clients' own rows what the old file still gives."""
    path, done, exchanges = run.path / METRICS, job.fed.round, len(job.fed.exchanges)
    tables = remembered(job)
    judged = {(r.round, int(r.final)) for r in job.history}
    tables["clients"] = [row for row in database.salvage(path, "clients") if row[:2] in judged]
    tables["traffic"] = [row for row in database.salvage(path, "traffic") if row[2] <= exchanges]
    lost = len(judged - {row[:2] for row in tables["clients"]})
    gone = f"; how single clients did in {lost} of {len(judged)} evaluated rounds is lost" if lost else ""
    say(f"the metrics up to round {done} are as the checkpoint remembers them{gone}")
    with writing(path):
        return database.rewrite(path, tables)
