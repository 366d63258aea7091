"""Aggregation rules that bear hostile rows: K rows in, one row out.

A rule is a frozen dataclass of options that is called as the server's average: `rule(rows, weights, start)`. All
rules go through `apply`, which rejects rows that are not finite (a row whose norm overflows float32 counts as such)
and returns `start` when nothing is left; `Outcome` also says which rows had a say and how each was scored.

A rule of your own implements `combine` for rows that are known to be finite:

    @RULES.register("halfway")
    @dataclass(frozen=True)
    class Halfway(Rule):
        def combine(self, rows, weights, start):
            return Outcome((start + rows.mean(0)) / 2, everyone(rows))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedkin.errors import UsageError
from fedkin.options import option, validated
from fedkin.registry import Registry
from fedkin.robust.rows import ascending, dots, gram, lengths, mean_of, sorted_columns, squared_distances, step

RULES: Registry[type[Rule]] = Registry("rule")
CHECK_EVERY = 16  # steps between two checks whether anything still moves: a check makes a GPU wait

Bounds = tuple[int, ...] | Callable[[int], tuple[int, ...]]
"""The columns at which tensors begin, and the end; or a way to them from the number of columns."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The new row; which rows had a say, bool [K]; the rule's score of each row (NaN: rejected), if it scores."""

    row: Tensor
    used: Tensor
    scores: Tensor | None = None


class Rule:
    """How rows become one although some of them lie."""

    about: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __call__(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        return apply(self, rows, weights, start).row

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        """Finite rows [K, D] with K >= 1, weights [K], what the clients started from [D]."""
        raise NotImplementedError

    def in_parts(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        """`combine` for each of P parts of the columns alone: rows [P, K, D], start [P, D] to [P, D]. Rules that can
        do this for all parts at once say how."""
        return torch.stack([self.combine(r, weights, s).row for r, s in zip(rows, start, strict=True)])

    def given(self, server: Server) -> Rule:
        """The rule with what only a run can give it; most need nothing."""
        return self


class ColumnWise(Rule):
    """A rule that treats each column alone: parts are nothing to it."""

    def in_parts(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        flat = rows.transpose(0, 1).reshape(rows.shape[1], -1)
        return self.combine(flat, weights, start.reshape(-1)).row.view_as(start)


class Server(Protocol):
    """What a run lets a rule know: where the tensors of rows of some width begin, and training on data of its own."""

    def bounds(self, width: int) -> tuple[int, ...]: ...

    def trainer(self, samples: int) -> Callable[[Tensor], Tensor]:
        """From what the clients start from to the server's own update, trained on so many samples."""
        ...


def apply(rule: Rule, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
    """The rule on those rows that are finite; `start`, and nobody used, when there are none."""
    flat = rows.reshape(len(rows), -1)
    wide = flat.float() if flat.element_size() < 4 else flat
    finite = torch.isfinite(torch.linalg.vector_norm(wide, dim=1))
    if not finite.any():
        return Outcome(start, finite)
    every = bool(finite.all())
    kept, share = (wide, weights) if every else (wide[finite], weights[finite])
    found = rule.combine(kept, share.to(kept.dtype), start.reshape(-1).to(kept.dtype))
    used = torch.zeros_like(finite).masked_scatter_(finite, found.used)
    scores = found.scores
    if scores is not None and not every:
        scores = scores.new_full(finite.shape, torch.nan).masked_scatter_(finite, scores)
    return Outcome(found.row.reshape(start.shape).to(start.dtype), used, scores)


def make_rule(name: str, options: Mapping[str, Any] | None = None) -> Rule:
    """A rule by name, its options checked."""
    return validated(RULES[name], options or {}, f"rule {name!r}")


def assumed_attackers(malicious: float, rows: int) -> int:
    """f: a share of the rows below 1, otherwise a number; always less than `rows`."""
    return min(int(rows * malicious + 1e-9) if malicious < 1 else int(malicious), rows - 1)


def everyone(rows: Tensor) -> Tensor:
    return torch.ones(len(rows), dtype=torch.bool, device=rows.device)


def lowest(scores: Tensor, count: int) -> Tensor:
    """Which entries along the last axis are the `count` lowest; the earlier one wins a tie."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(-1, scores.argsort(stable=True)[..., : max(1, count)], True)


def malicious_option() -> Any:
    return option(0.3, "how many attackers are assumed, f: a share of the clients if below 1, else a number", low=0)


@RULES.register("mean")
@dataclass(frozen=True)
class Mean(ColumnWise):
    """sum_i n_i x_i / sum_i n_i."""

    about = "the average by training samples, which a single hostile client can move anywhere"
    paper = "McMahan et al., AISTATS 2017"

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        return Outcome(mean_of(rows, weights), everyone(rows))


@RULES.register("multi-krum")
@dataclass(frozen=True)
class MultiKrum(Rule):
    """The plain mean of the q rows with the lowest scores; score_i = sum of the n - f - 2 smallest squared distances
    to other rows (Blanchard et al., sections 4 and 5).

    The guarantee needs 2f + 2 < n. Beyond that at least one neighbour counts; of one or two rows none is nearer to
    the rest, and all are used."""

    about = "the mean of the models that are closest to their neighbours"
    paper = "Blanchard et al., NeurIPS 2017"
    malicious: float = malicious_option()
    keep: int | None = option(None, "number of models that are averaged, q (default: n - f)", low=1)

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        used, scores = self._choose(rows, start)
        return Outcome(mean_of(rows, used.to(rows.dtype)), used, scores)

    def in_parts(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        used = self._choose(rows, start)[0].to(rows.dtype)
        return ((used / used.sum(1, keepdim=True)).unsqueeze(1) @ rows).squeeze(1)

    def _choose(self, rows: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        n = rows.shape[-2]
        f = assumed_attackers(self.malicious, n)
        nearest = ascending(squared_distances(rows, start))
        scores = nearest[..., 1 : 1 + max(1, n - f - 2)].sum(-1)
        return lowest(scores, (self.keep or n - f) if n > 2 else n), scores


@RULES.register("krum")
@dataclass(frozen=True)
class Krum(Rule):
    """Multi-Krum with q = 1: the one row closest to its n - f - 2 nearest neighbours (one or two rows: their mean)."""

    about = "the one model that is closest to its neighbours"
    paper = "Blanchard et al., NeurIPS 2017"
    malicious: float = malicious_option()

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        return MultiKrum(self.malicious, keep=1).combine(rows, weights, start)

    def in_parts(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        return MultiKrum(self.malicious, keep=1).in_parts(rows, weights, start)


@RULES.register("median")
@dataclass(frozen=True)
class Median(ColumnWise):
    """Coordinate-wise median; of an even number the mean of the middle two (`lower`: the lower, as in GAS's code)."""

    about = "the median of every coordinate"
    paper = "Yin et al., ICML 2018"
    lower: bool = option(False, "of an even number, take the lower middle value and not the mean of the two")

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        low, high = (len(rows) - 1) // 2, len(rows) // 2
        row = torch.empty_like(start)
        for columns, ordered in sorted_columns(rows):
            row[columns] = ordered[:, low] if self.lower else (ordered[:, low] + ordered[:, high]) / 2
        return Outcome(row, everyone(rows))


@RULES.register("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(ColumnWise):
    """Coordinate-wise mean without the q lowest and q highest values, q = floor(cut * f) but at most (n - 1) / 2,
    where it is the median."""

    about = "the mean of every coordinate without its largest and smallest values"
    paper = "Yin et al., ICML 2018"
    malicious: float = malicious_option()
    cut: float = option(1.0, "share of f that is dropped at either end; FedCAP uses 0.5", low=0, high=1)

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        n = len(rows)
        q = min(int(self.cut * assumed_attackers(self.malicious, n)), (n - 1) // 2)
        row = torch.empty_like(start)
        for columns, ordered in sorted_columns(rows):
            row[columns] = ordered[:, q : n - q].mean(1)
        return Outcome(row, everyone(rows))


@RULES.register("rfa")
@dataclass(frozen=True)
class RFA(Rule):
    """Geometric median by smoothed Weiszfeld (Algorithm 2): z <- sum_i b_i x_i / sum_i b_i with
    b_i = n_i / max(nu, |x_i - z|), from the weighted mean.

    z stays a weighted mean of the rows, so its distances follow from their Gram matrix and iterations cost next to
    nothing. `scores` are the final weights. Four steps are its paper's; FedCAP's experiments go on until nothing moves,
    for each tensor alone and with all clients alike (`per_tensor=true,weighted=false,iterations=1000,tolerance=0`)."""

    about = "the geometric median"
    paper = "Pillutla et al., IEEE TSP 2022"
    iterations: int = option(4, "largest number of Weiszfeld steps", low=1)
    floor: float = option(1e-5, "distances below this, nu, count as this", above=0)
    tolerance: float = option(1e-6, "stop when the objective falls by less than this share; 0: no longer falls", low=0)
    weighted: bool = option(True, "clients weigh as their training samples, n_i; false: all weigh the same")
    per_tensor: bool = option(False, "a median for each tensor alone, as in FedCAP's experiments")
    bounds: Bounds = option((), "columns at which tensors begin, and the end; given by the run")  # noqa: RUF009

    def given(self, server: Server) -> Rule:
        return replace(self, bounds=server.bounds) if self.per_tensor and not self.bounds else self

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        parts = tensor_columns(self.bounds, rows.shape[1]) if self.per_tensor else [slice(None)]
        shares = self._weigh(torch.stack([gram(rows[:, c], start[c]) for c in parts]), weights).to(rows.dtype)
        row = torch.cat([share @ rows[:, c] for share, c in zip(shares, parts, strict=True)])
        return Outcome(row, everyone(rows), None if self.per_tensor else shares[0])

    def in_parts(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        share = self._weigh(gram(rows, start), weights).to(rows.dtype)
        return (share.unsqueeze(1) @ rows).squeeze(1)

    def _weigh(self, product: Tensor, weights: Tensor) -> Tensor:
        """b_i / sum_j b_j from Gram matrices [..., K, K]."""
        alpha = weights.double() if self.weighted and weights.sum() > 0 else torch.ones_like(weights).double()
        share, own = (alpha / alpha.sum()).expand(product.shape[:-1]), product.diagonal(dim1=-2, dim2=-1)
        objective = torch.full_like(share[..., 0], torch.inf)
        for taken in range(1, self.iterations + 1):
            to = (product @ share.unsqueeze(-1)).squeeze(-1)
            squared = own - 2 * to + (share * to).sum(-1, keepdim=True)
            distance = squared.clamp(min=self.floor**2).sqrt()
            before, objective = objective, distance @ alpha
            falling = before - objective > self.tolerance * objective
            near = alpha / distance
            share = torch.where(falling.unsqueeze(-1), near / near.sum(-1, keepdim=True), share)
            if taken % CHECK_EVERY == 0 and not falling.any():
                break
        return share


def tensor_columns(bounds: Bounds, width: int) -> list[slice]:
    bounds = bounds(width) if callable(bounds) else bounds
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != width or any(np.diff(bounds) < 0):
        raise UsageError(f"bounds={bounds}: give the columns at which tensors begin, from 0 up to the end, {width}")
    return [slice(a, b) for a, b in pairwise(bounds)]


@RULES.register("clustered")
@dataclass(frozen=True)
class Clustered(Rule):
    """Two clusters of updates by complete linkage on 1 - cosine; the larger one is averaged by training samples.

    An update without a direction (zero) is at the largest distance, 2. Of two equal clusters the one with the first
    row is kept; one or two rows are all used."""

    about = "the mean of the larger of two clusters of updates"
    paper = "Sattler et al., ICASSP 2020"

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        from scipy.cluster.hierarchy import cut_tree, linkage
        from scipy.spatial.distance import squareform

        n = len(rows)
        if n < 3:
            return Outcome(mean_of(rows, weights), everyone(rows))
        product = gram(rows, start)
        norms = product.diagonal().sqrt()
        distance = (1 - product / (norms[:, None] * norms)).nan_to_num(nan=2.0).clamp(0, 2).cpu().numpy()
        label = cut_tree(linkage(squareform(distance, checks=False), "complete"), n_clusters=2)[:, 0]
        larger = label == label[0] if 2 * (label == label[0]).sum() >= n else label != label[0]
        used = torch.from_numpy(larger).to(rows.device)
        return Outcome(mean_of(rows, weights * used if (weights * used).sum() > 0 else used.to(rows.dtype)), used)


@RULES.register("fltrust")
@dataclass(frozen=True)
class FLTrust(Rule):
    """start + sum_i TS_i d_i |g0| / |d_i| / sum_i TS_i with trust TS_i = ReLU(cos(d_i, g0)), where g0 is what the
    server's own training on a small clean set gives (equations 2 to 4). Without any trust nothing moves.

    The server trains on its root set as clients train on their data: class-balanced samples that no client has or,
    if there are too few, copies of the clients' clean training samples (as in the paper), clients losing none.
    FedCAP's experiments rescale the first tensor of each update only, and where attackers send one and the same update
    they rescale it as often as it is sent, because it is one object in memory (`first_tensor_only`)."""

    about = "updates weighted by how well they agree with the server's own update"
    paper = "Cao et al., NDSS 2021"
    root: int = option(100, "number of samples that the server itself trains on", low=1)
    first_tensor_only: bool = option(False, "rescale only the first tensor, as FedCAP's code does")
    bounds: Bounds = option((), "columns at which tensors begin, and the end; given by the run")  # noqa: RUF009
    update: Tensor | Callable[[Tensor], Tensor] | None = field(
        default=None, compare=False, repr=False, metadata={"help": "the server's update, or a way to it from start"}
    )

    def given(self, server: Server) -> Rule:
        known = self if self.bounds else replace(self, bounds=server.bounds)
        return known if known.update is not None else replace(known, update=server.trainer(self.root))

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        if self.update is None:
            raise UsageError("rule 'fltrust' needs the server's own `update`: a run gives it, alone there is none")
        own = (self.update if isinstance(self.update, Tensor) else self.update(start)).to(rows)
        size, norms = own.double().norm(), lengths(rows, start)
        trust = (dots(rows, start, own) / (norms * size)).nan_to_num(nan=0.0).clamp(0, 1)
        share = trust / (trust.sum() + 1e-9)
        factor = (size / norms).nan_to_num(nan=0.0, posinf=0.0)
        if self.first_tensor_only:
            factor = factor ** torch.stack([(rows == row).all(1).sum() for row in rows])
        row = step(rows, start, share * factor)
        if self.first_tensor_only:
            rest = slice(tensor_columns(self.bounds, len(start))[0].stop, None)
            row[rest] = step(rows[:, rest], start[rest], share)
        return Outcome(row, trust > 0, trust)


@RULES.register("norm-clip")
@dataclass(frozen=True)
class NormClip(Rule):
    """start + sum_i n_i d_i min(1, limit / |d_i|) / sum_i n_i (Sun et al., section 4; without noise).

    `scores` are the norms."""

    about = "the average of updates, each cut to a largest length"
    paper = "Sun et al., 2019"
    limit: float | None = option(None, "largest length of an update (default: the median length of the round)", above=0)

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        norms = lengths(rows, start)
        share = weights.double() if weights.sum() > 0 else torch.ones_like(norms)
        factors = share / share.sum() * _clip(norms, self.limit)
        return Outcome(step(rows, start, factors), everyone(rows), norms)


@RULES.register("centred-clip")
@dataclass(frozen=True)
class CentredClip(Rule):
    """v <- v + mean_i (x_i - v) min(1, radius / |x_i - v|), a few times, from what the clients started from
    (Karimireddy et al., Algorithm 2). `scores` are the distances to the last v but one."""

    about = "the average of updates, clipped around a centre that is moved step by step"
    paper = "Karimireddy et al., ICML 2021"
    radius: float | None = option(None, "clipping radius, tau (default: the median distance at every step)", above=0)
    iterations: int = option(3, "number of steps", low=1)

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        centre = start
        for _ in range(self.iterations):
            norms = lengths(rows, centre)
            centre = step(rows, centre, _clip(norms, self.radius) / len(rows))
        return Outcome(centre, everyone(rows), norms)


def _clip(norms: Tensor, limit: float | None) -> Tensor:
    """min(1, limit / norm)."""
    longest = norms.quantile(0.5) if limit is None else torch.full_like(norms[0], limit)
    return torch.where(norms > longest, longest / norms, torch.ones_like(norms))
