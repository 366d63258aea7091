"""Runs what a plan asks for: what was run before is not run again, and one run that fails does not stop the rest."""

from __future__ import annotations

import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkin.config import Config, make_config
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.papers.measures import Outcome, Point, Traces, facts
from fedkin.papers.plan import Data, Plan
from fedkin.papers.processes import run_in_processes

if TYPE_CHECKING:
    from fedkin.data import Dataset, Split
    from fedkin.rounds import Event, Job, Listener, Result
    from fedkin.runs.folder import RunFolder

LEDGER = "reproduce.jsonl"
MAX_LINE = 16 << 20
TUNING = "finetune_epochs"  # the option that acts only after the last round


# ------------------------------------------------------------ what was run before


class Ledger:
    """Finished runs, one line each, in the folder of runs; runs that have a folder of their own are found there too."""

    def __init__(self, runs_dir: str | Path | None, data: Data) -> None:
        from fedkin.runs.catalogue import runs_folder

        self.folder, self._data = runs_folder(runs_dir), data
        self.path = self.folder / LEDGER
        self._known: dict[str, Outcome] = {}
        self._folders: dict[str, RunFolder] | None = None
        self.unreadable = 0
        for line in self._lines():
            try:
                outcome = _renewed(Outcome.from_dict(json.loads(line)))
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
    def outcomes(self) -> list[Outcome]:
        return list(self._known.values())

    def find(self, config: Config) -> Outcome | None:
        key = config.identity()
        if key not in self._known:
            folder = self._finished().get(key)
            if folder is not None:
                try:
                    self._known[key] = from_folder(folder, config, self._data)
                except FedKinError:
                    return None
        return self._known.get(key)

    def _finished(self) -> dict[str, RunFolder]:
        if self._folders is None:
            from fedkin.runs.catalogue import Catalogue
            from fedkin.runs.folder import RunFolder

            runs = Catalogue(self.folder).runs()
            self._folders = {r.identity: RunFolder(r) for r in runs if r.status == "finished"}
        return self._folders

    def add(self, outcome: Outcome) -> None:
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


def _renewed(outcome: Outcome) -> Outcome:
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


# ------------------------------------------------------------ from results to outcomes


def from_result(
    result: Result, config: Config, data: tuple[Dataset, Split], wall: float, alone: bool = True
) -> Outcome:
    """`config`: as it was asked for, whose identity is the run's."""
    points = tuple(
        Point(
            r.round,
            r.final,
            r.accuracy.micro,
            r.accuracy.macro,
            r.train_loss,
            r.bytes_down,
            r.seconds,
            r.accuracy.worst_decile,
        )
        for r in result.history
    )
    found = result.detection
    notes = [(n.round, n.name, _values(n.value)) for n in result.notes if n.name in _ASKED]
    traces = Traces(
        notes,
        None if found is None else asdict(found.overall),
        _hostile(config, len(result.per_client)),
        _classes(notes, data[0].y, data[1].train),
    )
    prepared = result.prepared
    return Outcome(
        config.identity(),
        config.to_dict(),
        points,
        facts(traces),
        result.seconds,
        device_name(prepared.device),
        prepared.precision,
        prepared.eval_point,
        prepared.split_hash,
        commit(),
        result.run and Path(result.run).name,
        wall,
        alone,
    )


def from_folder(run: RunFolder, config: Config, data: Data) -> Outcome:
    """The same from what a run left behind, which does not say what else went on then."""
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
    notes = [(at - 1, name, value) for at, name, value in run.notes() if name in _ASKED]
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
    return Outcome(
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


_ASKED = ("accepted", "rejected", "participants", "collaborators")


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _values(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _hostile(config: Config, clients: int) -> Callable[[int], Sequence[bool]] | None:
    if config.attack == "none":
        return None
    from fedkin.robust import Adversary, Attack

    who = Adversary.of(config, Attack(), clients)
    return lambda round: who.malicious(round).tolist()


def _has_collaborators(notes: Sequence[tuple[int, str, Any]]) -> bool:
    return any(name == "collaborators" for _, name, _ in notes)


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

Hear = Callable[[int, "Event"], None]
Done = Callable[[int, "Outcome | Exception"], None]


def run_cells(
    configs: Sequence[Config],
    data: Data,
    *,
    hear: Hear,
    done: Done,
    go_on: Callable[[], bool],
    together: int = 1,
    jobs: int = 1,
) -> None:
    """Runs the configurations in order; `hear` and `done` are told which one an event or an outcome belongs to, one
    call at a time. `go_on` is asked before anything new begins. Configurations that differ only in the tuning after
    the last round, or in how models are judged, are trained once; `together`: so many that share data and network at a
    time, on one device; `jobs`: so many processes."""
    groups, lock = batches(configs, together), threading.Lock()
    if min(jobs, len(groups)) > 1:
        return run_in_processes(groups, configs, data, min(jobs, len(groups)), hear=hear, done=done, go_on=go_on)
    for batch in groups:
        if not go_on():
            return
        run_batch(batch, configs, data, hear, done, lock)


def run_batch(
    batch: Sequence[int],
    configs: Sequence[Config],
    data: Data,
    hear: Hear,
    done: Done,
    lock: threading.Lock,
    alone: bool = True,
) -> None:
    """`alone`: nothing else is run at the same time."""
    chosen, begin, over = [configs[i] for i in batch], time.perf_counter(), set[int]()
    groups = _by_training(chosen)

    def tell(which: int, event: Event) -> None:
        with lock:
            hear(batch[which], event)

    def finish(which: int, result: Result | Exception) -> None:
        with lock:
            over.add(which)
            found: Outcome | Exception
            if isinstance(result, Exception):
                found = result
            else:
                wall = (time.perf_counter() - begin) / len(groups)
                free = alone and len(groups) == 1
                found = _attempt(lambda: from_result(result, chosen[which], data.of(chosen[which]), wall, free))
            done(batch[which], found)

    def one(group: Sequence[int], loaded: tuple[Dataset, Split], **given: Any) -> Result:
        run = _run_one if len(group) == 1 else _run_tunings if _tunes(chosen[group[0]]) else _run_judged
        return run(
            [chosen[w] for w in group],
            loaded,
            lambda k, event: tell(group[k], event),
            lambda k, result: finish(group[k], result),
            **given,
        )

    found: Any
    if len(groups) == 1:
        found = [_attempt(lambda: one(groups[0], data.of(chosen[0])))]
    else:
        found = _attempt(lambda: _run_together([(chosen[g[0]], partial(one, g)) for g in groups], data))
    for group, error in zip(groups, [found] * len(groups) if isinstance(found, Exception) else found, strict=True):
        if isinstance(error, Exception):
            for which in group:
                if which not in over:
                    finish(which, error)


def _attempt(work: Callable[[], Any]) -> Any:
    """What the work gives, or the exception it ended with; Ctrl-C still stops everything."""
    from fedkin.runs.start import Interrupted

    try:
        return work()
    except Interrupted:
        raise
    except Exception as error:
        return error


def trained(config: Config) -> str:
    """The identity of a run's training: the same for runs that differ only in the tuning at the end or, where nothing
    is tuned, in how models are judged."""
    from fedkin.methods import METHODS

    if _tunes(config):
        return replace(config, options={k: v for k, v in config.options.items() if k != TUNING}).identity()
    outputs = METHODS[config.method].outputs if config.method in METHODS else ()
    options = {k: v for k, v in config.options.items() if k not in outputs}
    return replace(config, options=options, eval_point="auto").identity()


def _tunes(config: Config) -> bool:
    from fedkin.methods import METHODS

    return config.method in METHODS and TUNING in getattr(METHODS[config.method].Options, "__dataclass_fields__", {})


def _by_training(configs: Sequence[Config]) -> list[list[int]]:
    """The numbers of configurations that share a training, training by training."""
    found: dict[str, list[int]] = {}
    for i, config in enumerate(configs):
        found.setdefault(trained(config), []).append(i)
    return list(found.values())


def batches(configs: Sequence[Config], together: int = 1) -> list[list[int]]:
    """Which configurations are run in one go, by their numbers: those of one training, or of up to `together` trainings
    that share data and network."""
    result: list[list[int]] = []
    open_: dict[tuple[Any, ...], tuple[list[int], int]] = {}  # a batch with room, and how many trainings it has
    for group in _by_training(configs):
        config = configs[group[0]]
        network = (config.data, config.model, config.device, config.precision)
        batch, count = open_.get(network, ([], together))
        if count == together:
            batch, count = [], 0
            result.append(batch)
        batch += group
        open_[network] = batch, count + 1
    return result


Finish = Callable[[int, "Result | Exception"], None]


def _run_one(
    configs: Sequence[Config], loaded: tuple[Dataset, Split], tell: Hear, finish: Finish, **given: Any
) -> Result:
    from fedkin.runs.start import start

    result = start(configs[0], on_event=lambda event: tell(0, event), loaded=loaded, **given)
    finish(0, result)
    return result


def _run_judged(
    configs: Sequence[Config], loaded: tuple[Dataset, Split], tell: Hear, finish: Finish, **given: Any
) -> Result:
    """One training, judged as each configuration says; the first one's result."""
    from fedkin.rounds import RoundRecord
    from fedkin.runs.start import start

    jobs: list[Job] = []

    def ready(job: Job) -> None:
        jobs.extend([job, *(job.evaluated_as(config) for config in configs[1:])])
        for which, other in enumerate(jobs[1:], 1):
            tell(which, other.prepared)

    def hear(event: Event) -> None:
        tell(0, event)
        if isinstance(event, RoundRecord):
            for which, other in enumerate(jobs[1:], 1):
                tell(which, other.evaluate_with(jobs[0], event))

    result = start(configs[0], on_event=hear, loaded=loaded, ready=ready, **given)
    finish(0, result)
    for which, other in enumerate(jobs[1:], 1):
        finish(which, other.result())
    return result


def _run_tunings(
    configs: Sequence[Config], loaded: tuple[Dataset, Split], tell: Hear, finish: Finish, **given: Any
) -> Result:
    """One training, then the tuning of each configuration from the same state; the last one's result."""
    from fedkin.rounds import drive, prepare

    job = prepare(configs[0], data=loaded, **given)
    for which in range(len(configs)):
        tell(which, job.prepared)
    for _ in range(configs[0].rounds):
        record = job.advance()
        if record is not None:
            for which in range(len(configs)):
                tell(which, record)
    state = job.state()
    for which, config in enumerate(configs):
        tuned = prepare(config, data=loaded, **given)
        own = {k: v for k, v in tuned.method.state().items() if k.startswith("tune_")}
        tuned.restore({**deepcopy(state), "method": {**deepcopy(state["method"]), **own}})
        result = drive(tuned, partial(tell, which))
        finish(which, result)
    return result


def _run_together(
    trainings: Sequence[tuple[Config, Callable[..., Result]]], data: Data
) -> Sequence[Result | Exception]:
    """Trainings, each with what carries it out, as rows of one cohort. Each is done with as soon as it ends; one that
    fails ends alone."""
    from fedkin.sweep.together import run_together

    carry_out = {config.identity(): work for config, work in trainings}

    def runner(config: Config, *, data: tuple[Dataset, Split], on_event: Listener | None, **given: Any) -> Result:
        return carry_out[config.identity()](data, **given)

    return run_together([config for config, _ in trainings], runner=runner, datasets=data.sets)


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

    def outcome(self, config: Config) -> Outcome | None:
        return self.ledger.find(config)


def open_runs(plan: Plan, ledger: Ledger, again: bool = False) -> list[Config]:
    """The runs that are to be done: those not done before, or done beside others where their times are asked for."""
    timed = plan.timed

    def is_open(config: Config) -> bool:
        found = ledger.find(config)
        return found is None or (config.identity() in timed and not found.alone)

    return [c for c in plan.runs if again or is_open(c)]


def reproduce(
    plan: Plan,
    ledger: Ledger,
    data: Data,
    *,
    budget: float | None = None,
    again: bool = False,
    together: int = 1,
    jobs: int = 1,
    hear: Callable[[Config, Event], None] | None = None,
    finished: Callable[[Config, Outcome | Exception], None] | None = None,
) -> Session:
    """Run what the plan needs and the ledger has not. `budget`: seconds after which nothing new is begun; `again`: run
    also what was run before."""
    session, begin = Session(plan, ledger), time.monotonic()
    todo, timed = open_runs(plan, ledger, again), plan.timed
    session.skipped = len(plan.runs) - len(todo)
    over: set[int] = set()

    def done(which: int, found: Outcome | Exception) -> None:
        over.add(which)
        if isinstance(found, Exception):
            session.failed[todo[which].identity()] = f"{found}" or type(found).__name__
        else:
            ledger.add(found)
            session.ran += 1
        if finished:
            finished(todo[which], found)

    def carry_out(some: Sequence[int], together: int, jobs: int) -> None:
        run_cells(
            [todo[i] for i in some],
            data,
            done=lambda k, found: done(some[k], found),
            hear=lambda k, event: hear(todo[some[k]], event) if hear else None,
            go_on=lambda: budget is None or time.monotonic() - begin < budget,
            together=together,
            jobs=jobs,
        )

    try:
        for i, config in enumerate(todo):
            if config.identity() in timed:
                carry_out([i], 1, 1)
        carry_out([i for i, config in enumerate(todo) if config.identity() not in timed], together, jobs)
    except (KeyboardInterrupt, FedKinError) as error:
        if not isinstance(error, KeyboardInterrupt) and not hasattr(error, "exit_code"):
            raise
        session.interrupted = True
    session.left = len(todo) - len(over)
    return session
