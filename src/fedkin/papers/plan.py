"""Which runs a selection of cells needs, each once, and how long they will take on this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedkin.config import Config
from fedkin.errors import FedKinError
from fedkin.papers.cell_settings import NO_DATA
from fedkin.papers.measures import Measures, metric_of
from fedkin.papers.published import Cell, Paper, Table
from fedkin.sweep.loaded import Data

QUICK_ROUNDS, QUICK_SAMPLES, QUICK_CLIENTS = 3, 60, 10
STAND_IN = "digits"
NEVER = 10**9
NO_MODELS = {"checkpoint_every": 0}  # those of a large table would fill a disk
KIND_KEYS = (
    "method",
    "data",
    "model",
    "clients",
    "partition",
    "participation",
    "epochs",
    "batch",
    "samples_per_client",
    "augment",
    "rule",
)


def quick(config: Config, data: Data) -> Config:
    """The same run, far smaller: for seeing that everything works. Digits stand in for data that are not here."""
    small: dict[str, Any] = {
        "rounds": min(config.rounds, QUICK_ROUNDS),
        "epochs": 1,
        "eval_every": 1,
        "samples_per_client": min(config.samples_per_client or QUICK_SAMPLES, QUICK_SAMPLES),
    }
    if data.lacks(config.data):
        partition = "dirichlet:0.5" if config.partition.startswith("dirichlet") else "pathological:2"
        small |= {
            "data": STAND_IN,
            "model": None,
            "partition": partition,
            "shift": None,
            "augment": False,
            "clients": min(config.clients or QUICK_CLIENTS, QUICK_CLIENTS),
        }
        if config.attackers != "redrawn":
            small["attackers"] = "fixed"  # those named may not be among fewer clients
    return replace(config, **small)


@dataclass(frozen=True)
class Planned:
    """A cell with its runs: one list of configurations (a run per seed) for each variant; and why they cannot be done
    here. Where only the data are missing they may have been done elsewhere."""

    table: Table
    cell: Cell
    runs: tuple[tuple[Config, ...], ...]
    why_not: str = ""


@dataclass
class Plan:
    paper: Paper
    cells: list[Planned]
    seeds: Sequence[int]
    quick: bool = False
    bases: dict[tuple[str, str, str], Planned] = field(default_factory=dict)  # cells that others refer to

    @property
    def runnable(self) -> list[Planned]:
        return [p for p in self.cells if not p.why_not]

    @property
    def runs(self) -> list[Config]:
        """Every run once, all cells at the first seed before any at the second."""
        found: dict[str, Config] = {}
        needed = [p for p in (*self.cells, *self.bases.values()) if not p.why_not]
        for number in range(len(self.seeds)):
            for planned in needed:
                for variant in planned.runs:
                    found.setdefault(variant[number].identity(), variant[number])
        return list(found.values())

    @property
    def timed(self) -> set[str]:
        """The runs whose times are asked for, by identity: they need the device to themselves."""
        needed = [p for p in (*self.cells, *self.bases.values()) if metric_of(p.cell.metric).timed]
        return {config.identity() for planned in needed for variant in planned.runs for config in variant}

    def base_of(self, planned: Planned) -> Planned | None:
        base = planned.table.base_of(planned.cell)
        return None if base is None else self.bases[planned.table.name, base.row, base.column]


def make_plan(
    paper: Paper,
    selection: Mapping[Table, Iterable[Cell]] | Iterable[tuple[Table, Cell]],
    seeds: Sequence[int],
    data: Data,
    *,
    small: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """`settings`: where and how to run (device, precision, ...), the same for all."""
    pairs = (
        [(t, c) for t, cells in selection.items() for c in cells] if isinstance(selection, Mapping) else list(selection)
    )
    plan = Plan(paper, [], seeds, small)

    def planned(table: Table, cell: Cell) -> Planned:
        why_not = cell.missing
        runs: list[tuple[Config, ...]] = []
        for variant in cell.variants if not why_not else ():
            if data.lacks(variant.data) and not small:
                why_not = f"{NO_DATA}: {variant.data}"
            config = quick(variant, data) if small else variant
            given = {**NO_MODELS, **(settings or {})}
            runs.append(tuple(replace(config, **given, seed=seed) for seed in seeds))
        return Planned(table, cell, tuple(runs), why_not)

    for table, cell in pairs:
        plan.cells.append(planned(table, cell))
        base = table.base_of(cell)
        if base is not None:
            plan.bases.setdefault((table.name, base.row, base.column), planned(table, base))
    return plan


# ------------------------------------------------------------ how long


def kind_of(config: Config) -> tuple[Any, ...]:
    """What decides how long a round takes."""
    return (*(getattr(config, key) for key in KIND_KEYS),)


@dataclass(frozen=True)
class Cost:
    """Seconds: before the first round, per round, per evaluation, per epoch of tuning at the end."""

    setup: float
    round: float
    evaluation: float = 0.0
    epoch: float = 0.0

    def of(self, config: Config) -> float:
        evaluations = config.rounds // config.eval_every + 1
        tuned = _tuning(config)
        return self.setup + self.round * config.rounds + self.evaluation * evaluations + self.epoch * tuned


def _tuning(config: Config) -> int:
    """Epochs of tuning after the last round, for methods that have it."""
    from fedkin.methods import METHODS, options_of

    return int(getattr(options_of(METHODS[config.method], config.options, config.method), "finetune_epochs", 0))


@dataclass
class Estimate:
    """How long runs take, kind by kind; `rough`: kinds that were guessed from others."""

    costs: dict[tuple[Any, ...], Cost] = field(default_factory=dict)
    rough: set[tuple[Any, ...]] = field(default_factory=set)

    def seconds(self, configs: Iterable[Config]) -> float:
        return sum(self.costs[kind_of(c)].of(c) for c in configs if kind_of(c) in self.costs)


def calibrate(
    configs: Sequence[Config],
    data: Data,
    done: Iterable[Measures] = (),
    limit: float = 60.0,
    tell: Callable[[Config], None] | None = None,
) -> Estimate:
    """A round or two of the first run of each kind, timed; kinds that were run before count as they took then. After
    `limit` seconds the rest is guessed from what is known."""
    found, begin = Estimate(), time.perf_counter()
    for outcome in done:
        if outcome.wall == outcome.wall:
            config = _config_of(outcome)
            if config is not None:
                found.costs[kind_of(config)] = Cost(0.0, outcome.wall / config.rounds)
    kinds: dict[tuple[Any, ...], Config] = {}
    for config in configs:
        kinds.setdefault(kind_of(config), config)
    for kind, config in kinds.items():
        if kind in found.costs or time.perf_counter() - begin > limit:
            continue
        if tell:
            tell(config)
        try:
            found.costs[kind] = _measure(config, data)
        except FedKinError:
            found.costs[kind] = Cost(0.0, 0.0)  # it will fail as quickly when it is run
    for kind, config in kinds.items():
        if kind not in found.costs:
            found.costs[kind] = _guess(config, found.costs)
            found.rough.add(kind)
    return found


def _config_of(outcome: Measures) -> Config | None:
    from fedkin.config import make_config

    try:
        return make_config(dict(outcome.config))
    except FedKinError:
        return None


def _measure(config: Config, data: Data) -> Cost:
    import torch

    from fedkin.rounds import prepare

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    begin = now()
    job = prepare(replace(config, eval_every=NEVER), data=data.of(config))
    ready = now()
    job.advance()
    first = now()
    if config.rounds >= 5:
        job.advance()
    second = now()
    job.evaluate()
    done = now()
    each = second - first if config.rounds >= 5 else first - ready
    setup = (ready - begin) + max(0.0, (first - ready) - each)
    return Cost(setup, each, done - second, each / config.epochs)


def _guess(config: Config, costs: Mapping[tuple[Any, ...], Cost]) -> Cost:
    """From kinds with the same data and model, else from all; by epochs, as rounds are mostly training."""
    if not costs:
        return Cost(0.0, 0.0)
    at = {key: i for i, key in enumerate(KIND_KEYS)}
    alike = [c for k, c in costs.items() if (k[at["data"]], k[at["model"]]) == (config.data, config.model)]
    known = alike or list(costs.values())
    return Cost(*(sum(getattr(c, f) for c in known) / len(known) for f in ("setup", "round", "evaluation", "epoch")))
