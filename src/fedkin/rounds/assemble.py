"""How a run is put together: everything is checked, the data are loaded, the network is built."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from fedkin.compute.batches import Source
from fedkin.compute.choice import Chooser
from fedkin.compute.forward import Context
from fedkin.compute.layout import Layout
from fedkin.compute.program import trace
from fedkin.config import Config
from fedkin.core.cohort import Site
from fedkin.core.federation import Average, Clients, Faults, Federation, Tamper
from fedkin.core.store import Store
from fedkin.data import Brought, Dataset, Split, remarks_on
from fedkin.engines.simulator import Simulator
from fedkin.errors import UsageError
from fedkin.methods import METHODS, Method, options_of
from fedkin.models import Given, Samples
from fedkin.robust import Adversary, DataAttack, Desk, Watched, make_attack
from fedkin.rounds import footprint
from fedkin.rounds.choices import (
    average_of,
    load_data,
    named_spec,
    network_of,
    pick_device,
    pick_precision,
    point_of,
    training_of,
)
from fedkin.rounds.clock import Clock
from fedkin.rounds.job import Job
from fedkin.rounds.records import Prepared
from fedkin.rounds.settings import idle, of_network, of_split, recorded, refuse


def prepare(
    config: Config,
    *,
    method: type[Method] | None = None,
    model: Given | None = None,
    data: tuple[Dataset, Split] | Brought | None = None,
    tamper: Tamper | None = None,
    average: Average | None = None,
    chooser: Chooser | None = None,
    sources: dict[int, tuple[Dataset, Source]] | None = None,
    admitted: bool = False,
) -> Job:
    """Check everything, load the data, build the network; nothing trains yet.

    `model` is copied, never changed (see `first_network`). `tamper` and `average` replace what the configuration's
    attack and rule would do; `chooser` trains in place of the run's own; `sources` are data sets that lie on the device
    already, by the data set's identity (for runs that share them; one that an attacker changes is never shared).
    `admitted`: it was found to fit before (a run that goes on)."""
    clock = Clock()
    average = average or average_of(config)
    attack = None if config.attack == "none" else make_attack(*named_spec(config.attack))
    kind = method or METHODS[config.method]
    options = options_of(kind, config.options, config.method)
    refuse(config, idle(config, kind, options, attack))
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    training = training_of(config, precision)
    if config.validation_share is None:
        config = replace(config, validation_share=kind.holdout)
    dataset, split = data if isinstance(data, tuple) else load_data(config, brought=data)
    if config.augment and len(dataset.shape) != 3:
        raise UsageError(f"augment=true needs images; {dataset.name!r} has samples of shape {dataset.shape}")
    sample = Source(dataset.x[:6], dataset.y[:6], torch.device("cpu"), dataset.mean, dataset.std)
    example = sample.batch(torch.arange(len(sample.y)))
    network, name, remarks = network_of(config, dataset, model)
    layout = Layout.of(network, config.head, config.buffers, example=example)
    refuse(config, of_split(config, split))
    refuse(config, of_network(config, layout, network, model is not None, kind.unused(options), example))
    adversary = None
    if attack is not None:
        adversary = Adversary.of(config, attack, split.clients)
        tamper = tamper or adversary.tamper
    shared = sources if sources is not None and not isinstance(attack, DataAttack) else {}
    if id(dataset) not in shared:
        shared[id(dataset)] = dataset, Source(dataset.x, dataset.y, device, dataset.mean, dataset.std)
    source = shared[id(dataset)][1]
    forward = trace(network, layout, example)
    initial = layout.row(network).to(device)
    check_outputs(forward, layout, initial, example, dataset.classes)
    point = point_of(config, kind)
    site = Site(
        forward=forward,
        layout=layout,
        initial=initial,
        source=source,
        parts={"train": split.train, "validation": split.validation, "test": split.test},
        names=split.names,
        classes=dataset.classes,
        seed=config.seed,
        training=training,
        store=Store(split.clients, kind.keeps, layout, initial),
        chooser=chooser or Chooser(config.way),
        hold=point != "received",
    )
    if adversary is not None:
        adversary.arm(site, dataset.x, dataset.y)
    engine = Simulator(site, kind(options), config.chunk)
    faults = Faults(config.drop, config.straggle, config.seed)
    samples = np.array([len(p) for p in split.train], np.int64)
    fed = Federation(
        engine, samples, seed=config.seed, faults=faults, average=average, tamper=tamper, names=split.names
    )
    fed.rounds, fed.stop_on_failure = config.rounds, config.on_failure == "stop"
    server = kind(options)
    if adversary is not None:
        adversary.detector, adversary.rule = server.detector, getattr(average, "rule", None)
        adversary.rounds = config.rounds
    if isinstance(average, Watched):
        average.meet(Desk(site, lambda: fed.round, kind.frozen_head))
    server.start(fed, layout, initial)
    needed = footprint.expected(config, site, server, engine.looks_at, footprint.activations_of(network, example))
    if not (config.force or admitted):
        footprint.check_memory(needed, device)
    remarks = [*remarks, *remarks_on(dataset, split)]
    resolved = replace(recorded(config, split), model=name)
    prepared = Prepared(
        resolved,
        split.clients,
        dataset.classes,
        split.hash,
        layout.parameters,
        str(device),
        precision,
        point,
        remarks=tuple(remarks),
        needed=needed,
    )
    samples_of = Samples(
        dataset.shape,
        dataset.x.dtype.name,  # type: ignore[arg-type]
        dataset.classes,
        tuple(dataset.class_names),
        dataset.mean,
        dataset.std,
        dataset.vocabulary,
    )
    job = Job(
        resolved,
        prepared,
        server,
        fed,
        site,
        engine,
        network,
        samples_of,
        asdict(options),
        adversary=adversary,
        split=split,
        clock=clock,
    )
    if adversary is not None and not adversary.counted:
        job.watched = Clients(np.flatnonzero(~adversary.malicious()), samples)
    clock.add("preparing", clock.wall)
    return job


def check_outputs(forward: Any, layout: Layout, row: torch.Tensor, example: torch.Tensor, classes: int) -> None:
    """A network needs an output for every class."""
    with torch.no_grad():
        logits = forward(layout.tensors(row.cpu().unsqueeze(0)), example, 1, Context()).logits
    if logits.shape[-1] < classes:
        raise UsageError(f"the network gives {logits.shape[-1]} outputs, the data have {classes} classes")
