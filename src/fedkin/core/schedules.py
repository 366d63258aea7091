"""Learning rates that change from round to round, and from client to client.

A schedule is a frozen dataclass of options. It says what the run's rate is in each round; what comes of it is a factor
that multiplies every rate a client trains with, a method's own included. Rounds are those of the run, so a run that is
resumed, a run that trains together with others and a site on its own machine have the rate of their round.

A schedule of your own implements `decayed`:

    @SCHEDULES.register("inverse")
    @dataclass(frozen=True)
    class Inverse(Schedule):
        about = "the rate divided by the round"
        def decayed(self, lr, round, rounds):
            return lr / (round + 1)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedkin.compute import keys
from fedkin.errors import UsageError, unknown
from fedkin.options import option, validated
from fedkin.registry import Registry

SCHEDULES: Registry[type[Schedule]] = Registry("learning-rate schedule")
LOGNORMAL = "lognormal:"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the learning rate goes from round to round."""

    about: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    warmup: int = option(
        0,
        "number of rounds n in which the rate rises linearly, from 1/n of it in the first to all of it in round n",
        low=0,
    )

    def rate(self, lr: float, round: int, rounds: int) -> float:
        """The rate of a round, counted from 0, of a run of so many rounds."""
        return self.decayed(lr, round, rounds) * (min(1.0, (round + 1) / self.warmup) if self.warmup else 1.0)

    def decayed(self, lr: float, round: int, rounds: int) -> float:
        """The rate without the warm-up."""
        raise NotImplementedError


@SCHEDULES.register("constant")
@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The rate stays what it is."""

    about = "the same rate in every round"

    def decayed(self, lr: float, round: int, rounds: int) -> float:
        return lr


@SCHEDULES.register("step")
@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """The rate is multiplied by gamma after every so many rounds, or after each of the rounds given: with every=10 or
    after=10 round 11 is the first with a smaller one. One of the two has to be given."""

    about = "the rate is multiplied by gamma every n rounds, or after given rounds"
    every: int | None = option(None, "number of rounds between two steps", low=1)
    after: str | None = option(None, "the rounds after which there is a step, as in 10+20")
    gamma: float = option(0.1, "what the rate is multiplied by at a step", above=0, high=1)

    def __post_init__(self) -> None:
        if (self.every is None) == (self.after is None):
            raise UsageError(
                "step: say every=10 (every ten rounds) or after=10+20 (after these rounds), one of the two"
            )
        self.rounds()  # what is not understood is told at once

    def rounds(self) -> list[int]:
        words = (self.after or "").split("+") if self.after is not None else []
        if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            raise UsageError(f"step: after={self.after!r}: accepts rounds from 1 on, as in 10+20")
        return [int(word) for word in words]

    def decayed(self, lr: float, round: int, rounds: int) -> float:
        steps = round // self.every if self.every is not None else sum(round >= after for after in self.rounds())
        return float(lr * self.gamma**steps)


@SCHEDULES.register("exponential")
@dataclass(frozen=True, kw_only=True)
class Exponential(Schedule):
    """The rate of a round is gamma times that of the round before."""

    about = "the rate is multiplied by gamma in every round"
    gamma: float = option(0.99, "what the rate is multiplied by in each round", above=0, high=1)

    def decayed(self, lr: float, round: int, rounds: int) -> float:
        return float(lr * self.gamma**round)


@SCHEDULES.register("cosine")
@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """minimum + (lr - minimum) (1 + cos(pi t / T)) / 2 in round t = 0, ..., T - 1 of T: slowly at first and at the end.
    The minimum is where the curve would be after the last round."""

    about = "the rate falls along half a cosine over the run's rounds, down to a minimum"
    paper = "Loshchilov and Hutter, ICLR 2017"
    minimum: float = option(0.0, "the rate at the end of the curve", low=0)

    def decayed(self, lr: float, round: int, rounds: int) -> float:
        if self.minimum > lr:
            raise UsageError(f"cosine: minimum={self.minimum:g} is above the learning rate, lr={lr:g}")
        return self.minimum + (lr - self.minimum) * (1 + math.cos(math.pi * round / rounds)) / 2


def make_schedule(name: str, options: Mapping[str, object] | None = None) -> Schedule:
    """A schedule by name, its options checked."""
    return validated(SCHEDULES[name], options or {}, f"learning-rate schedule {name!r}")


# ---------------------------------------------------------------- rates as numbers


@dataclass(frozen=True)
class Factors:
    """What a client's rates are multiplied by: in each round of a run, and at each client (empty: 1)."""

    rounds: tuple[float, ...]
    clients: tuple[float, ...] = ()

    @classmethod
    def of(cls, schedule: Schedule, lr: float, rounds: int, clients: Sequence[float] = ()) -> Factors | None:
        """None where nothing ever differs from `lr`."""
        rates = [schedule.rate(lr, round, rounds) for round in range(rounds)]
        for round, rate in enumerate(rates, start=1):
            if not (math.isfinite(rate) and rate >= 0):
                raise UsageError(f"lr_schedule: the rate of round {round} would be {rate}, which is none")
        if all(rate == lr for rate in rates) and all(factor == 1 for factor in clients):
            return None
        return cls(tuple(rate / lr for rate in rates), tuple(clients))

    def in_round(self, round: int) -> float:
        """What is trained after the last round (a fine-tuning) is trained as in that round."""
        return self.rounds[min(round, len(self.rounds) - 1)]

    def at(self, ids: keys.I64, round: int) -> NDArray[np.float64]:
        """Of each of these clients, [K]."""
        own = np.array(self.clients)[ids] if self.clients else np.ones(len(ids))
        return own * self.in_round(round)


def parse_factors(text: str) -> float | list[float] | dict[str, float]:
    """What the setting `lr_factors` says of single clients' rates: `lognormal:0.5`, the deviation of their logarithms;
    `1+0.5+2`, one for each in their order; `paris=0.1+lima=2`, some by name. `same` is none at all."""
    if text == "same":
        return []
    if text.startswith(LOGNORMAL):
        return _number(text, text.removeprefix(LOGNORMAL))
    words = text.split("+")
    if "=" not in text:
        return [_number(text, word) for word in words]
    given = {name.strip(): _number(text, factor) for name, _, factor in (word.rpartition("=") for word in words)}
    if len(given) < len(words):
        raise UsageError(f"lr_factors={text!r}: a client is named twice")
    return given


def client_factors(text: str, names: Sequence[str], seed: int) -> list[float]:
    """What each client multiplies its rates by; empty: all by 1. Drawn around 1 (the median) where a deviation is
    given; 1 for those that are not named. A site has "" for the names of the others."""
    given = parse_factors(text)
    if isinstance(given, float):
        draws = keys.uniform(keys.key(seed, "rates", np.arange(len(names))), 2)
        normal = np.sqrt(-2 * np.log1p(-draws[:, 0])) * np.cos(2 * math.pi * draws[:, 1])
        found: list[float] = np.exp(given * normal).tolist()
        return found
    if isinstance(given, dict):
        for name in given:
            if name not in names and "" not in names:
                raise unknown("client in lr_factors", name, names)
        return [given.get(name, 1.0) for name in names]
    if len(given) not in (0, len(names)):
        raise UsageError(f"lr_factors={text!r}: {len(given)} factors for {len(names)} clients; one for each, in order")
    return given


def _number(text: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(
            f"lr_factors={text!r}: {word.strip()!r} is no number above 0; write same, lognormal:0.5, 1+0.5+2 (one for "
            "each client) or NAME=0.1+NAME=2"
        )
    return value


__all__ = ["SCHEDULES", "Factors", "Schedule", "client_factors", "make_schedule", "parse_factors"]
