"""Runs what a plan asks for, and the ledger of what was run: its measures, one line a run."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from fedkin.config import Config, make_config
from fedkin.core.notes import COLLABORATORS
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.papers.measures import ASKED, Measures, Point, Traces, facts
from fedkin.papers.plan import Plan
from fedkin.rounds import Event, Listener
from fedkin.runs.catalogue import Past, runs_folder
from fedkin.runs.folder import RunFolder
from fedkin.runs.start import silent
from fedkin.sweep.executor import Ended, in_words
from fedkin.sweep.loaded import Data
from fedkin.sweep.runner import Cell, Quiet, run_sweep

LEDGER = "reproduce.jsonl"
MAX_LINE = 16 << 20


# ------------------------------------------------------------ what was run before


class Ledger:
    """Finished runs, one line each, in the folder of runs; runs that have a folder of their own are found there too."""

    def __init__(self, runs_dir: str | Path | None, data: Data) -> None:
        self.folder, self._data = runs_folder(runs_dir), data
        self.path = self.folder / LEDGER
        self._known: dict[str, Measures] = {}
        self._past: Past | None = None
        self.unreadable = 0
        for line in self._lines():
            try:
                outcome = _renewed(Measures.from_dict(json.loads(line)))
                self._known[outcome.identity] = outcome
            except (ValueError, RecursionError, DataError):
                self.unreadable += 1  # a line cut short when the machine went down, say

    def _lines(self) -> list[str]:
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from None
        return [line for line in text.splitlines() if line.strip() and len(line) <= MAX_LINE]

    @property
    def outcomes(self) -> list[Measures]:
        return list(self._known.values())

    def find(self, config: Config) -> Measures | None:
        key = config.identity()
        if key not in self._known:
            self._past = self._past or Past(self.folder)
            info = self._past.finished(config)
            if info is not None:
                try:
                    self._known[key] = from_folder(RunFolder(info), config, self._data)
                except FedKinError:
                    return None
        return self._known.get(key)

    def add(self, outcome: Measures) -> None:
        """Writes a line and makes sure that it is on the disk."""
        self._known[outcome.identity] = outcome
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b") as file:
                end = file.seek(0, os.SEEK_END)
                if end:
                    file.seek(end - 1)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                file.write(json.dumps(_plain(outcome.to_dict())).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror or error}") from None


def _renewed(outcome: Measures) -> Measures:
    """A record from before a setting was added has the setting's default, and the identity that goes with it."""
    if set(outcome.config) >= {f.name for f in fields(Config)}:
        return outcome
    try:
        config = make_config(outcome.config)
    except FedKinError:
        return outcome
    return replace(outcome, config=config.to_dict(), identity=config.identity())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and value != value:
        return None
    return value


# ------------------------------------------------------------ from runs to measures


def measures_of(ended: Ended) -> Measures:
    """What a reproduction keeps of a run: what its folder says, and of one that was run here and now where and how."""
    assert ended.folder is not None
    found = from_folder(ended.folder, ended.config, ended.data)
    if ended.result is None:
        return found
    where = device_name(ended.result.prepared.device)
    return replace(found, device=where, commit=commit(), wall=ended.wall, alone=ended.alone)


def from_folder(run: RunFolder, config: Config, data: Data) -> Measures:
    """The measures of a run by what it left behind, which does not say what else went on then."""
    info, rounds = run.info, run.table("rounds")
    order = sorted(range(len(rounds["round"])), key=lambda i: (rounds["round"][i], rounds["final"][i]))
    points = tuple(
        Point(
            int(rounds["round"][i]),
            bool(rounds["final"][i]),
            _float(rounds["micro"][i]),
            _float(rounds["macro"][i]),
            _float(rounds["train_loss"][i]),
            int(rounds["bytes_down"][i] or 0),
            _float(rounds["seconds"][i]),
            _float(rounds["worst_decile"][i]),
        )
        for i in order
    )
    if not points:
        raise DataError(f"run {info.id!r} has no evaluated round")
    notes = [(at - 1, name, value) for at, name, value in run.notes() if name in ASKED]
    detected = (info.result or {}).get("detection")
    labels, parts = (data.of(config)[0].y, run.split()["train"]) if _has_collaborators(notes) else (None, [])
    traces = Traces(
        notes,
        detected if isinstance(detected, dict) else None,
        _hostile(config, len(info.names)),
        _classes(notes, labels, parts),
    )
    prepared, git = info.prepared, info.environment.get("git")
    made_by = f"fedkin {info.environment.get('fedkin', '')}".strip()
    if isinstance(git, dict):
        made_by = f"{str(git.get('revision', ''))[:12]}{'+' if git.get('dirty') else ''}"
    where = info.environment.get("device", prepared.get("device"))
    return Measures(
        config.identity(),
        config.to_dict(),
        points,
        facts(traces),
        info.seconds,
        str(where),
        str(prepared.get("precision")),
        str(prepared.get("eval_point")),
        str(prepared.get("split_hash")),
        made_by,
        info.id,
        alone=False,
    )


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _hostile(config: Config, clients: int) -> Callable[[int], Sequence[bool]] | None:
    if config.attack == "none":
        return None
    from fedkin.robust import Adversary, Attack

    who = Adversary.of(config, Attack(), clients)
    return lambda round: who.malicious(round).tolist()


def _has_collaborators(notes: Sequence[tuple[int, str, Any]]) -> bool:
    return any(name == COLLABORATORS.name for _, name, _ in notes)


def _classes(notes: Sequence[tuple[int, str, Any]], labels: Any, parts: Sequence[Any]) -> list[frozenset[int]]:
    return [frozenset(labels[p].tolist()) for p in parts] if _has_collaborators(notes) else []


def device_name(device: str) -> str:
    """The machine's own name for where a run was done."""
    import torch

    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(torch.device(device)))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "cpu"


@cache
def commit() -> str:
    """The revision of the source tree (with a + if it was changed since), else what FEDKIN_COMMIT says (for a copy
    that is no checkout), else the version."""
    from fedkin.runs.facts import git_state
    from fedkin.version import VERSION

    found = git_state(str(Path(__file__).parent))
    if not found or not found.get("revision"):
        told = os.environ.get("FEDKIN_COMMIT", "")
        if told and not re.fullmatch(r"[0-9a-f]{7,40}\+?", told):
            raise UsageError(f"FEDKIN_COMMIT={told!r}: a revision is 7 to 40 hexadecimal digits (git rev-parse HEAD)")
        return told[:12] + "+" * told[12:].endswith("+") if told else f"fedkin {VERSION}"
    return f"{str(found['revision'])[:12]}{'+' if found.get('dirty') else ''}"


# ------------------------------------------------------------ running


@dataclass
class Session:
    """One go at a plan: what came out, what failed and why, and whether it was all there was to do."""

    plan: Plan
    ledger: Ledger
    failed: dict[str, str] = field(default_factory=dict)  # by identity
    ran: int = 0
    skipped: int = 0  # run before
    left: int = 0  # not begun: the budget was used up, or Ctrl-C
    interrupted: bool = False

    def outcome(self, config: Config) -> Measures | None:
        return self.ledger.find(config)


def open_runs(plan: Plan, ledger: Ledger, again: bool = False) -> list[Config]:
    """The runs that are to be done: those not done before, or done beside others where their times are asked for."""
    timed = plan.timed

    def is_open(config: Config) -> bool:
        found = ledger.find(config)
        return found is None or (config.identity() in timed and not found.alone)

    return [c for c in plan.runs if again or is_open(c)]


class _Told(Quiet):
    """Passes on what happens in which run."""

    def __init__(self, hear: Callable[[Config, Event], None], say: Callable[[str], None]) -> None:
        self._hear, self._say = hear, say

    def say(self, line: str) -> None:
        self._say(line)

    def listener(self, cell: Cell) -> Listener:
        cell.state = "running"
        return partial(self._hear, cell.config)


def reproduce(
    plan: Plan,
    ledger: Ledger,
    data: Data,
    *,
    budget: float | None = None,
    again: bool = False,
    together: int = 1,
    jobs: int = 1,
    devices: Sequence[str] = (),
    signals: bool = False,
    hear: Callable[[Config, Event], None] = lambda config, event: None,
    say: Callable[[str], None] = silent,
    finished: Callable[[Config, Measures | Exception], None] = lambda config, found: None,
) -> Session:
    """Run what the plan needs and the ledger has not: `run_sweep`, but for runs whose times are asked for, which have
    their device to themselves from their first round on. `again`: run also what was run before."""
    session, begin = Session(plan, ledger), time.monotonic()
    todo, timed = open_runs(plan, ledger, again), plan.timed
    session.skipped = len(plan.runs) - len(todo)

    def ended(cell: Cell) -> None:
        if cell.cause is not None:
            session.failed[cell.config.identity()] = in_words(cell.cause)
        else:
            ledger.add(cell.outcome)
            session.ran += 1
        finished(cell.config, cell.cause or cell.outcome)

    parts = {own: [c for c in todo if (c.identity() in timed) == own] for own in (True, False)}
    for own, configs in parts.items():
        if configs and not session.interrupted:
            spread: dict[str, Any] = {"jobs": 1, "devices": devices[:1]} if own else {"jobs": jobs, "devices": devices}
            sweep = run_sweep(
                configs,
                watcher=lambda cells: _Told(hear, say),
                ended=ended,
                fresh=again or own,
                together=1 if own else together,
                budget=None if budget is None else budget - (time.monotonic() - begin),
                signals=signals,
                keep=measures_of,
                data=data,
                **spread,
            )
            session.interrupted = sweep.signal is not None
    session.left = len(todo) - session.ran - len(session.failed)
    return session
