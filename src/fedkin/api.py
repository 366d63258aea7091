"""FedKin from Python: `fk.run(...)` and `fk.compare(...)`. The same checks as the command line, the same results."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from fedkin.config import SAME_POINT, make_config
from fedkin.data import Dataset, Partition, Split, from_arrays, from_torch
from fedkin.errors import UsageError
from fedkin.methods import METHODS, Method
from fedkin.models import Given
from fedkin.registry import Registry
from fedkin.rounds import Listener, Result, run_config, split_of
from fedkin.track import runs
from fedkin.track.catalogue import Catalogue
from fedkin.track.statistics import Outcome, groups_of, summary

LOG = logging.getLogger("fedkin")


def run(
    method: str | type[Method] = "fedavg",
    *,
    data: str | Dataset | tuple[Dataset, Split] = "digits",
    clients: int | Sequence[Any] | None = 20,
    partition: str | Partition = "pathological:2",
    model: str | Given | None = None,
    options: dict[str, Any] | None = None,
    on_event: Listener | None = None,
    **settings: Any,
) -> Result:
    """Train one federation; settings are those of `fedkin run --help` (rounds=..., lr=..., seed=...).

    `method` is a name or your own class; `model` a name, an `nn.Module` (copied, never changed; `init` says whether its
    weights are drawn anew from the seed), or its class or a function that makes one; `clients` a number, or your data:
    a list with one (x, y) or (x_train, y_train, x_test, y_test) or torch Dataset per client. With `runs_dir` the run
    leaves a folder there, `result.run`, and can be resumed."""
    values: dict[str, Any] = {**settings, "options": options or {}, "partition": str(partition)}
    given: dict[str, Any] = {}
    if isinstance(method, str):
        values["method"] = method
    else:
        values["method"] = _name_of(method, METHODS)
        given["method"] = method
    if isinstance(model, str):
        values["model"] = model
    elif model is not None:
        given["model"] = model
    if clients is None or isinstance(clients, int):
        values["clients"] = clients
    else:
        given["data"] = _own_data(clients)
        values["clients"], values["data"] = len(clients), "own"
    if isinstance(data, str):
        values.setdefault("data", data)
    elif "data" in given:
        raise UsageError("give data= or a list of clients, not both")
    else:
        values["data"] = data.name if isinstance(data, Dataset) else data[0].name
        given["data"] = data if isinstance(data, tuple) else None
    config = make_config(values)
    if isinstance(data, Dataset):
        given["data"] = (data, split_of(config, data, _object(partition)))
    elif isinstance(partition, Partition) and "data" not in given:
        from fedkin.data import load

        loaded = load(config.data, config.data_dir)
        given["data"] = (loaded, split_of(config, loaded, partition))
    if config.runs_dir is not None:
        result = runs.start(config, on_event=on_event, **given)
    else:
        result = run_config(config, on_event=on_event, **given)
    for remark in result.remarks:
        LOG.warning("%s: %s", config.method, remark)
    return result


def resume(
    run: str,
    *,
    runs_dir: str | None = None,
    method: type[Method] | None = None,
    model: Given | None = None,
    data: tuple[Dataset, Split] | None = None,
    clients: Sequence[Any] | None = None,
    on_event: Listener | None = None,
) -> Result:
    """Go on with a run that was interrupted; of a finished one, its result with the personal models.

    `run` is a name or a folder. What the run was given as Python objects has to be given again."""
    own = _own_data(clients) if clients is not None else data
    given: dict[str, Any] = {"method": method, "model": model, "data": own}
    folder = Catalogue(runs_dir).locate(run)
    return runs.resume(folder, on_event=on_event, **{k: v for k, v in given.items() if v is not None})


def compare(
    methods: Sequence[str | type[Method]],
    *,
    seeds: int | Sequence[int] = 1,
    attack: str | Sequence[str] = "none",
    rule: str | Sequence[str] = "mean",
    baseline: str | None = None,
    **settings: Any,
) -> tuple[list[Result], list[dict[str, Any]]]:
    """Every method at every seed under the same settings, under every attack and rule: the results, and one summary
    row for each method, attack and rule. `baseline`: a method that the others are tested against (Wilcoxon).

    All models are judged as received unless `eval_point` says otherwise ("auto": each method at its own point); a row's
    `diverged` says which seeds are not to be believed, and why."""
    settings = {"eval_point": SAME_POINT, **settings}
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    if not len(chosen) or not len(methods):
        raise UsageError(f"methods={methods!r}, seeds={seeds!r}: at least one of each")
    attacks, rules = ([v] if isinstance(v, str) else list(v) for v in (attack, rule))
    results = [
        run(method, seed=seed, attack=a, rule=r, **settings)
        for a, r, method, seed in product(attacks, rules, methods, chosen)
    ]
    groups = groups_of((o.config, o) for o in map(Outcome.of, results))
    return results, summary(groups, baseline)


def _name_of(kind: type[Method], registry: Registry[type[Method]]) -> str:
    return next((name for name, known in registry.items() if known is kind), kind.__name__.lower())


def _own_data(clients: Sequence[Any]) -> tuple[Dataset, Split]:
    if not len(clients):
        raise UsageError("clients=[]: give at least one client's data")
    arrays = isinstance(clients[0], tuple | list) and all(isinstance(np.asarray(p), np.ndarray) for p in clients[0])
    return from_arrays(clients) if arrays else from_torch(clients)


def _object(partition: str | Partition) -> Partition | None:
    return None if isinstance(partition, str) else partition
