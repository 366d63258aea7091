"""FedKin: personalised federated learning that survives hostile clients."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkin import data as data
    from fedkin.api import compare, resume, run
    from fedkin.bench.check import NetworkCheck, check
    from fedkin.compute.layout import Layout
    from fedkin.compute.losses import Term, align, cross_entropy, guide
    from fedkin.compute.optim import SGD, Adam
    from fedkin.config import Config
    from fedkin.core.cohort import Cohort, Model
    from fedkin.core.federation import Clients, Federation, each, weighted_mean
    from fedkin.core.store import Keep
    from fedkin.data import dirichlet, groups, iid, natural, pathological, shards
    from fedkin.errors import DataError, FedKinError, UsageError
    from fedkin.methods import METHODS, Method, option
    from fedkin.models import MODELS, adapters, lora, merged
    from fedkin.rounds import Result
    from fedkin.tasks import TASKS, Metric, Task, task
    from fedkin.use.join import Newcomers, join

from fedkin.version import VERSION as __version__

# Names are looked up when first used: importing torch takes seconds, and `fedkin --help` does not need it.
_HOMES = {
    "fedkin.api": ("compare", "resume", "run"),
    "fedkin.bench.check": ("NetworkCheck", "check"),
    "fedkin.core.cohort": ("Cohort", "Model"),
    "fedkin.core.store": ("Keep",),
    "fedkin.compute.losses": ("Term", "align", "cross_entropy", "guide"),
    "fedkin.compute.optim": ("SGD", "Adam"),
    "fedkin.config": ("Config",),
    "fedkin.data": ("dirichlet", "groups", "iid", "natural", "pathological", "shards"),
    "fedkin.errors": ("DataError", "FedKinError", "UsageError"),
    "fedkin.core.federation": ("Clients", "Federation", "each", "weighted_mean"),
    "fedkin.compute.layout": ("Layout",),
    "fedkin.methods": ("METHODS", "Method", "option"),
    "fedkin.models": ("MODELS", "adapters", "lora", "merged"),
    "fedkin.rounds": ("Result",),
    "fedkin.tasks": ("TASKS", "Metric", "Task", "task"),
    "fedkin.use.join": ("Newcomers", "join"),
}
_WHERE = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "data":  # the package, as `fk.data.load("digits")`
        return import_module("fedkin.data")
    if name not in _WHERE:
        raise AttributeError(f"module 'fedkin' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


__all__ = [
    "METHODS",
    "MODELS",
    "SGD",
    "TASKS",
    "Adam",
    "Clients",
    "Cohort",
    "Config",
    "DataError",
    "FedKinError",
    "Federation",
    "Keep",
    "Layout",
    "Method",
    "Metric",
    "Model",
    "NetworkCheck",
    "Newcomers",
    "Result",
    "Task",
    "Term",
    "UsageError",
    "__version__",
    "adapters",
    "align",
    "check",
    "compare",
    "cross_entropy",
    "dirichlet",
    "each",
    "groups",
    "guide",
    "iid",
    "join",
    "lora",
    "merged",
    "natural",
    "option",
    "pathological",
    "resume",
    "run",
    "shards",
    "task",
    "weighted_mean",
]
