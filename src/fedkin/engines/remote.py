"""Each client on its own machine: `ask` sends one message to every site and waits for what comes back.

How bytes travel is the business of a `Carrier` (in a deployment, `deploy.sites.Sites`). Here is what an exchange is: it
has a deadline, and no patience for late replies. What a reply must look like is known before it is asked for. A site
that is not there, dies, answers too late, too much or nonsense is a client that failed, with the reason and its name;
the round goes on with the others, and soon it is welcome again.

A run needs a least number of sites, of the whole federation: those that answered, and those that were not asked but
are there. With fewer an exchange waits for who comes back. So a phase that asks one site does not hang on that site.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import keys
from fedkin.core.federation import Measured, Messages
from fedkin.core.messages import Answer, Masked, Spec, difference, for_some, rows_for, spec_of, tensor_of
from fedkin.engines.conduct import ConductRecord
from fedkin.engines.measurement import LARGEST, Judge
from fedkin.engines.rehearsal import most_bytes
from fedkin.errors import FedKinError

STUCK_PERIOD = 0.05  # seconds between two looks for who has come back


class TooFew(FedKinError):
    """The run ends because too few sites are left; it can be resumed."""


@dataclass(frozen=True)
class Terms:
    """When an exchange is over. `minimum`: the share of the federation's sites without which the run waits for them to
    come back, until `give_up` seconds have passed without a reply that can be used. `phases`: deadlines of their own.
    `pause` and `invalid`: see `conduct`."""

    deadline: float = 600.0
    minimum: float = 0.5
    give_up: float = 3600.0
    period: float = 0.01  # seconds between two looks for replies
    phases: Mapping[str, float] = field(default_factory=dict)
    pause: float = 0.2
    invalid: int = 8

    def seconds(self, phase: str) -> float:
        return self.phases.get(phase, self.deadline)


@dataclass(frozen=True)
class Bounds:
    """What a reply may cost: seconds until it is there, bytes in memory; None: what the post allows anyway."""

    seconds: float
    bytes: int | None = None


@dataclass(frozen=True)
class Delivery:
    """What one site sent: values with a leading axis of one, and what it says about its work."""

    values: Mapping[str, object]
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Invalid:
    """A message that no honest site sends, and what is wrong with it."""

    reason: str


Arrival = Delivery | Invalid | str
"""A delivery, rubbish, or why there will be no reply."""
Rehearse = Callable[..., Spec | str]
"""(phase, message, round) to what one client's reply looks like, or why that cannot be known; see `Rehearsal`."""


class Carrier(Protocol):
    """Carries messages to sites and back. Sites are known by their number."""

    def send(
        self, ids: Sequence[int], message: Mapping[str, object], fields: Mapping[str, Any], bounds: Bounds
    ) -> dict[int, str]:
        """One message for each; an `Each` holds one row for each of `ids`. Returns whom it cannot reach, and why."""

    def collect(self) -> dict[int, Arrival]:
        """What has come since the last time."""

    def cancel(self, ids: Sequence[int]) -> None:
        """What these still send in reply is not wanted any more."""

    def present(self, client: int) -> bool:
        """Whether a message would reach this site now."""


class Remote:
    """`checkpoints` tells the rounds that the server could go back to, so that sites keep what they need for it.
    `rehearse` tells what is right; without it, or where it cannot, that is what most of at least two sites send."""

    def __init__(
        self,
        carrier: Carrier,
        names: Sequence[str],
        terms: Terms | None = None,
        checkpoints: Callable[[], list[int]] = list,
    ) -> None:
        self.carrier, self.names, self.terms, self._checkpoints = carrier, list(names), terms or Terms(), checkpoints
        self.losses = torch.full((len(names),), float("nan"))  # last training loss of each client
        self.client_steps = 0  # training steps of all sites, as they say
        self.rehearse: Rehearse | None = None
        self.say: Callable[[str], None] = lambda text: None
        self.alive: Callable[[], Sequence[int]] = lambda: range(len(self.names))  # all that were not removed
        self.expel: Callable[[int, str], None] = lambda client, why: None  # remove one for good
        # of work and of measurements apart: who measures well has not worked well
        self.conducts = [ConductRecord(len(names), self.terms.pause, self.terms.invalid) for _ in range(2)]
        self.voted: dict[str, Spec] = {}  # phases that cannot be rehearsed, and what most sites sent
        self._unknown: set[str] = set()  # those of which that was said
        self.useful: float | None = None  # when a reply could last be used
        self.judge = Judge(tests=[0] * len(names))  # of what sites say of their models
        self._round, self._calls, self._asked = -1, 0, 0
        self._known: tuple[object, tuple[Measured, dict[int, str]]] | None = None  # the last measurement, and of when

    def call(self, ids: keys.I64, function: str, message: Mapping[str, object], round: int) -> Answer:
        if round != self._round:
            self._round, self._calls = round, 0
        number, self._calls, self._asked = self._calls, self._calls + 1, self._asked + 1
        fields = {"phase": function, "round": round, "call": number, "checkpoints": self._checkpoints()}
        return _Exchange(self, ids, message, fields, self.right(function, message, round)).run(self.terms.minimum)

    def measure(self, ids: keys.I64, function: str, message: Mapping[str, object], round: int) -> Answer:
        """Like `call`, for looking only: nothing at the sites changes, and nobody has to answer."""
        fields = {"phase": function, "round": round, "call": -1, "checkpoints": self._checkpoints()}
        return _Exchange(self, ids, message, fields, self.judge.spec).run(0.0)

    def measured(self, ids: keys.I64, report: str, messages: Messages, round: int) -> tuple[Measured, dict[int, str]]:
        """What can be true of what the sites say; asked once, as long as no work comes between."""
        now = (round, self._asked, report)
        if self._known is None or self._known[0] != now:
            answer = self.measure(ids, report, messages(ids), round)
            found, why = self.judge.believed(answer)
            self._known = now, (found.of(ids), why)
        return self._known[1]

    def rows(self, ids: keys.I64, report: str, evaluated: str, messages: Messages, round: int) -> Tensor:
        return torch.zeros(len(ids), 0)

    def right(self, function: str, message: Mapping[str, object], round: int, anew: bool = False) -> Spec | None:
        """What a reply must look like; None: it cannot be known beforehand."""
        found = self.rehearse(function, message, round, anew) if self.rehearse is not None else "nobody rehearses it"
        if not isinstance(found, str):
            return found
        if function not in self._unknown:
            self._unknown.add(function)
            self.say(f"phase {function!r} cannot be rehearsed ({found}): what is right is what most sites answer")
        return None

    def take_note(self, client: int, fields: Mapping[str, Any]) -> None:
        """What a site says about its work; `FedKinError` if that cannot be."""
        loss, steps = fields.get("loss"), fields.get("steps", 0)
        if loss is not None and not (isinstance(loss, float | int) and abs(loss) <= LARGEST):
            raise FedKinError(f"it speaks of a training loss of {str(loss)[:40]}")
        if not isinstance(steps, int) or not 0 <= steps < 1 << 40:
            raise FedKinError(f"it speaks of {str(steps)[:40]} training steps")
        if loss is not None:
            self.losses[client] = float(loss)
        self.client_steps += steps


class _Exchange:
    """One question to some sites, from the first message to the answer."""

    def __init__(
        self, engine: Remote, ids: keys.I64, message: Mapping[str, object], fields: dict[str, Any], right: Spec | None
    ) -> None:
        self.engine, self.asked, self.message, self.fields, self.right = engine, ids.tolist(), message, fields, right
        self.carrier, self.terms = engine.carrier, engine.terms
        self.works: bool = fields["call"] >= 0
        self.conduct: ConductRecord = engine.conducts[self.works]
        self.begin = time.monotonic()
        self.deadline = self.terms.seconds(fields["phase"])
        self.came: dict[int, Delivery] = {}
        self.failed: dict[int, str] = {}
        self.seconds: dict[int, float] = {}
        self.waiting: set[int] = set()

    def run(self, minimum: float) -> Answer:
        self._ask(self.asked)
        stuck: float | None = None  # since when it has been known that too few answered
        end = self.begin + self.deadline
        while True:
            if self._collect():
                stuck = None
            if time.monotonic() > end:
                self._too_late()
            if not self.waiting:
                now = time.monotonic()
                if self._enough(minimum):
                    break
                stuck = now if stuck is None else stuck
                if now - stuck > self.terms.give_up:
                    raise TooFew(self._too_few(minimum))
                back = [c for c in self._missing() if self.carrier.present(c) and not self._paused(c)]
                if back:  # whoever is back is asked again
                    end = now + self.deadline
                    self._ask(back)
            time.sleep(self.terms.period if stuck is None else max(self.terms.period, STUCK_PERIOD))
        return self._answer(minimum)

    def _missing(self) -> list[int]:
        alive = set(self.engine.alive())
        return [c for c in self.asked if c not in self.came and c in alive]

    def _paused(self, client: int) -> str | None:
        return self.conduct.paused(client, time.monotonic())

    def _ask(self, clients: Sequence[int]) -> None:
        pauses = {c: self._paused(c) for c in clients}
        self.failed |= {c: why for c, why in pauses.items() if why is not None}
        to = [c for c in clients if pauses[c] is None]
        if not to:
            return
        mine = for_some(self.message, torch.tensor([self.asked.index(c) for c in to], dtype=torch.long))
        bounds = Bounds(self.deadline, None if self.right is None else most_bytes(self.right))
        away = self.carrier.send(to, mine, self.fields, bounds)
        self.failed |= away
        self.waiting |= set(to) - set(away)

    def _collect(self) -> int:
        """What has come, checked; how many of it can be used."""
        useful, now = 0, time.monotonic()
        for client, found in self.carrier.collect().items():
            if client not in self.waiting:
                continue
            self.waiting.discard(client)
            why = self._check(client, found) if isinstance(found, Delivery) else found
            if why is None and isinstance(found, Delivery):
                self.came[client], self.seconds[client] = found, now - self.begin
                self.conduct.good(client)
                useful += 1
            elif isinstance(why, Invalid):
                self._fail(client, why.reason, invalid=True)
            else:
                self._fail(client, str(why))
        return useful

    def _check(self, client: int, found: Delivery) -> Invalid | None:
        """What is wrong with a reply; None: nothing."""
        try:
            sent = spec_of(rows_for(found.values, 1))
            if self.right is not None and sent != self.right and self.works:
                self.right = self.engine.right(self.fields["phase"], self.message, self.fields["round"], anew=True)
            if self.right is not None and sent != self.right:
                return Invalid(difference(sent, self.right))
            self.engine.take_note(client, found.fields)
        except FedKinError as error:
            return Invalid(str(error))
        return None

    def _fail(self, client: int, why: str, invalid: bool = False, waited: float = 0.0) -> None:
        self.failed[client] = why
        if self.conduct.failed(client, why, time.monotonic(), invalid, waited):
            too_many = f"{self.terms.invalid} invalid messages in a row, the last: {why}"
            self.failed[client] = f"removed for good after {too_many}"
            self.engine.say(f"site {self.engine.names[client]!r}: {self.failed[client]}")
            self.engine.expel(client, too_many)

    def _too_late(self) -> None:
        if self.waiting:
            late = f"no reply within {self.deadline:g} s; reply came too late if at all"
            self.carrier.cancel(sorted(self.waiting))
            for client in sorted(self.waiting):
                self._fail(client, late, waited=self.deadline)
            self.waiting = set()

    def _enough(self, minimum: float) -> bool:
        """Of the whole federation: who answered, and who was not asked but is there."""
        needed = math.ceil(minimum * len(self.engine.alive()))
        return len(self.came) >= needed or len(self.came) + len(self._others()) >= needed

    def _others(self) -> list[int]:
        asked = set(self.asked)
        return [c for c in self.engine.alive() if c not in asked and self.carrier.present(c) and not self._paused(c)]

    def _too_few(self, minimum: float) -> str:
        names, alive = self.engine.names, self.engine.alive()
        silent = next((f"{names[c]!r}: {self.failed[c]}" for c in self.asked if c in self.failed), "nobody failed")
        there = len(self.came) + len(self._others())
        return (
            f"round {self.fields['round'] + 1}, {self.fields['phase']}: {len(self.came)} of {len(self.asked)} sites "
            f"answered; {there} of {len(alive)} are there, {math.ceil(minimum * len(alive))} are needed ({silent}), "
            f"for {self.terms.give_up:g} s now (--give-up); bring the sites back and resume the run"
        )

    def _answer(self, minimum: float) -> Answer:
        """Replies that look right, stacked, and the reasons with the sites' names."""
        engine, now = self.engine, time.monotonic()
        self._same()
        order = [c for c in self.asked if c in self.came]
        if engine.useful is None or (order and self.works):
            engine.useful = now
        elif minimum and self.asked and now - engine.useful > self.terms.give_up:
            raise TooFew(
                f"round {self.fields['round'] + 1}, {self.fields['phase']}: no site has answered for "
                f"{self.terms.give_up:g} s (--give-up); bring the sites back and resume the run"
            )
        reasons = {c: f"site {engine.names[c]!r}: {why}" for c, why in self.failed.items() if c not in self.came}
        stacked = _stack([self.came[c].values for c in order])
        return Answer(np.array(order, np.int64), stacked, {}, reasons, self.seconds, self.right)

    def _same(self) -> None:
        """All that is used looks right, even if what is right was learnt only when some replies were there. Where
        nothing else tells, that is what more than half of at least two replies look like, now or when they last did."""
        phase, looks = self.fields["phase"], {c: spec_of(rows_for(d.values, 1)) for c, d in self.came.items()}
        if self.right is None:
            same = {c: sum(look == other for other in looks.values()) for c, look in looks.items()}
            first = max(same, key=lambda c: same[c], default=None)
            if first is not None and same[first] >= 2 and 2 * same[first] > len(looks):
                self.engine.voted[phase] = looks[first]
            self.right = self.engine.voted.get(phase)
        for client, look in looks.items():
            if look != self.right:
                del self.came[client]
                if self.right is None:  # which is nobody's fault
                    self.failed[client] = "nothing tells what it should look like, and too few sites agree"
                else:
                    self._fail(client, difference(look, self.right))


def _stack(replies: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | Masked]:
    """Rows of several sites that look alike."""
    stacked: dict[str, Tensor | Masked] = {}
    for name, first in replies[0].items() if replies else ():
        each = [reply[name] for reply in replies]
        values = torch.cat([tensor_of(v) for v in each])
        stacked[name] = Masked(values, torch.cat([v.mask for v in each])) if isinstance(first, Masked) else values
    return stacked
