"""Clients that come when a run is over: each gets a model by the method's own recipe, and nobody else's changes.

They are clients of a federation of their own, with the numbers that come after those of the run. Its server half is a
copy of what the run's server has, with room for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import keys
from fedkin.compute.batches import Source
from fedkin.config import Config
from fedkin.core.cohort import Site
from fedkin.core.federation import Engine, Federation, Measured
from fedkin.core.schedules import parse_factors
from fedkin.data import Dataset, OwnClients, Preparing
from fedkin.data.clients import OwnClient, split_client, together
from fedkin.data.dataset import Array, numbered
from fedkin.data.encoding import aligned
from fedkin.data.fitting import fit
from fedkin.engines.simulator import Simulator
from fedkin.errors import DataError, UsageError
from fedkin.methods import Method
from fedkin.methods.base import EVALUATED, REPORTS
from fedkin.models import Samples
from fedkin.parts import words_of
from fedkin.preparation import Preparation
from fedkin.rounds import inference
from fedkin.rounds.assemble import Parts, make_site
from fedkin.rounds.trained import Trained
from fedkin.rounds.trial import check_ids
from fedkin.tasks import Metric

Rows = tuple[keys.I64, keys.I64]  # training and test rows of a client


@dataclass(frozen=True)
class Trial:
    """How a newcomer's model does on its own test samples, after training on so many samples; 0: before any."""

    client: str
    samples: int
    accuracy: float  # the task's main metric, as it is shown; NaN without test samples
    loss: float
    test_samples: int


@dataclass(frozen=True, eq=False)
class Arrived:
    """What came of newcomers: their trials, and their models as rows, made with all samples that they bring."""

    trials: list[Trial]
    rows: Tensor  # [M, D] on the CPU
    names: tuple[str, ...]
    metric: Metric
    epochs: int
    remarks: list[str] = field(default_factory=list)
    preparations: tuple[Preparation, ...] = ()  # of their tables


def arrive(trained: Trained, brought: OwnClients, counts: Sequence[int] = (), epochs: int | None = None) -> Arrived:
    """Models for clients with these data; `counts`: also with so many of their training samples alone."""
    for count in counts:
        if count < 1:
            raise UsageError(f"samples={count}: give numbers of training samples from 1 on")
    if epochs is not None and epochs < 1:
        raise UsageError(f"epochs={epochs}: must be at least 1")
    known = [name for name in trained.names if name in {part.name for part in brought.parts}]
    if known:
        raise UsageError(f"client {known[0]!r} was in the run: give a newcomer a name of its own")
    dataset, each = _as_in_the_run(trained, brought)
    names, remarks = tuple(part.name for part in brought.parts), list[str]()
    method = trained.method
    epochs = method.settle_epochs(trained.config.epochs) if epochs is None else epochs
    source = Source(dataset.x, dataset.y, trained.device, dataset.mean, dataset.std)

    def some(train: keys.I64, count: int) -> keys.I64:
        """So many of a client's training rows by lot, with more of them those and others."""
        lot = keys.key(trained.config.seed, "newcomer", len(trained.names))  # whoever else comes
        return train[np.sort(keys.permutation(lot, len(train))[:count])]

    def settled(count: int | None) -> _Late:
        few = [(train if count is None else some(train, count), test) for train, test in each]
        return _Late(trained, dataset, source, names, few, epochs)

    everything = settled(None)
    metric = everything.site.task.metric
    places = range(len(names))
    trials = everything.trials(everything.before(), places, 0)
    for count in sorted({*counts}):
        enough = [place for place in places if len(each[place][0]) >= count]
        few = [names[place] for place in places if place not in enough]
        if few:
            remarks.append(f"{', '.join(few)}: fewer than {count} training samples, so no accuracy with so many")
        if enough:
            late = settled(count)
            trials += late.trials(late.settle(), enough, count)
    measured = everything.settle()
    trials += [t for place in places for t in everything.trials(measured, [place], len(each[place][0]))]
    unserved = [f"{names[f.client - everything.first]}: {f.reason}" for f in everything.fed.failures]
    trials = sorted(
        {(t.client, t.samples): t for t in trials}.values(), key=lambda t: (names.index(t.client), t.samples)
    )
    return Arrived(trials, everything.rows(), names, metric, epochs, remarks + unserved, dataset.preparations)


def late_config(trained: Trained, epochs: int, newcomers: int) -> Config:
    """The run's settings for so many that come late: no schedule has a say in how they train."""
    config = trained.config
    listed = isinstance(parse_factors(config.lr_factors), list) and config.lr_factors != "same"
    factors = "+".join([config.lr_factors, *["1"] * newcomers]) if listed else config.lr_factors
    rounds = max(config.rounds, trained.round + 1)  # theirs comes after those of the run
    return replace(config, epochs=epochs, rounds=rounds, lr_schedule="constant", lr_factors=factors)


class Welcome:
    """A federation of newcomers alone, wherever they are, numbered after the clients of the run. `site` has room for
    them, and `sizes` are their training samples."""

    def __init__(
        self, trained: Trained, site: Site, engine: Engine, names: Sequence[str], sizes: Sequence[int]
    ) -> None:
        self.trained, self.site, self.engine, self.first = trained, site, engine, len(trained.names)
        self.ids = np.arange(self.first, self.first + len(names))
        samples = np.array([*trained.sizes, *sizes], np.int64)
        self.fed = Federation(engine, samples, seed=trained.config.seed, names=[*trained.names, *names])
        self.fed.round, self.fed.rounds = trained.round, trained.config.rounds
        self.method = self._with_room(trained.method)
        self.fed.removed = dict.fromkeys(range(self.first), 0)  # whoever asks all asks newcomers alone

    def _with_room(self, method: Method) -> Method:
        """A copy of the server half that also has a place for each newcomer where it has one for each client."""
        made, clients = type(method)(method.options), self.first + len(self.ids)
        made.start(self.fed, self.site.layout, self.site.initial)
        state = copy.deepcopy(method.state())
        for name, new in made.state().items():
            old, both = state.get(name), (clients, self.first)
            if isinstance(new, Tensor) and isinstance(old, Tensor) and old.dim() and new.dim() == old.dim():
                fits = (len(new), len(old)) == both and new.shape[1:] == old.shape[1:]
                state[name] = torch.cat([old, new[self.first :].to(old)]) if fits else old
        vars(made).update(state)
        return made

    def settle(self) -> Measured:
        """Of their own models."""
        self.method.welcome(self.fed, self.fed.all[self.ids])
        self.fed.round += 1
        return self.measured(self.trained.eval_point)

    def measured(self, point: str) -> Measured:
        return self.engine.measured(self.ids, REPORTS[point], self.deliver, self.fed.round)[0]

    def deliver(self, ids: keys.I64) -> dict[str, object]:
        """What newcomers receive that want their models."""
        return self.method.deliver_to(self.fed, self.fed.all[ids])


class _Late(Welcome):
    """Newcomers in this process, each with some of its training samples."""

    def __init__(
        self,
        trained: Trained,
        dataset: Dataset,
        source: Source,
        names: Sequence[str],
        each: Sequence[Rows],
        epochs: int,
    ) -> None:
        none, method = [np.zeros(0, np.int64)] * len(trained.names), trained.method
        train, test = ([of[part] for of in each] for part in (0, 1))
        parts: Parts = {"train": none + train, "validation": none + none[:1] * len(each), "test": none + test}
        self.names, self._tests = names, [len(test) for _, test in each]
        check_ids(trained.network, source, parts, [*trained.names, *names])
        site = make_site(
            late_config(trained, epochs, len(names)),
            type(method),
            trained.network,
            dataset,
            source,
            parts,
            [*trained.names, *names],
            trained.precision,  # type: ignore[arg-type]
            task=trained.task,
            initial=trained.first(),
        )
        engine = Simulator(site, type(method)(method.options), trained.config.chunk)
        super().__init__(trained, site, engine, names, [len(train) for train, _ in each])

    def before(self) -> Measured:
        """Of what a newcomer would have without any data: the shared model, or else what the method starts with."""
        common, point = self.method.common(), "received"
        if common:
            plain = Simulator(self.site, Method(), self.trained.config.chunk)
            return plain.measured(self.ids, REPORTS[point], lambda ids: common, self.fed.round)[0]
        return self.measured(point)

    def rows(self) -> Tensor:
        point = self.trained.eval_point
        return self.engine.rows(self.ids, REPORTS[point], EVALUATED[point], self.deliver, self.fed.round)

    def trials(self, measured: Measured, places: Sequence[int], samples: int) -> list[Trial]:
        shown, loss = measured.shown(self.site.task.metric.scale), measured.loss
        return [
            Trial(self.names[p], samples, float(shown[p]), float(loss[p]) if self._tests[p] else np.nan, self._tests[p])
            for p in places
        ]


# ---------------------------------------------------------------- data like the run's


def _as_in_the_run(trained: Trained, brought: OwnClients) -> tuple[Dataset, list[Rows]]:
    """The newcomers' samples as those of one data set that is prepared as the run's was, and each one's training and
    test rows."""
    like, config = trained.samples, trained.config
    if brought.targets != like.targets:
        raise DataError(f"the run's targets are {like.targets}, those of the new data {brought.targets}")
    parts = [_fitting(trained, brought, part) for part in brought.parts]
    raw, table = np.concatenate([x for x, _ in parts]), bool(like.preparations)
    dataset = Dataset(
        brought.name,
        np.zeros((len(raw), *like.shape), np.float32) if table else raw,
        np.concatenate([y for _, y in parts]),
        like.classes,
        like.class_names,
        mean=like.mean,
        std=like.std,
        vocabulary=like.vocabulary,
        columns=like.columns,
        parts=like.parts,
        targets=like.targets,
    )
    each, begin = list[Rows](), 0
    place = len(trained.names)  # of each, as if it came alone: who else comes changes nothing, here as with real sites
    for part, (x, _) in zip(brought.parts, parts, strict=True):
        labels = dataset.strata[begin : begin + len(x)]
        train, _, test = split_client(labels, part.tests, place, config.seed, config.test_share, 0.0)
        each.append((begin + train, begin + test))
        begin += len(x)
    return (_prepared(trained, dataset, raw, brought, each) if table else dataset), each


def _prepared(trained: Trained, dataset: Dataset, raw: Array, brought: OwnClients, each: Sequence[Rows]) -> Dataset:
    """The rows of tables as the run prepares them: by what all its clients have in common, and, what each client goes
    by alone, by a newcomer's own training samples."""
    columns = trained.samples.preparations[0].columns
    wish = Preparing.of(trained.config.impute, trained.config.scale)
    x, made = dataset.x.copy(), list[Preparation]()
    for part, rows in zip(brought.parts, each, strict=True):
        made.append(Preparation(fit(columns, [raw[rows[0]]], wish, "local", f"client {part.name!r} has")))
        for own in rows:
            x[own] = made[-1](raw[own])
    return replace(dataset, x=x, preparations=tuple(made))


def _fitting(trained: Trained, brought: OwnClients, part: OwnClient) -> tuple[Array, Array]:
    """One client's samples and targets as the run has them; DataError where they are not of that kind."""
    like, where = trained.samples, f"client {part.name!r}"
    if part.parts != like.parts:
        raise DataError(
            f"{where} has samples of {words_of(part.parts) or 'one array'}, the run of "
            f"{words_of(like.parts) or 'one array'}"
        )
    try:
        x = part.x if like.parts else _samples(brought, part, like)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if like.targets != "classes":
        return x, part.y
    codes, _, words = together("classes", [part.y], named=brought.class_names)
    y, foreign = numbered(np.array(words, dtype=str)[codes], like.names())
    if foreign:
        known = ", ".join(like.names()[:20]) + (", ..." if like.classes > 20 else "")
        if part.y.dtype.kind in "iu" and not brought.class_names and not any(n.isdecimal() for n in like.names()):
            raise DataError(
                f"{where} has numbers as labels ({', '.join(words[:5])}{', ...' if len(words) > 5 else ''}), and the "
                f"run's classes are called {known}: which number stands for which is not known; give the names"
            )
        raise DataError(
            f"{where} has the class {foreign[0]!r}, which the run does not know (it knows {known}): its models cannot "
            "give it; leave these samples out, or train a run with them"
        )
    return x, y


def _samples(brought: OwnClients, part: OwnClient, like: Samples) -> Array:
    """A client's samples in the run's form; the rows of tables with its columns, yet to be prepared."""
    if not brought.columns or not like.table:
        return inference.as_given(part.x, like)
    raw = aligned(brought.columns, part.x, like.table, "the run")
    for column, values in zip(like.table, raw.T, strict=True):
        if column.fill is None and np.isnan(values).any():
            raise DataError(f"column {column.name!r} has no value in a row, and the run has no missing values there")
    return raw if like.preparations else raw.astype(np.float32)
