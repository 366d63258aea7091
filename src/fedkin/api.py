"""FedKin from Python: `fk.run(...)` and `fk.compare(...)`. The same checks as the command line, the same results."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkin.config import SAME_POINT, Config, make_config
from fedkin.data import (
    Brought,
    Dataset,
    Partition,
    Split,
    load,
)
from fedkin.errors import UsageError, unknown
from fedkin.methods import METHODS, Method
from fedkin.models import Given
from fedkin.preparation import texts_of
from fedkin.report import looks, progress  # noqa: F401 - looks says that it shows results
from fedkin.rounds import Event, Listener, Result, StopTraining, run_config
from fedkin.rounds.choices import reading_of, targets_of
from fedkin.rounds.settings import refuse
from fedkin.rounds.validation import check_scored
from fedkin.runs import start as runs
from fedkin.runs.asked import (
    OF_READING,
    USUAL,
    Asked,
    brings_validation,
    common_of,
    named_method,
    one_object,
    own_of,
    request,
)
from fedkin.runs.catalogue import Catalogue
from fedkin.runs.origin import check_repeatable, with_origin
from fedkin.runs.sinks import Sink, make_sinks
from fedkin.sweep.executor import Ended
from fedkin.sweep.expand import axes_of, expand, flat_options, idle_of
from fedkin.sweep.groups import same_but_seed
from fedkin.sweep.runner import Cell, Quiet, run_sweep
from fedkin.sweep.search import space_of
from fedkin.sweep.selection import check_way, selected
from fedkin.sweep.statistics import METRICS, Outcome, groups_of
from fedkin.sweep.tuning import SHARE, TRIALS, Search, Tuned
from fedkin.sweep.tuning import tune as find
from fedkin.tasks import Task

if TYPE_CHECKING:
    from fedkin.report.comparison import Comparison

LOG = logging.getLogger("fedkin")


READ_ONCE = ("data", "clients", "task", "tokenizer", "length", *OF_READING)  # settings that say how objects are read


def run(
    method: str | type[Method] = "fedavg",
    *,
    data: str | Path | Dataset | tuple[Dataset, Split] = USUAL,
    clients: int | Sequence[Any] | Mapping[str, Any] | None = USUAL,
    partition: str | Partition = USUAL,
    model: str | Given | None = None,
    task: str | Task | None = None,
    start_from: str | Result | None = None,
    options: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    on_event: Listener | None = None,
    verbose: bool = False,
    sinks: Sequence[str | Sink] = (),
    **settings: Any,
) -> Result:
    """Train one federation; settings are those of `fedkin run --help` (rounds=..., lr=..., seed=...).

    `method` is a name or your own class; `model` a name, an `nn.Module` (copied, never changed; `init` says whether its
    weights are drawn anew from the seed), or its class or a function that makes one; `clients` a number, or your data:
    a list (or a dictionary by name) with one (x, y) or (x_train, y_train, x_test, y_test), data frame with a column
    "label", or data set of Hugging Face's or torch's per client. `task` says what is learnt, where that is not one
    class of several: a name, as in "regression:loss=mae", or what `fk.task` makes of your own loss and metrics. Where
    samples are texts, `tokenizer` makes `length` token ids of each. `start_from` is an earlier run, by name or as its
    result: the new one begins with what that one learnt. With `runs_dir` the run leaves a folder there, `result.run`,
    and can be resumed. A setting that would change nothing is refused.

    `verbose` shows a line for each evaluated round. `on_event` is called with what is known before the first round
    (`Prepared`), and then with the `RoundRecord` of every evaluated round; it may raise `StopTraining` to end the
    training after that round. `sinks`: names ("tensorboard", "mlflow", "wandb") and sinks of your own, of a run that
    leaves a folder."""
    given = {
        "data": data,
        "clients": clients,
        "partition": partition,
        "model": model,
        "task": task,
        "start_from": start_from,
        "tokenizer": tokenizer,
        "length": length,
    }
    asked = request(method, **settings, **given, options=options)
    return _run(asked, progress.hearing(verbose, on_event), sinks)


def resume(
    run: str,
    *,
    runs_dir: str | None = None,
    method: type[Method] | None = None,
    model: Given | None = None,
    task: Task | None = None,
    data: Dataset | tuple[Dataset, Split] | None = None,
    clients: Sequence[Any] | Mapping[str, Any] | None = None,
    partition: Partition | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    rounds: int | None = None,
    on_event: Listener | None = None,
    verbose: bool = False,
    sinks: Sequence[str | Sink] = (),
) -> Result:
    """Go on with a run that was interrupted; of a finished one, its result with the personal models.

    With `rounds` the run has so many in all, and the result is that of a run that had them from the start; where that
    cannot be (a learning rate or a method that follows the number of rounds), it is refused.

    A run that a listener ended (`StopTraining`) is finished; with `rounds` it goes on all the same.

    `run` is a name or a folder. What the run was given as Python objects has to be given again. `on_event`, `verbose`
    and `sinks` are as in `run`: nothing is remembered of them."""
    if data is not None and clients is not None:
        raise UsageError("give data= or a list of clients, not both")
    folder = Catalogue(runs_dir).locate(run)
    kept, texts = folder.info.configuration(), texts_of(tokenizer, length)
    how = reading_of(kept, targets_of(kept, task), texts)
    brought = None
    if clients is not None:
        brought = own_of(clients, how)
    elif data is not None or texts is not None:
        brought = one_object(kept.data if data is None else data, how, partition)
    elif partition is not None:
        brought = Brought(load(kept.data, kept.data_dir), partition)
    given: dict[str, Any] = {"method": method, "model": model, "task": task, "data": brought}
    rest: dict[str, Any] = {
        "on_event": progress.hearing(verbose, on_event),
        "rounds": rounds,
        "sinks": make_sinks(sinks),
    }
    return runs.resume(folder, **rest, **{k: v for k, v in given.items() if v is not None})


def compare(
    methods: Sequence[str | type[Method]],
    *,
    seeds: int | Sequence[int] = 1,
    attack: str | Sequence[str] = "none",
    rule: str | Sequence[str] = "mean",
    grid: Mapping[str, Iterable[Any]] | None = None,
    baseline: str | None = None,
    metric: str = "macro",
    select: str | None = None,
    together: int = 1,
    jobs: int = 1,
    devices: Sequence[str] = (),
    fresh: bool = False,
    on_event: Listener | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Comparison:
    """Every method at every seed under the same settings, under every attack and rule and in every cell of the grid:
    `results, table = fk.compare(...)`, the results, and one row for each method, attack, rule and cell. The table is a
    list of dictionaries that can be written out (`to_markdown`, `to_latex`, `to_csv`, `frame`) and drawn (`plot`).

    `seeds`: so many, from `seed` on (0 unless it is given), or a list of them.

    `grid`: several values of settings and of methods' options, as in {"lr": [0.01, 0.1], "ditto.lam": [0.1, 1]}; an
    option without a method's name is that of all methods that have it, and so are `options`. `baseline`: a method that
    the others are tested against (Wilcoxon), by `metric` ("macro", "micro", "worst-decile", "best-macro", ...).

    All models are evaluated as received unless `eval_point` says otherwise ("auto": each method at its own point); a
    row's `diverged` says which seeds are not to be believed, and why. A setting counts for those runs that it changes;
    a method that no rule reaches runs once, not under each. `select="val"` keeps of each method the row that is best on
    validation samples, averaged over seeds (needs validation_share); "test" chooses on test data, which `select` of the
    row says.

    With `runs_dir` what is finished is only read (unless `fresh`), what was cut short goes on, and the runs can be
    spread over processes (`jobs`) and `devices`; what was given as Python objects is always run, and in this process.
    `together`: so many runs train at once, as rows of one cohort. `on_event` hears of all runs, as in `run`."""
    from fedkin.report.comparison import Comparison, Table

    if isinstance(methods, str | type):
        raise UsageError(f"methods={methods!r}: a list of methods, for example ['fedavg', 'ditto']")
    chosen = _seeds(seeds, settings)
    if not chosen or not len(methods):
        raise UsageError(f"methods={methods!r}, seeds={seeds!r}: at least one of each")
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    common = common_of({"eval_point": SAME_POINT, **settings})
    named = _methods(methods)
    attacks, rules = ([v] if isinstance(v, str) else list(v) for v in (attack, rule))
    fixed_options = {f"options.{name}" for name in flat_options(common.values["options"])}
    by_itself = {*settings, *common.objects, *fixed_options}
    axes = axes_of(grid or {}, {"seed", "method", "attack", "rule"}, by_itself)
    fixed = [name for name in READ_ONCE if name in axes and "data" in common.objects]
    if fixed:
        raise UsageError(
            f"grid has {fixed[0]!r}, but the data are Python objects, which are read once: compare one by one"
        )
    block = {"attack": attacks, "rule": rules, **axes, "method": list(named), "seed": chosen}
    own = {name: kind for name, kind in named.items() if kind is not None}
    configs = expand(common.values, [block], common.as_asked, partial(LOG.warning, "%s"), own)
    order = {key: place for place, key in reversed([*enumerate(map(same_but_seed, configs))])}
    todo = [common.asked(c, own.get(c.method)) for c in sorted(configs, key=lambda c: order[same_but_seed(c)])]
    check_way(select, [one.config for one in todo], all(brings_validation(one.objects.get("data")) for one in todo))
    _check_folder(todo[0].config)
    tracked = todo[0].config.runs_dir is not None
    listener = _heard_here(on_event, jobs, devices)
    sweep = run_sweep(
        [cell.config for cell in todo],
        given=[cell.objects for cell in todo],
        watcher=lambda cells: _Heard(listener, progress.Several(cells) if verbose else Quiet()),
        keep=_result_of,
        tracked=tracked,
        together=together,
        jobs=jobs,
        devices=devices,
        fresh=fresh,
        listened=listener is not None,
    )
    if sweep.signal is not None:
        raise KeyboardInterrupt
    results = []
    for cell in sweep.cells:
        result: Result = cell.outcome or runs.resume(Catalogue(cell.config.runs_dir).find(cell.run or ""))
        results.append(result)
        if cell.state == "done":
            _warn(result)
    outcomes = [Outcome.of(result, cell.config) for result, cell in zip(results, sweep.cells, strict=True)]
    groups = groups_of((o.config, o) for o in outcomes)
    return Comparison(results, Table(selected(groups, select, metric) if select else groups, baseline, metric))


def _seeds(seeds: int | Sequence[int], settings: dict[str, Any]) -> list[int]:
    """So many from the `seed` of the settings on, which loses it, or those that are listed."""
    first = settings.pop("seed", None)
    if isinstance(seeds, int):
        begin = make_config({} if first is None else {"seed": first}).seed
        return list(range(begin, begin + seeds))
    if first is not None:
        raise UsageError(f"seed={first!r} beside seeds={list(seeds)}: give one of them; seeds=3 are three from seed on")
    return list(seeds)


def _methods(methods: Sequence[str | type[Method]]) -> dict[str, type[Method] | None]:
    """Methods by name, and the classes of those that are not registered."""
    found: dict[str, type[Method] | None] = {}
    for method in methods:
        name, kind = named_method(method)
        if name in found:
            again = "" if found[name] is kind else " by two different ones; give one of the classes another name"
            raise UsageError(f"method {name!r} is named twice{again}")
        found[name] = kind
    return found


def _heard_here(listener: Listener | None, jobs: int, devices: Sequence[str]) -> Listener | None:
    """What a listener asks for does not reach runs in other processes."""
    if listener is None or max(jobs, len(devices)) <= 1:
        return listener

    def hear(event: Event) -> None:
        try:
            listener(event)
        except StopTraining:
            raise UsageError("a listener cannot stop runs in other processes: give jobs=1 and one device") from None

    return hear


def tune(
    method: str | type[Method],
    *,
    search: Mapping[str, Any] | None = None,
    trials: int = TRIALS,
    seeds: int | Sequence[int] = 1,
    prune: bool = True,
    together: int = 1,
    jobs: int = 1,
    devices: Sequence[str] = (),
    **settings: Any,
) -> Tuned:
    """Look for good settings of a method, by trials that are chosen on validation samples; needs Optuna.

    `search` says where, as in {"lr": "1e-3..1:log", "lam": (0.01, 10, "log"), "batch": [10, 20, 50]}; by default the
    learning rate, and what the method declares. With several `seeds` (so many from `seed` on, or a list) a trial is a
    run for each, and the mean decides. `prune`: end trials early that do worse than the median of those before. The
    other settings are those of `fk.run`; a fifth of the training samples is set aside for validation unless
    `validation_share` says otherwise. With `runs_dir` the trials leave folders, the same call goes on where one was
    stopped, and `jobs` and `devices` spread them; not so where a method, a network or data are given as Python
    objects."""
    if trials < 1:
        raise UsageError(f"trials={trials}: must be at least 1")
    listener = _heard_here(settings.pop("on_event", None), jobs, devices)
    chosen = _seeds(seeds, settings)
    if not chosen:
        raise UsageError(f"seeds={seeds!r}: at least one")
    check_repeatable(settings.get("start_from"))
    if "validation_share" not in settings and not isinstance(settings.get("data"), tuple):
        settings["validation_share"] = SHARE
    asked = request(**{"method": method, **settings, "seed": chosen[0]})
    _check_folder(asked.config)
    check_scored(asked.config, brings_validation(asked.objects.get("data")))
    kind = asked.objects.get("method") or METHODS[asked.config.method]
    space = space_of(asked.config, kind, search or {}, idle_of(asked.config, kind))
    found = find(
        Search(asked.config, kind, space, chosen, trials, prune, asked.objects),
        watcher=lambda cells: _Shown(listener, Quiet()),
        together=together,
        jobs=jobs,
        devices=devices,
        listened=listener is not None,
    )
    if found.stopped is not None:
        raise KeyboardInterrupt
    for remark in found.remarks:
        LOG.warning("%s: %s", found.method, remark)
    return found


class _Shown(Quiet):
    """Shows what is to be shown, and passes all events on."""

    def __init__(self, listener: Listener | None, shown: Quiet) -> None:
        self._listener, self._shown = listener, shown

    def listener(self, cell: Cell) -> Listener:
        show, pass_on = self._shown.listener(cell), self._listener

        def hear(event: Event) -> None:
            show(event)
            if pass_on is not None:
                pass_on(event)

        return hear


class _Heard(_Shown):
    """A run that fails ends the comparison."""

    def failed(self, cell: Cell, error: str) -> None:
        assert cell.cause is not None
        raise cell.cause

    def say(self, line: str) -> None:
        self._shown.say(line)


def _result_of(ended: Ended) -> Result | None:
    """None in another process, where the folder has to do."""
    if ended.result is None and ended.folder is not None:
        return runs.resume(ended.folder)
    return ended.result if parent_process() is None else None


def _run(asked: Asked, on_event: Listener | None, sinks: Sequence[str | Sink]) -> Result:
    _check_folder(asked.config, sinks)
    start = run_config if asked.config.runs_dir is None else partial(runs.start, sinks=make_sinks(sinks))
    result = start(asked.config, on_event=on_event, **with_origin(asked.config, asked.objects))
    _warn(result)
    return result


def _check_folder(config: Config, sinks: Sequence[Any] = ()) -> None:
    if config.runs_dir is None:
        if sinks:
            raise UsageError("sinks hear of runs that leave a folder: say with runs_dir where one goes")
        refuse(config, {"checkpoint_every": "the run leaves no folder; say with runs_dir where one goes"})


def _warn(result: Result) -> None:
    for remark in result.remarks:
        LOG.warning("%s: %s", result.config.method, remark)
