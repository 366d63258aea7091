"""A site's part in a run: the invitation that it accepts, what it keeps, and the cohort of one that works for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkin.compute import keys
from fedkin.compute.batches import Source
from fedkin.config import Config, make_config
from fedkin.core.cohort import Cohort, DataPart, Scores, Site
from fedkin.data import Dataset, Preparing, Split
from fedkin.data.clients import split_client
from fedkin.data.fitting import prepare_table
from fedkin.data.targets import WORDS, Array, outputs_of
from fedkin.deploy.policy import Declined
from fedkin.deploy.site_columns import as_agreed
from fedkin.deploy.state import Stamp, Vault
from fedkin.deploy.trunk import settle
from fedkin.deploy.wire import Parcel, Transport
from fedkin.errors import FedKinError
from fedkin.methods import METHODS, Method, options_of
from fedkin.models import build
from fedkin.rounds import pick_device, pick_precision
from fedkin.rounds.assemble import Parts, check_task, make_site
from fedkin.rounds.choices import metrics_of
from fedkin.tasks import TASKS, Task, make_task
from fedkin.use.model_file import Card

if TYPE_CHECKING:
    from fedkin.deploy.worker import Worker

TRAVELS = (
    "method",
    "options",
    "task",
    "metrics",
    "model",
    "head",
    "buffers",
    "rounds",
    "epochs",
    "batch",
    "optimiser",
    "lr",
    "lr_schedule",
    "lr_factors",
    "momentum",
    "weight_decay",
    "clip_grad",
    "accumulate",
    "augment",
    "impute",
    "scale",
    "order",
    "seed",
    "test_share",
    "validation_share",
    "eval_point",
    "precision",
)
"""The settings a server tells its sites; where and how a site computes is its own business."""


TASK = "classification"  # what a run learns that does not say what


class OwnCohort(Cohort):
    """A cohort of one whose private draws come from a seed that never leaves the site. `exact`: whether a method may
    evaluate the models that it is sent; what comes of it is the method's to send, and no policy makes it coarse."""

    secret: int | None = None
    exact: bool = True

    def evaluate(self, rows: Tensor, data: DataPart = "test", extra: bool = False) -> Scores:
        if not self.exact:
            raise Declined("asked how well models do here, exactly: this site's policy (evaluation) forbids that")
        return super().evaluate(rows, data, extra)

    @property
    def seed(self) -> int:
        return self._site.seed if self.secret is None else self.secret


@dataclass
class Joined:
    """A run this site takes part in."""

    run: str
    attempt: int
    place: int
    config: Config
    method: Method
    network: nn.Module
    site: Site
    card: Card
    vault: Vault
    stamp: Stamp
    transport: Transport
    questions: dict[int, int] = field(default_factory=dict)  # answered so far, by round

    @property
    def kept(self) -> dict[str, Tensor]:
        """What this site keeps from round to round, [1, ...] each."""
        store = self.site.store
        return {name: store.read(name, np.array([self.place])) for name in store.state()}

    @kept.setter
    def kept(self, tensors: Mapping[str, Tensor]) -> None:
        place = torch.tensor([self.place])
        self.site.store.restore({name: {"ids": place, "rows": rows} for name, rows in tensors.items()})

    def load(self) -> None:
        """What the vault has."""
        store = self.site.store
        first = {name: store.first(name) for name in store.keeps}
        self.kept = self.vault.load({name: ((1, *t.shape), t.dtype) for name, t in first.items()})


def join(worker: Worker, message: Parcel) -> tuple[Joined, dict[str, int], str]:
    """Takes part in the run that the message invites to: how many samples there are for it, and what is to be said."""
    f = message.fields
    run, attempt, begin = str(f["run"]), whole(f, "attempt"), whole(f, "round")
    place, clients = whole(f, "place"), whole(f, "clients")
    if not place < clients <= 1_000_000:
        raise FedKinError(f"place {place} of {clients}: not possible")
    given = f.get("config")
    if not isinstance(given, dict):
        raise FedKinError("no settings came with the invitation")
    strange = sorted(map(str, given.keys() - {*TRAVELS}))
    if strange:  # leaving it out would train otherwise than the server believes
        raise FedKinError(
            f"the server says {strange[0][:40]!r}, which this FedKin does not know: both sides need the same"
        )
    config = make_config(given)
    method_class = METHODS[config.method]
    options = options_of(method_class, config.options, config.method)
    task = _task(worker, config.task or TASK)
    check_task(config, task, method_class, options)
    worker.policy.check(config, options, [m.name for m in (task.metric, *metrics_of(config, task))])
    dataset, own = _dataset(worker, f, place, config)
    network = build(str(config.model), dataset.shape, dataset.classes, dataset.vocabulary, config.seed)
    frozen = settle(network, f.get("frozen", ""), message.values, worker.folder)
    initial = message.values.get("initial")
    if not isinstance(initial, Tensor):
        raise FedKinError("no first model came with the invitation")
    device = pick_device(worker.device)
    odd = config.precision == "tf32" and device.type == "cpu"
    precision = pick_precision("auto" if odd else config.precision, device)
    source = Source(dataset.x, dataset.y, device, dataset.mean, dataset.std)
    parts: Parts = {k: [rows if i == place else rows[:0] for i in range(clients)] for k, rows in own.items()}
    names = [worker.name if i == place else "" for i in range(clients)]
    site = make_site(
        config, method_class, network, dataset, source, parts, names, precision, task=task, initial=initial
    )
    vault = Vault(worker.folder, run)
    vault.same_data(worker.data_print)
    stamp, remark = _resume(vault, attempt, begin)
    facts = {"method": config.method, "run": run, "site": worker.name, "seed": config.seed}
    card = Card.of(dataset, config.model, head=site.layout.head_name, **facts)
    transport: Transport = f["transport"] if f.get("transport") in ("fp16", "int8") else "fp32"
    found = Joined(run, attempt, place, config, method_class(options), network, site, card, vault, stamp, transport)
    found.load()
    remark = "" if f.get("late") is True else remark  # who comes late has nothing to go on with
    return found, {k: len(rows) for k, rows in own.items()}, remark + frozen


def _resume(vault: Vault, attempt: int, begin: int) -> tuple[Stamp, str]:
    """The state to go on from, where the server goes on from round `begin`."""
    stamp = vault.stamp()
    fresh = Stamp(begin, -1, attempt)
    remark = ""
    if stamp is None or (begin == 0 and stamp.attempt != attempt):
        remark = "; this site has no state of it and starts with the first model" if begin else ""
        if stamp is not None and (stamp.round, stamp.call) > (0, -1):
            remark = f"; its state of round {stamp.round + 1} is set aside in {vault.set_aside().name}"
        vault.begin(fresh)
        return fresh, remark
    if stamp.attempt != attempt and (stamp.round, stamp.call) >= (begin, 0):
        if vault.go_back(begin):
            return vault.stamp() or fresh, f"; back to its state at round {begin + 1}"
        remark = f"; its state is of round {stamp.round + 1}, older ones are gone"
        stamp = Stamp(begin, -1, attempt, stamp.phase)
    return stamp, remark


def _task(worker: Worker, spec: str) -> Task:
    """What the run learns, by its name and options among the tasks that are known here, if this site's data are for
    it."""
    name = spec.partition(":")[0]
    if name not in TASKS:
        raise FedKinError(
            f"the task {name[:40]!r} is not known at this site: it takes part if its client is started with the file "
            "that registers the task (--plugin FILE.py)"
        )
    task = make_task(spec)
    if task.targets != worker.targets:
        raise FedKinError(
            f"the run learns {name}, which needs {WORDS[task.targets]}; this site's data were read as "  # type: ignore[index]
            f"{WORDS[worker.targets]}: start its client with --task {name}, if they are for that"
        )
    return task


def _dataset(
    worker: Worker, fields: Mapping[str, Any], place: int, config: Config
) -> tuple[Dataset, dict[DataPart, keys.I64]]:
    """This site's samples, classes and the columns of its table numbered as all sites number them."""
    own, known, labels, table = worker.own, np.unique(worker.own.y), fields.get("labels"), fields.get("columns")
    if worker.targets != "classes":
        if labels != []:
            raise FedKinError("the server has a list of classes, and this site's targets are none")
        outputs = outputs_of(worker.targets, own.y, worker.vocabulary)
        return _parts(worker, own.y, outputs, (), place, config, table)
    if not isinstance(labels, list) or not 0 < len(labels) <= 1_000_000:
        raise FedKinError("the list of classes is missing")
    numbers = {v: i for i, v in enumerate(labels)}
    missing = [v.item() for v in known if v.item() not in numbers]
    if missing:
        raise FedKinError(f"class {missing[0]!r} of this site is not in the server's list")
    codes = np.array([numbers[v.item()] for v in known], np.int64)[np.searchsorted(known, own.y)]
    return _parts(worker, codes, len(labels), tuple(str(v) for v in labels), place, config, table)


def _parts(
    worker: Worker, y: Array, outputs: int, names: tuple[str, ...], place: int, config: Config, table: object
) -> tuple[Dataset, dict[DataPart, keys.I64]]:
    own, kind, wish = worker.own, worker.targets, Preparing.of(config.impute, config.scale)
    if not worker.columns and (table is not None or wish != Preparing()):
        raise FedKinError("the server prepares tables, and this site's data are none")
    if "federated" in (wish.impute, wish.scale):
        raise FedKinError("the server wants tables prepared by sums of all sites; this site prepares its own alone")
    x = np.nan_to_num(own.x).astype(np.float32) if worker.columns else own.x
    dataset = Dataset(worker.name, x, y, outputs, names, vocabulary=worker.vocabulary, targets=kind)
    shares = config.test_share, config.validation_share or 0.0
    split = split_client(dataset.strata, own.tests, place, config.seed, *shares)
    if worker.columns:
        columns, raw = as_agreed(worker.columns, own.x, table)
        whole = Split((split[0],), (split[1],), (split[2],), (worker.name,))
        dataset = prepare_table(dataset, whole, raw, columns, wish, own.lacks)
    return dataset, {"train": split[0], "validation": split[1], "test": split[2]}


def whole(fields: Mapping[str, Any], name: str, low: int = 0) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 1 << 53:
        raise FedKinError(f"{name}={value!r}: expected a whole number")
    return value
