"""Reading a run folder. Whoever wrote it is not trusted: names, sizes, types and links are checked before use."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedkin.config import Config, effective, make_config
from fedkin.errors import DataError, UsageError, unknown
from fedkin.rounds.clock import PARTS as PARTS_OF_TIME
from fedkin.runs.arrays import read_arrays
from fedkin.runs.database import ACCURACIES as ACCURACIES
from fedkin.runs.database import TABLES, read_table
from fedkin.runs.metric import ShownMetric
from fedkin.runs.reading import evaluated, metrics_of, parsed, read_bytes
from fedkin.runs.reading import number as number
from fedkin.runs.spreadsheet import inert

FORMAT = 1
STATUSES = ("running", "finished", "interrupted", "failed")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # what begins with a dash would be a flag to who types it
MAX_JSON = 16 << 20
MAX_SPLIT, MAX_ROWS = 256 << 20, 2 << 30  # bytes of the split in its file, and unpacked
RUN, METRICS, SPLIT, LOG, CHECKPOINTS, REPORT, SITES, LATECOMERS = (
    "run.json",
    "metrics.sqlite",
    "split.npz",
    "log.txt",
    "checkpoints",
    "report.html",
    "sites.json",
    "latecomers.json",
)
PARTS = ("train", "validation", "test")
IN_LISTS: tuple[str, ...] = (
    "id",
    "identity",
    "status",
    "created",
    "updated",
    "error",
    "method",
    "data",
    "attack",
    "seed",
    "rounds_done",
)
IN_LISTS += ("accuracy", "bytes", "seconds", "wall", "diverged")


def check_name(name: str) -> str:
    """A run's name as it may come from outside: no separators, nothing that climbs."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"run {name[:120]!r}: names are 1 to 100 letters, digits, dots, dashes and underscores, and begin with a "
            "letter or digit"
        )
    return name


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    try:
        value = json.loads(read_bytes(path, limit))
    except (ValueError, RecursionError):
        where = path.name if path.name == RUN else "/".join(path.parts[-3:])  # a run's own file is named with the run
        raise DataError(f"{where} is not valid JSON (half-written?)") from None
    if not isinstance(value, dict):
        raise DataError(f"{path.name} does not hold a JSON object")
    return value


def is_alive(folder: Path) -> bool:
    """Whether a process is at work in this run: it holds a lock on the folder that dies with it."""
    try:
        import fcntl
    except ImportError:  # no such locks here: believe what is written
        return True
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


@dataclass(frozen=True, eq=False)
class RunInfo:
    """What run.json says, checked. `status` is "interrupted" too where a running run's process is gone."""

    id: str
    path: Path
    status: str
    created: str
    updated: str
    error: str | None
    config: dict[str, Any]
    given: dict[str, Any]  # the configuration as it was given, before anything was filled in
    options: dict[str, Any]
    identity: str
    environment: dict[str, Any]
    prepared: dict[str, Any]
    names: list[str]
    malicious: list[int]
    result: dict[str, Any] | None
    progress: dict[str, Any] | None  # the newest record of a run that is not finished
    asked: list[str]  # the settings that somebody gave; the others have their defaults
    objects: list[str]  # what was given as Python objects, and cannot be had from here
    rounds_done: int
    stale: bool = False
    raw: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, folder: Path) -> RunInfo:
        raw = read_json(folder / RUN)
        if raw.get("format") != FORMAT:
            raise DataError(f"{RUN} has format {str(raw.get('format'))[:20]!r}; this version reads {FORMAT}")
        status = _taken(raw, "status", str)
        if status not in STATUSES:
            raise DataError(f"{RUN}: status {status[:40]!r} is none of {', '.join(STATUSES)}")
        stale = status == "running" and not is_alive(folder)
        texts = {k: _taken(raw, k, str) for k in ("created", "updated", "identity")}
        tables = {k: _taken(raw, k, dict) for k in ("config", "options", "environment", "prepared")}
        lists = {k: _taken(raw, k, list) for k in ("names", "malicious")}
        if not all(isinstance(n, str) for n in lists["names"]) or not all(
            isinstance(m, int) for m in lists["malicious"]
        ):
            raise DataError(f"{RUN}: names must be text, malicious clients numbers")
        later: dict[str, tuple[type[Any], Any]] = {
            "error": (str, None),
            "given": (dict, {}),
            "result": (dict, None),
            "progress": (dict, None),
        }
        later |= {"asked": (list, []), "objects": (list, []), "rounds_done": (int, 0)}
        others = {k: _taken(raw, k, kind, usual) for k, (kind, usual) in later.items()}
        status = "interrupted" if stale else status
        return cls(
            id=folder.name, path=folder, status=status, stale=stale, raw=raw, **texts, **tables, **lists, **others
        )

    def configuration(self, **changed: Any) -> Config:
        """The run as it was asked for; where the folder does not say what was, nothing counts as given."""
        then = dict(self.given or self.config)
        if "model" in self.objects:
            then.setdefault("init", "given")  # before there was a choice, a network began with the weights it came with
        if then.get("way") == "compiled":  # removed since; a way is no part of what a run is
            then["way"] = "auto"
        return make_config({**then, **changed}, [n for n in self.asked if isinstance(n, str)])

    @property
    def method(self) -> str:
        return str(self.config.get("method", ""))

    @property
    def data(self) -> str:
        return str(self.config.get("data", ""))

    @property
    def attack(self) -> str:
        return str(self.config.get("attack", "none"))

    @property
    def deployed(self) -> bool:
        """Whether its clients were real sites: a server of their own goes on with it."""
        return (self.path / SITES).is_file()

    @property
    def extended(self) -> list[dict[str, Any]]:
        """When the run was given more rounds: `at`, `from`, `to`."""
        found = self.raw.get("extended")
        whole = found if isinstance(found, list) else []
        return [e for e in whole if isinstance(e, dict) and all(name in e for name in ("at", "from", "to"))]

    @property
    def began_with(self) -> dict[str, Any]:
        """The run that it started from: `run`, `method`, `round`, the `sha256` of what was taken over, and in words
        what was `taken`, what was `left` and `notes`, of these those on samples `seen` before; empty if it started from
        none."""
        found = self.raw.get("start")
        if not isinstance(found, dict):
            return {}
        told = {k: found.get(k) for k in ("run", "method", "round", "sha256")}
        listed = {k: v if isinstance(v := found.get(k), list) else [] for k in ("taken", "left", "notes", "seen")}
        return {**told, **{k: [str(w)[:1000] for w in v] for k, v in listed.items()}}

    @property
    def halted(self) -> bool:
        """Whether it is finished although rounds were left: a listener ended it, or validation scores did."""
        return self.status == "finished" and (self.result or {}).get("stopped") is not None

    @property
    def cut_short(self) -> bool:
        """Whether a listener ended it, of which its settings say nothing; before that was written down, patience may
        have where there was one."""
        told = self.raw.get("halted")
        return self.halted and (told if isinstance(told, bool) else self.config.get("patience") is None)

    @property
    def seed(self) -> int:
        return _int(self.config.get("seed"))

    @property
    def rounds_total(self) -> int:
        return _int(self.config.get("rounds"))

    def settings(self, given: bool = True) -> dict[str, Any]:
        """The settings that change what comes out, as they were given (or with everything filled in): runs in which
        they agree are the same run, or differ by the seed in them. What "auto" stood for is said."""
        found = effective({**((self.given if given else None) or self.config), "attack": self.attack})
        resolved = {k: self.prepared.get(k) for k in ("precision", "eval_point") if k in found}
        return {**found, **{k: v for k, v in resolved.items() if isinstance(v, str)}}

    @property
    def _newest(self) -> dict[str, Any]:
        return self.result or self.progress or {}

    @property
    def accuracy(self) -> dict[str, float]:
        """Of the last evaluated round, finished or not; empty before the first. `metric` says what the numbers are."""
        found = self._newest.get("accuracy")
        return {k: number(found.get(k)) for k in ACCURACIES} if isinstance(found, dict) else {}

    @property
    def metric(self) -> ShownMetric:
        """What `accuracy` is: of tasks other than classification, another metric."""
        found = self.prepared.get("metric")
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return ShownMetric()
        return ShownMetric(
            found["name"][:40], "%" if found.get("unit") == "%" else "", found.get("higher") is not False
        )

    @property
    def seconds(self) -> float:
        """Of the rounds: training and the server's work."""
        return number(self._newest.get("seconds"))

    @property
    def wall(self) -> float:
        """Seconds by the wall clock, everything included; NaN for runs of versions that did not measure it."""
        return number(self._newest.get("wall"))

    @property
    def times(self) -> dict[str, float]:
        """The parts of the wall clock, of a finished run."""
        found = (self.result or {}).get("times")
        return {k: number(found.get(k)) for k in PARTS_OF_TIME} if isinstance(found, dict) else {}

    @property
    def diverged(self) -> str | None:
        """Why its numbers are not to be believed."""
        found = (self.result or {}).get("diverged")
        return found[:1000] if isinstance(found, str) else None

    @property
    def bytes(self) -> int:
        """Sent so far, both ways."""
        found = self._newest.get("bytes")
        return sum(_int(found.get(k)) for k in ("down", "up")) if isinstance(found, dict) else 0

    def to_dict(self) -> dict[str, Any]:
        """As `fedkin runs --json` prints it."""
        own = {name: getattr(self, name) for name in IN_LISTS}
        own["accuracy"] = self.accuracy | (self.metric.facts() if self.accuracy else {})
        shown = {"path": str(self.path), "rule": str(self.config.get("rule", "mean")), "rounds": self.rounds_total}
        return {**own, **shown, "split": self.prepared.get("split_hash")}


def _taken(raw: Mapping[str, Any], key: str, kind: type[Any], *default: Any) -> Any:
    """What run.json says under a name, if it is of this kind."""
    value = raw.get(key)
    if value is None and default:
        return default[0]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        what = "is missing" if value is None else f"is {type(value).__name__}, not {kind.__name__}"
        raise DataError(f"{RUN}: {key!r} {what}")
    return value


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else 0


@dataclass(frozen=True, eq=False)
class RunFolder:
    """One run's folder, for reading; `info` is what its run.json says (`status`, `config`, `accuracy`, ...)."""

    info: RunInfo

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Checks run.json; a folder that is none of ours, or half-written, is refused with the reason."""
        folder = Path(path)
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        try:
            return cls(RunInfo.read(folder.resolve()))
        except DataError as error:
            raise DataError(f"{folder} is not a run: {error}") from None

    @property
    def path(self) -> Path:
        """Where the folder is."""
        return self.info.path

    def table(
        self, name: str, where: Mapping[str, Any] | None = None, columns: list[str] | None = None
    ) -> dict[str, list[Any]]:
        """Columns of one of the tables; `where` keeps the rows with these values."""
        return read_table(self.path / METRICS, name, where, columns)

    def notes(self, name: str | None = None, round: int | None = None) -> list[tuple[int, str, Any]]:
        """What the method noted: (round, name, value), in order."""
        asked = {"name": name, "round": round}
        found = self.table("notes", {k: v for k, v in asked.items() if v is not None})
        rows = zip(found["round"], found["name"], found["value"], strict=True)
        return [(r, n, parsed(v)) for r, n, v in rows]

    def split(self) -> dict[str, Any]:
        """Row numbers of every client in "train", "validation" and "test", and the clients' "names"; "class_counts" and
        "class_counts_test", [clients, classes], where the run has them."""
        return dict(self._split)

    @cached_property
    def _split(self) -> dict[str, Any]:
        import numpy as np

        kinds = dict.fromkeys([f"{p}{end}" for p in PARTS for end in ("", "_ends")], "iu")
        counts = dict.fromkeys(("class_counts", "class_counts_test"), "iu")
        found = read_arrays(self.path / SPLIT, {"names": "U", **kinds, **counts}, MAX_SPLIT, MAX_ROWS)
        missing = [name for name in ("names", *kinds) if name not in found]
        if missing:
            raise DataError(f"{self.path / SPLIT} has no {missing[0]!r}")
        names = found["names"].tolist()
        parts: dict[str, Any] = {}
        for part in PARTS:
            rows, ends = found[part].astype(np.int64), found[f"{part}_ends"].astype(np.int64)
            fits = rows.ndim == 1 and ends.shape == (len(names),) and len(names) > 0
            if not fits or (np.diff(ends, prepend=0) < 0).any() or ends[-1] != len(rows):
                raise DataError(f"{self.path / SPLIT}: the offsets of {part!r} do not fit")
            parts[part] = np.split(rows, ends[:-1])
        for name in counts:
            if name in found:
                if found[name].ndim != 2 or len(found[name]) != len(names):
                    raise DataError(f"{self.path / SPLIT}: {name!r} is no table of the clients")
                parts[name] = found[name].astype(np.int64)
        return {**parts, "names": names}

    def history(self) -> list[dict[str, Any]]:
        """One entry per evaluated round, in the shape of `run --json`."""
        found, what = self.table("rounds"), self.info.metric.facts()
        return [evaluated(dict(zip(found, row, strict=True)), what) for row in zip(*found.values(), strict=True)]

    def per_client(self) -> list[dict[str, Any]]:
        """How each client's personal model did when last evaluated; of a finished run, the one that is its result."""
        marks = self.table("rounds", columns=["round", "final"])
        if not marks["round"]:
            return []
        kept = (self.info.result or {}).get("kept")
        at = kept if isinstance(kept, dict) else {name: marks[name][-1] for name in marks}
        last = {"round": _int(at.get("round")), "final": int(bool(at.get("final")))}
        found, train = self.table("clients", last), self.split()["train"]
        names = ("client", "name", "accuracy", "loss", "test_samples", "correct", "metrics", "validation")
        columns = (found["count" if name == "test_samples" else name] for name in names)
        clients = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        for told in clients:
            c, told["metrics"] = told["client"], metrics_of(told["metrics"])
            told["train_samples"] = len(train[c]) if isinstance(c, int) and 0 <= c < len(train) else 0
        return clients

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What befell clients, of one kind of `notes.EVENTS`."""
        found = self.table("events", {"kind": kind})
        return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Everything about the run, as `fedkin show --json` prints it: what `run --json` says, and where and when.

        As there, `removed` and `failed` count rounds from 0."""
        from fedkin.core import notes  # needs numpy, which a list of runs does not

        info, result = self.info, self.info.result or {}
        failed = [{**e, "round": e["round"] - 1} for e in self.events(notes.HAS_FAILED.kind)]
        return {
            **info.to_dict(),
            "options": info.options,
            "began_with": info.began_with or None,
            **{name: result.get(name) for name in ("best", "kept", "stopped", "validation")},
            "per_client": self.per_client(),
            "history": self.history(),
            "bytes": result.get("bytes", (info.progress or {}).get("bytes")),
            "removed": {str(e["client"]): e["round"] - 1 for e in self.events(notes.WAS_REMOVED.kind)},
            "failed": [{k: e[k] for k in ("client", "round", "phase", "reason")} for e in failed],
            "malicious": info.malicious,
            "detection": result.get("detection"),
            "config": info.config,
            "eval_point": info.prepared.get("eval_point"),
            "environment": info.environment,
            "times": info.times,
            "prepared": info.prepared,
            "remarks": result.get("remarks", []),
            "run": str(info.path),
        }

    def log(self, last: int = 200) -> list[str]:
        """The newest lines of the log."""
        return read_bytes(self.path / LOG, 1 << 30).decode("utf-8", "replace").splitlines()[-last:]

    def export(self, fmt: Literal["csv", "parquet"], to: str | Path) -> list[Path]:
        """Every table as a file of its own in `to`."""
        if fmt not in ("csv", "parquet"):
            raise unknown("format", str(fmt), ["csv", "parquet"])
        target = Path(to)
        try:
            target.mkdir(parents=True, exist_ok=True)
            return [_write(target / f"{name}.{fmt}", self.table(name), fmt) for name in TABLES]
        except OSError as error:
            raise DataError(f"{target} cannot be written: {error.strerror or error}") from None


def _write(path: Path, columns: Mapping[str, list[Any]], fmt: str) -> Path:
    if fmt == "csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(map(inert, row) for row in zip(*columns.values(), strict=True))
        return path
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError("parquet needs pyarrow: pip install 'fedkin[data]', or export csv") from None
    kinds = {"INTEGER": pyarrow.int64(), "REAL": pyarrow.float64(), "TEXT": pyarrow.string()}
    schema = pyarrow.schema([(c, kinds[k]) for c, k in TABLES[path.stem].items()])
    pyarrow.parquet.write_table(pyarrow.table(dict(columns), schema=schema), path)
    return path
