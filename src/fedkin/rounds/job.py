"""The round loop: draw a cohort, let the method work, evaluate, record. It knows no method, file or screen."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkin.compute import graphs
from fedkin.compute.backends import Precision
from fedkin.compute.batches import Source
from fedkin.compute.choice import Chooser
from fedkin.compute.layout import Layout
from fedkin.compute.optim import SGD, Adam, Optimiser
from fedkin.compute.probe import require_bf16
from fedkin.compute.program import Context, trace
from fedkin.config import Config, is_folder
from fedkin.core.cohort import Site, Store, Training
from fedkin.core.federation import (
    NOT_FINITE,
    Average,
    Clients,
    Each,
    Exchange,
    Failure,
    Faults,
    Federation,
    Note,
    Tamper,
    weighted_mean,
)
from fedkin.data import (
    CORRUPTIONS,
    Brought,
    Dataset,
    Own,
    Partition,
    Split,
    apply_shift,
    load,
    make_split,
    own_folder,
    remarks_on,
)
from fedkin.engines.simulator import LocalEngine, Messages
from fedkin.errors import DataError, UsageError, unknown
from fedkin.methods import METHODS, Method, options_of
from fedkin.methods.base import JUDGED, REPORTS
from fedkin.models import Given, Ready, Samples, build, default_model, first_network
from fedkin.robust import (
    Adversary,
    Backdoor,
    DataAttack,
    Desk,
    Detection,
    Watched,
    detection,
    make_attack,
    make_rule,
    verdicts_of,
)
from fedkin.rounds import footprint, inference
from fedkin.rounds.clock import Clock
from fedkin.rounds.divergence import GUESSING, Broken, Refusal, at_chance, divergence, out_of_hand
from fedkin.rounds.settings import idle, of_network, of_split, recorded, refuse


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
    """The state of a run after a round. `final` marks the one after the method's last fine-tuning.

    Times are since the start: `seconds` of the rounds themselves, of which `training` (what clients did when asked);
    `evaluating` and `writing` come on top; `wall` is what a stopwatch says, the preparing included."""

    round: int
    accuracy: Accuracy
    test_loss: float
    train_loss: float
    bytes_down: int  # since the start
    bytes_up: int
    seconds: float  # training, and the server's work
    participants: int
    failed: int  # in this round
    removed: int  # since the start
    final: bool = False
    client_steps: int = 0  # training steps of all clients, since the start
    training: float = math.nan  # NaN: written before FedKin kept these apart
    evaluating: float = math.nan
    writing: float = math.nan  # up to the round before
    wall: float = math.nan
    judged: int = 0  # clients that the accuracy is of
    judgeable: int = 0  # and that it should be of: where clients are elsewhere, some may not have answered

    @property
    def covers_all(self) -> bool:
        return self.judged >= self.judgeable

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RoundRecord:
        """From what `asdict` made of one."""
        return cls(**{**values, "accuracy": Accuracy(**values["accuracy"])})


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
    done: int = 0  # rounds that were done before, by a run that is resumed
    remarks: tuple[str, ...] = ()  # sentences a user should read before believing the numbers
    needed: footprint.Footprint | None = None  # memory and disk, as reckoned


@dataclass(frozen=True)
class Rows:
    """Every client's personal model as a row on the CPU, made when it is asked for."""

    clients: int
    make: Callable[[int], torch.Tensor]

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> torch.Tensor:
        if not 0 <= client < self.clients:
            raise IndexError(client)
        return self.make(client)


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
    seconds: float  # of the rounds: training, and the server's work
    ways: dict[str, str]
    prepared: Prepared
    notes: list[Note]
    malicious: list[int]  # the truth, for those who are malicious throughout
    _layout: Layout = field(repr=False)
    _rows: torch.Tensor | Rows = field(repr=False)  # [N, D] on the CPU
    _model: nn.Module = field(repr=False)
    _samples: Samples = field(repr=False)
    run: str | None = None  # the run's folder, if it has one
    backdoor: dict[str, float | None] | None = None  # success of the attack, in percent: personal, global
    remarks: list[str] = field(default_factory=list)  # sentences a user should read before believing the numbers
    wall: float = math.nan  # seconds from the beginning of preparing to the result
    times: dict[str, float] = field(default_factory=dict)  # its parts: see `clock.PARTS`
    diverged: str | None = None  # why the numbers are not to be believed
    memory: Mapping[str, int | None] = field(default_factory=dict)  # bytes: reckoned before, and at the most
    _adversary: Adversary | None = field(default=None, repr=False)

    @property
    def bytes(self) -> dict[str, int]:
        return {"down": sum(e.bytes_down for e in self.exchanges), "up": sum(e.bytes_up for e in self.exchanges)}

    def personal(self, client: int | str) -> Ready:
        """The model of a client, by number or name: an ordinary module in evaluation mode on the CPU, ready for use.

        It takes samples as the data had them (pixels as uint8 [n, C, H, W], which it normalises itself; numbers and
        token ids as they are) and gives class scores; `.network` is the network alone, `.names` the classes."""
        module = self._layout.load(copy.deepcopy(self._model), self._rows[self._number(client)])
        return Ready(module, self._samples).eval()

    def predict(self, x: Any, client: int | str) -> np.ndarray[Any, Any]:
        """What a client's model takes each of these samples for: labels as the data had them (whole numbers, or names).
        Samples are an array, tensor or list, not normalised."""
        return inference.labels(self.personal(client), x)

    def _number(self, client: int | str) -> int:
        names = [c.name for c in self.per_client]
        if isinstance(client, str):
            if client not in names:
                raise unknown("client", client, names)
            return names.index(client)
        if isinstance(client, bool) or not isinstance(client, int | np.integer) or not 0 <= client < len(names):
            raise UsageError(f"client {client!r}: this run has clients 0 to {len(names) - 1}")
        return client

    @property
    def detection(self) -> Detection | None:
        """Who was found out, against the truth; None without attackers, or where they change and nobody judges."""
        adversary = self._adversary
        if adversary is None or not adversary.malicious().any():
            return None
        truth = adversary.malicious if adversary.redraw else adversary.malicious()
        return detection(truth, verdicts_of(self.notes), self.removed)

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
            "wall": self.wall,
            "times": self.times,
            "diverged": self.diverged,
            "removed": {str(c): r for c, r in self.removed.items()},
            "failed": [asdict(f) for f in self.failures],
            "malicious": self.malicious,
            "detection": None if found is None else asdict(found.overall),
            "detection_rounds": None if found is None else {str(r + 1): asdict(v) for r, v in found.rounds.items()},
            "backdoor": self.backdoor,
            "gone": {} if found is None else {str(c): None if r is None else r + 1 for c, r in found.gone.items()},
            "config": self.config.to_dict(),
            "split": self.prepared.split_hash,
            "eval_point": self.prepared.eval_point,
            "device": self.prepared.device,
            "precision": self.prepared.precision,
            "ways": sorted(set(self.ways.values())),
            "remarks": self.remarks,
            "memory": dict(self.memory),
            "run": self.run,
        }


@dataclass(frozen=True, eq=False)
class Measured:
    """How every client's personal model did, [N]."""

    correct: Any
    count: Any
    loss: Any


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
    samples: Samples
    options: dict[str, Any]
    history: list[RoundRecord] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    refusals: list[Refusal] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)  # of the first record that has such a loss
    watched: Clients | None = None  # whose accuracy counts (benign clients under attack); None: everybody's
    adversary: Adversary | None = None
    split: Split | None = None
    measured: Measured | None = None  # what the newest record was made of
    finished: bool = False
    remarks: list[str] = field(default_factory=list)  # learned on the way; `Prepared` has those known before

    @property
    def seconds(self) -> float:
        """Of the rounds so far, without evaluating and writing."""
        return self.clock.rounds

    @property
    def malicious(self) -> list[int]:
        fixed = self.adversary is not None and not self.adversary.redraw
        return np.flatnonzero(self.adversary.malicious()).tolist() if fixed and self.adversary else []

    @property
    def _counted(self) -> np.ndarray[Any, Any]:
        """Whose accuracy counts."""
        return (self.watched if self.watched is not None else self.fed.all).ids

    def advance(self) -> RoundRecord | None:
        """One round; its record if this round is evaluated."""
        fed, last = self.fed, self.fed.round + 1 >= self.config.rounds
        cohort = fed.sample(self.config.participation)
        failures = len(fed.failures)
        with self._timed():
            self.method.round(fed, cohort)
        self._look_for_refusals(cohort, fed.failures[failures:])
        fed.round += 1
        if not last and fed.round % self.config.eval_every:
            return None
        return self._record(len(cohort), len(fed.failures) - failures)

    def finish(self) -> RoundRecord | None:
        """The method's last word; a record if it had one."""
        exchanges, failures = len(self.fed.exchanges), len(self.fed.failures)
        with self._timed():
            self.method.finish(self.fed)
        self.finished = True
        if len(self.fed.exchanges) == exchanges:
            return None
        return self._record(len(self.fed.alive), len(self.fed.failures) - failures, final=True)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """The rounds' own time: what `ask` took is training, what the federation's watcher took is writing."""
        fed, begin = self.fed, time.perf_counter()
        asked, watching = len(fed.exchanges), fed.watching
        yield
        trained, written = sum(e.seconds for e in fed.exchanges[asked:]), fed.watching - watching
        self.clock.add("training", trained)
        self.clock.add("writing", written)
        self.clock.add("server", max(0.0, time.perf_counter() - begin - trained - written))

    def _look_for_refusals(self, cohort: Clients, failures: Sequence[Failure]) -> None:
        """Which benign clients' replies were not finite in this round; those of attackers say nothing about the run."""
        bad = set() if self.adversary is None else set(np.flatnonzero(self.adversary.malicious(self.fed.round)))
        refused = [f for f in failures if NOT_FINITE in f.reason and f.client not in bad]
        if refused:
            who, asked = {f.client for f in refused}, {c for c in cohort if c not in bad}
            self.refusals.append(Refusal(self.fed.round + 1, len(who), len(asked | who), refused[0].reason))

    def _look_for_broken(self, training: np.ndarray[Any, Any]) -> None:
        """Whose loss is not finite, the first time that somebody's is not; NaN: not trained, but no test loss is NaN
        where there are test samples."""
        if self.broken or self.measured is None:
            return
        watched, has = self._counted, self.measured.count[self._counted] > 0
        test = np.where(has, np.nan_to_num(self.measured.loss[watched], nan=np.inf, posinf=np.inf), np.nan)
        for name, losses in (("training", training), ("test", test)):
            who = watched[np.isinf(losses)]
            if len(who):
                of = int((~np.isnan(losses)).sum())
                self.broken.append(Broken(self.fed.round, name, len(who), of, self.site.names[int(who[0])]))

    def _record(self, participants: int, failed: int, final: bool = False) -> RoundRecord:
        accuracy, test_loss = self._measure()
        watched = self._counted
        exchanges, losses = self.fed.exchanges, self.engine.losses.numpy()[watched]
        self._look_for_broken(losses)
        judged = 0 if self.measured is None else int((self.measured.count[watched] > 0).sum())
        record = RoundRecord(
            round=self.fed.round,
            accuracy=accuracy,
            test_loss=test_loss,
            train_loss=float(np.nanmean(losses)) if not np.isnan(losses).all() else float("nan"),
            bytes_down=sum(e.bytes_down for e in exchanges),
            bytes_up=sum(e.bytes_up for e in exchanges),
            seconds=self.seconds,
            participants=participants,
            failed=failed,
            removed=len(self.fed.removed),
            final=final,
            client_steps=self.site.chooser.client_steps,
            **{part: self.clock.parts[part] for part in ("training", "evaluating", "writing")},
            wall=self.clock.wall,
            judged=judged,
            judgeable=self.judgeable(judged),
        )
        self.history.append(record)
        return record

    def judgeable(self, judged: int) -> int:
        """Clients that an accuracy should be of; in one process, those that it is of."""
        return judged

    def evaluate(self, engine: LocalEngine | None = None) -> tuple[Any, Any, Any]:
        """Correct answers, test samples and mean loss of every client's personal model.

        Measuring, not part of the protocol: nobody drops out, nothing is counted."""
        ids, report = self.fed.all.ids, REPORTS[self.prepared.eval_point]
        values = (engine or self.engine).measured(ids, report, self._messages(), self.fed.round)
        correct, count = values["correct"].sum(1).cpu().numpy(), values["count"].sum(1).cpu().numpy()
        return correct, count, values["loss"].cpu().numpy()

    def rows(self, clients: Sequence[int] | None = None) -> torch.Tensor:
        """The personal models of these clients (none given: of all), as they are judged now, [K, D] on the CPU."""
        ids, point = self.fed.all.ids if clients is None else np.asarray(clients, np.int64), self.prepared.eval_point
        return self.engine.rows(ids, REPORTS[point], JUDGED[point], self._messages(), self.fed.round)

    def _messages(self) -> Messages:
        """What clients receive that want their models: made for those looked at together, unless the method makes it
        for all at once."""
        method, fed = self.method, self.fed
        if type(method).deliver_to_all is Method.deliver_to_all:
            return lambda ids: method.deliver_to(fed, fed.all[ids])
        whole = method.deliver_to_all(fed)
        return lambda ids: {
            k: Each(v.rows[torch.from_numpy(ids)]) if isinstance(v, Each) else v for k, v in whole.items()
        }

    def _models(self) -> torch.Tensor | Rows:
        """The personal models for a result: all of them if they are small, else whichever is asked for."""
        clients, then = len(self.fed.all), (self.fed.round, len(self.fed.exchanges))
        if clients * self.site.layout.width * 4 <= footprint.MODELS_AT_ONCE:
            return self.rows()

        def make(client: int) -> torch.Tensor:
            if then != (self.fed.round, len(self.fed.exchanges)):
                raise UsageError(
                    f"this result is of round {then[0]}, and its run has gone on since: take its models "
                    "before, or call result() again"
                )
            return self.rows([client])[0]

        return Rows(clients, make)

    def beside(self, config: Config) -> Job:
        """This very training, to be judged as `config` says: at another point, or by another of the method's
        `outputs`. To be made before the first round; `judge` takes its records."""
        kind = type(self.method)
        options, point = options_of(kind, config.options, config.method), point_of(config, kind)
        self.site.hold = self.site.hold or point != "received"
        resolved = replace(self.config, options=config.options, eval_point=config.eval_point)
        return replace(
            self,
            config=resolved,
            prepared=replace(self.prepared, config=resolved, eval_point=point),
            method=kind(options),
            engine=LocalEngine(self.site, kind(options), config.chunk),
            options=asdict(options),
            history=[],
        )

    def judge(self, training: Job, record: RoundRecord) -> RoundRecord:
        """The training's newest record, with the accuracy of this way of judging."""
        made = training.method
        if self.options != training.options:
            made = type(made)(self.method.options)
            for name, value in training.method.state().items():
                if name not in vars(made):  # what a method has from the start follows from its options
                    setattr(made, name, value)
        self.method, self.finished = made, training.finished
        accuracy, test_loss = self._measure()
        self.history.append(replace(record, accuracy=accuracy, test_loss=test_loss))
        return self.history[-1]

    def _measure(self) -> tuple[Accuracy, float]:
        """The accuracy of those whose accuracy counts, and their mean loss: infinite if somebody's is not a number,
        NaN where nobody has test samples."""
        with self.clock.counting("evaluating"):
            correct, count, loss = self.evaluate()
        self.measured = Measured(correct, count, loss)
        watched = self._counted
        with_test = watched[count[watched] > 0]
        each = np.where(np.isnan(loss[with_test]), np.inf, loss[with_test])
        mean = float(each.mean()) if len(with_test) else math.nan
        return Accuracy.of(correct[watched], count[watched]), mean

    def _chance(self) -> float:
        """Percent of the test samples that count that a model gets right which always says the same."""
        source, parts = self.site.source, self.site.parts["test"]
        rows = np.concatenate([np.zeros(0, np.int64), *(parts[c] for c in self._counted)])
        labels = source.y.cpu().numpy()[rows % max(source.count, 1)]  # an attacker's version is that sample
        return 100.0 * np.bincount(labels).max() / len(labels) if len(labels) else 100.0 / self.prepared.classes

    def _first_loss(self, most: int = 2000) -> float:
        """Mean test loss of the network the run began with, over as many samples as tell it well enough."""
        source, parts = self.site.source, self.site.parts["test"]
        rows = np.concatenate([np.zeros(0, np.int64), *(parts[c] for c in self._counted)])
        if not len(rows):
            return 0.0
        few = torch.from_numpy(rows[:: math.ceil(len(rows) / most)] % max(source.count, 1)).to(source.y.device)
        network = copy.deepcopy(self.model).eval()
        with torch.no_grad():
            pieces = [network(source.batch(part).cpu().contiguous()) for part in torch.split(few, 100)]
            return float(nn.functional.cross_entropy(torch.cat(pieces), source.y[few].cpu()))

    def backdoor(self) -> dict[str, float | None] | None:
        """How often test samples of other classes are taken for the target once they carry the trigger, in percent:
        by the personal models that count, and by the common model if there is one; None without a backdoor."""
        if self.adversary is None or not isinstance(self.adversary.attack, Backdoor):
            return None
        engine = self.engine.elsewhere(self.adversary.shown(self.site))
        ids = self._counted

        def success(correct: Any, count: Any) -> float:
            return float(100 * correct[ids].sum() / count[ids].sum()) if count[ids].sum() else float("nan")

        personal, common = success(*self.evaluate(engine)[:2]), self.method.common()
        return {"personal": personal, "global": success(*engine.scored(self.fed.all.ids, common)) if common else None}

    # ------------------------------------------------------------ what a checkpoint holds

    def state(self) -> dict[str, Any]:
        """Everything the coming rounds depend on, as plain values and tensors: `restore` on a job that was prepared
        the same way goes on as this one would."""
        fed = self.fed
        return {
            "round": fed.round,
            "finished": self.finished,
            "seconds": self.seconds,
            "clock": self.clock.state(),
            "refusals": [asdict(r) for r in self.refusals],
            "broken": [asdict(b) for b in self.broken],
            "method": self.method.state(),
            "clients": self.site.store.state(),
            "losses": self.engine.losses,
            "ways": self.site.chooser.state(),
            "history": [asdict(r) for r in self.history],
            "remarks": list(self.remarks),
            "federation": fed.state(),
            "generators": generators(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        fed, store = self.fed, self.site.store
        kind = type(self.method)
        for name in state["method"]:
            if not name.isidentifier() or name.startswith("__") or callable(getattr(kind, name, None)):
                raise DataError(f"the saved state sets {name!r}, which is no memory of {kind.__name__}")
        gone = [n for n in vars(self.method) if n != "options" and n not in state["method"]]
        if gone and kind.__module__.startswith("fedkin."):  # none of these forgets; a method of one's own may
            raise DataError(
                f"the saved state has no {gone[0]!r}, which {kind.__name__} needs: another version of "
                "FedKin wrote it; start a new run, or go on with that version"
            )
        for name in gone:
            delattr(self.method, name)
        for name, value in state["method"].items():
            setattr(self.method, name, value)
        store.restore(state["clients"])
        self.engine.losses = state["losses"]
        self.site.chooser.restore(state["ways"])
        self.history = [RoundRecord.of(r) for r in state["history"]]
        self.remarks = list(state.get("remarks", []))
        self.finished = bool(state["finished"])
        self.refusals = [Refusal(**r) for r in state.get("refusals", [])]
        self.broken = [Broken(**b) for b in state.get("broken", [])]
        known = {"training": state["seconds"], "wall": state["seconds"]}  # all that older checkpoints say
        self.clock.restore(state.get("clock", known))
        if "clock" not in state:
            self.remarks.append(
                f"{state['round']} rounds were done by a version that timed nothing else: the wall "
                "clock leaves out what went into their preparing, evaluating and writing"
            )
        fed.restore(state["federation"])
        fed.round = int(state["round"])
        set_generators(state["generators"])

    def result(self) -> Result:
        if not self.history:
            raise UsageError("this run has no finished round yet: call advance() first")
        with self.clock.counting("evaluating"):
            correct, count, loss = self.evaluate()
            rows = self._models()
            taken = self.backdoor()
        parts = self.site.parts
        with np.errstate(invalid="ignore", divide="ignore"):
            each = 100.0 * correct / count
        per_client = [
            ClientRecord(
                c,
                self.site.names[c],
                float(each[c]),
                float(loss[c]),
                len(parts["train"][c]),
                int(count[c]),
                int(correct[c]),
            )
            for c in self.fed.all
        ]
        attacked, classes, chance = self.adversary is not None, self.prepared.classes, self._chance()
        diverged = divergence(self.history, self.refusals, classes, chance, attacked, self.broken, self._first_loss)
        remarks = [*self.prepared.remarks, *self.remarks]
        if diverged is not None:
            remarks.append(f"diverged: {diverged}")
        elif not attacked and at_chance(self.history[-1], classes, chance):
            remarks.append(f"accuracy is no more than {GUESSING} ({chance:.2f} %): no sign of learning yet")
        elif not attacked and (odd := out_of_hand(self.history[-1], classes, self._first_loss)) is not None:
            remarks.append(odd)
        best = max(comparable(self.history), key=lambda r: (r.accuracy.micro, -r.round))
        return Result(
            method=self.config.method,
            options=self.options,
            seed=self.config.seed,
            config=self.config,
            accuracy=self.history[-1].accuracy,
            best=best,
            history=self.history,
            per_client=per_client,
            exchanges=self.fed.exchanges,
            failures=self.fed.failures,
            removed=self.fed.removed,
            seconds=self.seconds,
            ways=self.site.chooser.chosen,
            prepared=self.prepared,
            notes=self.fed.notes,
            _layout=self.site.layout,
            _rows=rows,
            _model=self.model,
            _samples=self.samples,
            malicious=self.malicious,
            _adversary=self.adversary,
            backdoor=taken,
            remarks=remarks,
            diverged=diverged,
            wall=self.clock.wall,
            times=dict(self.clock.parts),
            memory=footprint.memory_facts(self.prepared.needed, self.site.source.device),
        )


def comparable(history: Sequence[RoundRecord]) -> list[RoundRecord]:
    """The records whose accuracy is of everybody; if there is none, those that come closest. One that leaves the
    weakest out would look best."""
    most = max(1.0 if r.covers_all else r.judged / r.judgeable for r in history)
    return [r for r in history if (1.0 if r.covers_all else r.judged / r.judgeable) >= most]


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
    engine = LocalEngine(site, kind(options), config.chunk)
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


def network_of(config: Config, dataset: Dataset, model: Given | None) -> tuple[nn.Module, str, list[str]]:
    """The network a run starts with, what it is called, and what is to be said about its first weights."""
    if model is not None:
        network, remark = first_network(model, config.seed, config.init)
        return network, type(network).__name__, [remark] if remark is not None else []
    if config.init == "given":
        raise UsageError(
            "init='given' keeps the weights of a network of your own (model=Net() from Python); a named "
            "one has none to keep"
        )
    name = config.model or default_model(dataset.shape, dataset.vocabulary)
    return build(name, dataset.shape, dataset.classes, dataset.vocabulary, config.seed), name, []


AfterRound = Callable[[Job, RoundRecord | None], None]
"""Told after every round, evaluated or not, before anybody else; it may end the run by raising."""


def run_config(config: Config, *, on_event: Listener | None = None, **given: Any) -> Result:
    """Run to the end. `given`: see `prepare`."""
    return drive(prepare(config, **given), on_event)


def drive(job: Job, on_event: Listener | None = None, after_round: AfterRound | None = None) -> Result:
    """The rounds that are left of a job, and its result."""
    tell, look = on_event or (lambda event: None), after_round or (lambda job, record: None)
    tell(replace(job.prepared, done=job.fed.round))
    try:
        while not job.finished:
            record = job.advance() if job.fed.round < job.config.rounds else job.finish()
            with job.clock.counting("writing"):
                look(job, record)
            if record is not None:
                tell(record)
        return job.result()
    finally:
        if torch.device(job.prepared.device).type == "cuda" and not job.site.chooser.shared:
            graphs.forget()


def generators() -> dict[str, Any]:
    """The state of the global generators. FedKin draws from none of them; a method of one's own may."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    kind, words, gauss = random.getstate()
    found = {"torch": torch.get_rng_state(), "numpy": numpy, "python": [kind, list(words), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_generators(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    kind, words, gauss = state["python"]
    random.setstate((kind, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def named_spec(spec: str) -> tuple[str, dict[str, str]]:
    """A name and its options: "lie:z=0.5,other=1"."""
    name, _, rest = spec.partition(":")
    pairs = [part.partition("=") for part in rest.split(",") if part]
    for key, equals, _value in pairs:
        if not equals:
            raise UsageError(f"{spec!r}: options are written name:key=value,key=value; {key!r} has no value")
    return name, {key: value for key, _, value in pairs}


def point_of(config: Config, kind: type[Method]) -> str:
    """When models are judged."""
    return kind.eval_point if config.eval_point == "auto" else config.eval_point


def optimiser_of(config: Config) -> Optimiser:
    if config.optimiser == "adam":
        if config.momentum:
            raise UsageError(f"momentum={config.momentum} goes with optimiser sgd; adam has its own")
        return Adam(config.lr, weight_decay=config.weight_decay)
    return SGD(config.lr, config.momentum, config.weight_decay)


def training_of(config: Config, precision: Precision) -> Training:
    """How the configuration's clients train, in the simulator and at a site alike."""
    fixed = config.order == "fixed"
    return Training(config.epochs, config.batch, optimiser_of(config), precision, config.augment, fixed)


def average_of(config: Config) -> Average:
    """How the configuration's rule combines what clients send."""
    name, options = named_spec(config.rule)
    return weighted_mean if name == "mean" and not options else Watched(make_rule(name, options))


def load_data(
    config: Config, known: dict[str, Dataset] | None = None, brought: Brought | None = None
) -> tuple[Dataset, Split]:
    """The data set and who has which part of it. `known`: data sets read before, filled here. `brought`: data that
    come as Python objects, in place of those that the configuration names."""
    kinds = config.shift.split(",") if config.shift and config.shift != "all" else config.shift
    for kind in kinds if isinstance(kinds, list) else []:
        if kind not in CORRUPTIONS:
            raise unknown("corruption", kind, [*CORRUPTIONS, "all"])
    what = brought.what if brought is not None else own_folder(config.data) if is_folder(config.data) else None
    if isinstance(what, Own):
        dataset, split = what.split(
            seed=config.seed,
            test_share=config.test_share,
            validation_share=config.validation_share or 0.0,
            samples_per_client=config.samples_per_client,
            quantity_skew=config.quantity_skew,
        )
    elif isinstance(what, tuple):
        dataset, split = what[0], replace(what[1], partition="")
    else:
        known, key = {} if known is None else known, f"{config.data}\n{config.data_dir}"
        if what is None:
            what = known[key] if key in known else known.setdefault(key, load(config.data, config.data_dir))
        dataset, split = what, split_of(config, what, brought.partition if brought is not None else None)
    refuse(config, of_split(config, split))
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


def pick_precision(name: str, device: torch.device) -> Precision:
    if name == "auto":
        return "tf32" if device.type == "cuda" else "fp32"
    if name == "tf32" and device.type != "cuda":
        raise UsageError("precision='tf32' is a GPU format; on this device use fp32")
    if name == "bf16" and device.type == "cpu":
        require_bf16()
    return name  # type: ignore[return-value]


def check_outputs(forward: Any, layout: Layout, row: torch.Tensor, example: torch.Tensor, classes: int) -> None:
    """A network needs an output for every class."""
    with torch.no_grad():
        logits = forward(layout.tensors(row.cpu().unsqueeze(0)), example, 1, Context()).logits
    if logits.shape[-1] < classes:
        raise UsageError(f"the network gives {logits.shape[-1]} outputs, the data have {classes} classes")
