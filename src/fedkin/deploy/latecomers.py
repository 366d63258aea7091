"""Sites that come when a run has its models: one after the other is given one, by the recipe of the run's method.

The run's folder is only read, but for a line in its log for each and the list of who has had a model (`guestbook`).
What its server half does for a newcomer, it does on a copy (`rounds.newcomers`), over the same link, gate, limits and
policies as in a run. The data stay at the site, and so does its model."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from fedkin.compute import keys
from fedkin.core.federation import Measured, Messages
from fedkin.core.messages import Answer
from fedkin.data import Preparing
from fedkin.data.clients import split_sizes
from fedkin.deploy.greeting import Facts, like, misfit
from fedkin.deploy.guestbook import Guestbook
from fedkin.deploy.server import OpenLink, Serving, bound, elsewhere, known_sites, prepared_again, terms_of
from fedkin.deploy.sites import TALK, Sites
from fedkin.deploy.trunk import as_values
from fedkin.engines.conduct import ConductRecord
from fedkin.engines.measurement import Judge
from fedkin.engines.rehearsal import Rehearsal
from fedkin.engines.remote import Carrier, Remote, Terms
from fedkin.errors import DataError, FedKinError
from fedkin.options import said
from fedkin.rounds.newcomers import Welcome, late_config
from fedkin.rounds.trained import Trained
from fedkin.runs.checkpoint import writing
from fedkin.runs.facts import now
from fedkin.runs.folder import LOG, RunFolder
from fedkin.runs.restore import at_newest
from fedkin.tasks import Metric

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settled:
    """A site that came late and has its model. What is measured there is `before`, of the model that it began with,
    and `after`; NaN where the site does not tell."""

    site: str
    train_samples: int
    test_samples: int
    before: float
    after: float


@dataclass
class Latecomers:
    """What came of it: `serve_latecomers` returns this, also when it is interrupted (`stopped`)."""

    run: str
    method: str
    metric: Metric
    epochs: int
    settled: list[Settled] = field(default_factory=list)
    stopped: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `fedkin server --join RUN --json` prints them."""
        facts = {"metric": self.metric.name, "unit": self.metric.unit, "higher": self.metric.higher}
        own = {"run": self.run, "method": self.method, "epochs": self.epochs, **facts}
        return {**own, "newcomers": [asdict(site) for site in self.settled], "stopped": self.stopped}


class Visitors(Sites):
    """Sites that are let in one after the other; the others wait and stay connected."""

    run_sites: Sequence[Facts] = ()
    guestbook: Guestbook
    terms = Terms()
    _conduct: Mapping[str, ConductRecord] = {}
    _removed: Mapping[str, str] = {}
    _over: Mapping[str, tuple[str, str]] = {}  # site -> the process that was served, and why it has no model

    def _admit(self, facts: Facts, process: str) -> None:
        why = misfit(self.run_sites, facts)
        served, failed = self._over.get(facts.name, ("", ""))
        if why is None and served != process:
            why = self.guestbook.refusal(facts.name) or self._removed.get(facts.name) or self._paused(facts.name)
        if why or (failed and served == process):  # who has its model may stay
            raise DataError(why or failed)

    def _paused(self, name: str) -> str | None:
        paused = name in self._conduct and self._conduct[name].paused(0, time.monotonic())
        return "it failed, and may come again after a while" if paused else None

    def next(self) -> Facts | None:
        """Who has waited longest; None: nobody waits."""
        self.tick()
        waiting = (f for name, f in self.facts.items() if name not in self._over or not self._has_been(name))
        return next(waiting, None)

    def _has_been(self, name: str) -> bool:
        return self._over[name][0] == self._processes[name]

    def seat(self, visit: Visit, run: str) -> None:
        """Invite one of them to a run of its own, of this name; DataError where it does not take part."""
        name, place = visit.late.name, visit.place
        self._by_number, self._run, self._attempt = [""] * place + [name], run, int(time.time() * 1000)
        self._invitation, self._trunk = lambda _: visit.invitation(), lambda: as_values(visit.trained.network)
        self._ready.clear()
        self._furnished.clear()
        self.trouble.pop(name, None)
        self._invite(name)
        until = time.monotonic() + TALK
        while place not in self._ready:
            self.tick()
            if name in self.trouble or name not in self._nodes or time.monotonic() > until:
                raise DataError(self.trouble.get(name, "it did not answer the invitation"))
            time.sleep(0.02)

    def leave(self, name: str, failed: str = "") -> None:
        """It has its model, or has failed: the next one may come."""
        conduct = self._conduct.get(name) or ConductRecord(1, self.terms.pause, self.terms.invalid)
        self._conduct = {**self._conduct, name: conduct}
        if not failed:
            conduct.good(0)
        elif conduct.failed(0, failed, time.monotonic(), invalid=True):
            why = (
                f"it failed {self.terms.invalid} times in a row and is not let in again by this server, the last time:"
            )
            self._removed = {**self._removed, name: f"{why} {failed}"}
        if name in self._nodes:
            self._over = {**self._over, name: (self._processes[name], failed)}
            if failed:
                self._refuse(self._nodes[name], failed)
            else:
                self.dismiss()
        self.facts.pop(name, None)
        self._by_number, self._invitation = [], None


def serve_latecomers(
    run: RunFolder,
    serving: Serving,
    *,
    clients: int | None = None,
    epochs: int | None = None,
    again: Sequence[str] = (),
    say: Say = print,
) -> Latecomers:
    """Give sites that come late models of a deployed run, until `clients` of them have one or until interrupted.

    `epochs`: for how many each trains (default: what the method needs). Each name is given one model of a run, those
    in `again` one more."""
    facts = known_sites(run, instead="join")
    guestbook = Guestbook(run.path, again)
    with OpenLink(serving, say) as link:
        sites = link.sites(serving, run.info.configuration(), Visitors)
        sites.run_sites, sites.guestbook, sites.terms = facts, guestbook, serving.terms
        trained = trained_of(run, facts, sites)
        bound(link.link, trained.layout.width, serving)
        epochs = trained.method.settle_epochs(trained.config.epochs) if epochs is None else epochs
        found = Latecomers(run.info.id, trained.config.method, trained.task.metric, epochs)
        say(f"run {run.info.id}, round {trained.round}: sites that come now get models by {found.method}'s recipe")
        last = time.monotonic()
        try:
            while clients is None or len(found.settled) < clients:
                late = sites.next()
                if late is not None:
                    enter = partial(guestbook.enter, late.name)
                    visit = partial(Visit, trained, facts, late, epochs, sites, serving, enter)
                    line = _welcome(late, visit, sites, found)
                    _log(run, line)
                    say(line)
                    last = time.monotonic()
                elif clients is not None and time.monotonic() - last > serving.wait:
                    raise FedKinError(
                        f"{len(found.settled)} of {clients} sites have a model, and nobody came for "
                        f"{serving.wait:g} s; start the others with `fedkin client`, or wait longer with --wait"
                    )
                else:
                    time.sleep(0.05)
        except KeyboardInterrupt:
            found.stopped = True
        return found


def _log(run: RunFolder, line: str) -> None:
    """One line more in the run's log, like those of its own server."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with writing(run.path / LOG), open(os.open(run.path / LOG, flags, 0o600), "a", encoding="utf-8") as log:
        log.write(f"{now()} {' '.join(line.split())}\n")


def _welcome(late: Facts, visit: Callable[[], Visit], sites: Visitors, found: Latecomers) -> str:
    """Serve one site; what is to be said of it."""
    number = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    try:
        one = visit()
        sites.seat(one, f"{found.run[:70]}-late-{number}")
        told = one.settle()
    except Exception as error:  # whatever comes of what a site says and does is that site's trouble
        why = str(error) if isinstance(error, FedKinError) else f"{type(error).__name__}: {error}"
        sites.leave(late.name, why)
        return f"site {late.name!r} has no model: {why}"
    sites.leave(late.name)
    found.settled.append(told)
    metric = found.metric
    both = {"before": told.before, "after": told.after}
    known = {when: value for when, value in both.items() if not math.isnan(value)}
    words = ", ".join(f"{said(value, metric.unit)}{metric.unit} {when}" for when, value in known.items())
    words = (
        f"{metric.name} {words}"
        if words
        else f"how that does is not known ({one.engine.untold or 'it has no test samples'})"
    )
    return f"site {late.name!r} came late and has a model of its own, by {told.train_samples} samples: {words}"


class _AtOnce(ConductRecord):
    """A visit is over with the first question to which there comes nothing, or rubbish; only how its model does a site
    need not tell (`works` False)."""

    def __init__(self, sites: int, works: bool) -> None:
        super().__init__(sites, 0.0, 0)
        self._works = works

    def failed(self, site: int, reason: str, now: float, invalid: bool = False, waited: float = 0.0) -> bool:
        if self._works or invalid or waited:
            raise FedKinError(f"an invalid message: {reason}" if invalid else reason)
        return super().failed(site, reason, now)


class Questions(Remote):
    """Those to the one site of a visit. `untold`: why it is not known how its model does. `enter` is called once, when
    it has answered something that the method asks, before it is sent anything that may come of that."""

    def __init__(self, carrier: Carrier, names: Sequence[str], terms: Terms, enter: Callable[[], None]) -> None:
        super().__init__(carrier, names, terms)
        self._enter: Callable[[], None] | None = enter
        self.conducts = [_AtOnce(len(names), works) for works in (False, True)]
        self.untold = ""

    def measured(self, ids: keys.I64, report: str, messages: Messages, round: int) -> tuple[Measured, dict[int, str]]:
        found, why = super().measured(ids, report, messages, round)
        self.untold = next(iter(why.values()), "").removeprefix(f"site {self.names[-1]!r}: ")
        return found, why

    def call(self, ids: keys.I64, function: str, message: Mapping[str, object], round: int) -> Answer:
        answer = super().call(ids, function, message, round)
        if len(answer.ids):
            self.enter()
        return answer

    def enter(self) -> None:
        """From now on this visit counts."""
        if self._enter is not None:
            self._enter()
            self._enter = None


class Visit:
    """One site's way to its model. `enter`: see `Questions`."""

    def __init__(
        self,
        trained: Trained,
        run: Sequence[Facts],
        late: Facts,
        epochs: int,
        carrier: Carrier,
        serving: Serving,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        config, method = replace(late_config(trained, epochs, 1), validation_share=0.0), trained.method
        self.trained, self.run, self.late, self.serving, self.place = trained, run, late, serving, len(trained.names)
        self.config, names = config, [*trained.names, late.name]
        theirs, first = like(run, Preparing.of(config.impute, config.scale)), trained.first()
        site = elsewhere(config, type(method), trained.network, theirs, names, trained.task, first)
        self.train, _, self.tests = split_sizes(late.samples, late.tests, config.test_share, 0.0)
        # a site that is gone comes again: nobody waits for it here
        self.engine = Questions(carrier, names, replace(serving.terms, minimum=0.0), enter)
        self.engine.rehearse = Rehearsal(site, type(method)(method.options), theirs.x, theirs.y)
        self.engine.judge = Judge(trained.task, site.extra, [0] * self.place + [self.tests])
        self.welcome = Welcome(trained, site, self.engine, [late.name], [self.train])
        fed = self.welcome.fed
        self.engine.alive = lambda: fed.alive.ids.tolist()
        self.engine.expel = lambda client, why: fed.remove([client], why)

    def invitation(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the site is told before it begins."""
        terms = terms_of(self.config, self.run, self.trained.network, self.serving)
        return {**terms, "round": self.trained.round, "late": True}, {"initial": self.welcome.site.initial}

    def settle(self) -> Settled:
        """Its model, which stays there, and how that does; FedKinError where there is none."""
        scale = self.trained.task.metric.scale
        before = self.welcome.measured(self.trained.eval_point).shown(scale)
        after = self.welcome.settle().shown(scale)
        if self.welcome.fed.failures:
            raise FedKinError(self.welcome.fed.failures[0].reason)
        if not self.engine.carrier.present(self.place):
            raise FedKinError("the connection to it was lost")
        self.engine.enter()  # also where the method asked nothing
        return Settled(self.late.name, self.train, self.tests, float(before[0]), float(after[0]))


def trained_of(run: RunFolder, facts: Sequence[Facts], carrier: Carrier) -> Trained:
    """A deployed run as its newest sound checkpoint has it."""
    engine = Remote(carrier, [f.name for f in facts], Terms())
    return Trained.of(at_newest(run, lambda: prepared_again(run, facts, engine)))
