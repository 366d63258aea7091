"""What the words of a configuration stand for: a device, an optimiser, a rule, the data, the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedkin.compute.batches import Source
from fedkin.compute.optim import SGD, Adam, Optimiser
from fedkin.compute.probe import require_bf16
from fedkin.compute.work import Precision
from fedkin.config import Config
from fedkin.core.cohort import Training
from fedkin.core.federation import Average, weighted_mean
from fedkin.core.schedules import Factors, client_factors, make_schedule
from fedkin.data import (
    CORRUPTIONS,
    OF_IMAGES,
    Brought,
    Dataset,
    OwnClients,
    Partition,
    Preparing,
    Reading,
    Shown,
    Split,
    WholeTable,
    apply_shift,
    is_image_folder,
    load,
    make_split,
    own_data,
)
from fedkin.data.targets import WORDS, Targets
from fedkin.errors import UsageError, unknown
from fedkin.methods import Method
from fedkin.models import MODELS, Given, begun, default_model, first_network
from fedkin.options import named_spec
from fedkin.parts import words_of
from fedkin.preparation import Texts
from fedkin.robust import Watched, make_rule
from fedkin.rounds.settings import OF_TABLES, of_split, refuse
from fedkin.tasks import USUAL, Metric, Task, make_task


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device={name!r}: accepts auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise UsageError(f"device={name!r}: this machine has {found} usable GPUs; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device={name!r}: accepts auto, cpu, cuda or cuda:N")
    return device


def pick_precision(name: str, device: torch.device) -> Precision:
    if name == "auto":
        return "tf32" if device.type == "cuda" else "fp32"
    if name == "tf32" and device.type != "cuda":
        raise UsageError("precision='tf32' is a GPU format; on this device use fp32")
    if name == "bf16" and device.type == "cpu":
        require_bf16()
    return name  # type: ignore[return-value]


def point_of(config: Config, method_class: type[Method]) -> str:
    """When models are evaluated."""
    return method_class.eval_point if config.eval_point == "auto" else config.eval_point


def optimiser_of(config: Config) -> Optimiser:
    if config.optimiser == "adam":
        if config.momentum:
            raise UsageError(f"momentum={config.momentum} goes with optimiser sgd; adam has its own")
        return Adam(config.lr, weight_decay=config.weight_decay)
    return SGD(config.lr, config.momentum, config.weight_decay)


def factors_of(config: Config, names: Sequence[str] = ()) -> Factors | None:
    """What the configuration multiplies rates by, in each round and at each of these clients."""
    schedule = make_schedule(*named_spec(config.lr_schedule))
    own = client_factors(config.lr_factors, names, config.seed) if names else ()
    return Factors.of(schedule, config.lr, config.rounds, own)


def training_of(config: Config, precision: Precision, names: Sequence[str] = ()) -> Training:
    """How the configuration's clients train, in the simulator and at a site alike."""
    fixed, factors = config.order == "fixed", factors_of(config, names)
    how = (precision, config.augment, fixed, factors, config.clip_grad, config.accumulate)
    return Training(config.epochs, config.batch, optimiser_of(config), *how)


def average_of(config: Config) -> Average:
    """How the configuration's rule combines what clients send."""
    name, options = named_spec(config.rule)
    return weighted_mean if name == "mean" and not options else Watched(make_rule(name, options))


def targets_of(config: Config, task: Task | None = None) -> Targets:
    """Of which kind the targets in files are that do not say so themselves."""
    if task is None:
        task = None if config.task is None else make_task(config.task)
    return "classes" if task is None else task.targets  # type: ignore[return-value]


def reading_of(config: Config, targets: Targets, texts: Texts | None = None) -> Reading:
    """How data are read that do not say so themselves."""
    names = tuple(config.categories.split("+")) if config.categories else ()
    shown = Shown.of(config.image_size, config.image_mode)
    return Reading(config.label, config.client_column, names, targets=targets, shown=shown, texts=texts)


def task_of(config: Config, dataset: Dataset, given: Task | None = None) -> Task:
    """What is learnt of these data."""
    task = given or make_task(config.task or USUAL[dataset.targets])
    if task.targets != dataset.targets:
        raise UsageError(
            f"the task {task.name} needs targets that are {WORDS[task.targets]}; those of "  # type: ignore[index]
            f"{dataset.name} are {WORDS[dataset.targets]}: take the task {USUAL[dataset.targets]}, or other data"
        )
    return task


def metrics_of(config: Config, task: Task) -> tuple[Metric, ...]:
    """The metrics beside the task's main one."""
    if config.metrics == "all":
        return task.chosen(list(task.metrics))
    return task.chosen(None if config.metrics is None else config.metrics.split("+"))


def data_key(data: str, data_dir: str | None, targets: Targets = "classes") -> str:
    """What `load_data` keeps a data set under that was read."""
    return f"{data}\n{data_dir}\n{targets}"


def load_data(
    config: Config,
    known: dict[str, Dataset] | None = None,
    brought: Brought | None = None,
    targets: Targets | None = None,
) -> tuple[Dataset, Split]:
    """The data set and who has which part of it. `known`: data sets read before, filled here. `brought`: data that
    come as Python objects, in place of those that the configuration names. `targets`: what files hold that do not say
    so themselves (default: by the configuration's task)."""
    targets = targets or targets_of(config)
    corruptions = config.shift.split(",") if config.shift and config.shift != "all" else config.shift
    for name in corruptions if isinstance(corruptions, list) else []:
        if name not in CORRUPTIONS:
            raise unknown("corruption", name, [*CORRUPTIONS, "all"])
    how, preparing = reading_of(config, targets), Preparing.of(config.impute, config.scale)
    what = brought.what if brought is not None else own_data(config.data, how)
    applied = frozenset[str]() if brought is None else brought.applied
    if not (isinstance(what, WholeTable) or (isinstance(what, OwnClients) and what.columns)):
        refuse(config, {name: "the data are no tables" for name in OF_TABLES if name not in applied})
    if not (brought is None and is_image_folder(config.data)):
        refuse(config, {name: "the data are no images in folders" for name in OF_IMAGES if name not in applied})
    if config.client_column is not None and not (isinstance(what, OwnClients) and what.by_column):
        refuse(config, {"client_column": "the data are not one table with a column of clients"})
    if isinstance(what, OwnClients):
        dataset, split = what.split(
            seed=config.seed,
            test_share=config.test_share,
            validation_share=config.validation_share or 0.0,
            samples_per_client=config.samples_per_client,
            quantity_skew=config.quantity_skew,
            preparing=preparing,
        )
    elif isinstance(what, WholeTable):
        split = split_of(config, what.dataset, brought.partition if brought is not None else None)
        dataset = what.prepared(split, preparing)
    elif isinstance(what, tuple):
        dataset, split = what[0], replace(what[1], partition="")
    else:
        known, key = {} if known is None else known, data_key(config.data, config.data_dir, targets)
        if what is None:
            if key not in known:
                known[key] = load(config.data, config.data_dir, targets=targets)
            what = known[key]
        dataset, split = what, split_of(config, what, brought.partition if brought is not None else None)
    refuse(config, of_split(config, split))
    if corruptions:
        dataset = apply_shift(dataset, split, corruptions, config.severity, config.seed)
    return dataset, split


def split_of(config: Config, dataset: Dataset, partition: Partition | None = None) -> Split:
    """Who has which part, as the configuration says."""
    return make_split(
        dataset,
        config.clients,
        partition or config.partition,
        config.seed,
        samples_per_client=config.samples_per_client,
        quantity_skew=config.quantity_skew,
        test_share=config.test_share,
        validation_share=config.validation_share or 0.0,
    )


def network_of(config: Config, dataset: Dataset, model: Given | None) -> tuple[nn.Module, str, list[str]]:
    """The network a run starts with, what it is called, and what is to be said about its first weights."""
    if model is not None:
        network, remark = first_network(model, config.seed, config.init, dataset.parts, example_of(dataset))
        return network, type(network).__name__, [remark] if remark is not None else []
    entry = None if config.model is None else MODELS[config.model]
    if config.init == "given" and (entry is None or entry.given is None):
        raise UsageError(
            "init='given' keeps the weights of a network of your own (model=Net() from Python, --model FILE.py:NAME); "
            "a named one has none to keep"
        )
    if dataset.parts and (entry is None or entry.given is None):
        raise UsageError(
            f"the samples have several parts ({words_of(dataset.parts)}): give a network that takes them, "
            "model=Net, with arguments of these names"
        )
    name = config.model or dataset.model or default_model(dataset.shape, dataset.vocabulary)
    of_data = (dataset.shape, dataset.classes, dataset.vocabulary)
    network, remark = begun(
        entry or MODELS[name], *of_data, config.seed, config.init, dataset.parts, example_of(dataset)
    )
    return network, name, [remark] if remark is not None else []


def example_of(dataset: Dataset) -> Tensor:
    """A few inputs of a network for such data."""
    few = Source(dataset.x[:6], dataset.y[:6], torch.device("cpu"), dataset.mean, dataset.std)
    return few.batch(torch.arange(len(few.y)))
