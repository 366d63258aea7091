"""The server's view of the clients: who there is, and the one road to them, `ask`.

Every exchange goes through here, so bytes, seconds, failures and what an attacker may touch are the same for every
method and every engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import keys
from fedkin.core import notes
from fedkin.errors import FedKinError

MAX_REPLY_BYTES = 2 << 30
NOT_FINITE = "values that are not finite"  # in the reason of a reply that is refused for it
MOST_NAMES = 20  # that a client made up, in a sentence


class Clients(Sequence[int]):
    """Some clients, in ascending order, with the sizes of their training sets."""

    def __init__(self, ids: Sequence[int] | keys.I64, samples: keys.I64) -> None:
        self.ids = np.unique(np.asarray(ids, np.int64))
        self._all = samples

    @property
    def samples(self) -> Tensor:
        """Training samples of each, [K] on the CPU."""
        return torch.from_numpy(self._all[self.ids].astype(np.float32))

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | np.integer):
            return int(self.ids[index])
        if isinstance(index, Tensor):
            index = index.cpu().numpy()
        return Clients(self.ids[index], self._all)

    def __contains__(self, client: object) -> bool:
        return client in self.ids

    def __sub__(self, other: Sequence[int]) -> Clients:
        return Clients(np.setdiff1d(self.ids, np.asarray(list(other), np.int64)), self._all)

    def __and__(self, other: Sequence[int]) -> Clients:
        return Clients(np.intersect1d(self.ids, np.asarray(list(other), np.int64)), self._all)

    def __or__(self, other: Sequence[int]) -> Clients:
        return Clients(np.union1d(self.ids, np.asarray(list(other), np.int64)), self._all)

    def __repr__(self) -> str:
        return f"Clients({self.ids.tolist()})"


@dataclass(frozen=True)
class Each:
    """One row of a message for each client asked, in their order."""

    rows: Tensor


def each(rows: Tensor) -> Each:
    """Mark a message tensor as one row per client; anything else is sent to all alike."""
    return Each(rows)


@dataclass(frozen=True)
class Masked:
    """Rows of which only the entries under a mask travel; the receiver has, or is sent, the mask."""

    values: Tensor
    mask: Tensor  # bool, same shape


Reply = Mapping[str, Tensor | Masked]
"""What a client function returns: named tensors, the first axis running over clients."""

Spec = dict[str, tuple[tuple[int, ...], torch.dtype, bool]]
"""Shape, type and whether it comes under a mask, of every tensor that one client sends."""


def wire_bytes(value: object) -> int:
    """What one value costs on the wire: tensors as they are, truth values as bits, plain numbers as four bytes."""
    if isinstance(value, Masked):
        return int(value.mask.sum()) * value.values.element_size()
    if isinstance(value, Tensor):
        return -(-value.numel() // 8) if value.dtype == torch.bool else value.numel() * value.element_size()
    if isinstance(value, bool | int | float):
        return 4
    if isinstance(value, str):
        return len(value.encode())
    if value is None:
        return 0
    raise FedKinError(f"a message cannot hold a {type(value).__name__}: send tensors, numbers and strings")


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
        not_finite: Clients | None = None,
    ) -> None:
        self.clients, self._values, self._masks, self._average = clients, dict(values), dict(masks), average
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
        values = {k: v[chosen.to(v.device)] for k, v in self._values.items()}
        masks = {k: m[chosen.to(m.device)] for k, m in self._masks.items()}
        clients: Clients = self.clients[chosen]
        average = self._average.among(clients) if isinstance(self._average, Noted) else self._average
        return Replies(clients, values, masks, average, self.not_finite)

    def mean(self, name: str, otherwise: Tensor, weights: Tensor | None = None) -> Tensor:
        """The average over clients, by training samples unless `weights` are given; `otherwise` if nobody answered."""
        if not len(self):
            return otherwise
        rows = self[name]
        return self._average(rows, (self.samples if weights is None else weights).to(rows.device), otherwise)

    def combine(self, rows: Tensor, otherwise: Tensor, weights: Tensor) -> Tensor:
        """`mean` of rows that the server has made from the replies, one for each client that answered."""
        return self._average(rows, weights.to(rows.device), otherwise)


class Average(Protocol):
    """How rows become one: (rows [K, D], weights [K], what the clients started from [D]) to [D]."""

    def __call__(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor: ...


def weighted_mean(rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
    """sum_k w_k row_k / sum_k w_k."""
    share = weights.to(rows.dtype)
    return (share / share.sum()) @ rows


@dataclass(frozen=True)
class Noted:
    """An average over rows of these clients; a rule that says whom it left out is written down."""

    average: Average
    clients: Clients
    note: Callable[[str | notes.Kind, Any], None]

    def __call__(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        row = self.average(rows, weights, start)
        used = getattr(getattr(self.average, "last", None), "used", None)
        if used is not None and len(used) == len(self.clients):
            self.note(notes.USED, {"clients": self.clients.ids.tolist(), "used": used.cpu().tolist()})
        return row

    def among(self, clients: Clients) -> Noted:
        return Noted(self.average, clients, self.note)


Messages = Callable[[keys.I64], Mapping[str, object]]
"""What these clients receive when they want their models."""


class Measured(NamedTuple):
    """How clients' personal models did on their test samples, [K] each: right answers, samples, mean loss."""

    correct: np.ndarray[Any, Any]
    total: np.ndarray[Any, Any]
    loss: np.ndarray[Any, Any]


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


@dataclass
class Answer:
    ids: keys.I64
    replies: dict[str, Tensor | Masked] = field(default_factory=dict)
    odd: dict[int, Reply] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)  # of each client, where an engine knows
    right: Spec | None = None  # what every reply must look like; None: what is stacked here was made by trusted code


Tamper = Callable[[keys.I64, str, Mapping[str, object], Answer, int], Answer]
"""What an attacker does to an answer: (ids asked, phase, message, honest answer, round) to the answer received."""


@dataclass
class Faults:
    """Clients that break, drawn anew for every exchange from (seed, round, phase, client)."""

    drop: float = 0.0  # does nothing and stays silent
    straggle: float = 0.0  # works, but its reply comes too late
    seed: int = 0

    def draw(self, kind: str, share: float, ids: keys.I64, round: int, phase: str) -> np.ndarray[Any, Any]:
        if not share:
            return np.zeros(len(ids), bool)
        drawn: np.ndarray[Any, Any] = keys.uniform(keys.key(self.seed, kind, round, phase, ids), 1)[:, 0] < share
        return drawn


class Federation:
    """All clients, and `ask`."""

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
        self.rounds = 1
        self.removed: dict[int, int] = {}  # client -> round
        self.why_removed: dict[int, str] = {}  # of those whom not the method removed
        self.failures: list[Failure] = []
        self.exchanges: list[Exchange] = []
        self.notes: list[Note] = []
        self.watcher: Watcher | None = None
        self.watching = 0.0  # seconds the watcher has taken
        self.stop_on_failure = False

    @property
    def all(self) -> Clients:
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
            "average": self._average.state() if hasattr(self._average, "state") else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.removed = dict(state["removed"])
        self.failures = [Failure(*f) for f in state["failures"]]
        self.exchanges = [Exchange(*e) for e in state["exchanges"]]
        self.notes = [Note(*n) for n in state["notes"]]
        self.why_removed = dict(state.get("why_removed", {}))
        if hasattr(self._average, "restore") and state["average"] is not None:  # a rule with a memory
            self._average.restore(state["average"])

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
            mine = {
                k: Each(v.rows[torch.from_numpy(~dropped)]) if isinstance(v, Each) and dropped.any() else v
                for k, v in message.items()
            }
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
        wild = Clients([c for c, why in reasons.items() if isinstance(why, NotFinite)], self._samples)
        return Replies(answered, values, masks, Noted(self._average, answered, self.note), wild)


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
        if isinstance(value, Masked):
            kept = Masked(value.values[chosen], value.mask[chosen])
            values[name], masks[name] = kept.values, kept.mask
            if len(up):
                entries = kept.mask.reshape(len(up), -1).sum(1).cpu().numpy()
                up += entries * kept.values.element_size()
        else:
            values[name] = value if good.all() else value[chosen]
            up += wire_bytes(values[name][0]) if len(up) else 0
    return values, masks, up


class NotFinite(str):
    """Why a reply was refused, where it is that its values are not finite."""


def gate(answer: Answer, right: Spec | None = None) -> tuple[Answer, dict[int, str]]:
    """The right names, shapes and types, finite, within the size limit; otherwise the client failed, and here is why.

    What is `right` is known before anybody may have changed a reply, and never learnt from replies of who knows whom;
    None: trusted code has just made these."""
    right = spec_of(answer.replies) if right is None else right
    bad = {client: difference(spec_of(reply, stacked=False), right) for client, reply in answer.odd.items()}
    stacked = spec_of(answer.replies)
    if stacked != right:
        bad |= dict.fromkeys(answer.ids.tolist(), difference(stacked, right))
        return Answer(answer.ids[:0]), bad
    for name, value in answer.replies.items():
        tensor = value.values if isinstance(value, Masked) else value
        size = tensor[0].numel() * tensor.element_size() if len(tensor) else 0
        if size > MAX_REPLY_BYTES:
            for client in answer.ids.tolist():
                bad.setdefault(client, f"{name!r} has {size} bytes, more than the limit of {MAX_REPLY_BYTES}")
        if tensor.is_floating_point() and len(tensor):
            flat = tensor.reshape(len(tensor), -1)
            finite = torch.isfinite(flat.sum(1))  # an overflowing sum of finite numbers is looked at again below
            for k in torch.nonzero(~finite).flatten().tolist():
                wrong = int((~torch.isfinite(flat[k])).sum())
                if wrong:
                    bad.setdefault(int(answer.ids[k]), NotFinite(f"{name!r} has {wrong} {NOT_FINITE}"))
    return answer, bad


def spec_of(reply: Reply, stacked: bool = True) -> Spec:
    """What one client's reply looks like; `stacked`: the first axis runs over clients."""
    tensors = {k: v.values if isinstance(v, Masked) else v for k, v in reply.items()}
    return {k: (tuple(t.shape[stacked:]), t.dtype, isinstance(reply[k], Masked)) for k, t in tensors.items()}


def difference(sent: Spec, right: Spec) -> str:
    """What is wrong with a reply, in words."""
    if set(sent) != set(right):
        return f"sent {sorted(sent)[:MOST_NAMES]} instead of {sorted(right)}"
    for name, (shape, dtype, masked) in sent.items():
        if shape != right[name][0]:
            return f"{name!r} has shape {list(shape)} instead of {list(right[name][0])}"
        if dtype != right[name][1]:
            return f"{name!r} is {dtype} instead of {right[name][1]}"
        if masked != right[name][2]:
            return f"{name!r} comes {'under a' if masked else 'without its'} mask"
    return "odd reply"
