"""How a run is put together: one way to make a site, and one to make a job of it, wherever the clients are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkin.compute import keys
from fedkin.compute.batches import Source
from fedkin.compute.choice import Chooser
from fedkin.compute.forward import Context
from fedkin.compute.layout import Layout
from fedkin.compute.program import trace
from fedkin.compute.work import Precision
from fedkin.config import STATE_MARK, Config
from fedkin.core.cohort import DataPart, Site
from fedkin.core.federation import Average, Clients, Engine, Faults, Federation, Tamper
from fedkin.core.store import Store
from fedkin.data import Brought, Dataset, Split, remarks_on
from fedkin.engines.simulator import Simulator
from fedkin.errors import FedKinError, UsageError
from fedkin.methods import METHODS, Method, options_of
from fedkin.models import Given, Samples
from fedkin.options import named_spec
from fedkin.robust import Adversary, Attack, DataAttack, ServerSide, Watched, make_attack
from fedkin.rounds import footprint, trial, validation
from fedkin.rounds.choices import (
    average_of,
    example_of,
    load_data,
    metrics_of,
    network_of,
    pick_device,
    pick_precision,
    point_of,
    targets_of,
    task_of,
    training_of,
)
from fedkin.rounds.clock import Clock
from fedkin.rounds.job import Job
from fedkin.rounds.records import Prepared
from fedkin.rounds.settings import as_applied, idle, of_network, of_split, refuse
from fedkin.rounds.trained import Trained
from fedkin.rounds.warm import Beginning, Taken
from fedkin.tasks import Task

Parts = Mapping[DataPart, Sequence[keys.I64]]


def prepare(
    config: Config,
    *,
    method: type[Method] | None = None,
    model: Given | None = None,
    task: Task | None = None,
    data: tuple[Dataset, Split] | Brought | None = None,
    tamper: Tamper | None = None,
    average: Average | None = None,
    chooser: Chooser | None = None,
    sources: dict[int, tuple[Dataset, Source]] | None = None,
    begin_with: Trained | Taken | None = None,
    admitted: bool = False,
) -> Job:
    """A simulation: check everything, load the data, build the network; nothing trains yet.

    `model` is copied, never changed (see `first_network`). `tamper` and `average` replace what the configuration's
    attack and rule would do; `chooser` trains in place of the run's own; `sources` are data sets that lie on the device
    already, by the data set's identity (for runs that share them; one that an attacker changes is never shared).
    `begin_with`: what an earlier run has learnt, or what was taken over before. `admitted`: it was found to fit
    before (a run that goes on)."""
    clock = Clock()
    average = average or average_of(config)
    attack = None if config.attack == "none" else make_attack(*named_spec(config.attack))
    method_class = method or METHODS[config.method]
    options = options_of(method_class, config.options, config.method)
    refuse(config, idle(config, method_class, options, attack))
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    training_of(config, precision)  # refused before the data are read
    wanted = config.validation_share
    if wanted is None:
        config = replace(config, validation_share=method_class.holdout)
    loaded = data if isinstance(data, tuple) else load_data(config, brought=data, targets=targets_of(config, task))
    dataset, split = loaded
    task = task_of(config, dataset, task)
    check_task(config, task, method_class, options, attack)
    if config.augment and len(dataset.shape) != 3:
        raise UsageError(f"augment=true needs images; {dataset.name!r} has samples of shape {dataset.shape}")
    network, name, remarks = network_of(config, dataset, model)
    shared = sources if sources is not None and not isinstance(attack, DataAttack) else {}
    if id(dataset) not in shared:
        shared[id(dataset)] = dataset, Source(dataset.x, dataset.y, device, dataset.mean, dataset.std, dataset.keys)
    source = shared[id(dataset)][1]
    parts: Parts = {"train": split.train, "validation": split.validation, "test": split.test}
    trial.check_ids(network, source, parts, split.names)
    example = example_of(dataset)
    layout = Layout.of(network, config.head, config.buffers, example=example)
    refuse(config, of_split(config, split))
    validates = any(map(len, split.validation)) and bool(wanted if split.partition else True)
    validation.check(config, validates)
    refuse(config, of_network(config, layout, network, model is not None, method_class.unused(options), example))
    adversary = None if attack is None else Adversary.of(config, attack, split.clients)
    taken = _taken(config, begin_with, method_class, network, layout, dataset, split, source)
    site = make_site(
        config,
        method_class,
        network,
        dataset,
        source,
        parts,
        split.names,
        precision,
        task=task,
        chooser=chooser,
    )
    site.validate = validates
    if taken is not None:
        site.store.restore(taken.kept)
        remarks += taken.remarks
    if adversary is not None:
        adversary.poison_site(site, dataset.x, dataset.y)
        tamper = tamper or adversary.tamper
    engine = Simulator(site, method_class(options), config.chunk)
    sizes = [(len(train), len(test)) for train, test in zip(split.train, split.test, strict=True)]
    resolved = replace(as_applied(config, split), model=name)
    job = make_job(
        resolved, method_class(options), network, dataset, site, engine, sizes, split.hash, average, tamper, adversary
    )
    needed = footprint.expected(config, site, job.method, engine.at_once, footprint.activations_of(network, example))
    if not (config.force or admitted):
        footprint.check_memory(needed, device)
    if site.has_batch_norm and (config.batch == 1 or any(train == 1 for train, _ in sizes)):
        whose = "batch=1" if config.batch == 1 else f"a client with one training sample ({_alone(split)})"
        remarks.append(
            f"{whose}: BatchNorm has the statistics of a single sample, and where a channel is one number, what it "
            "gives is the same for all samples (PyTorch refuses that)"
        )
    if site.validate and (own := method_class.looks_at_validation(options)):
        remarks.append(f"the validation samples are no strangers to {config.method}: {own}; those for tests are")
    job.prepared = replace(job.prepared, remarks=(*remarks, *remarks_on(dataset, split)), needed=needed)
    if taken is not None:
        job.prepared = replace(job.prepared, seen=tuple(taken.facts.get("seen", ())))
    job.split, job.clock, job.taken = split, clock, taken
    clock.add("preparing", clock.wall)
    return job


def _alone(split: Split) -> str:
    return next(name for name, rows in zip(split.names, split.train, strict=True) if len(rows) == 1)


def _taken(
    config: Config,
    begin_with: Trained | Taken | None,
    method_class: type[Method],
    network: nn.Module,
    layout: Layout,
    dataset: Dataset,
    split: Split,
    source: Source,
) -> Taken | None:
    """What the run takes over from an earlier one, the shared model of which is in the network from here on."""
    if begin_with is None:
        if config.start_from is not None:
            raise FedKinError(f"start_from={config.start_from!r}: give that run as begin_with, as runs.origin finds it")
        return None
    if isinstance(begin_with, Trained):
        said = config.start_from or "an earlier run"
        run = said.partition(STATE_MARK)[0].rpartition(os.sep)[2]
        found = Beginning(config.method, method_class.keeps, network, layout, dataset, split, source)
        begin_with = found.take(begin_with, run)
    begin_with.into(network)
    return begin_with


def make_site(
    config: Config,
    method_class: type[Method],
    network: nn.Module,
    dataset: Dataset,
    source: Source,
    parts: Parts,
    names: Sequence[str],
    precision: Precision,
    *,
    task: Task | None = None,
    initial: Tensor | None = None,
    chooser: Chooser | None = None,
) -> Site:
    """Where clients with these names work: in a simulation, at a site of a deployment, in a benchmark; and without
    samples, what a server of real sites knows of them.

    `dataset` is theirs or like theirs; `source` holds the samples that `parts` number. `initial`: the first model where
    it comes from somebody else."""
    example = example_of(dataset)
    layout = Layout.of(network, config.head, config.buffers, example=example)
    first = layout.row(network) if initial is None else initial
    if first.shape != (layout.width,) or first.dtype != torch.float32:
        raise FedKinError(f"the first model does not fit {config.model}: both sides need the same FedKin")
    forward, first = trace(network, layout, example), first.to(source.device)
    with torch.no_grad():
        logits = forward(layout.tensors(first.cpu().unsqueeze(0).clone()), example, 1, Context()).logits
    task = task or task_of(config, dataset)
    task.check_outputs(logits.shape[1:], dataset.classes, type(network).__name__)
    site = Site(
        forward,
        layout,
        first,
        source,
        parts,
        names,
        dataset.groups,
        training_of(config, precision, names),
        config.seed,
        Store(len(names), method_class.keeps, layout, first),
        chooser or Chooser(config.way),
        task=task,
        extra=metrics_of(config, task),
        hold=point_of(config, method_class) != "received",
    )
    trial.check_task(site)
    return site


def check_task(
    config: Config, task: Task, method_class: type[Method], options: Any, attack: Attack | None = None
) -> None:
    """UsageError if the method or the attack cannot do with such a task."""
    why = method_class.unfit(options, task)
    if why is not None:
        raise UsageError(
            f"method {config.method!r} cannot learn the task {task.name}: {why}; take another method, for example "
            "fedavg, fedper, ditto or fedcap"
        )
    if task.whole and config.batch == 1:
        raise UsageError(
            f"batch=1: the task {task.name} compares the samples of a mini-batch with each other, and of one sample "
            "nothing is learnt; take a larger batch"
        )
    if isinstance(attack, DataAttack) and attack.needs_classes and task.targets != "classes":
        raise UsageError(f"attack {config.attack!r} changes class labels, and the task {task.name} has none")


def make_job(
    config: Config,
    server: Method,
    network: nn.Module,
    dataset: Dataset,
    site: Site,
    engine: Engine,
    sizes: Sequence[tuple[int, int]],
    split_hash: str,
    average: Average,
    tamper: Tamper | None = None,
    adversary: Adversary | None = None,
) -> Job:
    """The server's half of a run whose clients an engine reaches. `config` is resolved: what was left open is filled
    in. `sizes`: training and test samples of each client."""
    samples = np.array([train for train, _ in sizes], np.int64)
    faults = Faults(config.drop, config.straggle, config.seed)
    fed = Federation(engine, samples, seed=config.seed, faults=faults, average=average, tamper=tamper, names=site.names)
    fed.rounds, fed.stop_on_failure = config.rounds, config.on_failure == "stop"
    if adversary is not None:
        adversary.detector, adversary.rule = server.detector, getattr(average, "rule", None)
        adversary.rounds = config.rounds
    if isinstance(average, Watched) and site.source.count:  # who has no samples has nothing to tell a rule
        average.connect(ServerSide(site, lambda: fed.round, server.frozen_head))
    server.start(fed, site.layout, site.initial)
    prepared = Prepared(
        config,
        len(sizes),
        dataset.classes if dataset.targets == "classes" else 0,
        split_hash,
        site.layout.parameters,
        str(site.source.device),
        site.training.precision,
        point_of(config, type(server)),
        task=site.task.name,
        metric=site.task.metric,
        extra=site.extra,
        columns=dataset.prepared,
    )
    x, names = dataset.x.dtype.name, tuple(dataset.class_names)
    normal = (dataset.mean, dataset.std, dataset.vocabulary, dataset.parts, dataset.targets, dataset.columns)
    taken = Samples(dataset.shape, x, dataset.classes, names, *normal, dataset.preparations, dataset.texts)  # type: ignore[arg-type]
    benign = adversary is not None and not adversary.counted
    counted = Clients(np.flatnonzero(~adversary.malicious()), samples) if adversary is not None and benign else fed.all
    options = asdict(server.options)
    return Job(
        config, prepared, server, fed, site, engine, network, taken, options, sizes, counted, adversary=adversary
    )
