"""The round loop: draw a cohort, let the method work, evaluate, record. It knows no method, file or screen."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedkin.cohort import Site, Store, Training
from fedkin.compute import graphs
from fedkin.compute.batches import Source
from fedkin.compute.choice import Chooser
from fedkin.compute.probe import require_bf16
from fedkin.compute.program import Context, trace
from fedkin.config import Config
from fedkin.data import CORRUPTIONS, Dataset, Partition, Split, apply_shift, from_folder, load, make_split
from fedkin.engines.local import LocalEngine
from fedkin.errors import UsageError, unknown
from fedkin.federation import Average, Clients, Exchange, Failure, Faults, Federation, Note, Tamper, weighted_mean
from fedkin.layout import Layout
from fedkin.methods import METHODS, Method, options_of
from fedkin.models import build, default_model
from fedkin.robust import Adversary, DataAttack, Detection, Verdict, Watched, detection, make_attack, make_rule


@dataclass(frozen=True)
class Accuracy:
    """Percent over clients that have test samples. `worst_decile`: mean of the lowest tenth of clients."""

    micro: float
    macro: float
    worst_decile: float
    std: float

    @classmethod
    def of(cls, correct: np.ndarray[Any, Any], count: np.ndarray[Any, Any]) -> Accuracy:
        has = count > 0
        if not has.any():
            nan = float("nan")
            return cls(nan, nan, nan, nan)
        each = np.sort(100.0 * correct[has] / count[has])
        tenth = each[: max(1, math.ceil(len(each) / 10))]
        micro = 100.0 * correct[has].sum() / count[has].sum()
        return cls(float(micro), float(each.mean()), float(tenth.mean()), float(each.std()))


@dataclass(frozen=True)
class RoundRecord:
    """The state of a run after a round. `final` marks the one after the method's last fine-tuning."""

    round: int
    accuracy: Accuracy
    test_loss: float
    train_loss: float
    bytes_down: int  # since the start
    bytes_up: int
    seconds: float
    participants: int
    failed: int  # in this round
    removed: int  # since the start
    final: bool = False


@dataclass(frozen=True)
class ClientRecord:
    client: int
    name: str
    accuracy: float
    loss: float
    train_samples: int
    test_samples: int
    correct: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """Said once, before the first round."""

    config: Config
    clients: int
    classes: int
    split_hash: str
    parameters: int
    device: str
    precision: str
    eval_point: str


Event = Prepared | RoundRecord
Listener = Callable[[Event], None]


@dataclass(eq=False)
class Result:
    method: str
    options: dict[str, Any]
    seed: int
    config: Config
    accuracy: Accuracy  # personal models after the last round
    best: RoundRecord
    history: list[RoundRecord]
    per_client: list[ClientRecord]
    exchanges: list[Exchange]
    failures: list[Failure]
    removed: dict[int, int]
    seconds: float
    ways: dict[str, str]
    prepared: Prepared
    notes: list[Note]
    malicious: list[int]  # the truth, for those who are malicious throughout
    _layout: Layout = field(repr=False)
    _rows: torch.Tensor = field(repr=False)  # [N, D] on the CPU
    _model: nn.Module = field(repr=False)

    @property
    def bytes(self) -> dict[str, int]:
        return {"down": sum(e.bytes_down for e in self.exchanges), "up": sum(e.bytes_up for e in self.exchanges)}

    def personal(self, client: int) -> nn.Module:
        """This client's model, an ordinary module in evaluation mode on the CPU."""
        if not 0 <= client < len(self._rows):
            raise UsageError(f"client {client}: this run has clients 0 to {len(self._rows) - 1}")
        module = self._layout.load(copy.deepcopy(self._model), self._rows[client])
        return module.eval()

    @property
    def detection(self) -> Detection | None:
        """Who was found out, against the truth; None without fixed attackers."""
        if not self.malicious:
            return None
        truth = np.zeros(len(self.per_client), bool)
        truth[self.malicious] = True
        verdicts = [
            Verdict(n.round, np.asarray(n.value["clients"], np.int64), np.asarray(n.value["used"], bool))
            for n in self.notes
            if n.name == "used"
        ]
        return detection(truth, verdicts, self.removed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        found = self.detection
        return {
            "method": self.method,
            "options": self.options,
            "seed": self.seed,
            "accuracy": asdict(self.accuracy),
            "best": {"round": self.best.round, **asdict(self.best.accuracy)},
            "per_client": [asdict(c) for c in self.per_client],
            "history": [asdict(r) for r in self.history],
            "bytes": self.bytes,
            "seconds": self.seconds,
            "removed": {str(c): r for c, r in self.removed.items()},
            "failed": [asdict(f) for f in self.failures],
            "malicious": self.malicious,
            "detection": None if found is None else asdict(found.overall),
            "config": self.config.to_dict(),
            "split": self.prepared.split_hash,
            "eval_point": self.prepared.eval_point,
            "device": self.prepared.device,
            "precision": self.prepared.precision,
            "ways": sorted(set(self.ways.values())),
            "run": None,
        }


@dataclass
class Job:
    """A run, ready to go. `advance` does one round; everything else is bookkeeping."""

    config: Config
    prepared: Prepared
    method: Method
    fed: Federation
    site: Site
    engine: LocalEngine
    model: nn.Module
    options: dict[str, Any]
    history: list[RoundRecord] = field(default_factory=list)
    seconds: float = 0.0
    watched: Clients | None = None  # whose accuracy counts (benign clients under attack); None: everybody's
    adversary: Adversary | None = None

    @property
    def malicious(self) -> list[int]:
        fixed = self.adversary is not None and not self.adversary.redraw
        return np.flatnonzero(self.adversary.malicious()).tolist() if fixed and self.adversary else []

    def advance(self) -> RoundRecord | None:
        """One round; its record if this round is evaluated."""
        begin = time.perf_counter()
        fed, last = self.fed, self.fed.round + 1 >= self.config.rounds
        cohort = fed.sample(self.config.participation)
        failures = len(fed.failures)
        self.method.round(fed, cohort)
        self.seconds += time.perf_counter() - begin
        fed.round += 1
        if not last and fed.round % self.config.eval_every:
            return None
        return self._record(len(cohort), len(fed.failures) - failures)

    def finish(self) -> RoundRecord | None:
        """The method's last word; a record if it had one."""
        begin, exchanges, failures = time.perf_counter(), len(self.fed.exchanges), len(self.fed.failures)
        self.method.finish(self.fed)
        self.seconds += time.perf_counter() - begin
        if len(self.fed.exchanges) == exchanges:
            return None
        return self._record(len(self.fed.alive), len(self.fed.failures) - failures, final=True)

    def _record(self, participants: int, failed: int, final: bool = False) -> RoundRecord:
        correct, count, loss, _ = self.evaluate()
        watched = (self.watched if self.watched is not None else self.fed.all).ids
        with_test = watched[count[watched] > 0]
        exchanges, losses = self.fed.exchanges, self.engine.losses.numpy()[watched]
        record = RoundRecord(
            round=self.fed.round,
            accuracy=Accuracy.of(correct[watched], count[watched]),
            test_loss=float(loss[with_test].mean()) if len(with_test) else float("nan"),
            train_loss=float(np.nanmean(losses)) if not np.isnan(losses).all() else float("nan"),
            bytes_down=sum(e.bytes_down for e in exchanges),
            bytes_up=sum(e.bytes_up for e in exchanges),
            seconds=self.seconds,
            participants=participants,
            failed=failed,
            removed=len(self.fed.removed),
            final=final,
        )
        self.history.append(record)
        return record

    def evaluate(self) -> tuple[Any, Any, Any, torch.Tensor]:
        """Correct answers, test samples and mean loss of every client's personal model, and the models [N, D].

        Measuring, not part of the protocol: nobody drops out, nothing is counted."""
        after = self.prepared.eval_point == "after_local"
        message = self.method.deliver_to_all(self.fed)
        ids = self.fed.all.ids
        answer = self.engine.call(ids, "report_after_local" if after else "report", message, self.fed.round, 1)
        values = {k: v for k, v in answer.replies.items() if isinstance(v, torch.Tensor)}
        correct, count = values["correct"].sum(1).cpu().numpy(), values["count"].sum(1).cpu().numpy()
        return correct, count, values["loss"].cpu().numpy(), values["rows"]

    def result(self) -> Result:
        if not self.history:
            raise UsageError("this run has no finished round yet: call advance() first")
        correct, count, loss, rows = self.evaluate()
        parts = self.site.parts
        with np.errstate(invalid="ignore", divide="ignore"):
            each = 100.0 * correct / count
        per_client = [
            ClientRecord(c, self.site.names[c], float(each[c]), float(loss[c]), len(parts["train"][c]),
                         int(count[c]), int(correct[c]))
            for c in self.fed.all
        ]  # fmt: skip
        best = max(self.history, key=lambda r: (r.accuracy.micro, -r.round))
        return Result(
            method=self.config.method, options=self.options, seed=self.config.seed, config=self.config,
            accuracy=self.history[-1].accuracy, best=best, history=self.history, per_client=per_client,
            exchanges=self.fed.exchanges, failures=self.fed.failures, removed=self.fed.removed, seconds=self.seconds,
            ways=self.site.chooser.chosen, prepared=self.prepared, notes=self.fed.notes, _layout=self.site.layout,
            _rows=rows.cpu(), _model=self.model, malicious=self.malicious,
        )  # fmt: skip


def prepare(
    config: Config,
    *,
    method: type[Method] | None = None,
    model: nn.Module | None = None,
    data: tuple[Dataset, Split] | None = None,
    tamper: Tamper | None = None,
    average: Average | None = None,
) -> Job:
    """Check everything, load the data, build the network; nothing trains yet.

    `tamper` and `average` replace what the configuration's attack and rule would do."""
    average = average or _rule(config)
    attack = None if config.attack == "none" else make_attack(*named_spec(config.attack))
    kind = method or METHODS[config.method]
    options = options_of(kind, config.options, config.method)
    opt = config.optimiser_of()
    device = pick_device(config.device)
    precision = pick_precision(config.precision, device)
    if config.validation_share is None:
        config = replace(config, validation_share=kind.holdout)
    dataset, split = data if data is not None else load_data(config)
    if config.augment and len(dataset.shape) != 3:
        raise UsageError(f"augment=true needs images; {dataset.name!r} has samples of shape {dataset.shape}")
    name = config.model or default_model(dataset.shape, dataset.vocabulary)
    network = model
    if network is None:
        network = build(name, dataset.shape, dataset.classes, dataset.vocabulary, config.seed)
    layout = Layout.of(network, config.head, config.buffers)
    adversary = None
    if attack is not None:
        redraw = config.attackers == "redrawn"
        adversary = Adversary(attack, split.clients, config.malicious, config.seed, config.knowledge, redraw)
        tamper = tamper or adversary.tamper
    source = Source(dataset.x, dataset.y, device, dataset.mean, dataset.std)
    sample = Source(dataset.x[:6], dataset.y[:6], torch.device("cpu"), dataset.mean, dataset.std)
    example = sample.batch(torch.arange(len(sample.y)))
    forward = trace(network, layout, example)
    initial = layout.row(network).to(device)
    _check_classes(forward, layout, initial, example, dataset.classes)
    point = kind.eval_point if config.eval_point == "auto" else config.eval_point
    site = Site(
        forward=forward, layout=layout, initial=initial, source=source,
        parts={"train": split.train, "validation": split.validation, "test": split.test}, names=split.names,
        classes=dataset.classes, seed=config.seed,
        training=Training(config.epochs, config.batch, opt, precision, config.augment),
        store=Store(split.clients, kind.keeps, layout, initial), chooser=Chooser(config.way),
        hold=point == "after_local",
    )  # fmt: skip
    if adversary is not None and isinstance(adversary.attack, DataAttack):
        x, y = adversary.poison(dataset.x, dataset.y, split.train, dataset.classes)
        source.add_version(None if np.array_equal(x, dataset.x) else x, y)
        site.poisoned = adversary.malicious
    engine = LocalEngine(site, kind(options), config.chunk)
    faults = Faults(config.drop, config.straggle, config.seed)
    samples = np.array([len(p) for p in split.train], np.int64)
    fed = Federation(
        engine, samples, seed=config.seed, faults=faults, average=average, tamper=tamper, names=split.names
    )
    fed.rounds = config.rounds
    server = kind(options)
    server.start(fed, layout, initial)
    resolved = replace(config, clients=split.clients, model=type(network).__name__ if model is not None else name)
    prepared = Prepared(resolved, split.clients, dataset.classes, split.hash, layout.parameters, str(device),
                        precision, point)  # fmt: skip
    job = Job(resolved, prepared, server, fed, site, engine, network, asdict(options), adversary=adversary)
    if adversary is not None and not adversary.redraw:
        job.watched = Clients(np.flatnonzero(~adversary.malicious()), samples)
    return job


def run_config(config: Config, *, on_event: Listener | None = None, **given: Any) -> Result:
    """Run to the end. `given`: see `prepare`."""
    job = prepare(config, **given)
    tell = on_event or (lambda event: None)
    tell(job.prepared)
    try:
        for _ in range(config.rounds):
            record = job.advance()
            if record is not None:
                tell(record)
        record = job.finish()
        if record is not None:
            tell(record)
        return job.result()
    finally:
        if torch.device(job.prepared.device).type == "cuda":
            graphs.forget()


def named_spec(spec: str) -> tuple[str, dict[str, str]]:
    """A name and its options: "lie:z=0.5,other=1"."""
    name, _, rest = spec.partition(":")
    pairs = [part.partition("=") for part in rest.split(",") if part]
    for key, equals, _value in pairs:
        if not equals:
            raise UsageError(f"{spec!r}: options are written name:key=value,key=value; {key!r} has no value")
    return name, {key: value for key, _, value in pairs}


def _rule(config: Config) -> Average:
    name, options = named_spec(config.rule)
    return weighted_mean if name == "mean" and not options else Watched(make_rule(name, options))


def load_data(config: Config) -> tuple[Dataset, Split]:
    """The data set and who has which part of it."""
    if Path(config.data).is_dir():
        return from_folder(config.data)
    kinds = config.shift.split(",") if config.shift and config.shift != "all" else config.shift
    for kind in kinds if isinstance(kinds, list) else []:
        if kind not in CORRUPTIONS:
            raise unknown("corruption", kind, [*CORRUPTIONS, "all"])
    dataset = load(config.data, config.data_dir)
    split = split_of(config, dataset)
    if kinds:
        dataset = apply_shift(dataset, split, kinds, config.severity, config.seed)
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


def pick_precision(name: str, device: torch.device) -> Literal["fp32", "tf32", "bf16"]:
    if name == "auto":
        return "tf32" if device.type == "cuda" else "fp32"
    if name == "tf32" and device.type != "cuda":
        raise UsageError("precision='tf32' is a GPU format; on this device use fp32")
    if name == "bf16" and device.type == "cpu":
        require_bf16()
    return name  # type: ignore[return-value]


def _check_classes(forward: Any, layout: Layout, row: torch.Tensor, example: torch.Tensor, classes: int) -> None:
    with torch.no_grad():
        logits = forward(layout.tensors(row.cpu().unsqueeze(0)), example, 1, Context()).logits
    if logits.shape[-1] < classes:
        raise UsageError(f"the network gives {logits.shape[-1]} outputs, the data have {classes} classes")


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row per method: mean and standard deviation over seeds, of macro accuracy and the rest."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.method, repr(sorted(result.options.items()))), []).append(result)
    return [_summarise(group) for group in groups.values()]


def _summarise(group: Sequence[Result]) -> dict[str, Any]:
    def stats(values: Iterable[float]) -> dict[str, float]:
        a = np.array(list(values), float)
        return {"mean": float(a.mean()), "std": float(a.std(ddof=1)) if len(a) > 1 else 0.0}

    return {
        "method": group[0].method,
        "options": group[0].options,
        "seeds": [r.seed for r in group],
        "eval_point": group[0].prepared.eval_point,
        **{k: stats(getattr(r.accuracy, k) for r in group) for k in ("macro", "micro", "worst_decile", "std")},
        "best_micro": stats(r.best.accuracy.micro for r in group),
        "megabytes": stats(sum(r.bytes.values()) / 1e6 for r in group),
        "seconds": stats(r.seconds for r in group),
    }
