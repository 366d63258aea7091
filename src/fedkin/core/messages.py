"""What travels between server and clients: whom it goes to, what a reply is, what it costs, the gate it has to pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import keys
from fedkin.errors import FedKinError

MAX_REPLY_BYTES = 2 << 30
NOT_FINITE = "values that are not finite"  # in the reason of a reply that is refused for it
MOST_NAMES = 20  # that a client made up, in a sentence


class Clients(Sequence[int]):
    """Some clients, in ascending order, with the sizes of their training sets.

    A sequence of numbers that also knows set operations: `fed.all - cohort`, `a & b`, `a | b`, and `cohort[chosen]`
    with a tensor of truth values, one for each client."""

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
    """Mark a message tensor as one row per client; anything else is sent to all alike.

    `fed.ask(cohort, self.train, model=fk.each(rows))` sends row k to the k-th client of the cohort."""
    return Each(rows)


def for_some(message: Mapping[str, object], at: Tensor | slice) -> dict[str, object]:
    """The message for some of the clients asked, by their places among them."""
    return {k: Each(v.rows[at]) if isinstance(v, Each) else v for k, v in message.items()}


def opened(message: Mapping[str, object]) -> dict[str, object]:
    """The message as a client function gets it."""
    return {k: v.rows if isinstance(v, Each) else v for k, v in message.items()}


@dataclass(frozen=True)
class Masked:
    """Rows of which only the entries under a mask travel; the receiver has, or is sent, the mask."""

    values: Tensor
    mask: Tensor  # bool, same shape

    def __getitem__(self, at: Any) -> Masked:
        return Masked(self.values[at], self.mask[at])

    def __len__(self) -> int:
        return len(self.values)


Reply = Mapping[str, Tensor | Masked]
"""What a client function returns: named tensors, the first axis running over clients."""


def tensor_of(value: Any) -> Any:
    """A value of a reply without its mask."""
    return value.values if isinstance(value, Masked) else value


def rows_for(reply: Mapping[str, Any] | None, clients: int) -> dict[str, Tensor | Masked]:
    """What a client function returned, if it is named tensors of one row for each of so many clients."""
    for name, value in (reply or {}).items():
        tensor = tensor_of(value)
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != clients:
            rows = "one row of numbers" if clients == 1 else f"a row of numbers for each of {clients} clients"
            shape = f"of shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise FedKinError(f"{name!r} {shape}, not {rows}")
    return dict(reply or {})


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


@dataclass
class Answer:
    """What an engine brings back of one `ask`."""

    ids: keys.I64
    replies: dict[str, Tensor | Masked] = field(default_factory=dict)
    odd: dict[int, Reply] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)  # of each client, where an engine knows
    right: Spec | None = None  # what every reply must look like; None: what is stacked here was made by trusted code


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
        tensor = tensor_of(value)
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
    tensors = {name: tensor_of(value) for name, value in reply.items()}
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
