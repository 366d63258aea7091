"""A run in the making: one round after another, evaluated and recorded."""

from __future__ import annotations

import copy
import math
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
from fedkin.core.federation import Engine, Failure, Federation, Measured, Messages, Note
from fedkin.core.messages import NOT_FINITE, Clients, for_some
from fedkin.data import Split
from fedkin.engines.simulator import Simulator
from fedkin.errors import UsageError
from fedkin.methods import Method, options_of
from fedkin.methods.base import EVALUATED, REPORTS
from fedkin.models import Samples
from fedkin.robust import Adversary
from fedkin.rounds import validation
from fedkin.rounds.choices import point_of
from fedkin.rounds.clock import Clock
from fedkin.rounds.divergence import BrokenLosses, Refusal
from fedkin.rounds.memory import restoring, state_of
from fedkin.rounds.records import Accuracy, Prepared, RoundRecord, best_on_validation
from fedkin.rounds.result import Result, result_of
from fedkin.rounds.validation import Snapshot
from fedkin.rounds.warm import Taken


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
    counted: Clients  # whose accuracy counts: everybody's; under attack that of the benign
    history: list[RoundRecord] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    refusals: list[Refusal] = field(default_factory=list)
    broken: list[BrokenLosses] = field(default_factory=list)  # of the first record that has such a loss
    adversary: Adversary | None = None
    split: Split | None = None
    taken: Taken | None = None  # what it began with that another run has learnt
    measured: Measured | None = None  # what the newest record was made of
    kept: Snapshot | None = None  # of the best round so far, where its models are the result
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
    def stopped(self) -> int | None:
        """After which round training stopped early, since validation scores got no better; None: it has not."""
        return validation.stopped(self.history, self.config)

    @property
    def no_rounds_left(self) -> bool:
        """All rounds are done that there will be: what is left is `finish`."""
        return self.fed.round >= self.config.rounds or self.stopped is not None

    @property
    def last_round(self) -> int:
        """After which round training ends, as far as is known."""
        return self.stopped or self.config.rounds

    def advance(self) -> RoundRecord | None:
        """One round; its record if this round is evaluated."""
        fed, last = self.fed, self.fed.round + 1 >= self.config.rounds
        cohort = fed.sample(self.config.participation)
        failures = len(fed.failures)
        with self._timed():
            self.method.round(fed, cohort)
        self._check_for_refusals(cohort, fed.failures[failures:])
        fed.round += 1
        if not last and fed.round % self.config.eval_every:
            return None
        return self._record(len(cohort), len(fed.failures) - failures)

    def finish(self) -> RoundRecord | None:
        """The method's last word; a record if it had one."""
        exchanges, failures = len(self.fed.exchanges), len(self.fed.failures)
        if self.adversary is not None:
            self.adversary.rounds = self.fed.round
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

    def _check_for_refusals(self, cohort: Clients, failures: Sequence[Failure]) -> None:
        """Which benign clients' replies were not finite in this round; those of attackers say nothing about the run."""
        bad = set() if self.adversary is None else set(np.flatnonzero(self.adversary.malicious(self.fed.round)))
        refused = [f for f in failures if NOT_FINITE in f.reason and f.client not in bad]
        if refused:
            who, asked = {f.client for f in refused}, {c for c in cohort if c not in bad}
            self.refusals.append(Refusal(self.fed.round + 1, len(who), len(asked | who), refused[0].reason))

    def _check_for_broken_losses(self, training: np.ndarray[Any, Any]) -> None:
        """Whose loss is not finite, the first time that somebody's is not; NaN: not trained, but no test loss is NaN
        where there are test samples."""
        if self.broken or self.measured is None:
            return
        ids, has = self.counted.ids, self.measured.total[self.counted.ids] > 0
        test = np.where(has, np.nan_to_num(self.measured.loss[ids], nan=np.inf, posinf=np.inf), np.nan)
        for name, losses in (("training", training), ("test", test)):
            who = ids[np.isinf(losses)]
            if len(who):
                of = int((~np.isnan(losses)).sum())
                self.broken.append(BrokenLosses(self.fed.round, name, len(who), of, self.site.names[int(who[0])]))

    def _record(self, participants: int, failed: int, final: bool = False) -> RoundRecord:
        told, ids, exchanges = self._measure(), self.counted.ids, self.fed.exchanges
        losses = self.engine.losses.numpy()[ids]
        self._check_for_broken_losses(losses)
        record = RoundRecord(
            **told,
            round=self.fed.round,
            train_loss=float(np.nanmean(losses)) if not np.isnan(losses).all() else float("nan"),
            bytes_down=sum(e.bytes_down for e in exchanges),
            bytes_up=sum(e.bytes_up for e in exchanges),
            seconds=self.seconds,
            participants=participants,
            failed=failed,
            removed=len(self.fed.removed),
            final=final,
            client_steps=self.engine.client_steps,
            training=self.clock.parts["training"],
            evaluating=self.clock.parts["evaluating"],
            writing=self.clock.parts["writing"],
            wall=self.clock.wall,
            judged=0 if self.measured is None else int((self.measured.total[ids] > 0).sum()),
            judgeable=self._judgeable(),
            lr=self.site.training.rate(self.fed.round - 1),
        )
        self.history.append(record)
        if self.config.keep == "best" and best_on_validation(self.history) is record:
            self.kept = None  # before there is another one
            self.kept = validation.Snapshot.of(self, record)
        return record

    def as_kept(self) -> Job:
        """This job as it was when the models were made that are its result, to look at them: the job itself, but with
        keep=best that of the best round on validation samples, where these could be scored."""
        if self.kept is None or self.kept.record(self.history) is self.history[-1]:
            return self
        then, method, fed = self.kept, type(self.method)(self.method.options), copy.copy(self.fed)
        vars(method).update(then.method)
        fed.round = then.round
        fed.removed = {c: at for c, at in fed.removed.items() if at < then.round}
        fed.why_removed = {c: why for c, why in fed.why_removed.items() if c in fed.removed}
        store = copy.copy(self.site.store)
        store.restore(then.clients)
        site = replace(self.site, store=store)
        engine = Simulator(site, type(method)(method.options), self.config.chunk)
        return replace(self, method=method, fed=fed, site=site, engine=engine, kept=None)

    def _judgeable(self) -> int:
        """How many clients an accuracy should be of."""
        return sum(self.sizes[c][1] > 0 and c not in self.fed.why_removed for c in self.counted)

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
        return found.spread(ids, len(fed.all))

    def rows(self, clients: Sequence[int] | None = None) -> torch.Tensor:
        """The personal models of these clients (none given: of all), as they are evaluated now, [K, D] on the CPU."""
        ids, point = self.fed.all.ids if clients is None else np.asarray(clients, np.int64), self.prepared.eval_point
        return self.engine.rows(ids, REPORTS[point], EVALUATED[point], self._messages(), self.fed.round)

    def _messages(self) -> Messages:
        """What clients receive that want their models: made for those looked at together, unless the method makes it
        for all at once."""
        method, fed = self.method, self.fed
        if type(method).deliver_to_all is Method.deliver_to_all:
            return lambda ids: method.deliver_to(fed, fed.all[ids])
        whole = method.deliver_to_all(fed)
        return lambda ids: for_some(whole, torch.from_numpy(ids))

    def evaluated_as(self, config: Config) -> Job:
        """This very training, evaluated as `config` says: at another point, or by another of the method's `outputs`.
        To be made before the first round; `evaluate_with` takes its records."""
        method_class = type(self.method)
        options, point = options_of(method_class, config.options, config.method), point_of(config, method_class)
        self.site.hold = self.site.hold or point != "received"
        resolved = replace(self.config, options=config.options, eval_point=config.eval_point)
        return replace(
            self,
            config=resolved,
            prepared=replace(self.prepared, config=resolved, eval_point=point),
            method=method_class(options),
            engine=Simulator(self.site, method_class(options), config.chunk),
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
        self.history.append(replace(record, **self._measure()))
        return self.history[-1]

    def _measure(self) -> dict[str, Any]:
        """What a record says of the models, on test and on validation samples."""
        with self.clock.counting("evaluating"):
            self.measured = self.evaluate()
        accuracy, loss, metrics = self._averaged(self.measured)
        found: dict[str, Any] = {"accuracy": accuracy, "test_loss": loss, "metrics": metrics}
        if (aside := self.measured.validation) is not None:
            accuracy, loss, metrics = self._averaged(aside)
            found |= {"validation": accuracy, "validation_loss": loss, "validation_metrics": metrics}
            found["validated"] = int((aside.total[self.counted.ids] > 0).sum())
        return found

    def _averaged(self, measured: Measured) -> tuple[Accuracy, float, dict[str, float]]:
        """The accuracy of those whose accuracy counts, their mean loss (infinite if somebody's is not a number, NaN
        where nobody has samples), and the other metrics, each over the clients of which it can be computed."""
        count, ids = measured.total, self.counted.ids
        has = ids[count[ids] > 0]
        each = np.where(np.isnan(measured.loss[has]), np.inf, measured.loss[has])
        mean = float(each.mean()) if len(has) else math.nan
        columns = zip(self.prepared.extra, measured.extra[ids].T, strict=False)
        known = {m.name: found[~np.isnan(found)] for m, found in columns}
        others = {name: float(found.mean()) if len(found) else math.nan for name, found in known.items()}
        return Accuracy.of(measured.correct[ids], count[ids], self.prepared.metric), mean, others

    # ------------------------------------------------------------ what comes of it

    def state(self) -> dict[str, Any]:
        return state_of(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where a run that was prepared the same way gave this; `DataError`, and nothing changes, if it is of
        another."""
        restoring(self, state)()

    def result(self) -> Result:
        if not self.history:
            raise UsageError("this run has no finished round yet: call advance() first")
        return result_of(self)
