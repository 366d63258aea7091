"""Sweeps: a grid of runs, each with its folder. What is finished is not done again, what was interrupted goes on,
and what fails stands in the table as failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fedkin import plugins
from fedkin.config import NOT_IDENTITY, Config, make_config
from fedkin.data import Dataset, Split
from fedkin.errors import DataError, FedKinError, UsageError, unknown
from fedkin.methods import METHODS, options_of
from fedkin.options import describe
from fedkin.robust import make_attack
from fedkin.rounds import Event, Listener, Result, RoundRecord, load_data, named_spec, pick_device, run_config
from fedkin.rounds.settings import idle, refuse, settled
from fedkin.runs.catalogue import Catalogue
from fedkin.runs.folder import RunFolder, RunInfo
from fedkin.runs.sinks import make_sinks
from fedkin.runs.start import Interrupted, Stop, resume, start
from fedkin.sweep.groups import said
from fedkin.sweep.statistics import Outcome
from fedkin.sweep.together import run_together

MOST_CELLS = 20_000
TOGETHER_ON_GPU = 8
MOST_SPLITS = 8  # kept in memory
OF_THE_DATA = (
    "data",
    "data_dir",
    "clients",
    "partition",
    "samples_per_client",
    "quantity_skew",
    "test_share",
    "shift",
    "severity",
    "seed",
)
State = Literal["waiting", "running", "done", "skipped", "interrupted", "failed"]


# ---------------------------------------------------------------- which runs


def expand(
    base: Mapping[str, Any],
    blocks: Sequence[Mapping[str, Sequence[Any]]],
    check: Callable[[Config], Config] = lambda config: config,
    say: Callable[[str], object] = lambda sentence: None,
) -> list[Config]:
    """All combinations of every block's lists over the common settings, seed by seed, each once.

    A block maps a setting to its values; `options.lam` is an option of every method that has it, `options.ditto.lam`
    of one. A setting counts for the runs that it changes, and is left out of the others; `say` hears of that. One that
    changes no run is refused."""
    asked: list[Config] = []
    common = flat_options(base.get("options", {}))
    every = [_axes(block) for block in blocks]
    owners = [_options_of([str(m) for m in axes.get("method", [base.get("method", "fedavg")])]) for axes in every]
    _check_options(list(common), {m: names for known in owners for m, names in known.items()})
    for axes, known in zip(every, owners, strict=True):
        _check_options([k.removeprefix("options.") for k in axes if k.startswith("options.")], known)
        size = 1
        for listed in axes.values():
            size *= len(listed)
        if size > MOST_CELLS:
            raise UsageError(f"the grid has {size} runs; at most {MOST_CELLS}")
        chosen = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
        asked += [check(_cell(base, common, one, known)) for one in chosen]
    reasons = [_idle(config) for config in asked]
    made, sentences = settled(asked, reasons)
    for config, found in zip(made, reasons, strict=True):
        refuse(config, found)
    for sentence in sentences:
        say(sentence)
    cells: dict[str, Config] = {}
    for config in made:
        cells.setdefault(config.identity(), config)
    seeds = list(dict.fromkeys(c.seed for c in cells.values()))
    return [c for s in seeds for c in cells.values() if c.seed == s]


def _cell(
    base: Mapping[str, Any], common: Mapping[str, Any], chosen: Mapping[str, Any], known: Mapping[str, set[str]]
) -> Config:
    options = {**common, **{k.removeprefix("options."): v for k, v in chosen.items() if k.startswith("options.")}}
    values = {**base, **{k: v for k, v in chosen.items() if not k.startswith("options.")}}
    method = str(values.get("method", "fedavg"))
    own: dict[str, Any] = {}
    for name, value in sorted(options.items(), key=lambda item: "." in item[0]):  # what names a method comes last
        taker, _, key = name.rpartition(".")
        if taker == method or (not taker and key.replace("-", "_") in known[method]):
            own[key] = value
    return make_config({**values, "options": own})


def _idle(config: Config) -> dict[str, str]:
    kind = METHODS[config.method]
    attack = None if config.attack == "none" else make_attack(*named_spec(config.attack))
    return idle(config, kind, options_of(kind, config.options, config.method), attack)


def _axes(block: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The lists of a block in the order in which they are nested: attacks outside, methods and their options inside."""
    names = [f.name for f in fields(Config) if f.name != "options"]
    axes: dict[str, list[Any]] = {}
    for raw, values in block.items():
        key = raw if raw.startswith("options.") else raw.replace("-", "_")
        if not key.startswith("options.") and key not in names:
            raise unknown("setting in a grid", raw, [*names, "options.NAME"])
        if key in NOT_IDENTITY:
            raise UsageError(f"{raw} does not change what comes out of a run, so there is no grid over it")
        items = list(values) if isinstance(values, list | tuple | range) else [values]
        if not items:
            raise UsageError(f"{raw} = []: a grid needs at least one value")
        if any(isinstance(item, Mapping | list | tuple) for item in items):
            raise UsageError(f"{raw} = {values!r}: a list of plain values")
        if len(set(items)) < len(items):
            twice = next(item for i, item in enumerate(items) if item in items[:i])
            raise UsageError(f"{raw}: {twice!r} is named twice")
        axes[key] = items
    rank = {"attack": 0, "rule": 2, "method": 3}
    return dict(sorted(axes.items(), key=lambda a: rank.get(a[0], 4 if a[0].startswith("options.") else 1)))


def flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Tables inside [options] are those of single methods: {"ditto": {"lam": 1}} becomes {"ditto.lam": 1}."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


def _options_of(methods: Sequence[str]) -> dict[str, set[str]]:
    return {m: {"profile", *(d.name for d in describe(METHODS[m].Options))} for m in methods}


def _check_options(given: Sequence[str], known: Mapping[str, set[str]]) -> None:
    """`ditto.lam` reaches ditto only; `lam` every method that has it. What reaches nobody is refused."""
    for name in given:
        method, dot, key = name.rpartition(".")
        if dot and method not in known:
            raise unknown(f"method in option {name!r},", method, known)
        if dot and key.replace("-", "_") not in known[method]:
            raise unknown(f"option of method {method!r}", key, known[method])
        if not any(key.replace("-", "_") in names for names in known.values()):
            raise unknown("option of " + ", ".join(known), key, set().union(*known.values()))


# ---------------------------------------------------------------- running them


@dataclass(eq=False)
class Cell:
    """One run of a sweep, and how far it is."""

    config: Config
    state: State = "waiting"
    records: list[RoundRecord] = field(default_factory=list)
    error: str = ""
    run: str | None = None  # the folder's name
    outcome: Outcome | None = None
    varied: Sequence[str] = ()  # settings, besides attack and rule, that tell it from the others

    @property
    def name(self) -> str:
        config = self.config
        options = "".join(f" {k}={v}" for k, v in config.options.items())
        attack = "" if config.attack == "none" else f" under {config.attack}"
        rule = "" if config.rule == "mean" else f" by {config.rule}"
        more = "".join(f" {said(k, getattr(config, k))}" for k in self.varied if k not in ("attack", "rule"))
        return f"{config.method}{options}{attack}{rule}{more} seed {config.seed}"


class Watcher(Protocol):
    """Who shows a sweep while it goes on."""

    def listener(self, cell: Cell) -> Listener: ...

    def failed(self, cell: Cell, error: str) -> None: ...

    def say(self, line: str) -> None: ...


class Quiet:
    """Shows nothing."""

    def listener(self, cell: Cell) -> Listener:
        cell.state = "running"

        def hear(event: Event) -> None:
            if isinstance(event, RoundRecord):
                cell.records.append(event)

        return hear

    def failed(self, cell: Cell, error: str) -> None:
        cell.state, cell.error = "failed", error

    def say(self, line: str) -> None: ...


@dataclass(eq=False)
class Sweep:
    cells: list[Cell]
    signal: int | None = None  # what ended it early

    @property
    def failed(self) -> list[Cell]:
        return [c for c in self.cells if c.state == "failed"]

    @property
    def outcomes(self) -> list[Outcome]:
        return [c.outcome for c in self.cells if c.outcome is not None]

    @property
    def skipped(self) -> int:
        return sum(c.state == "skipped" for c in self.cells)


def together_by_default(config: Config) -> int:
    return TOGETHER_ON_GPU if pick_device(config.device).type == "cuda" else 1


class Data:
    """The data of a sweep: every set read once, every split made once (the newest few are kept)."""

    def __init__(self) -> None:
        self.sets: dict[str, Dataset] = {}
        self._splits: dict[tuple[Any, ...], tuple[Dataset, Split]] = {}

    def of(self, config: Config) -> tuple[Dataset, Split]:
        share = METHODS[config.method].holdout if config.validation_share is None else config.validation_share
        key = (*(getattr(config, k) for k in OF_THE_DATA), share)
        if key not in self._splits:
            while len(self._splits) >= MOST_SPLITS:
                del self._splits[next(iter(self._splits))]
            self._splits[key] = load_data(replace(config, validation_share=share), self.sets)
        return self._splits[key]


class Past:
    """Runs that are there already, by what they are."""

    def __init__(self, runs_dir: str | None) -> None:
        self._catalogue = Catalogue(runs_dir)
        self._known: dict[str, list[RunInfo]] = {}
        for info in self._catalogue.runs():
            self._known.setdefault(info.identity, []).append(info)
        self._before = {info.id for found in self._known.values() for info in found}

    def finished(self, config: Config) -> RunInfo | None:
        """The newest finished run of exactly this, unless files it was trained on have changed since."""
        done = [i for i in self._of(config) if i.status == "finished"]
        return next((i for i in reversed(done) if not changed_since(config, i)), None)

    def unfinished(self, config: Config) -> RunInfo | None:
        """The one of those that stopped that came furthest."""
        left = [i for i in self._of(config) if i.status in ("interrupted", "failed") and not changed_since(config, i)]
        return max(left, key=lambda i: i.rounds_done, default=None)

    def busy(self, config: Config) -> RunInfo | None:
        return next((i for i in self._of(config) if i.status == "running"), None)

    def newest(self, config: Config) -> RunInfo | None:
        """The folder that this sweep made for it."""
        identity = plugins.identity_of(config)
        found = [i for i in self._catalogue.runs() if i.identity == identity and i.id not in self._before]
        return found[-1] if found else None

    def _of(self, config: Config) -> list[RunInfo]:
        found = [i for same in _spellings(config) for i in self._known.get(plugins.identity_of(same), [])]
        return sorted((i for i in found if _same_place(config, i)), key=lambda i: (i.created, i.id))


def _spellings(config: Config) -> list[Config]:
    """The same run, its method's own evaluation point named or left to the method."""
    own = METHODS[config.method].eval_point
    return [replace(config, eval_point=p) for p in ("auto", own)] if config.eval_point in ("auto", own) else [config]


def _same_place(config: Config, info: RunInfo) -> bool:
    """Data in files: the same files, wherever the command is given."""
    here = Path(config.data)
    return not here.exists() or str(here.resolve()) == info.given.get("data", str(here.resolve()))


def changed_since(config: Config, info: RunInfo) -> bool:
    """Whether the user's own files are newer than the run."""
    here = Path(config.data)
    if not here.exists():
        return False
    try:
        begun = datetime.fromisoformat(info.created).timestamp()
        files = [here, *here.iterdir()] if here.is_dir() else [here]
        return max(f.stat().st_mtime for f in files) > begun + 1
    except (OSError, ValueError):
        return True


def run_sweep(
    configs: Sequence[Config],
    *,
    watcher: Callable[[list[Cell]], Watcher] | None = None,
    fresh: bool = False,
    together: int = 1,
    sinks: Sequence[str] = (),
    signals: bool = False,
    tracked: bool = True,
) -> Sweep:
    """Run all cells, each in its folder (unless not `tracked`), up to `together` at once.

    Finished ones are read, interrupted ones resumed; `fresh` begins all anew. With `signals`, Ctrl-C and SIGTERM stop
    after the round, and the same call goes on from there."""
    if not configs:
        raise UsageError("an empty sweep: give at least one method")
    sweep = Sweep([Cell(config) for config in configs])
    past = Past(configs[0].runs_dir) if tracked else None
    if past is not None and not fresh:
        for cell in sweep.cells:
            _take(cell, past)
    data = Data()
    todo = [c for c in sweep.cells if c.state == "waiting"]
    if todo:
        data.of(todo[0].config)  # data that are missing end the command here, not cell by cell
    shown: Watcher = watcher(sweep.cells) if watcher is not None else Quiet()
    work = _Work(sweep, past, shown, data, fresh, list(sinks), Stop(shown.say))
    try:
        with work.stop.listening(signals):
            for batch in _batches(todo, together):
                if work.stop.number is not None:
                    break
                work.one(batch[0]) if len(batch) == 1 else work.several(batch)
    except KeyboardInterrupt:
        for cell in sweep.cells:
            if cell.state == "running":
                cell.state = "interrupted"
        sweep.signal = work.stop.number or 2
    sweep.signal = sweep.signal or work.stop.number
    return sweep


def _take(cell: Cell, past: Past) -> None:
    """A cell that is finished already is only read."""
    info = past.finished(cell.config)
    if info is not None:
        with suppress(DataError):  # a result that cannot be read is made again
            cell.outcome = Outcome.read(RunFolder(info), cell.config)
            cell.state, cell.run = "skipped", info.id


def _batches(cells: Sequence[Cell], together: int) -> Iterator[list[Cell]]:
    """Neighbours that can train together: on one device, in one precision and way."""
    batch: list[Cell] = []
    for cell in cells:
        if batch and (len(batch) >= together or _kind(batch[0].config) != _kind(cell.config)):
            yield batch
            batch = []
        batch.append(cell)
    if batch:
        yield batch


def _kind(config: Config) -> tuple[str, str, str]:
    return config.device, config.precision, config.way


@dataclass(eq=False)
class _Work:
    sweep: Sweep
    past: Past | None
    shown: Watcher
    data: Data
    fresh: bool
    sinks: list[str]
    stop: Stop

    def one(self, cell: Cell) -> None:
        try:
            result = self.run(cell, self.shown.listener(cell), self.data.of(cell.config))
            self.done(cell, result)
        except Exception as error:
            self.ended(cell, error)

    def several(self, batch: Sequence[Cell]) -> None:
        cells = {id(cell.config): cell for cell in batch}
        hear = [self.shown.listener(cell) for cell in batch]

        def runner(config: Config, *, on_event: Listener, data: tuple[Dataset, Split], **given: Any) -> Result:
            return self.run(cells[id(config)], on_event, data, **given)

        configs = [cell.config for cell in batch]
        found = run_together(configs, on_event=lambda i, event: hear[i](event), runner=runner, datasets=self.data.sets)
        for cell, outcome in zip(batch, found, strict=True):
            if isinstance(outcome, Exception):
                self.ended(cell, outcome)
            else:
                self.done(cell, outcome)

    def run(self, cell: Cell, hear: Listener, data: tuple[Dataset, Split], **given: Any) -> Result:
        if self.past is None:
            return run_config(cell.config, on_event=hear, data=data, **given)
        more: dict[str, Any] = {"say": self.shown.say, "stop": self.stop, "sinks": make_sinks(self.sinks), **given}
        if not self.fresh:
            busy = self.past.busy(cell.config)
            if busy is not None:
                cell.run = busy.id
                raise UsageError("it is at work in another process: wait for that one, or stop it")
            left = self.past.unfinished(cell.config)
            if left is not None:
                cell.run = left.id
                self.shown.say(f"{cell.name}: going on with {left.id} after round {left.rounds_done}")
                return resume(RunFolder(left), on_event=hear, data=data, **more)
        return start(cell.config, on_event=hear, loaded=data, **more)

    def done(self, cell: Cell, result: Result) -> None:
        cell.state = "done"
        if result.run is None:
            slim = replace(result, _rows=torch.empty(0, 0))  # the models of all cells would fill the memory
            cell.outcome = Outcome.of(slim, cell.config)
            return
        folder = RunFolder.open(result.run)
        cell.run, cell.outcome = folder.info.id, Outcome.read(folder, cell.config)

    def ended(self, cell: Cell, error: Exception) -> None:
        if isinstance(error, Interrupted):
            cell.state, cell.run = "interrupted", error.run.name
            return
        if cell.run is None and self.past is not None:
            made = self.past.newest(cell.config)
            cell.run = made.id if made is not None else None
        said = str(error) if isinstance(error, FedKinError) else f"{type(error).__name__}: {error}"
        self.shown.failed(cell, said or type(error).__name__)


__all__ = ["Cell", "Sweep", "Watcher", "expand", "run_sweep", "together_by_default"]
