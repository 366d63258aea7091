"""What hostile clients do. Reply attacks change what they send: rows in, rows out. Data attacks change what they train
on and leave the protocol alone.

A reply attack sees updates d_i = reply - received of all n participants and returns a row for each of the m malicious
ones. With `full` knowledge it may use every update, with `own` those of the malicious clients only (which then stand
in for everybody's). A single row has no spread: its standard deviation counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from statistics import NormalDist
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkin.errors import UsageError
from fedkin.options import option, validated
from fedkin.registry import Registry
from fedkin.robust.rows import dots, gram
from fedkin.robust.rules import Mean, Rule, apply, make_rule

Array = NDArray[Any]
Knowledge = Literal["own", "full"]

ATTACKS: Registry[type[Attack]] = Registry("attack")


@dataclass(frozen=True)
class Attack:
    """Base of all attacks; `about` and `paper` are what `fedkin attacks` shows."""

    about: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    uses_knowledge: ClassVar[bool] = True  # whether it matters if attackers see everybody's updates or their own
    _: KW_ONLY
    lie_about_votes: bool = option(False, "attackers that sit on a committee also reverse their votes")


class ReplyAttack(Attack):
    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        """Updates of all participants [n, D], who is malicious bool [n], to what the malicious ones send [m, D]."""
        raise NotImplementedError


class DataAttack(Attack):
    needs_classes: ClassVar[bool] = True  # whether it looks at labels as classes

    def poison(self, x: Array, y: Array, classes: int, rank: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Changed copies of one malicious client's training samples; it is the `rank`-th malicious client."""
        raise NotImplementedError


def make_attack(name: str, options: Mapping[str, Any] | None = None) -> Attack:
    """An attack by name, its options checked."""
    return validated(ATTACKS[name], options or {}, f"attack {name!r}")


def known(updates: Tensor, malicious: Tensor, knowledge: Knowledge) -> Tensor:
    """The updates the attackers can see."""
    return updates if knowledge == "full" else updates[malicious]


def spread(rows: Tensor) -> Tensor:
    """Unbiased standard deviation of every coordinate; zero for a single row."""
    return rows.std(0) if len(rows) > 1 else torch.zeros_like(rows[0])


def alike(row: Tensor, malicious: Tensor) -> Tensor:
    """The same row from every malicious client."""
    return row.expand(int(malicious.sum()), -1)


# ---------------------------------------------------------------- replies


@ATTACKS.register("sf")
@dataclass(frozen=True)
class SignFlip(ReplyAttack):
    """d -> -d."""

    uses_knowledge = False
    about = "sign flip: the honest update with its sign reversed"
    paper = "Li et al., AAAI 2019; FedCAP"

    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        return -updates[malicious]


@ATTACKS.register("mr")
@dataclass(frozen=True)
class ModelReplacement(ReplyAttack):
    """d -> n d."""

    uses_knowledge = False
    about = "model replacement: the honest update, enlarged so that it outweighs the others"
    paper = "Bagdasaryan et al., AISTATS 2020"
    factor: float | None = option(None, "factor by which it is enlarged (default: the number of participants)")

    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        return updates[malicious] * (len(updates) if self.factor is None else self.factor)


@ATTACKS.register("gaussian")
@dataclass(frozen=True)
class Gaussian(ReplyAttack):
    """d -> N(0, sigma^2), sigma the standard deviation of the honest update's coordinates."""

    uses_knowledge = False
    about = "random noise of the same size instead of an update"
    paper = "FedCAP's code (Random)"
    sigma: float | None = option(None, "standard deviation (default: that of the honest update)", above=0)

    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        honest = updates[malicious]
        noise = torch.from_numpy(rng.standard_normal(honest.shape, np.float32)).to(honest)
        return noise * (spread(honest.T)[:, None] if self.sigma is None else self.sigma)


@ATTACKS.register("lie")
@dataclass(frozen=True)
class LIE(ReplyAttack):
    """A little is enough: d = mu - z sigma in every coordinate (Algorithm 3)."""

    about = "a little is enough: a small common shift that hides in the spread of the updates"
    paper = "Baruch et al., NeurIPS 2019"
    z: float | None = option(
        None, "size of the shift in standard deviations (default: the paper's, which follows from n and m)"
    )

    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        seen = known(updates, malicious, knowledge)
        z = lie_z(len(updates), int(malicious.sum())) if self.z is None else self.z
        return alike(seen.mean(0) - z * spread(seen), malicious)


def lie_z(n: int, m: int) -> float:
    """z = Phi^-1((n - m - s) / (n - m)) with s = floor(n / 2) + 1 - m supporters to be won (at least one); 0.3 where
    this is not positive."""
    s = max(1, n // 2 + 1 - m)
    below = (n - m - s) / max(1, n - m)
    return NormalDist().inv_cdf(below) if below > 0.5 else 0.3


class Envelope(ReplyAttack):
    """d = mean + gamma p with the largest gamma at which d still lies within the others (Shejwalkar and Houmansadr,
    section IV), p = -sigma as in FedCAP and Blades; gamma is doubled until d sticks out, then bisected."""

    def within(self, to: Tensor, between: Tensor) -> bool:
        """Given |d - d_i|^2 [n] and |d_i - d_j|^2 [n, n]: is d hidden?"""
        raise NotImplementedError

    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        seen = known(updates, malicious, knowledge)
        mean, towards = seen.mean(0), -spread(seen)
        product, along, size = gram(seen, mean), dots(seen, mean, towards), float(towards.double().square().sum())
        own = product.diagonal()
        between = (own[:, None] + own - 2 * product).clamp(min=0)
        gamma = largest(lambda g: self.within(own - 2 * g * along + g * g * size, between)) if size else 0.0
        return alike(mean + gamma * towards, malicious)


def largest(feasible: Callable[[float], bool], tolerance: float = 1e-5, least: float = 1e-30) -> float:
    """The largest feasible number, to a relative tolerance, where all below it are feasible; 0 if none from `least` on
    is."""
    low, high = 0.0, 1.0
    while feasible(high) and high < 1e30:
        low, high = high, 2 * high
    while high - low > tolerance * low and high > least:
        middle = (low + high) / 2
        low, high = (middle, high) if feasible(middle) else (low, middle)
    return low


@ATTACKS.register("min-max")
@dataclass(frozen=True)
class MinMax(Envelope):
    """max_i |d - d_i| <= max_ij |d_i - d_j| (FedCAP equation 9)."""

    about = "an update as far from the others as the two most distant ones are from each other"
    paper = "Shejwalkar and Houmansadr, NDSS 2021"

    def within(self, to: Tensor, between: Tensor) -> bool:
        return bool(to.max() <= between.max())


@ATTACKS.register("min-sum")
@dataclass(frozen=True)
class MinSum(Envelope):
    """sum_i |d - d_i|^2 <= max_i sum_j |d_i - d_j|^2 (FedCAP equation 10; its code sums the distances themselves, which
    leaves the attackers some 12 % less room in its CIFAR-10 setting)."""

    about = "an update whose summed distance to all is that of the outermost update"
    paper = "Shejwalkar and Houmansadr, NDSS 2021"
    bound: Literal["max", "min"] = option("max", "compare with the outermost update (paper) or the innermost (code)")
    squared: bool = option(True, "sums of squared distances (paper), or of distances (FedCAP's code)")

    def within(self, to: Tensor, between: Tensor) -> bool:
        if not self.squared:
            to, between = to.clamp(min=0).sqrt(), between.sqrt()
        sums = between.sum(1)
        return bool(to.sum() <= (sums.max() if self.bound == "max" else sums.min()))


@ATTACKS.register("ipm")
@dataclass(frozen=True)
class IPM(ReplyAttack):
    """Inner product manipulation: d = -epsilon mean(benign updates); with own knowledge, the mean of their own."""

    about = "the mean of the benign updates, reversed and enlarged"
    paper = "Xie et al., UAI 2019"
    epsilon: float | None = option(None, "factor of enlargement (default: the number of participants)", above=0)

    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        benign = updates[malicious if knowledge == "own" or bool(malicious.all()) else ~malicious]
        epsilon = len(updates) if self.epsilon is None else self.epsilon
        return alike(-epsilon * benign.mean(0), malicious)


@ATTACKS.register("adaptive")
@dataclass(frozen=True)
class Adaptive(ReplyAttack):
    """d = mean + g p with the largest g that the defence, which the attackers know, still accepts; p is minus the
    benign mean, as in IPM, or minus the spread, as in LIE.

    Against the run's own defence that is the method's if it has one: FedCAP's limit on calibrated updates, C-PFL's
    committee, which the attackers play on their own data. Otherwise it is the rule. A rule accepts if it uses every
    attacker's row (Krum: one of theirs); they try it on what they know, not knowing sample counts and a rule's draws.
    `norm` accepts up to a length of t_norm, `committee` up to an angle with the mean, at the mean's length."""

    about = "the strongest update that a defence, which the attackers know, still accepts"
    paper = "after Fang et al., USENIX Security 2020, and Shejwalkar and Houmansadr, NDSS 2021"
    against: str | Rule = option(  # noqa: RUF009
        "run",
        "the defence; run: the one that the run uses; else norm, committee, or a rule, as in "
        "gas:parts=50;malicious=0.2",
    )
    direction: Literal["mean", "spread"] = option(
        "mean", "direction of the updates: minus the mean, or minus the spread"
    )
    t_norm: float = option(10.0, "with against=norm, the longest update that is accepted", above=0)
    cosine: float = option(0.5, "with against=committee, smallest cosine with the mean", low=-1, high=1)
    most: float | None = option(None, "largest size g (default, against a rule: participants + 1, as IPM)", above=0)
    passes: Callable[[Tensor], bool] | None = field(
        default=None, compare=False, repr=False, metadata={"help": "whether an update would pass; given by the run"}
    )

    def __post_init__(self) -> None:
        self.rule()  # a wrong name is told at once

    def rule(self) -> Rule | None:
        if isinstance(self.against, Rule):
            return self.against
        if self.passes is not None or self.against in ("norm", "committee"):
            return None
        name, _, rest = self.against.partition(":")
        return Mean() if name == "run" else make_rule(name, dict(o.partition("=")[::2] for o in rest.split(";") if o))

    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        rows, own, rule, committee = updates.clone(), updates[malicious], self.rule(), self.against == "committee"
        if knowledge == "own":  # theirs stand in for everybody's
            rows[~malicious] = own[torch.arange(len(rows) - len(own), device=own.device) % len(own)]
        benign = (own if knowledge == "own" or bool(malicious.all()) else updates[~malicious]).double()
        mean, most = benign.mean(0), self.most or (len(rows) + 1 if rule else float("inf"))
        towards = -mean if self.direction == "mean" and not committee else -spread(benign)

        def sent(g: float) -> Tensor:
            row = mean + g * towards
            return (row * (mean.norm() / row.norm().clamp(min=1e-300)) if committee else row).to(updates.dtype)

        def accepted(g: float) -> bool:
            rows[malicious] = row = sent(g)
            if self.passes is not None:
                return self.passes(row)
            if rule is None:
                long, turned = row.double().norm(), mean @ row.double()
                return bool(turned >= self.cosine * long * mean.norm() if committee else long <= self.t_norm)
            used = apply(rule, rows, torch.ones_like(rows[:, 0]), torch.zeros_like(row)).used
            return int(used[malicious].sum()) >= max(1, min(len(own), int(used.sum())))

        tolerance, least = (1e-2, 1e-2) if self.passes else (1e-4 if rule else 1e-8, 1e-30)
        return alike(sent(largest(lambda g: g <= most and accepted(g), tolerance, least)), malicious)


@ATTACKS.register("nan")
@dataclass(frozen=True)
class NotANumber(ReplyAttack):
    """d -> NaN: does anything crash, and is the client counted as failed?"""

    uses_knowledge = False
    about = "replies that are not numbers (NaN)"

    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        return torch.full_like(updates[malicious], torch.nan)


@ATTACKS.register("garbage")
@dataclass(frozen=True)
class Garbage(ReplyAttack):
    """Random numbers of enormous size, or of the wrong shape."""

    uses_knowledge = False
    about = "enormous values, or replies of the wrong shape"
    kind: Literal["huge", "shape"] = option("huge", "what is wrong with the reply: huge values, or a wrong shape")
    size: float = option(1e15, "how large the values are", above=0)

    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        m, width = updates[malicious].shape
        draw = rng.uniform(-self.size, self.size, (m, width + (self.kind == "shape")))
        return torch.from_numpy(draw).to(updates)


# ---------------------------------------------------------------- data


@ATTACKS.register("lf")
@dataclass(frozen=True)
class LabelFlip(DataAttack):
    """Training on wrong labels: (y + 1) mod C, C - 1 - y, or labels drawn at random."""

    uses_knowledge = False
    about = "label flip: training on wrong labels"
    paper = "FedCAP (next), its code and Blades (mirror), Ditto (random)"
    labels: Literal["next", "mirror", "random"] = option(
        "next", "the wrong label for class y of C: y+1 mod C, C-1-y, or a random one"
    )

    def poison(self, x: Array, y: Array, classes: int, rank: int, rng: np.random.Generator) -> tuple[Array, Array]:
        if self.labels == "random":
            return x.copy(), rng.integers(0, classes, y.shape, y.dtype)
        return x.copy(), (y + 1) % classes if self.labels == "next" else classes - 1 - y


@ATTACKS.register("input-noise")
@dataclass(frozen=True)
class InputNoise(DataAttack):
    """x + N(0, sigma^2) on every training sample, other noise in every round, labels kept (C-PFL, equation 13).

    x is what the network sees: normalised, and not clipped. `test` puts the noise on what noisy clients are tested on
    as well; they are then counted like everybody else, as what they lose is the question."""

    uses_knowledge = False
    needs_classes = False
    about = "noise on the training inputs"
    paper = "C-PFL"
    sigma: float = option(0.1, "standard deviation of the noise; C-PFL uses 0.1, 0.2 and 0.3", above=0)
    test: bool = option(False, "the attackers' test inputs are noisy as well, and their accuracy counts")

    def poison(self, x: Array, y: Array, classes: int, rank: int, rng: np.random.Generator) -> tuple[Array, Array]:
        if x.dtype.kind not in "uf":
            raise UsageError("attack 'input-noise' needs pixels or numbers; these data are token ids")
        return x.copy(), y.copy()  # the noise comes with each batch (`Source.add_noise`)


def bars(shape: tuple[int, ...]) -> list[Array]:
    """DBA's trigger for CIFAR: four bars of 1 x 6 pixels, as indices [pixels, 2] into the last two axes."""
    if len(shape) < 2 or shape[-2] < 5 or shape[-1] < 15:
        raise UsageError(f"the bars of the trigger need 5 x 15 pixels, a sample has {shape}: use trigger=patch")
    return [np.array([[r, c] for c in range(a, a + 6)]) for r in (0, 4) for a in (0, 9)]


def corner(shape: tuple[int, ...], size: int) -> list[Array]:
    """A patch in the last corner in four pieces, as indices into the last two axes (the last one if there is one)."""
    field = np.array(shape[-2:])
    patch = np.indices(np.minimum(size, field)).reshape(len(field), -1).T
    return np.array_split(field - 1 - patch, 4)


@ATTACKS.register("backdoor")
@dataclass(frozen=True)
class Backdoor(DataAttack, ReplyAttack):
    """A share of the samples carries a trigger and the target label. `distributed` gives every attacker one of four
    pieces of the trigger; all of it is shown when the attack is evaluated. `scale` boosts the update: d -> scale d."""

    uses_knowledge = False
    about = "a trigger in the input that makes the model answer with the target class"
    paper = "BadNets, Gu et al. 2017; DBA, Xie et al., ICLR 2020; Bagdasaryan et al., AISTATS 2020"
    target: int = option(0, "the class that the trigger leads to", low=0)
    share: float = option(0.2, "share of each attacker's samples that get the trigger", above=0, high=1)
    trigger: Literal["patch", "bars"] = option(
        "patch", "shape of the trigger: a square in the last corner, or DBA's four bars"
    )
    size: int = option(3, "side of the square, in pixels", low=1)
    distributed: bool = option(False, "every attacker uses only a quarter of the trigger")
    scale: float = option(1.0, "factor by which the update is enlarged; 0: the number of participants", low=0)

    def triggered(self, x: Array, rank: int | None = None) -> Array:
        """Copies that carry the trigger, or only attacker `rank`'s piece of it, at the largest value there is."""
        pieces = bars(x.shape[1:]) if self.trigger == "bars" else corner(x.shape[1:], self.size)
        where = np.concatenate(pieces) if rank is None or not self.distributed else pieces[rank % 4]
        shown = x.copy()
        shown[(..., *where.T)] = 255 if x.dtype == np.uint8 else x.max(initial=0)
        return shown

    def poison(self, x: Array, y: Array, classes: int, rank: int, rng: np.random.Generator) -> tuple[Array, Array]:
        if self.target >= classes:
            raise UsageError(f"target={self.target}: the data have classes 0 to {classes - 1}")
        chosen = rng.permutation(len(y))[: int(np.ceil(self.share * len(y)))]
        x, y = x.copy(), y.copy()
        x[chosen], y[chosen] = self.triggered(x, rank)[chosen], self.target
        return x, y

    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Knowledge, rng: np.random.Generator) -> Tensor:
        return updates[malicious] * (self.scale or len(updates))
