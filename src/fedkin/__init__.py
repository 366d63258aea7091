"""FedKin: personalised federated learning that survives hostile clients."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkin import data as data
    from fedkin.api import compare, resume, run, tune
    from fedkin.bench.check import NetworkCheck, check
    from fedkin.compute.layout import Layout
    from fedkin.compute.losses import Term, align, cross_entropy, guide
    from fedkin.compute.optim import SGD, Adam
    from fedkin.config import Config
    from fedkin.core.cohort import Cohort, Model
    from fedkin.core.federation import Clients, Federation, each, weighted_mean
    from fedkin.core.store import Keep
    from fedkin.data import Dataset, Split, dirichlet, groups, iid, make_split, natural, pathological, shards
    from fedkin.data import load as load_data
    from fedkin.errors import DataError, FedKinError, UsageError
    from fedkin.methods import METHODS, Method, option
    from fedkin.models import MODELS, adapters, lora, merged
    from fedkin.models import build as build_model
    from fedkin.report.comparison import Comparison, Table
    from fedkin.report.page import write_report
    from fedkin.rounds import Prepared, Result, RoundRecord, StopTraining
    from fedkin.runs.catalogue import Catalogue
    from fedkin.runs.folder import RunFolder
    from fedkin.runs.sinks import Sink
    from fedkin.sweep.tuning import Tuned
    from fedkin.tasks import TASKS, Metric, Task, task
    from fedkin.use.export import export
    from fedkin.use.join import Newcomers, join
    from fedkin.use.model_file import load as load_model
    from fedkin.web.routes import create_app as web_app

from fedkin.version import VERSION as __version__

# Names are looked up when first used: importing torch takes seconds, and `fedkin --help` does not need it.
_HOMES = {
    "fedkin.api": ("compare", "resume", "run", "tune"),
    "fedkin.bench.check": ("NetworkCheck", "check"),
    "fedkin.core.cohort": ("Cohort", "Model"),
    "fedkin.core.store": ("Keep",),
    "fedkin.compute.losses": ("Term", "align", "cross_entropy", "guide"),
    "fedkin.compute.optim": ("SGD", "Adam"),
    "fedkin.config": ("Config",),
    "fedkin.data": (
        *("dirichlet", "groups", "iid", "natural", "pathological", "shards"),
        *("load as load_data", "make_split", "Dataset", "Split"),
    ),
    "fedkin.errors": ("DataError", "FedKinError", "UsageError"),
    "fedkin.core.federation": ("Clients", "Federation", "each", "weighted_mean"),
    "fedkin.compute.layout": ("Layout",),
    "fedkin.methods": ("METHODS", "Method", "option"),
    "fedkin.models": ("MODELS", "adapters", "build as build_model", "lora", "merged"),
    "fedkin.report.comparison": ("Comparison", "Table"),
    "fedkin.report.page": ("write_report",),
    "fedkin.rounds": ("Prepared", "Result", "RoundRecord", "StopTraining"),
    "fedkin.runs.catalogue": ("Catalogue",),
    "fedkin.runs.folder": ("RunFolder",),
    "fedkin.runs.sinks": ("Sink",),
    "fedkin.sweep.tuning": ("Tuned",),
    "fedkin.tasks": ("TASKS", "Metric", "Task", "task"),
    "fedkin.use.export": ("export",),
    "fedkin.use.join": ("Newcomers", "join"),
    "fedkin.use.model_file": ("load as load_model",),
    "fedkin.web.routes": ("create_app as web_app",),
}
_WHERE = {
    called or name: (home, name)
    for home, names in _HOMES.items()
    for name, _, called in (entry.partition(" as ") for entry in names)
}


def __getattr__(name: str) -> Any:
    if name == "data":  # the package, as `fk.data.load("digits")`
        return import_module("fedkin.data")
    if name not in _WHERE:
        raise AttributeError(f"module 'fedkin' has no attribute {name!r}")
    home, there = _WHERE[name]
    return getattr(import_module(home), there)


__all__ = [
    "METHODS",
    "MODELS",
    "SGD",
    "TASKS",
    "Adam",
    "Catalogue",
    "Clients",
    "Cohort",
    "Comparison",
    "Config",
    "DataError",
    "Dataset",
    "FedKinError",
    "Federation",
    "Keep",
    "Layout",
    "Method",
    "Metric",
    "Model",
    "NetworkCheck",
    "Newcomers",
    "Prepared",
    "Result",
    "RoundRecord",
    "RunFolder",
    "Sink",
    "Split",
    "StopTraining",
    "Table",
    "Task",
    "Term",
    "Tuned",
    "UsageError",
    "__version__",
    "adapters",
    "align",
    "build_model",
    "check",
    "compare",
    "cross_entropy",
    "dirichlet",
    "each",
    "export",
    "groups",
    "guide",
    "iid",
    "join",
    "load_data",
    "load_model",
    "lora",
    "make_split",
    "merged",
    "natural",
    "option",
    "pathological",
    "resume",
    "run",
    "shards",
    "task",
    "tune",
    "web_app",
    "weighted_mean",
    "write_report",
]
