"""Each client on its own machine: `ask` sends one message to every site and waits for what comes back.

How bytes travel is the business of a `Post` (Flower's, in a deployment). Here is what an exchange is: it has a
deadline, a least number of replies, and no patience for late ones. A site that is not there, dies, answers too late,
too much or nonsense is a client that failed, with the reason and its name; the round goes on with the others, and in
the next exchange it is welcome again.
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
from fedkin.errors import FedKinError
from fedkin.federation import Answer, Each, Masked, Reply


@dataclass(frozen=True)
class Terms:
    """When an exchange is over. `minimum`: the share of the sites asked without which the deadline does not end it;
    they may come back and are asked again, until `give_up` seconds have passed since the deadline."""

    deadline: float = 600.0
    minimum: float = 0.5
    give_up: float = 3600.0
    period: float = 0.01  # seconds between two looks for replies


@dataclass(frozen=True)
class Delivery:
    """What one site sent: values with a leading axis of one, and what it says about its work."""

    values: Mapping[str, object]
    fields: Mapping[str, Any] = field(default_factory=dict)


class Post(Protocol):
    """Carries messages to sites and back. Sites are known by their number."""

    def send(self, ids: Sequence[int], message: Mapping[str, object], fields: Mapping[str, Any]) -> dict[int, str]:
        """One message for each; an `Each` holds one row for each of `ids`. Returns whom it cannot reach, and why."""

    def collect(self) -> dict[int, Delivery | str]:
        """What has come since the last time: a delivery, or why there will be none."""

    def cancel(self, ids: Sequence[int]) -> None:
        """What these still send in reply is not wanted any more."""

    def present(self, client: int) -> bool:
        """Whether a message would reach this site now."""


class FlowerEngine:
    """`checkpoints` tells the rounds that the server could go back to, so that sites keep what they need for it."""

    def __init__(
        self,
        post: Post,
        names: Sequence[str],
        terms: Terms | None = None,
        checkpoints: Callable[[], list[int]] = list,
    ) -> None:
        self._post, self.names, self.terms, self._checkpoints = post, list(names), terms or Terms(), checkpoints
        self.losses = torch.full((len(names),), float("nan"))  # last training loss of each client
        self.client_steps = 0  # training steps of all sites, as they say
        self._round, self._calls = -1, 0

    def call(self, ids: keys.I64, function: str, message: Mapping[str, object], round: int) -> Answer:
        if round != self._round:
            self._round, self._calls = round, 0
        number, self._calls = self._calls, self._calls + 1
        fields = {"phase": function, "round": round, "call": number,
                  "checkpoints": self._checkpoints()}  # fmt: skip
        return self._exchange(ids, message, fields, self.terms.minimum)

    def measure(self, ids: keys.I64, function: str, message: Mapping[str, object], round: int) -> Answer:
        """Like `call`, for looking only: nothing at the sites changes, and nobody has to answer."""
        fields = {"phase": function, "round": round, "call": -1, "checkpoints": self._checkpoints()}
        return self._exchange(ids, message, fields, 0.0)

    def _exchange(
        self, ids: keys.I64, message: Mapping[str, object], fields: Mapping[str, Any], minimum: float
    ) -> Answer:
        begin = time.monotonic()
        asked = ids.tolist()
        needed = math.ceil(minimum * len(asked))
        came: dict[int, Delivery] = {}
        seconds: dict[int, float] = {}
        failed = self._send(asked, asked, message, fields)
        waiting = set(asked) - set(failed)
        while True:
            for client, found in self._post.collect().items():
                if client not in waiting:
                    continue
                waiting.discard(client)
                if isinstance(found, Delivery):
                    came[client], seconds[client] = found, time.monotonic() - begin
                else:
                    failed[client] = found
            spent = time.monotonic() - begin
            if not waiting and len(came) >= needed:
                break
            if spent > self.terms.deadline:
                late = f"no reply within {self.terms.deadline:g} s; reply came too late if at all"
                failed |= dict.fromkeys(waiting, late)
                self._post.cancel(sorted(waiting))
                waiting = set()
                if len(came) >= needed:
                    break
            if spent > self.terms.deadline + self.terms.give_up:
                raise FedKinError(self._too_few(fields, asked, came, needed, failed))
            if not waiting:  # too few: whoever is back is asked again
                back = [c for c in asked if c not in came and self._post.present(c)]
                refused = self._send(asked, back, message, fields) if back else {}
                failed |= refused
                waiting = set(back) - set(refused)
                time.sleep(0.2)
            time.sleep(self.terms.period)
        return self._answer(ids, came, {c: why for c, why in failed.items() if c not in came}, seconds)

    def _send(
        self, asked: Sequence[int], to: Sequence[int], message: Mapping[str, object], fields: Mapping[str, Any]
    ) -> dict[int, str]:
        at = torch.tensor([asked.index(c) for c in to], dtype=torch.long)
        mine = {k: Each(v.rows.cpu()[at]) if isinstance(v, Each) else v for k, v in message.items()}
        return self._post.send(to, mine, fields)

    def _too_few(
        self, fields: Mapping[str, Any], asked: Sequence[int], came: Mapping[int, Any], needed: int,
        failed: Mapping[int, str],
    ) -> str:  # fmt: skip
        silent = next((f"{self.names[c]!r}: {failed[c]}" for c in asked if c in failed), "nobody failed")
        return (
            f"round {fields['round'] + 1}, {fields['phase']}: {len(came)} of {len(asked)} sites answered, {needed} are "
            f"needed ({silent}); bring the sites back and resume the run"
        )

    def _answer(
        self, ids: keys.I64, came: Mapping[int, Delivery], failed: Mapping[int, str], seconds: dict[int, float]
    ) -> Answer:
        """Replies that look alike stacked, the others one by one, and the reasons with the sites' names."""
        groups: dict[object, list[int]] = {}
        reasons = {c: f"site {self.names[c]!r}: {why}" for c, why in failed.items()}
        for client in ids.tolist():
            if client in came:
                try:
                    groups.setdefault(_look(came[client].values), []).append(client)
                    self._hear(client, came[client].fields)
                except FedKinError as error:
                    reasons[client] = f"site {self.names[client]!r}: {error}"
        largest = max(groups.values(), key=len, default=[])
        odd = {c: _single(came[c].values) for group in groups.values() if group is not largest for c in group}
        stacked = _stack([came[c].values for c in largest])
        return Answer(np.array(largest, np.int64), stacked, odd, reasons, seconds)

    def _hear(self, client: int, fields: Mapping[str, Any]) -> None:
        loss, steps = fields.get("loss"), fields.get("steps")
        if isinstance(loss, float) and math.isfinite(loss):
            self.losses[client] = loss
        if isinstance(steps, int) and 0 <= steps < 1 << 40:
            self.client_steps += steps


def _look(values: Mapping[str, object]) -> object:
    """What makes two replies stackable; an error for what no client function returns."""
    look = []
    for name, value in values.items():
        tensor = value.values if isinstance(value, Masked) else value
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != 1:
            raise FedKinError(f"{name!r} is not one row of numbers")
        look.append((name, tuple(tensor.shape), tensor.dtype, isinstance(value, Masked)))
    return tuple(look)


def _single(values: Mapping[str, object]) -> Reply:
    return {
        name: Masked(v.values[0], v.mask[0]) if isinstance(v, Masked) else v[0]
        for name, v in values.items()
        if isinstance(v, Tensor | Masked)
    }


def _stack(replies: Sequence[Mapping[str, object]]) -> dict[str, Tensor | Masked]:
    stacked: dict[str, Tensor | Masked] = {}
    for name in replies[0] if replies else ():
        values = [r[name] for r in replies]
        masked = [v for v in values if isinstance(v, Masked)]
        if masked:
            stacked[name] = Masked(torch.cat([v.values for v in masked]), torch.cat([v.mask for v in masked]))
        else:
            stacked[name] = torch.cat([v for v in values if isinstance(v, Tensor)])
    return stacked
