"""The simulator's adversary: who is hostile, what they train on, and what arrives from them.

It sits at `ask` and knows no method. Every float tensor of a reply is an update of what the client received under the
same name (or, failing that, of the only part of the message with its shape); a tensor without such a counterpart, or
that is called an update, is taken as an update of zero. Each tensor is attacked on its own. Votes (scores, votes,
correct, right) are left as they are unless the attackers also lie about votes; whole numbers are never touched
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkin.compute import keys
from fedkin.core.cohort import Cohort, Site
from fedkin.core.federation import Answer, Each, Masked, Reply
from fedkin.errors import UsageError
from fedkin.options import option
from fedkin.robust.attacks import Adaptive, Array, Attack, Backdoor, DataAttack, InputNoise, ReplyAttack
from fedkin.robust.detection import Detector
from fedkin.robust.rules import Rule

Bools = NDArray[np.bool_]

VOTES = ("scores", "votes", "correct", "right")
UPDATES = ("update", "updates")


@dataclass(frozen=True, eq=False)
class GuessedServer:
    """What attackers take the server's own knowledge for: an update like the mean of those they see."""

    update: Tensor

    def bounds(self, width: int) -> tuple[int, ...]:
        return (0, width)

    def trainer(self, samples: int) -> Callable[[Tensor], Tensor]:
        return lambda start: self.update


class Threat(Protocol):
    """The settings of a run that say who attacks."""

    @property
    def malicious(self) -> float: ...
    @property
    def attackers(self) -> str: ...
    @property
    def knowledge(self) -> Literal["own", "full"]: ...
    @property
    def seed(self) -> int: ...


def named(attackers: str, clients: int) -> list[int]:
    """The clients that the setting `attackers` names; none if it only says how they are drawn."""
    if attackers in ("fixed", "redrawn"):
        return []
    words = [w.strip() for w in attackers.split("+")]
    wrong = [w for w in words if not (w.isascii() and w.isdigit() and int(w) < clients)]
    if wrong:
        raise UsageError(
            f"attackers={attackers!r}: {wrong[0]!r} is no client; write fixed, redrawn, or the numbers of "
            f"clients from 0 to {clients - 1}, as in 1+8+10"
        )
    if len({int(w) for w in words}) < len(words):
        raise UsageError(f"attackers={attackers!r}: a client is named twice")
    return [int(w) for w in words]


@dataclass(eq=False)
class Adversary:
    """int(share * clients) of the clients are malicious; everything follows from the seed.

    `rule` and `detector` are the run's defence, for attacks that adapt to it."""

    attack: Attack
    clients: int
    share: float = option(0.3, "share of the clients that are malicious", low=0, high=1)
    seed: int = option(0, "seed of who is malicious, and of all that attackers draw", low=0)
    knowledge: Literal["own", "full"] = option(
        "full", "which updates attackers see: their own, or those of all clients"
    )
    redraw: bool = option(False, "other clients are malicious in every round, as in C-PFL")
    lie_about_votes: bool = option(False, "malicious committee members reverse their scores")
    rule: Rule | None = None
    detector: Callable[[], Detector | None] = field(default=lambda: None)
    site: Site | None = None  # where the attackers have their data
    rounds: int | None = None  # attackers that change do so in these; in the tuning after them nobody is malicious
    who: Sequence[int] = ()  # named, and not drawn

    @classmethod
    def of(cls, threat: Threat, attack: Attack, clients: int) -> Adversary:
        """The adversary that a run's settings ask for."""
        who = named(threat.attackers, clients)
        share = len(who) / clients if who else threat.malicious
        redraw = threat.attackers == "redrawn"
        return cls(attack, clients, share, threat.seed, threat.knowledge, redraw, who=who)

    def malicious(self, round: int = 0) -> Bools:
        """Who is malicious in a round, [clients]."""
        stream = keys.key(self.seed, "malicious", round if self.redraw else 0)
        chosen = np.zeros(self.clients, bool)
        if self.redraw and self.rounds is not None and round >= self.rounds:
            return chosen
        if self.who:
            chosen[list(self.who)] = True
            return chosen
        chosen[keys.permutation(stream, self.clients)[: int(self.share * self.clients + 1e-9)]] = True
        return chosen

    # ------------------------------------------------------------ replies

    def tamper(self, ids: keys.I64, phase: str, message: Mapping[str, object], answer: Answer, round: int) -> Answer:
        """What the server receives instead of the honest answer (`Tamper`)."""
        bad = self.malicious(round)[answer.ids]
        if not bad.any():
            return answer
        received = _received(message, np.searchsorted(ids, answer.ids))
        sent: dict[str, Tensor | Masked] = {}
        misshapen: dict[str, Tensor] = {}
        for name, value in answer.replies.items():
            sent[name] = value
            if name in VOTES:
                if self.lie_about_votes or self.attack.lie_about_votes:
                    sent[name] = _replaced(value, bad, _inverted(_values(value)[torch.from_numpy(bad)]))
            elif isinstance(self.attack, ReplyAttack) and _values(value).is_floating_point():
                rng = keys.generator(self.seed, "attack", round, phase, name)
                rows = self._forge(name, self.attack, value, received, bad, rng, round)
                if rows.shape[1:] == _values(value).shape[1:]:
                    sent[name] = _replaced(value, bad, rows)
                else:
                    misshapen[name] = rows
        return _with_odd(answer, sent, misshapen, bad)

    def _forge(
        self,
        name: str,
        attack: ReplyAttack,
        value: Tensor | Masked,
        received: Mapping[str, Tensor],
        bad: Bools,
        rng: np.random.Generator,
        round: int,
    ) -> Tensor:
        """What the malicious clients send in place of their rows of `value`."""
        honest = _values(value)
        base, chosen = _counterpart(name, honest, received), torch.from_numpy(bad).to(honest.device)
        adapts = isinstance(attack, Adaptive) and attack.against == "run"
        if adapts:
            base = self._calibrated(name, honest, received, base)
        updates = (honest - base).reshape(len(honest), -1)
        if isinstance(value, Masked):
            updates = updates * value.mask.reshape(updates.shape)
        if adapts:
            known = updates if self.knowledge == "full" else updates[chosen]
            attack = self._adapted(attack, known, base.expand_as(honest)[chosen], round)
        rows = attack(updates.float(), chosen, self.knowledge, rng).to(honest.dtype)
        if rows.shape[1] != updates.shape[1]:
            return rows
        return base.expand_as(honest)[chosen] + rows.reshape(-1, *honest.shape[1:])

    def _calibrated(self, name: str, honest: Tensor, received: Mapping[str, Tensor], base: Tensor) -> Tensor:
        """What replies count from where a method measures them from a common reference: there, not from what each
        client received."""
        detector = self.detector()
        if detector is None or detector.reference is None or detector.reference.shape != honest.shape[1:]:
            return base
        start = _counterpart("", honest, received) if name in UPDATES else torch.zeros_like(honest[:1])
        return detector.reference.to(honest) - start

    def _adapted(self, attack: ReplyAttack, known: Tensor, base: Tensor, round: int) -> ReplyAttack:
        """An adaptive attack that knows what it has to pass: the method's own check, or else the rule."""
        assert isinstance(attack, Adaptive)
        detector = self.detector()
        if detector is not None and detector.measures == "length":
            longest = detector.bar(torch.linalg.vector_norm(known, dim=1))
            return replace(attack, passes=lambda row: float(row.norm()) <= longest * (1 - 1e-5))
        if detector is not None and self.site is not None and base[0].numel() == self.site.layout.size("body"):
            body = base[0].reshape(-1)
            bar, most = detector.bar(known.new_zeros(0)), attack.most or len(known) + 1
            return replace(attack, most=most, passes=lambda row: float(self._accuracy(body + row, round)) >= bar)
        return attack if self.rule is None else replace(attack, against=self.rule.given(GuessedServer(known.mean(0))))

    def _accuracy(self, body: Tensor, round: int) -> Tensor:
        """Mean accuracy of a body under the common head on what the attackers have themselves, in their eyes the
        committee's."""
        assert self.site is not None
        cohort = Cohort(self.site, np.flatnonzero(self.malicious(round)), round, "attack")
        return cohort.evaluate(cohort.rows(body=body), "train").accuracy.nanmean().double()

    # ------------------------------------------------------------ data

    def poison(self, x: Array, y: Array, parts: Sequence[keys.I64], classes: int) -> tuple[Array, Array]:
        """The data set with the malicious clients' samples changed. `parts`: each client's training samples; pass
        these alone, and what the attackers are evaluated on stays clean. Where the attackers change every round, every
        client's samples are changed, and the run uses the changed version when it is a client's turn."""
        if not isinstance(self.attack, DataAttack):
            return x, y
        x, y = x.copy(), y.copy()
        turned = range(self.clients) if self.redraw else np.flatnonzero(self.malicious()).tolist()
        for rank, client in enumerate(turned):
            mine, rng = parts[client], keys.generator(self.seed, "poison", client)
            x[mine], y[mine] = self.attack.poison(x[mine], y[mine], classes, rank, rng)
        return x, y

    def poison_site(self, site: Site, x: Array, y: Array) -> None:
        """Puts what the attackers make of the data next to the clean samples, and tells the site when they use it."""
        attack, source, bad, self.site = self.attack, site.source, self.malicious(), site
        if not isinstance(attack, DataAttack):
            return
        bad_x, bad_y = self.poison(x, y, site.parts["train"], site.classes)
        if isinstance(attack, Backdoor):  # nobody trains on these: `backdoor_site` asks for them
            tested = np.concatenate(site.parts["test"])
            bad_x[tested], bad_y[tested] = attack.triggered(x[tested]), attack.target
        source.add_version(None if np.array_equal(bad_x, x) else bad_x, bad_y)
        site.poisoned = self.malicious
        if isinstance(attack, InputNoise):
            source.add_noise(attack.sigma, self.seed)
            if attack.test:
                if self.redraw:
                    raise UsageError("input-noise:test=true needs the same attackers all along: attackers=fixed")
                noisy = [part + source.count * int(b) for part, b in zip(site.parts["test"], bad, strict=True)]
                site.parts = {**site.parts, "test": noisy}

    @property
    def counted(self) -> bool:
        """Whether malicious clients' own models count in the accuracy: they do where what they lose is the question,
        and where everybody is malicious at times."""
        return self.redraw or (isinstance(self.attack, InputNoise) and self.attack.test)

    def backdoor_site(self, site: Site) -> Site:
        """The site as the backdoor is evaluated there: test samples of other classes, with trigger and target label."""
        if not isinstance(self.attack, Backdoor):
            raise UsageError(f"attack {type(self.attack).__name__} has no trigger: only a backdoor has")
        clean, count = site.source.y[: site.source.count].cpu().numpy(), site.source.count
        others = [part[clean[part] != self.attack.target] + count for part in site.parts["test"]]
        return replace(site, parts={**site.parts, "test": others})

    def triggered(self, x: Array) -> Array:
        """Inputs with the whole trigger, to see how often a model answers with the target class."""
        if not isinstance(self.attack, Backdoor):
            raise UsageError(f"attack {type(self.attack).__name__} has no trigger: only a backdoor has")
        return self.attack.triggered(x)


def _values(value: Tensor | Masked) -> Tensor:
    return value.values if isinstance(value, Masked) else value


def _received(message: Mapping[str, object], at: keys.I64) -> dict[str, Tensor]:
    """The tensors of a message as those who answered received them, the first axis over clients or of length one."""
    rows = torch.from_numpy(at)
    each = {k: v.rows[rows.to(v.rows.device)] for k, v in message.items() if isinstance(v, Each)}
    return each | {k: v.unsqueeze(0) for k, v in message.items() if isinstance(v, Tensor)}


def _counterpart(name: str, honest: Tensor, received: Mapping[str, Tensor]) -> Tensor:
    """What the clients started from, broadcast over them; zero if nothing of that shape was sent, or for updates."""
    fitting = {k: v for k, v in received.items() if v.shape[1:] == honest.shape[1:] and v.is_floating_point()}
    fitting = {} if name in UPDATES else fitting
    if name in fitting:
        return fitting[name].to(honest)
    return next(iter(fitting.values())).to(honest) if len(fitting) == 1 else torch.zeros_like(honest[:1])


def _replaced(value: Tensor | Masked, bad: Bools, rows: Tensor) -> Tensor | Masked:
    """A copy with the malicious clients' rows exchanged; under a mask only what travels."""
    honest = _values(value)
    changed, chosen = honest.clone(), torch.from_numpy(bad).to(honest.device)
    changed[chosen] = rows.where(value.mask[chosen], honest[chosen]) if isinstance(value, Masked) else rows
    return Masked(changed, value.mask) if isinstance(value, Masked) else changed


def _inverted(votes: Tensor) -> Tensor:
    """The best becomes the worst: max + min - vote within each member's votes (of each class, if they are by class);
    a lone number is a share, 1 - vote."""
    if votes.dtype == torch.bool:
        return ~votes
    if votes[0].numel() == 1 and votes.is_floating_point():
        return 1 - votes
    flat = votes.reshape(*votes.shape[:2], -1).double()
    high = flat.masked_fill(~flat.isfinite(), -torch.inf).amax(1, keepdim=True)
    low = flat.masked_fill(~flat.isfinite(), torch.inf).amin(1, keepdim=True)
    return (high + low - flat).reshape(votes.shape).to(votes.dtype)


def _with_odd(answer: Answer, sent: dict[str, Tensor | Masked], misshapen: dict[str, Tensor], bad: Bools) -> Answer:
    """Replies of another shape cannot be stacked: their senders' replies come one by one."""
    if not misshapen:
        return Answer(answer.ids, sent, answer.odd, answer.failed)
    odd: dict[int, Reply] = dict(answer.odd)
    for k, client in enumerate(answer.ids[bad].tolist()):
        honest = {n: _row(v, int(np.flatnonzero(bad)[k])) for n, v in sent.items()}
        odd[client] = {**honest, **{n: rows[k] for n, rows in misshapen.items()}}
    good = torch.from_numpy(~bad)
    kept = {n: Masked(v.values[good], v.mask[good]) if isinstance(v, Masked) else v[good] for n, v in sent.items()}
    return Answer(answer.ids[~bad], kept, odd, answer.failed)


def _row(value: Tensor | Masked, k: int) -> Any:
    return Masked(value.values[k], value.mask[k]) if isinstance(value, Masked) else value[k]
