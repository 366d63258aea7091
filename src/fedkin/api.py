"""FedKin from Python: `fk.run(...)` and `fk.compare(...)`. The same checks as the command line, the same results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from fedkin.config import make_config
from fedkin.data import Dataset, Partition, Split, from_arrays, from_torch
from fedkin.errors import UsageError
from fedkin.methods import METHODS, Method
from fedkin.registry import Registry
from fedkin.rounds import Listener, Result, run_config, split_of, summary


def run(
    method: str | type[Method] = "fedavg",
    *,
    data: str | Dataset | tuple[Dataset, Split] = "digits",
    clients: int | Sequence[Any] | None = 20,
    partition: str | Partition = "pathological:2",
    model: str | nn.Module | None = None,
    options: dict[str, Any] | None = None,
    on_event: Listener | None = None,
    **settings: Any,
) -> Result:
    """Train one federation; settings are those of `fedkin run --help` (rounds=..., lr=..., seed=...).

    `method` is a name or your own class; `model` a name or an `nn.Module`; `clients` a number, or your data: a list
    with one (x, y) or (x_train, y_train, x_test, y_test) or torch Dataset per client."""
    values: dict[str, Any] = {**settings, "options": options or {}, "partition": str(partition)}
    given: dict[str, Any] = {}
    if isinstance(method, str):
        values["method"] = method
    else:
        values["method"] = _name_of(method, METHODS)
        given["method"] = method
    if isinstance(model, nn.Module):
        given["model"] = model
    elif model is not None:
        values["model"] = model
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
    return run_config(config, on_event=on_event, **given)


def compare(
    methods: Sequence[str | type[Method]], *, seeds: int | Sequence[int] = 1, **settings: Any
) -> tuple[list[Result], list[dict[str, Any]]]:
    """Every method at every seed under the same settings: the results, and one summary row per method."""
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    if not len(chosen):
        raise UsageError(f"seeds={seeds!r}: at least one")
    results = [run(method, seed=seed, **settings) for method in methods for seed in chosen]
    return results, summary(results)


def _name_of(kind: type[Method], registry: Registry[type[Method]]) -> str:
    return next((name for name, known in registry.items() if known is kind), kind.__name__.lower())


def _own_data(clients: Sequence[Any]) -> tuple[Dataset, Split]:
    if not len(clients):
        raise UsageError("clients=[]: give at least one client's data")
    arrays = isinstance(clients[0], tuple | list) and all(isinstance(np.asarray(p), np.ndarray) for p in clients[0])
    return from_arrays(clients) if arrays else from_torch(clients)


def _object(partition: str | Partition) -> Partition | None:
    return None if isinstance(partition, str) else partition
