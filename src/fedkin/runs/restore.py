"""Back to where a run was: one way, for a simulation and for the server of real sites.

A damaged checkpoint is passed over for the one before it, and metrics that are damaged, or behind every checkpoint, are
written anew from what the run remembers; both are said. A sound checkpoint that is not of this very run is an error
that names what differs. All of that is known before anything changes, in the job or in the folder."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedkin import plugins
from fedkin.errors import DataError, UsageError
from fedkin.methods import Method
from fedkin.rounds import Job, prepare
from fedkin.rounds.memory import restoring
from fedkin.rounds.trained import fingerprint
from fedkin.runs import begun_with, checkpoint, database
from fedkin.runs.checkpoint import writing
from fedkin.runs.entries import tables_of
from fedkin.runs.facts import first_weights
from fedkin.runs.folder import CHECKPOINTS, METRICS, RunFolder
from fedkin.runs.recorder import Recorder
from fedkin.version import VERSION

BACK = ": going back to the one before"
Say = Callable[[str], None]
Marks = dict[str, int]  # where the tables end


def restore(job: Job, run: RunFolder, recorder: Recorder, say: Say, go_on: bool = False) -> None:
    """A job that was prepared anew to where the run of this folder was; the recorder listens to it from there on.

    Of a finished run nothing more is to be written. `go_on`: although a listener ended its training."""
    check_same(job, run)
    _check_versions(run, say)
    marks, changed = _put_back(job, run, say, go_on)
    if run.info.status == "finished":
        return
    with job.clock.counting("writing"):
        recorder.resumed(job.fed.round)
        recorder.attach(job, marks)
        if changed and job.fed.round:  # the checkpoint on the disk is of another state, or counts rows that are gone
            recorder.checkpoint(job)
            checkpoint.remove(run.path / CHECKPOINTS, "final")


def check_same(job: Job, run: RunFolder) -> None:
    """An error that names what differs, unless this job is the one that the run is of."""
    before, now = run.info.prepared, job.prepared
    known, first = before.get("data_hash"), before.get("model_hash")
    if before.get("split_hash") != now.split_hash:
        why = (
            f"its data or their split changed (split {now.split_hash[:12]} now, {str(before.get('split_hash'))[:12]} "
            "then); restore the data, or start a new run"
        )
    elif before.get("parameters") != now.parameters:
        why = f"the model has {now.parameters} parameters, not {before.get('parameters')} as then"
    elif first is not None and first != first_weights(job):
        why = "the network's first weights are not those it began with; give the network as it was given then"
    elif known is not None and known != fingerprint(job.site.source):
        why = f"the samples of {job.config.data!r} changed since it began"
    else:
        return
    raise DataError(f"run {run.info.id!r} cannot go on: {why}")


def _check_versions(run: RunFolder, say: Say) -> None:
    then, now = run.info.environment, {"fedkin": VERSION, "torch": torch.__version__}
    other = [f"{k} {then.get(k)} then, {v} now" for k, v in now.items() if then.get(k) not in (None, v)]
    if other:
        say(f"other versions ({'; '.join(other)}): the result may differ in the last digits")
    if run.info.config.get("way") == "compiled":
        say("the run was begun with way=compiled, which was removed: it goes on with way=auto")


@dataclass(frozen=True)
class SoundCheckpoint:
    """A checkpoint that can be read and is of this run."""

    name: str
    marks: Marks
    finished: bool  # whether the run was, then
    round: int
    rounds_matter: bool  # whether the method has asked how many rounds there will be
    put: Callable[[], None]  # the job to where it was then


def sound_checkpoints(job: Job, run: RunFolder, say: Say) -> Iterator[SoundCheckpoint]:
    """The newest first. Those that are damaged are passed over and said; one that is not of this run is an error."""
    samples = np.array([train for train, _ in job.sizes], np.int64)
    for name in checkpoint.names(run.path / CHECKPOINTS):
        try:
            state = checkpoint.load(run.path / CHECKPOINTS, name, job.site.source.device, samples)
            marks, saved = {t: int(state["marks"][t]) for t in database.TABLES}, state["job"]
            if not isinstance(saved, dict):
                raise DataError("it holds no state")
        except (DataError, KeyError, TypeError, ValueError) as error:
            say(f"checkpoint {name} is damaged ({error}){BACK}")
            continue
        where, of = f"run {run.info.id!r} cannot go on from its checkpoint {name}", state.get("run")
        if of is not None and of != run.info.raw.get("id"):
            raise DataError(f"{where}: that is of run {str(of)[:100]!r}; nothing was changed")
        try:
            put = restoring(job, saved)
            matter = saved["federation"].get("rounds_matter") is not False
            yield SoundCheckpoint(name, marks, bool(saved.get("finished")), int(saved["round"]), matter, put)
        except DataError as error:
            raise DataError(f"{where}, which does not fit ({error}): nothing was changed; start a new run") from None


def check_readable(run: RunFolder) -> None:
    """An error unless models can be taken from the run's folder alone."""
    info = run.info
    if info.deployed or info.data == "sites":
        raise UsageError(
            f"run {info.id!r} was a deployment: each site has its own model, as personal.safetensors, and only the "
            f"server knows where its sites are; a site that comes late gets one from fedkin server --join {info.id}"
        )
    if info.objects:
        raise UsageError(
            f"run {info.id!r} was given its {', '.join(info.objects)} as Python objects, which are not in its folder: "
            f"use what fedkin.resume({info.id!r}, {', '.join(f'{name}=...' for name in info.objects)}) returns"
        )
    _check_models(run)


def _check_models(run: RunFolder) -> None:
    if not checkpoint.names(run.path / CHECKPOINTS):
        raise DataError(f"run {run.info.id!r} has no checkpoint, so no models; run it with --checkpoint-every 1")


def as_it_was(run: RunFolder, device: str | None = None, only: str | None = None) -> Job:
    """A run's job as its newest sound checkpoint has it, for looking at and for taking models from. The run is only
    read; it may still be going on. `only`: the checkpoint that this has to be."""
    check_readable(run)
    info, changed = run.info, {} if device is None else {"device": device}
    settings = info.configuration(**changed)
    return at_newest(run, lambda: prepare(settings, admitted=True, begin_with=begun_with.kept(info)), only)


def at_newest(run: RunFolder, prepared: Callable[[], Job], only: str | None = None) -> Job:
    """A run's job, prepared anew, as its newest sound checkpoint has it."""
    info = run.info
    _check_models(run)
    plugins.require(info.id, info.raw.get("plugins"), info.config.get("model"))
    job, passed = prepared(), list[str]()
    if job.prepared.split_hash != info.prepared.get("split_hash"):
        raise DataError(f"run {info.id!r}: its data or their split are not what they were; restore the data")
    sound = next(sound_checkpoints(job, run, passed.append), None)
    passed = [why.removesuffix(BACK) for why in passed]  # nobody goes back here
    if sound is None:
        raise DataError(f"run {info.id!r}: no sound checkpoint is left ({passed[-1]})")
    if only not in (None, sound.name):
        raise DataError(f"run {info.id!r}: {passed[0] if passed else f'its checkpoint {only} is gone'}")
    sound.put()
    return job


def _put_back(job: Job, run: RunFolder, say: Say, go_on: bool) -> tuple[Marks, bool]:
    """Where the tables of the metrics end, and whether the job or they are otherwise than the checkpoint says."""
    folder, reached, over = run.path / CHECKPOINTS, None, run.info.status == "finished"
    chosen = newest = None
    for found in sound_checkpoints(job, run, say):
        if (
            not over
            and found.finished
            and found.round < job.config.rounds
            and type(job.method).finish is not Method.finish
        ):
            continue  # of before there were to be more rounds: what was done after the last one cannot be undone
        if newest is None:
            newest, reached = found, _reached(run, say)
        if reached is None or all(reached[t] >= found.marks[t] for t in database.TABLES):
            chosen = found
            break
        say(f"checkpoint {found.name} is ahead of the metrics database, which misses rows{BACK}")
    if newest is None:
        return _from_the_first_round(run, say)
    state = chosen or newest
    if over and not state.finished:
        raise DataError(f"run {run.info.id!r} is finished, but the models in its last checkpoint are gone")
    state.put()
    open_again, dropped = (False, False) if over else _open_again(job, go_on)
    mended = reached is None or chosen is None or dropped
    marks = _rewrite_metrics(job, run, say) if mended else state.marks
    for name in checkpoint.names(folder):  # newer ones were passed over; older ones count rows that were then
        if name == state.name:
            if not mended:
                break
        else:
            checkpoint.remove(folder, name)
    checkpoint.tidy(folder)
    return marks, mended or open_again


def _open_again(job: Job, go_on: bool) -> tuple[bool, bool]:
    """Whether the job was over and is to have more rounds, and whether a record had to go that a run of so many
    rounds does not have: the last round is always evaluated."""
    ended, job.finished = job.finished, job.finished and job.fed.round >= job.config.rounds
    if go_on and job.halted is not None:
        ended, job.halted = True, None
    every, last = job.config.eval_every, job.config.rounds
    kept = [r for r in job.history if r.round % every == 0 or r.round == last]
    dropped = len(kept) < len(job.history)
    job.history = kept
    return ended and not job.finished, dropped


def _from_the_first_round(run: RunFolder, say: Say) -> tuple[Marks, bool]:
    damaged = checkpoint.names(run.path / CHECKPOINTS)
    if run.info.status == "finished":
        raise DataError(f"run {run.info.id!r} is finished, but the models in its last checkpoint are gone")
    if damaged and run.info.deployed:
        raise DataError(
            f"run {run.info.id!r}: no checkpoint is sound, and sites that begin again would lose what they "
            "keep; bring the files back from a backup, or start a new run"
        )
    no_metrics = _reached(run, say) is None
    for name in damaged:
        checkpoint.remove(run.path / CHECKPOINTS, name)
    checkpoint.tidy(run.path / CHECKPOINTS)
    if no_metrics:
        database.rewrite(run.path / METRICS, {})
    say("no sound checkpoint: starting again from the first round")
    return dict.fromkeys(database.TABLES, 0), no_metrics


def _reached(run: RunFolder, say: Say) -> Marks | None:
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


def _rewrite_metrics(job: Job, run: RunFolder, say: Say) -> Marks:
    """New metrics: what the job remembers, and of the clients' own rows what the old file still gives."""
    path, done, exchanges = run.path / METRICS, job.fed.round, len(job.fed.exchanges)
    tables: dict[str, list[tuple[Any, ...]]] = tables_of(job)
    evaluated = {(r.round, int(r.final)) for r in job.history}
    tables["clients"] = [row for row in database.salvage(path, "clients") if row[:2] in evaluated]
    tables["traffic"] = [row for row in database.salvage(path, "traffic") if row[2] <= exchanges]
    lost = len(evaluated - {row[:2] for row in tables["clients"]})
    gone = f"; how single clients did in {lost} of {len(evaluated)} evaluated rounds is lost" if lost else ""
    say(f"the metrics up to round {done} are as the checkpoint remembers them{gone}")
    with writing(path):
        return database.rewrite(path, tables)
