"""The writing end of a run folder: hears every exchange and every round, and never changes what they compute."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from fedkin import plugins
from fedkin.config import Config
from fedkin.core.federation import Exchange, Failure, Note, Traffic
from fedkin.core.notes import kind_of
from fedkin.errors import FedKinError, UsageError
from fedkin.models import MODELS
from fedkin.rounds import Job, Result, RoundRecord
from fedkin.runs import checkpoint, database
from fedkin.runs.checkpoint import replace_file, sync_folder, write_json, writing
from fedkin.runs.folder import CHECKPOINTS, FORMAT, LOG, METRICS, PARTS, RUN, SPLIT
from fedkin.version import VERSION

PROGRESS_EVERY = 5.0  # seconds between two updates of run.json while nothing else changes it
FINGERPRINT = 1000  # samples whose values are looked at to tell whether the data are still the same


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
        identity = plugins.identity_of(config)
        if objects:  # what a Python object is cannot be told from outside: such a run equals no other
            identity = hashlib.sha256(f"{identity}{folder.name}".encode()).hexdigest()
        raw = {
            "format": FORMAT,
            "id": folder.name,
            "created": now(),
            "updated": now(),
            "status": "running",
            "pid": os.getpid(),
            "host": platform.node(),
            "error": None,
            "config": job.config.to_dict(),
            "given": located(config),
            "asked": sorted(config.asked),
            "objects": list(objects),
            "plugins": plugins.facts(config),
            "options": job.options,
            "identity": identity,
            "environment": environment(job),
            "prepared": prepared_facts(job),
            "names": list(job.site.names),
            "malicious": job.malicious,
            "rounds_done": 0,
            "progress": None,
            "result": None,
        }
        try:
            recorder = cls(folder, raw, config.checkpoint_every)
            with writing(folder):
                replace_file(folder / SPLIT, [split_bytes(job)])
                database.create(folder / METRICS)
                write_json(folder / RUN, plain(raw))  # last: a folder without it is half-written
                sync_folder(runs_dir)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        recorder.log(f"started {config.method} on {config.data}, seed {config.seed}, split {job.prepared.split_hash}")
        return recorder

    def attach(self, job: Job, marks: Mapping[str, int] | None = None) -> None:
        """Listen to a job; `marks`: forget what the tables hold beyond (a resumed run)."""
        fed = job.fed
        self._rounds, self._notes, self._removed = job.config.rounds, len(fed.notes), len(fed.removed)
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
        at, phase = min(exchange.round + 1, self._rounds), exchange.phase
        self._exchanges += 1
        number = self._exchanges
        self.base.add("exchanges", [exchange_row(number, exchange, self._rounds)])
        each = zip(traffic.clients.tolist(), traffic.bytes_down, traffic.bytes_up, traffic.seconds, strict=True)
        self.base.add("traffic", [(at, phase, number, *row) for row in each])
        self.base.add("events", [(at, phase, f.client, "failed", f.reason) for f in failures])
        for f in failures:
            self.log(f"round {at} {phase}: client {self._names[f.client]} failed: {f.reason}")

    def after_round(self, job: Job, record: RoundRecord | None, save: bool = False) -> None:
        """The round's rows in one commit, then a checkpoint if one is due (or `save`)."""
        done = job.fed.round
        due = self._every > 0 and (done % self._every == 0 or job.finished or save)
        with writing(self.folder / METRICS):
            self._gather(job, record)
            self.base.commit(must=due or job.finished or save)
        if due:
            self.checkpoint(job)
        self._raw["rounds_done"] = done
        if record is not None:
            self._raw["progress"] = progress(record)
            self.log(line(record, self._rounds))
        if due or time.monotonic() - self._written > PROGRESS_EVERY:
            self._write()

    def _gather(self, job: Job, record: RoundRecord | None) -> None:
        fed, base, last = job.fed, self.base, self._rounds
        for note in fed.notes[self._notes :]:
            base.add("notes", [note_row(note, last)])
            base.add("events", verdict_rows(note, last))
        self._notes = len(fed.notes)
        for client, round in list(fed.removed.items())[self._removed :]:
            base.add("events", [removal_row(job, client, round)])
            self.log(
                f"round {min(round + 1, last)}: client {self._names[client]} removed for good: "
                f"{removal_row(job, client, round)[-1]}"
            )
        self._removed = len(fed.removed)
        if record is None or job.measured is None:
            return
        final = int(record.final)
        base.add("rounds", [round_row(record)])
        with np.errstate(invalid="ignore", divide="ignore"):
            each = 100.0 * job.measured.correct / job.measured.total
        columns = (a.tolist() for a in (job.measured.correct, job.measured.total, each, job.measured.loss))
        base.add(
            "clients",
            [
                (
                    record.round,
                    final,
                    client,
                    self._names[client],
                    int(correct),
                    int(count),
                    accuracy,
                    loss if count else math.nan,
                )
                for client, (correct, count, accuracy, loss) in enumerate(zip(*columns, strict=True))
            ],
        )

    def checkpoint(self, job: Job) -> None:
        name = "final" if job.finished else f"round-{job.fed.round:06d}"
        folder = self.folder / CHECKPOINTS
        with writing(folder / name):
            state = {"job": job.state(), "marks": self.base.marks(), "run": self._raw.get("id")}
            size = checkpoint.save(folder, name, job.fed.round, state)
        self.log(f"checkpoint {name}, {size} bytes")

    # ------------------------------------------------------------ status

    def resumed(self, round: int) -> None:
        before = self._raw.get("resumed")
        again = {
            "at": now(),
            "after_round": round,
            "host": platform.node(),
            "fedkin": VERSION,
            "torch": torch.__version__,
        }
        self._raw |= {
            "status": "running",
            "error": None,
            "pid": os.getpid(),
            "host": platform.node(),
            "resumed": [*(before if isinstance(before, list) else []), again],
        }
        self.log(f"resumed after round {round}")
        self._write()

    def finished(self, result: Result) -> None:
        self._raw |= {"status": "finished", "progress": None, "error": None, "result": outcome(result)}
        self._write()
        self.log(f"finished, macro accuracy {result.accuracy.macro:.4f}")
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
            self._log.write(f"{now()} {' '.join(text.split())}\n")

    def _write(self) -> None:
        self._raw["updated"] = now()
        with writing(self.folder / RUN):
            write_json(self.folder / RUN, plain(self._raw))
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


def located(config: Config) -> dict[str, Any]:
    """The configuration with paths that hold wherever one resumes from."""
    values = config.to_dict()
    if Path(config.data).exists():
        values["data"] = str(Path(config.data).resolve())
    if config.data_dir is not None:
        values["data_dir"] = str(Path(config.data_dir).resolve())
    return values


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


def split_bytes(job: Job) -> bytes:
    """Who has which samples and classes. An attacker's version of a sample (beyond the count) is that sample here."""
    import io

    count = job.site.source.count
    labels = job.site.source.y[:count].cpu().numpy()
    arrays: dict[str, Any] = {"names": np.array([str(n) for n in job.site.names])}
    for part in PARTS:
        rows = [np.asarray(r, np.int64) % count for r in job.site.parts[part]]  # type: ignore[index]
        arrays[part] = np.concatenate(rows)
        arrays[f"{part}_ends"] = np.cumsum([len(r) for r in rows])
        if part != "validation":
            held = [np.bincount(labels[r], minlength=job.prepared.classes) for r in rows]
            arrays["class_counts" if part == "train" else "class_counts_test"] = np.array(held, np.int64)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def fingerprint(job: Job) -> str:
    """Of the samples themselves: all labels, and the values of some hundred samples spread over the set."""
    source, digest = job.site.source, hashlib.sha256()
    step = max(1, source.count // FINGERPRINT)
    digest.update(str(tuple(source.x.shape[1:])).encode())
    digest.update(source.y[: source.count].cpu().numpy().tobytes())
    digest.update(source.x[: source.count : step].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def first_weights(job: Job) -> str:
    """Of the network that all clients start with, frozen parameters and all."""
    digest = hashlib.sha256()
    for name, value in job.model.state_dict().items():
        digest.update(f"{name} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def prepared_facts(job: Job) -> dict[str, Any]:
    p = job.prepared
    own = {} if job.config.model in MODELS else {"model_hash": first_weights(job)}
    return {
        "clients": p.clients,
        "classes": p.classes,
        "split_hash": p.split_hash,
        "parameters": p.parameters,
        "eval_point": p.eval_point,
        "device": p.device,
        "precision": p.precision,
        "data_hash": fingerprint(job),
        **own,
        "needed": p.needed.to_dict() if p.needed is not None else None,
    }


def environment(job: Job) -> dict[str, Any]:
    return {
        "fedkin": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": job.prepared.device,
        "gpu": torch.cuda.get_device_name(job.prepared.device) if job.prepared.device.startswith("cuda") else None,
        "precision": job.prepared.precision,
        "threads": torch.get_num_threads(),
        "git": git_state(os.getcwd()),
    }


@functools.cache
def git_state(folder: str) -> dict[str, Any] | None:
    """The revision of the repository one works in, and whether it has changes; None outside of one."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = ask("rev-parse", "HEAD")
    if revision is None:
        return None
    changes = ask("status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


# ---------------------------------------------------------------- rows of the tables


def round_row(record: RoundRecord) -> tuple[Any, ...]:
    a = record.accuracy
    return (
        record.round,
        int(record.final),
        a.micro,
        a.macro,
        a.worst_decile,
        a.std,
        record.test_loss,
        record.train_loss,
        record.bytes_down,
        record.bytes_up,
        record.seconds,
        record.participants,
        record.failed,
        record.removed,
        record.client_steps,
        record.training,
        record.evaluating,
        record.writing,
        record.wall,
        record.judged,
        record.judgeable,
        record.lr,
    )


def exchange_row(number: int, exchange: Exchange, last: int) -> tuple[Any, ...]:
    return (
        number,
        min(exchange.round + 1, last),
        exchange.phase,
        exchange.asked,
        exchange.answered,
        exchange.bytes_down,
        exchange.bytes_up,
        exchange.seconds,
    )


def note_row(note: Note, last: int) -> tuple[Any, ...]:
    return min(note.round + 1, last), note.name, json.dumps(plain(note.value))


def verdict_rows(note: Note, last: int) -> list[tuple[Any, ...]]:
    return [(min(note.round + 1, last), "", *found) for found in kind_of(note.name).events(note.value)]


def removal_row(job: Job, client: int, round: int) -> tuple[Any, ...]:
    why = job.fed.why_removed.get(client, f"by {job.config.method}")
    return min(round + 1, job.config.rounds), "", client, "removed", why


def remembered(job: Job) -> dict[str, list[tuple[Any, ...]]]:
    """The tables as far as the job itself remembers them: not how each client did in past rounds, nor its traffic."""
    fed, last = job.fed, job.config.rounds
    events = [(min(f.round + 1, last), f.phase, f.client, "failed", f.reason) for f in fed.failures]
    events += [row for note in fed.notes for row in verdict_rows(note, last)]
    events += [removal_row(job, client, round) for client, round in fed.removed.items()]
    return {
        "rounds": [round_row(r) for r in job.history],
        "exchanges": [exchange_row(i, e, last) for i, e in enumerate(fed.exchanges, start=1)],
        "notes": [note_row(note, last) for note in fed.notes],
        "events": sorted(events, key=lambda row: row[0]),
    }


# ---------------------------------------------------------------- values


def now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def progress(record: RoundRecord) -> dict[str, Any]:
    return {
        "round": record.round,
        "final": record.final,
        "accuracy": asdict(record.accuracy),
        "train_loss": record.train_loss,
        "bytes": {"down": record.bytes_down, "up": record.bytes_up},
        "seconds": record.seconds,
        "wall": record.wall,
        "removed": record.removed,
        "judged": record.judged,
        "judgeable": record.judgeable,
    }


def outcome(result: Result) -> dict[str, Any]:
    """A result without what the tables hold."""
    full = result.to_dict()
    kept = (
        "accuracy",
        "best",
        "bytes",
        "seconds",
        "wall",
        "times",
        "removed",
        "detection",
        "backdoor",
        "ways",
        "remarks",
        "diverged",
        "memory",
    )
    last = result.history[-1]
    done = {
        "failed": len(result.failures),
        "rounds_done": last.round,
        "judged": last.judged,
        "judgeable": last.judgeable,
        "partly_judged": sum(not r.covers_all for r in result.history),
    }
    return {**{k: full[k] for k in kept if k in full}, **done}


def line(record: RoundRecord, rounds: int) -> str:
    name = "final tuning" if record.final else f"round {record.round}/{rounds}"
    a = record.accuracy
    whose = "" if record.covers_all else f" ({record.judged} of {record.judgeable} clients)"
    return (
        f"{name}: loss {record.train_loss:.4f}, accuracy {a.macro:.2f}{whose}, worst decile {a.worst_decile:.2f}, "
        f"failed {record.failed}, removed {record.removed}, {record.wall:.2f} s"
    )


def plain(value: Any) -> Any:
    """As JSON has it: tensors and arrays as nested lists, what is not a number as null."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().tolist()
    elif isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(v) for v in value]
    return str(value)


__all__ = ["Recorder"]
