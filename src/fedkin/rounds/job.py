"""A run in the making: one round after another, evaluated and recorded; what a checkpoint of it holds."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkin.config import Config
from fedkin.core import notes
from fedkin.core.cohort import Site
from fedkin.core.federation import NOT_FINITE, Clients, Each, Engine, Failure, Federation, Measured, Messages, Note
from fedkin.data import Split
from fedkin.engines.simulator import Simulator
from fedkin.errors import DataError, UsageError
from fedkin.methods import Method, options_of
from fedkin.methods.base import JUDGED, REPORTS
from fedkin.models import Samples
from fedkin.robust import Adversary, Backdoor
from fedkin.rounds import footprint
from fedkin.rounds.choices import point_of
from fedkin.rounds.clock import Clock
from fedkin.rounds.divergence import GUESSING, Broken, Refusal, at_chance, divergence, out_of_hand
from fedkin.rounds.records import Accuracy, ClientRecord, Prepared, RoundRecord, comparable
from fedkin.rounds.result import Result, Rows


@dataclass
class Job:
    """A run, ready to go. `advance` does one round; everything else is bookkeeping."""

    config: Config
    prepared: Prepared
    method: Method
    fed: Federation
    site: Site
    engine: Engine
    model: nn.Module
    samples: Samples
    options: dict[str, Any]
    sizes: Sequence[tuple[int, int]]  # training and test samples of each client
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
        watched, has = self._counted, self.measured.total[self._counted] > 0
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
            client_steps=self.engine.client_steps,
            **{part: self.clock.parts[part] for part in ("training", "evaluating", "writing")},
            wall=self.clock.wall,
            judged=0 if self.measured is None else int((self.measured.total[watched] > 0).sum()),
            judgeable=self._judgeable(),
            lr=self.site.training.rate(self.fed.round - 1),
        )
        self.history.append(record)
        return record

    def _judgeable(self) -> int:
        """How many clients an accuracy should be of."""
        return sum(self.sizes[c][1] > 0 and c not in self.fed.why_removed for c in self._counted.tolist())

    def evaluate(self, engine: Engine | None = None) -> Measured:
        """How every client's personal model does; no test samples where nobody knows.

        Measuring, not part of the protocol: nobody drops out, nothing is counted."""
        fed, report = self.fed, REPORTS[self.prepared.eval_point]
        ids = (fed.all - list(fed.why_removed)).ids
        found, missing = (engine or self.engine).measured(ids, report, self._messages(), fed.round)
        if missing:
            note = {"clients": list(missing), "reasons": list(missing.values()), "of": self._judgeable()}
            fed.notes.append(Note(max(0, fed.round - 1), notes.UNJUDGED.name, note))
        if len(ids) == len(fed.all):
            return found
        n = len(fed.all)
        everybody = Measured(np.zeros(n), np.zeros(n), np.full(n, np.nan))
        for values, known in zip(everybody, found, strict=True):
            values[ids] = known
        return everybody

    def rows(self, clients: Sequence[int] | None = None) -> torch.Tensor:
        """The personal models of these clients (none given: of all), as they are evaluated now, [K, D] on the CPU."""
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

    def evaluated_as(self, config: Config) -> Job:
        """This very training, evaluated as `config` says: at another point, or by another of the method's `outputs`.
        To be made before the first round; `evaluate_with` takes its records."""
        kind = type(self.method)
        options, point = options_of(kind, config.options, config.method), point_of(config, kind)
        self.site.hold = self.site.hold or point != "received"
        resolved = replace(self.config, options=config.options, eval_point=config.eval_point)
        return replace(
            self,
            config=resolved,
            prepared=replace(self.prepared, config=resolved, eval_point=point),
            method=kind(options),
            engine=Simulator(self.site, kind(options), config.chunk),
            options=asdict(options),
            history=[],
        )

    def evaluate_with(self, training: Job, record: RoundRecord) -> RoundRecord:
        """The training's newest record, with the accuracy of this way of evaluating."""
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
            self.measured = self.evaluate()
        correct, count, loss = self.measured
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
        client = type(self.method)(self.method.options)
        engine = Simulator(self.adversary.shown(self.site), client, self.config.chunk)
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
            "ways": {**self.site.chooser.state(), "client_steps": self.engine.client_steps},
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
        self.engine.client_steps = int(state["ways"]["client_steps"])
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
        with np.errstate(invalid="ignore", divide="ignore"):
            each = 100.0 * correct / count
        columns = zip(self.site.names, each.tolist(), loss.tolist(), self.sizes, count, correct, strict=True)
        per_client = [
            ClientRecord(c, name, accuracy, mean, size[0], int(of), int(right))
            for c, (name, accuracy, mean, size, of, right) in enumerate(columns)
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
