"""What is asked for from Python: settings, and apart from them what comes as objects (methods, networks, data, runs).

`fk.run`, `fk.compare` and `fk.tune` are called with both in one; a run has them apart, as only settings can be written
down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from numbers import Number
from pathlib import Path
from typing import Any

from fedkin.config import Config, is_folder, make_config
from fedkin.data import (
    Brought,
    Dataset,
    OwnClients,
    Partition,
    Reading,
    Split,
    applied,
    is_whole,
    load,
    own_clients,
    own_data,
    own_whole,
    unwritten,
)
from fedkin.data.own import listed
from fedkin.data.targets import Targets
from fedkin.errors import UsageError
from fedkin.methods import METHODS, Method, given_options
from fedkin.preparation import Texts, texts_of
from fedkin.registry import Registry
from fedkin.rounds import Result
from fedkin.rounds.choices import reading_of, targets_of
from fedkin.runs.origin import of_result, resolved
from fedkin.tasks import Task


class _Usual:
    """Not given: what `fedkin run --help` says."""

    def __repr__(self) -> str:
        return "the default"


USUAL: Any = _Usual()
OF_READING = ("label", "client_column", "categories", "image_size", "image_mode")
"""Settings that say how objects are read."""


@dataclass(frozen=True, eq=False)
class Asked:
    """One run as it was asked for: its settings, and what came as Python objects."""

    config: Config
    objects: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Common:
    """What all runs of a call have in common: settings, what came as Python objects, and which of the settings follow
    from those. `deal`: a partition that no text stands for."""

    values: dict[str, Any]
    objects: dict[str, Any]
    inferred: Set[str]
    deal: Partition | None

    def as_asked(self, config: Config) -> Config:
        config = resolved(config)
        return replace(config, given=config.asked - self.inferred) if self.inferred else config

    def asked(self, config: Config, kind: type[Method] | None) -> Asked:
        """One of the runs; `kind` where its method is not registered."""
        objects = {**self.objects, **({} if kind is None else {"method": kind})}
        if self.deal is not None and "data" not in objects and not is_folder(config.data):
            objects["data"] = Brought(load(config.data, config.data_dir), self.deal)
        return Asked(config, objects)


def named_method(method: Any) -> tuple[str, type[Method] | None]:
    """A method's name, and its class where it is not registered."""
    if isinstance(method, str):
        return method, None
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UsageError(f"method={method!r}: a method's name, or a class made from fedkin.Method")
    name = _name_of(method, METHODS)
    ours = method.__module__.startswith("fedkin.") and METHODS.get(name) is method
    return name, None if ours else method


def request(method: Any = "fedavg", **given: Any) -> Asked:
    name, kind = named_method(method)
    common = common_of({**given, "method": name})
    config = common.as_asked(make_config(common.values))
    options = given_options(kind or METHODS[config.method], config.options, config.method)
    return common.asked(replace(config, options=options), kind)


def common_of(given: Mapping[str, Any]) -> Common:
    """What was asked for, with objects apart from settings."""
    values, objects = {**given}, dict[str, Any]()
    data, clients, partition = (values.pop(name, USUAL) for name in ("data", "clients", "partition"))
    model, task, options, start_from = (values.pop(name, None) for name in ("model", "task", "options", "start_from"))
    values["options"] = {} if options is None else options
    if isinstance(model, str):
        values["model"] = model
    elif model is not None:
        objects["model"] = model
    if isinstance(task, Task):
        objects["task"] = task
    elif task is not None:
        values["task"] = task
    if isinstance(start_from, Result):
        if start_from._trained is None:
            raise UsageError("start_from: this result has no models of its run; give the run's name or folder")
        objects["begin_with"] = start_from._trained
        values["start_from"] = of_result(start_from._trained, start_from.run)
    elif start_from is not None:
        values["start_from"] = start_from
    deal = unwritten(partition) if isinstance(partition, Partition) else None
    if partition is not USUAL:
        values["partition"] = str(partition) if isinstance(partition, Partition) else partition
    how = _reading(values, task, texts_of(values.pop("tokenizer", None), values.pop("length", None)))
    inferred: set[str] = set()
    if clients is None or (clients is not USUAL and isinstance(clients, Number | str)):
        values["clients"] = clients
    elif clients is not USUAL:
        if data is not USUAL:
            raise UsageError("give data= or a list of clients, not both")
        objects["data"] = brought = own_of(clients, how)
        assert isinstance(brought.what, OwnClients)
        values = {"partition": "natural", **values, "data": "own", "clients": len(brought.what.parts)}
        inferred = {"clients", *(["partition"] if partition is USUAL else [])}
    if isinstance(data, str | Path):
        values["data"] = str(data)
    if (data is not USUAL and not isinstance(data, str | Path)) or (how.texts is not None and "data" not in objects):
        objects["data"] = brought = one_object(data, how, deal)
        what = brought.what[0] if isinstance(brought.what, tuple) else brought.what
        values.setdefault("data", what.name if isinstance(what, Dataset) else "own")
    return Common(values, objects, inferred, deal)


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


def own_of(clients: Any, how: Reading) -> Brought:
    """The data of each client."""
    found = listed(clients)
    if isinstance(found, Sequence | Mapping) and not len(found):
        raise UsageError(f"clients={found!r}: give at least one client's data")
    each = list(found.values()) if isinstance(found, Mapping) else found
    return Brought(own_clients(found, how), applied=applied(each, how))


def one_object(data: Any, how: Reading, deal: Partition | None) -> Brought:
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
    return Brought(dataset_of(data), deal)


def dataset_of(data: Any) -> Dataset | tuple[Dataset, Split]:
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


def brings_validation(data: Any) -> bool:
    what = data.what if isinstance(data, Brought) else None
    return isinstance(what, tuple) and any(map(len, what[1].validation))
