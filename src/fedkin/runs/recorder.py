"""The writing end of a run folder: hears every exchange and every round, and never changes what they compute."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fedkin.config import Config
from fedkin.core.federation import Exchange, Failure, Traffic
from fedkin.errors import FedKinError, UsageError
from fedkin.rounds import Job, Result, RoundRecord
from fedkin.runs import begun_with, checkpoint, database, entries, facts
from fedkin.runs.checkpoint import replace_file, sync_folder, write_json, writing
from fedkin.runs.folder import CHECKPOINTS, LOG, METRICS, RUN, SPLIT
from fedkin.version import VERSION

PROGRESS_EVERY = 5.0  # seconds between two updates of run.json while nothing else changes it


class Recorder:
    """Use as a context: on leaving, files are closed and the folder is free for others."""

    def __init__(self, folder: Path, raw: dict[str, Any], every: int) -> None:
        self.folder, self._raw, self._every = folder, raw, every
        self._lock = lock(folder)
        self._rounds = 0
        self._notes, self._removed = 0, 0
        self._written = time.monotonic()
        self._base: database.Database | None = None
        with writing(folder / LOG):
            self._log = open(folder / LOG, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    # ------------------------------------------------------------ beginning and end

    @classmethod
    def create(cls, runs_dir: Path, job: Job, config: Config, objects: Sequence[str] = ()) -> Recorder:
        """A new folder for a job that has not begun. `config` is what was asked for; the job's own is resolved."""
        with writing(runs_dir):
            folder = new_folder(runs_dir, config.method)
        raw = facts.of_a_beginning(job, config, folder, objects)
        try:
            recorder = cls(folder, raw, config.checkpoint_every)
            with writing(folder):
                replace_file(folder / SPLIT, [facts.split_bytes(job)])
                database.create(folder / METRICS)
                begun_with.save(folder, job)
                write_json(folder / RUN, entries.plain(raw))  # last: a folder without it is half-written
                sync_folder(runs_dir)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        recorder.log(f"started {config.method} on {config.data}, seed {config.seed}, split {job.prepared.split_hash}")
        return recorder

    def attach(self, job: Job, marks: Mapping[str, int] | None = None) -> None:
        """Listen to a job; `marks`: forget what the tables hold beyond (a resumed run)."""
        fed = job.fed
        self._rounds, self._notes, self._removed = job.last_round, len(fed.notes), len(fed.removed)
        with writing(self.folder / METRICS):
            self._base = database.Database(self.folder / METRICS)
            if marks is not None:
                self._base.rewind(marks)
        self._exchanges = len(fed.exchanges)
        fed.watcher = self.exchange
        self._names = list(job.site.names)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._base is not None:
            self._base.close()
        self._log.close()
        if self._lock is not None:
            os.close(self._lock)

    # ------------------------------------------------------------ while it runs

    @property
    def base(self) -> database.Database:
        assert self._base is not None, "attach first"
        return self._base

    def exchange(self, exchange: Exchange, traffic: Traffic, failures: Sequence[Failure]) -> None:
        """`Federation.watcher`: rows for the tables; failures go to the log at once."""
        self._exchanges += 1
        self.base.add("exchanges", [entries.exchange_row(self._exchanges, exchange, self._rounds)])
        self.base.add("traffic", entries.traffic_rows(self._exchanges, exchange, traffic, self._rounds))
        self.base.add("events", [entries.failure_row(f, self._rounds) for f in failures])
        for f in failures:
            at = min(f.round + 1, self._rounds)
            self.log(f"round {at} {f.phase}: client {self._names[f.client]} failed: {f.reason}")

    def after_round(self, job: Job, record: RoundRecord | None, save: bool = False) -> None:
        """The round's rows in one commit, then a checkpoint if one is due (or `save`)."""
        done, self._rounds = job.fed.round, job.last_round
        due = self._every > 0 and (done % self._every == 0 or job.finished or save)
        with writing(self.folder / METRICS):
            self._gather(job, record)
            self.base.commit(must=due or job.finished or save)
        if due:
            self.checkpoint(job)
        self._raw |= {"rounds_done": done, "halted": job.halted is not None}
        if record is not None:
            self._raw["progress"] = facts.of_progress(record)
            self.log(line(record, job.config.rounds))
        if job.stopped is not None and not job.finished:
            self.log(f"stopped early after round {done}: {job.why_stopped}")
        if due or time.monotonic() - self._written > PROGRESS_EVERY:
            self._write()

    def _gather(self, job: Job, record: RoundRecord | None) -> None:
        fed, base, last = job.fed, self.base, self._rounds
        for note in fed.notes[self._notes :]:
            base.add("notes", [entries.note_row(note, last)])
            base.add("events", entries.verdict_rows(note, last))
        for client, round in list(fed.removed.items())[self._removed :]:
            row = entries.removal_row(job, client, round)
            base.add("events", [row])
            self.log(f"round {row[0]}: client {self._names[client]} removed for good: {row[-1]}")
        self._notes, self._removed = len(fed.notes), len(fed.removed)
        if record is not None:
            base.add("rounds", [entries.round_row(record)])
            base.add("clients", entries.client_rows(job, record))

    def checkpoint(self, job: Job) -> None:
        name = "final" if job.finished else f"round-{job.fed.round:06d}"
        folder = self.folder / CHECKPOINTS
        with writing(folder / name):
            state = {"job": job.state(), "marks": self.base.marks(), "run": self._raw.get("id")}
            size = checkpoint.save(folder, name, job.fed.round, state)
        self.log(f"checkpoint {name}, {size} bytes")

    # ------------------------------------------------------------ status

    def resumed(self, round: int) -> None:
        before, here = self._raw.get("resumed"), facts.of_this_process()
        versions = {"fedkin": VERSION, "torch": torch.__version__}
        again = {"at": facts.now(), "after_round": round, "host": here["host"], **versions}
        resumed = [*(before if isinstance(before, list) else []), again]
        self._raw |= {"status": "running", "error": None, **here, "resumed": resumed}
        self.log(f"resumed after round {round}")
        self._write()

    def extended(self, config: Config, done: int) -> None:
        """The run is to have as many rounds as this configuration says. It is the run that it would have been with them
        from the start, and says when that was changed."""
        raw, rounds = self._raw, config.rounds
        before, result, objects = raw.get("extended"), raw.get("result"), raw.get("objects")
        now = {"at": facts.now(), "from": raw["config"].get("rounds"), "to": rounds, "after_round": done}
        known = {k: result[k] for k in ("accuracy", "bytes", "seconds", "wall") if k in result} if result else None
        self._raw |= {
            **{k: {**raw[k], "rounds": rounds} for k in ("config", "given") if raw.get(k)},
            "asked": sorted(config.asked),
            "identity": facts.identity_of(config, self.folder, objects if isinstance(objects, list) else []),
            "status": "running",
            "result": None,
            "progress": known or raw.get("progress"),
            "extended": [*(before if isinstance(before, list) else []), {**now, "fedkin": VERSION}],
        }
        self.log(f"{now['from']} rounds were to be done, now {rounds}; {done} are done")
        self._write()

    def finished(self, result: Result) -> None:
        self._raw |= {"status": "finished", "progress": None, "error": None, "result": facts.of_a_result(result)}
        self._write()
        self.log(f"finished, macro {result.accuracy.metric} {result.accuracy.macro:.4f}")
        if result.diverged is not None:
            self.log(f"diverged: {result.diverged}")

    def stopped(self, status: str, error: BaseException | str) -> None:
        """The end before the end. Says what it can: the disk may be full."""
        text = str(error) or type(error).__name__
        self._raw |= {"status": status, "error": text if status == "failed" else None}
        try:
            self._write()
            self.log(f"{status}: {text}")
            if isinstance(error, BaseException) and status == "failed":
                for part in traceback.format_exception(error):
                    self._log.write(part)
        except (FedKinError, OSError):
            pass

    def log(self, text: str) -> None:
        with writing(self.folder / LOG):
            self._log.write(f"{facts.now()} {' '.join(text.split())}\n")

    def _write(self) -> None:
        self._raw["updated"] = facts.now()
        with writing(self.folder / RUN):
            write_json(self.folder / RUN, entries.plain(self._raw))
        self._written = time.monotonic()


# ---------------------------------------------------------------- the folder


def new_folder(runs_dir: Path, method: str) -> Path:
    """`method-20261115-171502-a3f9` in `runs_dir`."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", method).lstrip(".")[:60] or "run"
    while True:
        folder = runs_dir / f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder.resolve()


def lock(folder: Path) -> int | None:
    """Nobody else works in this folder until the handle is closed or the process gone."""
    try:
        import fcntl
    except ImportError:
        return None
    handle = os.open(folder, os.O_RDONLY)
    for _ in range(20):  # somebody may just be looking whether the run is alive
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            time.sleep(0.05)
    os.close(handle)
    raise UsageError(f"run {folder.name!r} is at work in another process: wait for it, or stop it")


def line(record: RoundRecord, rounds: int) -> str:
    name = "final tuning" if record.final else f"round {record.round}/{rounds}"
    a = record.accuracy
    whose = "" if record.covers_all else f" ({record.judged} of {record.judgeable} clients)"
    return (
        f"{name}: loss {record.train_loss:.4f}, {a.metric} {a.said(a.macro)}{whose}, "
        f"worst decile {a.said(a.worst_decile)}, "
        f"failed {record.failed}, removed {record.removed}, {record.wall:.2f} s"
    )
