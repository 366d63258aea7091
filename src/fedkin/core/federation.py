"""The server's view of the clients: who there is, and the one road to them, `ask`.

Every exchange goes through here, so bytes, seconds, failures and what an attacker may touch are the same for every
method and every engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import keys
from fedkin.core import notes
from fedkin.core.messages import Answer as Answer
from fedkin.core.messages import Clients as Clients
from fedkin.core.messages import Each as Each
from fedkin.core.messages import Masked as Masked
from fedkin.core.messages import NotFinite, for_some, tensor_of
from fedkin.core.messages import Reply as Reply
from fedkin.core.messages import Spec as Spec
from fedkin.core.messages import difference as difference
from fedkin.core.messages import each as each
from fedkin.core.messages import gate as gate
from fedkin.core.messages import spec_of as spec_of
from fedkin.core.messages import wire_bytes as wire_bytes
from fedkin.errors import DataError, FedKinError


@dataclass(frozen=True)
class Failure:
    client: int
    round: int
    phase: str
    reason: str


@dataclass(frozen=True)
class Exchange:
    """One `ask`, as counted."""

    round: int
    phase: str
    asked: int
    answered: int
    bytes_down: int
    bytes_up: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Traffic:
    """One `ask` client by client: who was asked, bytes to and from each, and seconds."""

    clients: keys.I64
    bytes_down: list[int]
    bytes_up: list[int]
    seconds: list[float]


Watcher = Callable[[Exchange, Traffic, Sequence[Failure]], None]
"""Told of every exchange as soon as it is over."""


@dataclass(frozen=True)
class Note:
    """Something a method wants remembered for its reports: weights, votes, thresholds."""

    round: int
    name: str
    value: Any


class Replies:
    """What came back, stacked: `replies["body"]` is [K, ...], a row for each of `replies.clients`."""

    def __init__(
        self,
        clients: Clients,
        values: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
        average: Average,
        note: Callable[[notes.Kind, Any], None] = lambda kind, value: None,
        not_finite: Clients | None = None,
    ) -> None:
        self.clients, self._values, self._masks = clients, dict(values), dict(masks)
        self._average, self._note = average, note
        # who sent values that are not finite: failed like others and not among `clients`, but known by name
        self.not_finite = clients[:0] if not_finite is None else not_finite

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def samples(self) -> Tensor:
        return self.clients.samples

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            had = ", ".join(self._values) or "nothing (nobody answered)"
            raise FedKinError(f"no reply named {name!r}: the clients sent {had}")
        return self._values[name]

    def mask(self, name: str) -> Tensor:
        """Which entries of a masked reply travelled."""
        return self._masks[name]

    def only(self, chosen: Tensor) -> Replies:
        """The replies of some of the clients (bool [K]): what the average leaves out, no rule gets to see."""
        values, masks = ({k: v[chosen.to(v.device)] for k, v in of.items()} for of in (self._values, self._masks))
        return Replies(self.clients[chosen], values, masks, self._average, self._note, self.not_finite)

    def mean(self, name: str, otherwise: Tensor, weights: Tensor | None = None) -> Tensor:
        """The average over clients, by training samples unless `weights` are given; `otherwise` if nobody answered."""
        if not len(self):
            return otherwise
        return self.combine(self[name], otherwise, self.samples if weights is None else weights)

    def combine(self, rows: Tensor, otherwise: Tensor, weights: Tensor) -> Tensor:
        """`mean` of rows that the server has made from the replies, one for each client that answered. A rule that
        says whom it left out is written down."""
        row = self._average(rows, weights.to(rows.device), otherwise)
        used = getattr(getattr(self._average, "last", None), "used", None)
        if used is not None and len(used) == len(self.clients):
            self._note(notes.USED, {"clients": self.clients.ids.tolist(), "used": used.cpu().tolist()})
        return row


class Average(Protocol):
    """How rows become one: (rows [K, D], weights [K], what the clients started from [D]) to [D]."""

    def __call__(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor: ...


def weighted_mean(rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
    """The server's usual average, sum_k w_k row_k / sum_k w_k, of rows [K, D]; `start` is not used.

    >>> import torch
    >>> weighted_mean(torch.tensor([[0.0], [3.0]]), torch.tensor([2, 1]), torch.zeros(1))
    tensor([1.])
    """
    share = weights.to(rows.dtype)
    return (share / share.sum()) @ rows


Messages = Callable[[keys.I64], Mapping[str, object]]
"""What these clients receive when they want their models."""


VALIDATION = "validation_"
"""What stands before the names of what a report says of validation samples."""


@dataclass(frozen=True, eq=False)
class Measured:
    """How clients' personal models did on their test samples, [K] each: right answers (of other tasks than classes: the
    main metric times the samples), the samples that it is of, mean loss; and the other metrics, [K, M].

    `validation`: the same on their validation samples, where the run has a use for that."""

    correct: np.ndarray[Any, Any]
    total: np.ndarray[Any, Any]
    loss: np.ndarray[Any, Any]
    extra: np.ndarray[Any, Any]
    validation: Measured | None = None

    def shown(self, scale: float = 100.0) -> np.ndarray[Any, Any]:
        """The main metric of each client, by default in percent; NaN for a client that it is not known of."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(scale * self.correct / self.total)

    def on_validation(self, scale: float = 100.0) -> np.ndarray[Any, Any]:
        """`shown`, of validation samples."""
        return np.full(len(self.total), np.nan) if self.validation is None else self.validation.shown(scale)

    def of(self, clients: np.ndarray[Any, Any]) -> Measured:
        """The same of some of the clients, by their places."""
        aside = None if self.validation is None else self.validation.of(clients)
        return Measured(self.correct[clients], self.total[clients], self.loss[clients], self.extra[clients], aside)

    def spread(self, places: np.ndarray[Any, Any], clients: int) -> Measured:
        """The same among so many clients: nothing is known of those at other places."""
        made = Measured(
            np.zeros(clients),
            np.zeros(clients),
            np.full(clients, np.nan),
            np.full((clients, self.extra.shape[1]), np.nan),
            None if self.validation is None else self.validation.spread(places, clients),
        )
        for mine, known in ((made.correct, self.correct), (made.total, self.total), (made.loss, self.loss)):
            mine[places] = known
        made.extra[places] = self.extra
        return made


class Engine(Protocol):
    """Where clients are, and how they are reached."""

    losses: Tensor  # the last training loss of each client; NaN before the first
    client_steps: int  # training steps of all clients so far

    def call(self, ids: keys.I64, function: str, message: Mapping[str, object], round: int) -> Answer:
        """Carries out an `ask`: runs `function` for these clients where their data are.

        Returns stacked replies for the clients that answered, replies that do not look right one by one, and the reason
        for each client that did not answer. An engine whose replies come from elsewhere says what is `right`."""

    def measured(
        self, ids: keys.I64, report: str, messages: Messages, round: int
    ) -> tuple[Measured, Mapping[int, str]]:
        """What these clients report of their personal models, and why some do not. Nothing changes at the clients."""

    def rows(self, ids: keys.I64, report: str, evaluated: str, messages: Messages, round: int) -> Tensor:
        """The models that `report` is of, [K, D] on the CPU; `evaluated` is the function that makes them. [K, 0] where
        models stay with their clients."""


Tamper = Callable[[keys.I64, str, Mapping[str, object], Answer, int], Answer]
"""What an attacker does to an answer: (ids asked, phase, message, honest answer, round) to the answer received."""


@dataclass
class Faults:
    """Clients that break, drawn anew for every exchange from (seed, round, phase, client)."""

    drop: float = 0.0  # does nothing and stays silent
    straggle: float = 0.0  # works, but its reply comes too late
    seed: int = 0

    def draw(self, what: str, share: float, ids: keys.I64, round: int, phase: str) -> np.ndarray[Any, Any]:
        if not share:
            return np.zeros(len(ids), bool)
        drawn: np.ndarray[Any, Any] = keys.uniform(keys.key(self.seed, what, round, phase, ids), 1)[:, 0] < share
        return drawn


class Federation:
    """All clients, and the one way to reach them, `ask`: `fed` in a method's server half.

    `fed.round` counts rounds from 0, `fed.rounds` is how many there will be, and `fed.names` are the clients' names."""

    def __init__(
        self,
        engine: Engine,
        samples: keys.I64,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        average: Average = weighted_mean,
        tamper: Tamper | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._engine, self._samples, self.seed = engine, np.asarray(samples, np.int64), seed
        self._faults, self._average, self._tamper = faults or Faults(seed=seed), average, tamper
        self.names = list(names) or [str(i) for i in range(len(samples))]
        self.round = 0
        self._rounds, self.rounds_matter = 1, False
        self.removed: dict[int, int] = {}  # client -> round
        self.why_removed: dict[int, str] = {}  # of those whom not the method removed
        self.failures: list[Failure] = []
        self.exchanges: list[Exchange] = []
        self.notes: list[Note] = []
        self.watcher: Watcher | None = None
        self.watching = 0.0  # seconds the watcher has taken
        self.stop_on_failure = False

    @property
    def rounds(self) -> int:
        """How many rounds there will be. A method that asks makes its rounds depend on it, which is remembered: such a
        run cannot be made longer afterwards."""
        self.rounds_matter = True
        return self._rounds

    @rounds.setter
    def rounds(self, rounds: int) -> None:
        self._rounds = rounds

    @property
    def all(self) -> Clients:
        """Every client, removed or not."""
        return Clients(np.arange(len(self._samples)), self._samples)

    @property
    def alive(self) -> Clients:
        """All clients that have not been removed."""
        return self.all - list(self.removed)

    def remove(self, clients: Sequence[int], why: str | None = None) -> None:
        """Never ask these again. `why`: where it is not the method's own judgement."""
        for client in clients:
            if why is not None and int(client) not in self.removed:
                self.why_removed[int(client)] = why
            self.removed.setdefault(int(client), self.round)

    def note(self, kind: str | notes.Kind, value: Any) -> None:
        """Remember a number, a list or a small tensor under this round; `notes` has the kinds that have a meaning."""
        name = kind if isinstance(kind, str) else kind.name
        self.notes.append(Note(self.round, name, value.detach().cpu() if isinstance(value, Tensor) else value))

    def state(self) -> dict[str, Any]:
        """What this federation remembers, as plain values."""
        return {
            "removed": dict(self.removed),
            "failures": [astuple(f) for f in self.failures],
            "exchanges": [astuple(e) for e in self.exchanges],
            "notes": [(n.round, n.name, n.value) for n in self.notes],
            "why_removed": dict(self.why_removed),
            "rounds_matter": self.rounds_matter,
            "average": self._average.state() if hasattr(self._average, "state") else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.restoring(state)()

    def restoring(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """What puts such a state in place, once all of it has been looked at."""
        found: dict[str, Any] = {
            "removed": dict(state["removed"]),
            "failures": [Failure(*f) for f in state["failures"]],
            "exchanges": [Exchange(*e) for e in state["exchanges"]],
            "notes": [Note(*n) for n in state["notes"]],
            "why_removed": dict(state.get("why_removed", {})),
            "rounds_matter": state.get("rounds_matter") is not False,  # older ones do not say
        }
        for client in [*found["removed"], *found["why_removed"], *(f.client for f in found["failures"])]:
            if client not in self.all:
                raise DataError(f"it speaks of client {client!r:.40}, of {len(self._samples)}")
        average = state["average"]

        def put() -> None:
            if hasattr(self._average, "restore") and average is not None:  # a rule with a memory
                self._average.restore(average)
            vars(self).update(found)

        return put

    def sample(self, participation: float) -> Clients:
        """This round's cohort: the same for every method at the same seed, as long as nobody was removed."""
        order = keys.permutation(keys.key(self.seed, "cohort", self.round), len(self._samples))
        kept = [c for c in order.tolist() if c not in self.removed]
        count = max(1, math.floor(participation * len(self._samples) + 0.5))
        return Clients(kept[:count], self._samples)

    def ask(self, clients: Clients, function: Callable[..., Any], /, **message: Any) -> Replies:
        """Run a client function of the method where the data are, and collect what comes back.

        Tensors in the message go to every client alike; wrap rows in `each` to send every client its own."""
        phase = function.__name__
        ids = clients.ids
        begin = time.perf_counter()
        down = sum((_bytes_down(v, len(ids)) for v in message.values()), np.zeros(len(ids), np.int64))
        dropped = self._faults.draw("drop", self._faults.drop, ids, self.round, phase)
        answer, right = Answer(ids[:0]), Spec()
        working = ids[~dropped]
        if len(working):
            mine = for_some(message, torch.from_numpy(~dropped)) if dropped.any() else message
            answer = self._engine.call(working, phase, mine, self.round)
            right = spec_of(answer.replies) if answer.right is None else answer.right
            if self._tamper is not None:
                answer = self._tamper(working, phase, mine, answer, self.round)
        late = self._faults.draw("straggle", self._faults.straggle, ids, self.round, phase)
        reasons = dict(answer.failed)
        reasons |= {int(c): "dropped out" for c in ids[dropped]}
        reasons |= {int(c): "reply came too late" for c in ids[late & ~dropped]}
        kept, bad = gate(answer, right)
        reasons |= {c: why for c, why in bad.items() if c not in reasons}
        failures = [Failure(client, self.round, phase, str(reason)) for client, reason in sorted(reasons.items())]
        self.failures += failures
        good = np.array([c not in reasons for c in kept.ids.tolist()], bool)
        values, masks, up = _unpack(kept, good)
        answered = Clients(kept.ids[good], self._samples)
        seconds = time.perf_counter() - begin
        sums = int(down.sum()), int(up.sum())
        exchange = Exchange(self.round, phase, len(ids), len(answered), *sums, seconds)
        self.exchanges.append(exchange)
        if self.watcher is not None:
            begin = time.perf_counter()
            self.watcher(exchange, _traffic(ids, down, answered.ids, up, answer.seconds, seconds), failures)
            self.watching += time.perf_counter() - begin
        if failures and self.stop_on_failure:
            first = failures[0]
            raise FedKinError(
                f"client {self.names[first.client]!r} failed in round {self.round + 1}, phase {phase}: {first.reason}; "
                "the run stops because on_failure=stop (drop: go on without such a client)"
            )
        not_finite = Clients([c for c, why in reasons.items() if isinstance(why, NotFinite)], self._samples)
        return Replies(answered, values, masks, self._average, self.note, not_finite)


def _traffic(
    ids: keys.I64, down: keys.I64, answered: keys.I64, up: keys.I64, own: Mapping[int, float], seconds: float
) -> Traffic:
    sent = dict(zip(answered.tolist(), up.tolist(), strict=True))
    share = seconds / max(len(ids), 1)
    asked = ids.tolist()
    return Traffic(ids, down.tolist(), [sent.get(c, 0) for c in asked], [own.get(c, share) for c in asked])


def _bytes_down(value: object, clients: int) -> keys.I64:
    """What one value of a message costs for each client."""
    if isinstance(value, Each):
        if len(value.rows) != clients:
            raise FedKinError(f"each(...) needs one row for each of the {clients} clients asked, got {len(value.rows)}")
        one = wire_bytes(value.rows[0]) if clients else 0
    else:
        one = wire_bytes(value)
    return np.full(clients, one, np.int64)


def _unpack(answer: Answer, good: np.ndarray[Any, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], keys.I64]:
    """Values and masks of the good replies, and what each of them cost."""
    values: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    up = np.zeros(int(good.sum()), np.int64)
    chosen = torch.from_numpy(good)
    for name, value in answer.replies.items():
        kept = value if good.all() else value[chosen]
        values[name] = tensor_of(kept)
        if isinstance(kept, Masked):
            masks[name] = kept.mask
            entries = kept.mask.reshape(len(up), -1).sum(1).cpu().numpy() if len(up) else 0
            up += entries * kept.values.element_size()
        else:
            up += wire_bytes(kept[0]) if len(up) else 0
    return values, masks, up
