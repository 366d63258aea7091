"""Rules around another rule: what it is given are means of random groups of rows, or random parts of the columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import keys
from fedkin.errors import UsageError
from fedkin.options import option
from fedkin.robust.rows import block, mean_of
from fedkin.robust.rules import (
    RFA,
    RULES,
    FLTrust,
    Outcome,
    Rule,
    Server,
    assumed_attackers,
    lowest,
    make_rule,
    malicious_option,
)


def _order(count: int, seed: int, what: str, rows: Tensor, start: Tensor) -> Tensor:
    """A random order of 0..count-1, new in every round without any memory: it follows from the seed and what is
    combined."""
    content = (int(t.contiguous().view(torch.int32).sum(dtype=torch.int64)) for t in (start, rows[0]))
    key = int(keys.key(seed, what, *content) >> np.uint64(1))
    return torch.randperm(count, generator=torch.Generator(rows.device).manual_seed(key), device=rows.device)


def _base(base: str | Rule, malicious: float) -> Rule:
    if isinstance(base, Rule):
        return base
    takes = {f.name for f in fields(RULES[base])}  # type: ignore[arg-type]
    return make_rule(base, {"malicious": malicious} if "malicious" in takes else {})


@RULES.register("bucketing")
@dataclass(frozen=True)
class Bucketing(Rule):
    """Rows in random order, plain means of `size` at a time, then a base rule on the means (Algorithm 1).

    As a share, `malicious` is taken of the buckets (FedCAP); as a number it stays what it is (Karimireddy). A bucket
    weighs as much as its rows together. The order is drawn anew from the seed and the round's content."""

    about = "a base rule that is applied to the means of small random groups"
    paper = "Karimireddy et al., ICLR 2022"
    size: int = option(2, "number of clients in a group (bucket), s", low=1)
    base: str | Rule = option("multi-krum", "the rule that combines the groups")  # noqa: RUF009
    malicious: float = malicious_option()
    seed: int = option(0, "seed of the random orders", low=0)

    def __post_init__(self) -> None:
        _base(self.base, self.malicious)  # a wrong name is told at once

    def given(self, server: Server) -> Rule:
        return replace(self, base=_base(self.base, self.malicious).given(server))

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        order = _order(len(rows), self.seed, "bucketing", rows, start)
        buckets = [order[at : at + self.size] for at in range(0, len(order), self.size)]
        means = rows.new_empty(len(buckets), rows.shape[1])
        for mean, bucket in zip(means, buckets, strict=True):
            torch.mean(rows[bucket], 0, out=mean)
        found = _base(self.base, self.malicious).combine(means, torch.stack([weights[b].sum() for b in buckets]), start)
        of = torch.empty_like(order)
        of[order] = torch.arange(len(order), device=rows.device) // self.size
        return Outcome(found.row, found.used[of], None if found.scores is None else found.scores[of])


@RULES.register("gas")
@dataclass(frozen=True)
class GAS(Rule):
    """Gradient splitting: coordinates are dealt at random into p parts; score_i = sum over parts of the distance
    between row i and the base rule's result there; the plain mean of the n - f rows with the lowest scores
    (Liu et al., Algorithm 1)."""

    about = "the mean of the models that are closest to a base rule on small parts of the model"
    paper = "Liu et al., ICML 2023"
    parts: int = option(1000, "number of parts that the model is cut into, p", low=1)
    base: str | Rule = option("multi-krum", "the rule that is applied to every part")  # noqa: RUF009
    malicious: float = malicious_option()
    seed: int = option(0, "seed of the random parts", low=0)

    def __post_init__(self) -> None:
        base = _base(self.base, self.malicious)
        if isinstance(base, FLTrust) or (isinstance(base, RFA) and base.per_tensor):
            raise UsageError(f"base={type(base).__name__}: it looks at whole models or tensors, gas at random parts")

    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        n, base = len(rows), _base(self.base, self.malicious)
        order = _order(rows.shape[1], self.seed, "gas", rows, start)
        dealt, begin = rows.gather(1, order.expand_as(rows)), start[order]
        scores = torch.zeros(n, dtype=torch.float64, device=rows.device)
        for columns, size in _equal_parts(len(order), self.parts, block(rows)):
            part = dealt[:, columns].view(n, -1, size).transpose(0, 1)  # [P, K, D]
            found = base.in_parts(part, weights, begin[columns].view(-1, size))
            scores += torch.linalg.vector_norm(part - found.unsqueeze(1), dim=2).double().sum(0)
        used = lowest(scores, n - assumed_attackers(self.malicious, n))
        return Outcome(mean_of(rows, used.to(rows.dtype)), used, scores)


def _equal_parts(width: int, parts: int, together: int) -> Iterator[tuple[slice, int]]:
    """About `together` columns at a time: parts of the same size, and that size; sizes differ by one at most."""
    small, longer = divmod(width, min(parts, width))
    ends = longer * (small + 1)
    for begin, end, size in ((0, ends, small + 1), (ends, width, small)):
        step = max(1, together // size) * size
        yield from ((slice(at, min(at + step, end)), size) for at in range(begin, end, step))
