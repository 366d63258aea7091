"""FedKin from Python: `fk.run(...)` and `fk.compare(...)`. The same checks as the command line, the same results."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import parent_process
from numbers import Number
from pathlib import Path
from typing import Any

from fedkin.config import SAME_POINT, Config, is_folder, make_config
from fedkin.data import (
    Brought,
    Dataset,
    Partition,
    Reading,
    Split,
    applied,
    is_whole,
    load,
    own_clients,
    own_data,
    own_whole,
    parse_partition,
)
from fedkin.data.targets import Targets
from fedkin.errors import UsageError
from fedkin.methods import METHODS, Method, options_of
from fedkin.models import Given
from fedkin.preparation import Texts, texts_of
from fedkin.registry import Registry
from fedkin.robust import make_attack
from fedkin.rounds import Listener, Result, named_spec, run_config
from fedkin.rounds.choices import reading_of, targets_of
from fedkin.rounds.settings import idle, refuse, settled
from fedkin.runs import start as runs
from fedkin.runs.catalogue import Catalogue
from fedkin.sweep.executor import Ended
from fedkin.sweep.runner import Cell, Quiet, run_sweep
from fedkin.sweep.selection import check_way, selected
from fedkin.sweep.statistics import Outcome, groups_of, summary
from fedkin.tasks import Task

LOG = logging.getLogger("fedkin")


class _Usual:
    """Not given: what `fedkin run --help` says."""

    def __repr__(self) -> str:
        return "the default"


USUAL: Any = _Usual()
OF_READING = ("label", "client_column", "categories", "image_size", "image_mode")
"""Settings that say how objects are read."""


def run(
    method: str | type[Method] = "fedavg",
    *,
    data: str | Path | Dataset | tuple[Dataset, Split] = USUAL,
    clients: int | Sequence[Any] | Mapping[str, Any] | None = USUAL,
    partition: str | Partition = USUAL,
    model: str | Given | None = None,
    task: str | Task | None = None,
    options: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    on_event: Listener | None = None,
    **settings: Any,
) -> Result:
    """Train one federation; settings are those of `fedkin run --help` (rounds=..., lr=..., seed=...).

    `method` is a name or your own class; `model` a name, an `nn.Module` (copied, never changed; `init` says whether its
    weights are drawn anew from the seed), or its class or a function that makes one; `clients` a number, or your data:
    a list (or a dictionary by name) with one (x, y) or (x_train, y_train, x_test, y_test), data frame with a column
    "label", or data set of Hugging Face's or torch's per client. `task` says what is learnt, where that is not one
    class of several: a name, as in "regression:loss=mae", or what `fk.task` makes of your own loss and metrics. Where
    samples are texts, `tokenizer` makes `length` token ids of each. With `runs_dir` the run leaves a folder there,
    `result.run`, and can be resumed. A setting that would change nothing is refused."""
    texts = {"tokenizer": tokenizer, "length": length}
    asked = _request(method, data, clients, partition, model, options, settings, task=task, **texts)
    return _run(asked, on_event)


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
) -> Result:
    """Go on with a run that was interrupted; of a finished one, its result with the personal models.

    With `rounds` the run has so many in all, and the result is that of a run that had them from the start; where that
    cannot be (a learning rate or a method that follows the number of rounds), it is refused.

    `run` is a name or a folder. What the run was given as Python objects has to be given again."""
    if data is not None and clients is not None:
        raise UsageError("give data= or a list of clients, not both")
    folder = Catalogue(runs_dir).locate(run)
    kept, texts = folder.info.configuration(), texts_of(tokenizer, length)
    how = reading_of(kept, targets_of(kept, task), texts)
    brought = None
    if clients is not None:
        brought = _own(clients, how)
    elif data is not None or texts is not None:
        brought = _given(kept.data if data is None else data, how, partition)
    elif partition is not None:
        brought = Brought(load(kept.data, kept.data_dir), partition)
    given: dict[str, Any] = {"method": method, "model": model, "task": task, "data": brought}
    return runs.resume(folder, on_event=on_event, rounds=rounds, **{k: v for k, v in given.items() if v is not None})


def compare(
    methods: Sequence[str | type[Method]],
    *,
    seeds: int | Sequence[int] = 1,
    attack: str | Sequence[str] = "none",
    rule: str | Sequence[str] = "mean",
    baseline: str | None = None,
    select: str | None = None,
    together: int = 1,
    jobs: int = 1,
    devices: Sequence[str] = (),
    fresh: bool = False,
    **settings: Any,
) -> tuple[list[Result], list[dict[str, Any]]]:
    """Every method at every seed under the same settings, under every attack and rule: the results, and one summary
    row for each method, attack and rule. `baseline`: a method that the others are tested against (Wilcoxon).

    All models are evaluated as received unless `eval_point` says otherwise ("auto": each method at its own point); a
    row's `diverged` says which seeds are not to be believed, and why. A setting counts for those runs that it changes;
    a method that no rule reaches runs once, not under each. `select="val"` keeps of each method the row that is best on
    validation samples, averaged over seeds (needs validation_share); "test" chooses on test data, which `select` of the
    row says.

    With `runs_dir` what is finished is only read (unless `fresh`), what was cut short goes on, and the runs can be
    spread over processes (`jobs`) and `devices`; what was given as Python objects is always run, and in this process.
    `together`: so many runs train at once, as rows of one cohort."""
    settings = {"eval_point": SAME_POINT, **settings}
    if isinstance(methods, str | type):
        raise UsageError(f"methods={methods!r}: a list of methods, for example ['fedavg', 'ditto']")
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    if not len(chosen) or not len(methods):
        raise UsageError(f"methods={methods!r}, seeds={seeds!r}: at least one of each")
    attacks, rules = ([v] if isinstance(v, str) else list(v) for v in (attack, rule))
    listener = settings.pop("on_event", None)
    asked = [
        _request(**{"method": method, **settings, "seed": seed, "attack": a, "rule": r})
        for a, r, method, seed in product(attacks, rules, methods, chosen)
    ]
    configs, said = settled([a.config for a in asked], [a.idle() for a in asked])
    for sentence in said:
        LOG.warning("%s", sentence)
    cells: dict[tuple[Any, str], _Asked] = {}
    for one, config in zip(asked, configs, strict=True):
        cells.setdefault((one.objects.get("method"), config.identity()), _Asked(config, one.objects))
    todo = list(cells.values())
    check_way(select, [one.config for one in todo], all(_brings_validation(one.objects.get("data")) for one in todo))
    _check_folder(todo[0].config)
    tracked = todo[0].config.runs_dir is not None
    sweep = run_sweep(
        [cell.config for cell in todo],
        given=[cell.objects for cell in todo],
        watcher=lambda cells: _Heard(listener),
        keep=_result_of,
        tracked=tracked,
        together=together,
        jobs=jobs,
        devices=devices,
        fresh=fresh,
    )
    if sweep.signal is not None:
        raise KeyboardInterrupt
    results = []
    for cell in sweep.cells:
        result: Result = cell.outcome or runs.resume(Catalogue(cell.config.runs_dir).find(cell.run or ""))
        results.append(result)
        if cell.state == "done":
            _warn(result)
    groups = groups_of((o.config, o) for o in map(Outcome.of, results))
    return results, summary(selected(groups, select) if select is not None else groups, baseline)


def _brings_validation(data: Any) -> bool:
    what = data.what if isinstance(data, Brought) else None
    return isinstance(what, tuple) and any(map(len, what[1].validation))


@dataclass(frozen=True, eq=False)
class _Asked:
    """One run as it was asked for: its settings, and what came as Python objects."""

    config: Config
    objects: dict[str, Any] = field(default_factory=dict)

    def idle(self) -> dict[str, str]:
        config = self.config
        kind = self.objects.get("method") or METHODS[config.method]
        attack = None if config.attack == "none" else make_attack(*named_spec(config.attack))
        return idle(config, kind, options_of(kind, config.options, config.method), attack)


class _Heard(Quiet):
    """Passes all events on; a run that fails ends the comparison."""

    def __init__(self, listener: Listener | None) -> None:
        self._listener = listener

    def listener(self, cell: Cell) -> Listener:
        cell.state = "running"
        return self._listener or (lambda event: None)

    def failed(self, cell: Cell, error: str) -> None:
        assert cell.cause is not None
        raise cell.cause


def _result_of(ended: Ended) -> Result | None:
    """None in another process, where the folder has to do."""
    if ended.result is None and ended.folder is not None:
        return runs.resume(ended.folder)
    return ended.result if parent_process() is None else None


def _run(asked: _Asked, on_event: Listener | None) -> Result:
    _check_folder(asked.config)
    start = run_config if asked.config.runs_dir is None else runs.start
    result = start(asked.config, on_event=on_event, **asked.objects)
    _warn(result)
    return result


def _check_folder(config: Config) -> None:
    if config.runs_dir is None:
        refuse(config, {"checkpoint_every": "the run leaves no folder; say with runs_dir where one goes"})


def _warn(result: Result) -> None:
    for remark in result.remarks:
        LOG.warning("%s: %s", result.config.method, remark)


def _request(
    method: Any = "fedavg",
    data: Any = USUAL,
    clients: Any = USUAL,
    partition: Any = USUAL,
    model: Any = None,
    options: Any = None,
    settings: Mapping[str, Any] | None = None,
    task: Any = None,
    tokenizer: Any = None,
    length: Any = None,
    **more: Any,
) -> _Asked:
    values: dict[str, Any] = {**(settings or {}), **more, "options": {} if options is None else options}
    objects: dict[str, Any] = {}
    if isinstance(method, type) and issubclass(method, Method):
        values["method"] = _name_of(method, METHODS)
        if not (method.__module__.startswith("fedkin.") and METHODS.get(values["method"]) is method):
            objects["method"] = method
    elif isinstance(method, str):
        values["method"] = method
    else:
        raise UsageError(f"method={method!r}: a method's name, or a class made from fedkin.Method")
    if isinstance(model, str):
        values["model"] = model
    elif model is not None:
        objects["model"] = model
    if isinstance(task, Task):
        objects["task"] = task
    elif task is not None:
        values["task"] = task
    deal = _unwritten(partition) if isinstance(partition, Partition) else None
    if partition is not USUAL:
        values["partition"] = str(partition) if isinstance(partition, Partition) else partition
    how = _reading(values, task, texts_of(tokenizer, length))
    inferred: set[str] = set()
    if clients is None or (clients is not USUAL and isinstance(clients, Number | str)):
        values["clients"] = clients
    elif clients is not USUAL:
        if data is not USUAL:
            raise UsageError("give data= or a list of clients, not both")
        objects["data"] = _own(clients, how)
        values = {"partition": "natural", **values, "data": "own", "clients": len(clients)}
        inferred = {"clients", *(["partition"] if partition is USUAL else [])}
    if isinstance(data, str | Path):
        values["data"] = str(data)
    if (data is not USUAL and not isinstance(data, str | Path)) or (how.texts is not None and "data" not in objects):
        objects["data"] = brought = _given(data, how, deal)
        what = brought.what[0] if isinstance(brought.what, tuple) else brought.what
        values.setdefault("data", what.name if isinstance(what, Dataset) else "own")
    config = make_config(values, values.keys() - inferred if inferred else None)
    if deal is not None and "data" not in objects and not is_folder(config.data):
        objects["data"] = Brought(load(config.data, config.data_dir), deal)
    return _Asked(config, objects)


def _unwritten(partition: Partition) -> Partition | None:
    """A partition that its text does not stand for: one of the user's own."""
    try:
        return None if parse_partition(str(partition)) == partition else partition
    except UsageError:
        return partition


def _targets(task: Any) -> Targets:
    """Of which kind the targets are that come with such a task."""
    if task is None or isinstance(task, Task):
        return targets_of(Config(), task)
    if not isinstance(task, str):
        raise UsageError(f"task={task!r}: give a task's name, or what fedkin.task makes")
    return targets_of(make_config({"task": task}))


def _reading(values: Mapping[str, Any], task: Any, texts: Texts | None) -> Reading:
    """How objects are read, by the settings that say so."""
    said = {name: values[name] for name in OF_READING if values.get(name) is not None}
    return reading_of(make_config(said), _targets(task), texts)


def _own(clients: Any, how: Reading) -> Brought:
    if isinstance(clients, Sequence | Mapping) and not len(clients):
        raise UsageError(f"clients={clients!r}: give at least one client's data")
    each = list(clients.values()) if isinstance(clients, Mapping) else clients
    return Brought(own_clients(clients, how), applied=applied(each, how))


def _given(data: Any, how: Reading, deal: Partition | None) -> Brought:
    """Data that are one object; or, where they are texts, lie at a path."""
    if data is USUAL:
        raise UsageError("a tokenizer needs texts: give them as clients=[...] or as data=...")
    if isinstance(data, str | Path):
        what = own_data(str(data), how)
        if what is None:
            raise UsageError(f"data={str(data)!r} has no texts for a tokenizer: give a table or folder of your own")
        return Brought(what, deal, frozenset({"label"}))
    if is_whole(data) or (how.texts is not None and isinstance(data, list)):
        return Brought(own_whole(data, how), deal, applied([data], how))
    return Brought(_checked(data), deal)


def _checked(data: Any) -> Dataset | tuple[Dataset, Split]:
    pair = isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Dataset) and isinstance(data[1], Split)
    if not pair and not isinstance(data, Dataset):
        raise UsageError(
            f"data is a {type(data).__name__}: give a name, a file, a folder, a fedkin Dataset or a pair "
            "(Dataset, Split); samples that belong to clients go into clients=[(x, y), ...]"
        )
    found: Dataset | tuple[Dataset, Split] = data
    return found


def _name_of(kind: type[Method], registry: Registry[type[Method]]) -> str:
    return next((name for name, known in registry.items() if known is kind), kind.__name__.lower())
