"""Good settings for a method, found by trials: `fedkin tune` and `fk.tune`.

A trial is one run for each seed. It is chosen by its score on validation samples alone, the mean over clients and then
over seeds; test samples have no say, and are only looked at for the trial that was chosen. A trial whose first seed
does worse than the median of those before is ended early."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedkin import plugins
from fedkin.config import Config
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.methods import Method, options_of
from fedkin.options import said
from fedkin.rounds import Event, RoundRecord
from fedkin.runs.catalogue import runs_folder
from fedkin.sweep.groups import OPTION
from fedkin.sweep.loaded import Data
from fedkin.sweep.runner import Cell, Watcher, run_sweep
from fedkin.sweep.search import Axis, chosen, combinations
from fedkin.sweep.statistics import Outcome
from fedkin.sweep.unseen import check_unseen
from fedkin.version import VERSION

if TYPE_CHECKING:
    from fedkin.sweep.study import Proposal, Study, Told

SHARE = 0.2
"""Of each client's training samples that is set aside where nobody said how much."""
TRIALS = 20
HOPELESS = 3  # trials that fail, and none that did not, end a search


@dataclass(frozen=True)
class Trial:
    """One choice of settings, and what came of it.

    `state` is "done", "pruned" (ended early) or "failed", and `why` says why, or that training stopped early; `rounds`
    are those that were done, of the seed with the most. `score` is the mean
    over seeds of the score on validation samples, `std` its spread; `test` and `test_std` are the same on test samples,
    on which nothing was chosen, of the trial that was chosen alone. `runs` names the folders."""

    number: int
    settings: Mapping[str, Any]
    state: Literal["done", "pruned", "failed"]
    score: float = math.nan
    std: float = math.nan
    test: float = math.nan
    test_std: float = math.nan
    rounds: int = 0
    why: str = ""
    runs: Sequence[str] = ()

    def words(self) -> str:
        return " ".join(f"{name}={_short(value)}" for name, value in self.settings.items())


@dataclass(frozen=True)
class Tuned:
    """What a search for settings of a `method` has found; `fk.tune` returns one.

    `best` is the trial that was chosen on validation samples, None if none came to its end; `settings` are its settings
    as `fk.run` takes them, and `config` is the whole configuration at the first of the `seeds`. `metric`, `unit` and
    `higher` (whether more is better) say what scores are. `trials` are all of them, `space` says where was searched,
    `importance` which share of the differences goes back to each setting. `study` is the file that remembers the
    trials, `stopped` the signal that ended the search early, and `remarks` are sentences to read first."""

    method: str
    trials: list[Trial]
    best: Trial | None
    config: Config | None  # of the best, at the first seed
    space: list[str]
    seeds: list[int]
    metric: str
    unit: str
    higher: bool
    importance: Mapping[str, float] = field(default_factory=dict)
    study: str | None = None
    stopped: int | None = None
    remarks: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        found = "nothing yet" if self.best is None else self.best.words()
        return f"Tuned({self.method}: {found} of {len(self.trials)} trials)"

    @property
    def settings(self) -> dict[str, Any]:
        """Those that were chosen, as keyword arguments of `fk.run`: `fk.run(method, **tuned.settings)`."""
        if self.best is None or self.config is None:
            raise UsageError("no trial came to its end: there is nothing to choose from")
        names = [name for name in self.best.settings if name in vars(self.config)]
        own = {name: value for name, value in self.best.settings.items() if name not in names}
        return {**{name: self.best.settings[name] for name in names}, **({"options": own} if own else {})}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `fedkin tune --json` prints them."""
        kept = {k: v for k, v in vars(self).items() if k not in ("trials", "best", "config")}
        trials = [{k: v for k, v in asdict(t).items() if k not in ("test", "test_std")} for t in self.trials]
        return {**kept, "trials": trials, "best": None if self.best is None else asdict(self.best)}

    def to_markdown(self) -> str:
        """The trials as a table, the best first."""
        head = ["trial", "settings", f"validation {self.metric}", "state"]
        rows = [[str(t.number), t.words(), said(t.score, self.unit), t.state] for t in ranked(self.trials, self.higher)]
        return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---:", "---", "---:", "---"], *rows])


def ranked(trials: Sequence[Trial], higher: bool) -> list[Trial]:
    """The best first, then those that did not come to their ends, in the order in which they were tried."""
    sign = 1 if higher else -1
    done = [t for t in trials if t.state == "done"]
    return sorted(done, key=lambda t: (-sign * t.score, t.number)) + [t for t in trials if t.state != "done"]


@dataclass(frozen=True)
class Search:
    """What is to be found, and in how many trials."""

    base: Config
    kind: type[Method]
    space: Sequence[Axis]
    seeds: Sequence[int]
    trials: int = TRIALS
    prune: bool = True
    given: Mapping[str, Any] = field(default_factory=dict)  # as Python objects

    @cached_property
    def store(self) -> Path | None:
        """The file of the study: the same for the same settings, space, seeds and data of one's own, by the same
        version. None: the runs leave no folders, or were given Python objects, of which nobody can tell whether they
        are the same."""
        if self.base.runs_dir is None or self.given:
            return None
        axes = [axis.words() for axis in self.space]
        what = [plugins.identity_of(self.base), axes, list(self.seeds), _contents(Path(self.base.data)), VERSION]
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        return runs_folder(self.base.runs_dir) / f"tune-{self.base.method}-{digest[:12]}.jsonl"


def _contents(path: Path) -> str:
    """Of files of one's own, wherever they lie; nothing where the data have a name."""
    if not path.exists():
        return ""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and not file.name.startswith("."):
            with file.open("rb") as content:
                own = hashlib.file_digest(content, "sha256").hexdigest()
            digest.update(f"{file.relative_to(path).as_posix()} {own}\n".encode())
    return digest.hexdigest()


def tune(
    search: Search,
    *,
    watcher: Callable[[list[Cell]], Watcher] | None = None,
    tell: Callable[[Trial], object] = lambda trial: None,
    together: int = 1,
    jobs: int = 1,
    devices: Sequence[str] = (),
    budget: float | None = None,
    signals: bool = False,
    listened: bool = False,
) -> Tuned:
    """Trials until there are as many as were asked for, those of earlier calls among them. `tell` hears of each that
    ends. `together`, `jobs`, `devices`, `budget`, `signals` and `listened`: see `run_sweep`."""
    from fedkin.sweep.study import Study

    store = search.store
    if store is not None:
        store.parent.mkdir(parents=True, exist_ok=True)
    warmup = max(2, -(-search.base.rounds // 5))
    end = None if budget is None else time.monotonic() + budget
    width = max(1, -(-max(jobs, len(devices)) * together // len(search.seeds)))
    how: dict[str, Any] = {
        "together": together,
        "jobs": jobs,
        "devices": devices,
        "signals": signals,
        "listened": listened,
    }
    how |= {"watcher": watcher, "tracked": search.base.runs_dir is not None, "data": Data()}
    signal = None
    check_unseen([chosen(search.base, {}, seed) for seed in search.seeds], search.given, how["data"])
    with Study(store, search.space, search.base.seed, warmup) as study:
        while signal is None and (end is None or time.monotonic() < end):
            batch, ended = study.begun()[:width], len(study.ended())
            left = min(width - len(batch), search.trials - ended - len(batch))
            while left > 0 and study.untried() != []:
                batch.append(study.ask())
                left -= 1
            if not batch:
                break
            signal = _Batch(search, study, batch).run(tell, how)
            if len(study.ended()) == ended:
                break
        return _found(search, study, signal)


class _Batch:
    """Some trials that are carried out at once."""

    def __init__(self, search: Search, study: Study, batch: Sequence[Proposal]) -> None:
        self.search, self.study, self.batch = search, study, batch
        self.configs = {p.number: [chosen(search.base, p.values, s) for s in search.seeds] for p in batch}
        self.wanted = {c.identity(): c for configs in self.configs.values() for c in configs}
        self.first = {c[0].identity(): number for number, c in self.configs.items()}  # whose scores decide
        self.pruned: dict[int, int] = {}  # after which round

    def run(self, tell: Callable[[Trial], object], how: Mapping[str, Any]) -> int | None:
        """The signal that ended it early."""
        configs = list(self.wanted.values())
        sweep = run_sweep(configs, judge=self.judge, given=[self.search.given] * len(configs), **how)
        cells = dict(zip(self.wanted, sweep.cells, strict=True))
        for proposal in self.batch:
            own = [cells[c.identity()] for c in self.configs[proposal.number]]
            if proposal.number not in self.pruned and any(c.state in ("waiting", "interrupted") for c in own):
                continue  # it goes on another time
            tell(self._told(proposal, own))
        return sweep.signal

    def judge(self, cell: Cell, event: Event) -> bool:
        """Whether a run is to end here: its trial is pruned."""
        identity = cell.config.identity()
        number = self.first.get(identity)
        if number is not None and self.search.prune and isinstance(event, RoundRecord) and not event.final:
            last = event.round >= cell.config.rounds
            if not math.isnan(event.choice) and self.study.report(number, event.round, event.choice) and not last:
                self.pruned[number] = event.round
        whose = [n for n, configs in self.configs.items() if identity in (c.identity() for c in configs)]
        return bool(whose) and all(n in self.pruned for n in whose)

    def _told(self, proposal: Proposal, cells: Sequence[Cell]) -> Trial:
        """The study hears of a trial that has ended."""
        outcomes: list[Outcome] = [c.outcome for c in cells if c.outcome is not None]
        facts: dict[str, Any] = {"runs": [c.run for c in cells if c.run]}
        failed, number = next((c for c in cells if c.state == "failed"), None), proposal.number
        end: Literal["done", "pruned", "failed"] = "done"
        if number in self.pruned:
            end, facts["rounds"] = "pruned", self.pruned[number]
            facts["why"] = f"pruned after round {self.pruned[number]}: below the median of the trials before"
        elif failed is not None:
            end, facts["why"] = "failed", failed.error[:1000]
        else:
            diverged = next((o.diverged for o in outcomes if o.diverged), None)
            scores = [math.nan if o.validation is None else o.validation.macro for o in outcomes]
            early = {o.seed: o.stopped for o in outcomes if o.stopped is not None}
            done = max(early.get(o.seed, self.search.base.rounds) for o in outcomes)
            facts |= {"rounds": done, "metric": outcomes[0].accuracy.metric}
            if early:
                facts["why"] = "stopped early: " + ", ".join(f"seed {s} after round {r}" for s, r in early.items())
            facts |= {"unit": outcomes[0].accuracy.unit, "higher": outcomes[0].accuracy.higher}
            if diverged is not None:
                end, facts["why"] = "failed", f"diverged: {diverged}"
            elif not np.isfinite(scores).all():
                end, facts["why"] = "failed", "its validation score cannot be computed"
            else:
                facts |= {"validation": scores, "test": [o.accuracy.macro for o in outcomes]}
        sign = 1 if facts.get("higher", True) else -1
        self.study.tell(number, end, sign * float(np.mean(facts["validation"])) if end == "done" else None, facts)
        told = self.study.ended()
        if failed is not None and not any(t.end == "done" for t in told):
            wrong = isinstance(failed.cause, UsageError | DataError)
            if wrong or sum(t.end == "failed" for t in told) >= HOPELESS:
                raise failed.cause if wrong and failed.cause else FedKinError(f"every trial fails: {failed.error}")
        return trial_of(next(t for t in told if t.number == number))


def trial_of(told: Told) -> Trial:
    """A trial as it is remembered."""
    try:
        return _remembered(told)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"trial {told.number} of the study cannot be read ({error}): remove its file to begin anew"
        ) from None


def _remembered(told: Told) -> Trial:
    facts = told.facts
    settings = {name.removeprefix(OPTION): value for name, value in told.values.items()}
    own = {"rounds": int(facts.get("rounds") or 0), "why": str(facts.get("why") or "")}
    runs = tuple(str(run) for run in facts.get("runs") or ())
    if told.end != "done":
        return Trial(told.number, settings, told.end, **own, runs=runs)  # type: ignore[arg-type]
    (score, std), (test, test_std) = _spread(facts.get("validation")), _spread(facts.get("test"))
    return Trial(told.number, settings, told.end, score, std, test, test_std, **own, runs=runs)  # type: ignore[arg-type]


def _spread(values: Any) -> tuple[float, float]:
    each = np.array(values, float).reshape(-1)
    return float(each.mean()), float(each.std(ddof=1)) if len(each) > 1 else math.nan


def _found(search: Search, study: Study, signal: int | None) -> Tuned:
    told = study.ended()
    trials = [trial_of(t) for t in told]
    about = next((t.facts for t in told if t.end == "done"), {})
    higher = about.get("higher") is not False
    best = next((t for t in ranked(trials, higher) if t.state == "done"), None)
    values = next((t.values for t in told if best is not None and t.number == best.number), {})
    trials = [t if t is best else replace(t, test=math.nan, test_std=math.nan) for t in trials]
    remarks = []
    if len(told) < search.trials and study.untried() == [] and not study.begun():
        remarks.append(f"all {len(combinations(search.space) or [])} combinations have been tried")
    if best is not None and (own := search.kind.looks_at_validation(_options(search, values))):
        remarks.append(f"the validation samples are no strangers to {search.base.method}: {own}")
    return Tuned(
        search.base.method,
        trials,
        best,
        None if best is None else chosen(search.base, values, search.seeds[0]),
        [axis.words() for axis in search.space],
        list(search.seeds),
        str(about.get("metric") or "accuracy"),
        str(about.get("unit") or "") if about else "%",
        higher,
        {name.removeprefix(OPTION): share for name, share in study.importance().items()},
        None if search.store is None else str(search.store),
        signal,
        remarks,
    )


def _options(search: Search, values: Mapping[str, Any]) -> Any:
    return options_of(search.kind, chosen(search.base, values, search.seeds[0]).options, search.base.method)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
