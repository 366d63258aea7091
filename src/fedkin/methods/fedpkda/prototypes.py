"""Class prototypes: bounded and noised where the data are, combined into global ones on the server.

Distances between n prototypes of F numbers cost a solve of the smaller of n and F: with the centred prototypes as rows
of X and G = X X^T, x_i^T (a X^T X + c I)^-1 x_i is entry (i, i) of G (a G + c I)^-1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import keys
from fedkin.core.cohort import Cohort
from fedkin.errors import UsageError
from fedkin.options import option

Covariance = Literal["full", "diag", "ledoit_wolf"]
EPS = 1e-6
FEWEST = 3  # prototypes of a class that make a global one
AT_ONCE = 1 << 26  # numbers in a stack of classes worked on together
MEANINGFUL = 10.0  # an epsilon above this promises nothing


def phase(s: float) -> float:
    """phi(s) = (softplus(s) - softplus(-s)) / (softplus(s) + softplus(-s)); the numerator is s itself."""
    return s / (abs(s) + 2 * math.log1p(math.exp(-abs(s))))


# ---------------------------------------------------------------- where the data are


@dataclass(frozen=True)
class PrototypeOptions:
    """How class means are made before they may leave a client, what that costs in privacy, and what they become."""

    clip: float = option(1.0, "bound on features before noise is added; inf: no bound", above=0, infinite=True)
    clip_kind: Literal["value", "l2"] = option(
        "value", "what is bounded: each value, or the length of a feature vector"
    )
    nonnegative: bool = option(False, "features come from a ReLU, so clip to [0, clip], which costs less privacy")
    noise: float = option(0.1, "scale b of the Laplace noise that each number of a prototype gets", low=0)
    target_epsilon: float | None = option(None, "choose b such that each class and round costs this epsilon", above=0)

    cov: Literal["full", "diag", "ledoit_wolf"] = option(
        "full", "covariance of the distances; full can find no outlier among fewer than F + 2 prototypes (F: features)"
    )
    senders: Literal["participants", "all"] = option("participants", "the clients that send prototypes in a round")
    proto_cache: bool = option(True, "also use the last prototypes of clients that sent none in this round")

    def __post_init__(self) -> None:
        if self.target_epsilon is not None and math.isinf(self.clip):
            raise UsageError(f"target_epsilon={self.target_epsilon}: needs a bound on the features, but clip is inf")

    def bounded(self, features: Tensor) -> Tensor:
        """Clipped features, [B, F]."""
        features = features.clamp(min=0) if self.nonnegative else features
        if self.clip_kind == "value" or math.isinf(self.clip):
            return features.clamp(-self.clip, self.clip)
        scaled: Tensor = features * (self.clip / features.norm(dim=1, keepdim=True).clamp(min=self.clip))
        return scaled

    def sensitivity(self, width: int) -> float:
        """How far apart, in L1, two bounded features of `width` numbers can be: what one sample can do to a sum."""
        if self.clip_kind == "value":
            return width * self.clip * (1 if self.nonnegative else 2)
        return math.sqrt(width) * self.clip * (math.sqrt(2) if self.nonnegative else 2)

    def scale(self, width: int, count: Tensor) -> Tensor:
        """b for classes of `count` samples."""
        if self.target_epsilon is None:
            return torch.full_like(count, self.noise)
        return self.sensitivity(width) / (count.clamp(min=1) * self.target_epsilon)

    def epsilon(self, width: int, count: Tensor) -> Tensor:
        """What the mean of a class of `count` samples costs: sensitivity / (count b)."""
        return self.sensitivity(width) / (count * self.scale(width, count))

    def noised(self, client: Cohort, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means of bounded features plus Lap(0, b), [K, C, F] with zeros for absent classes; which classes are there,
        [K, C]; the samples of the smallest, [K]."""
        means, count = client.prototypes(rows, clip=self.bounded)
        noise = laplace(client.seed, client.ids, client.round, tuple(means.shape[1:])).to(means.device)
        sent = means + noise * self.scale(means.shape[2], count).unsqueeze(2)
        has = count > 0
        return sent.where(has.unsqueeze(2), 0.0), has, count.masked_fill(~has, math.inf).amin(1)

    def spend(self, spent: Tensor, ids: Tensor, fewest: Tensor, width: int) -> dict[str, Any]:
        """Charge clients, whose smallest class has `fewest` samples, for a round; what the noise buys so far.

        For one sample exchanged for another of its class and client; the costs of rounds add up."""
        count = fewest.cpu().double().clamp(min=1)
        cost = self.epsilon(width, count)
        spent[ids] += cost
        total = float(spent.max())
        if math.isinf(total):
            meaning = "no privacy: prototypes are sent without noise, or without a bound on the features"
        elif total > MEANINGFUL:
            meaning = f"not meaningful as differential privacy: epsilon {total:.4g} is above {MEANINGFUL:g}"
        else:
            meaning = f"the prototypes sent so far are {total:.4g}-differentially private"
        meaning += "; models and their weights in the average travel without noise"
        return {
            "per_class_and_round": float(cost.max()),
            "composed": total,
            "smallest_class": int(count.min()),
            "meaning": meaning,
        }


def laplace(seed: int, clients: keys.I64, round: int, shape: tuple[int, ...]) -> Tensor:
    """Lap(0, 1) noise [K, *shape], a function of (seed, client, round). It hides nothing from who knows the seed."""
    drawn = keys.uniform(keys.key(seed, "prototypes", round, clients), math.prod(shape)) - 0.5
    values = -np.sign(drawn) * np.log(np.maximum(1 - 2 * np.abs(drawn), 2.0**-53))
    return torch.from_numpy(values.astype(np.float32)).view(len(clients), *shape)


def spread(goals: Tensor, known: Tensor) -> Tensor:
    """Prototypes of the known classes only, as they travel, to one for each class (zeros elsewhere)."""
    wide = goals.new_zeros(len(known), goals.shape[1])
    wide[known] = goals
    return wide


# ---------------------------------------------------------------- on the server


def remember(memory: Tensor, known: Sequence[int], ids: Sequence[int], rows: Tensor) -> Tensor:
    """`memory`, a row for each client in `known`, with these clients' rows replaced, or added where there was none."""
    at = {client: k for k, client in enumerate(known)}
    old = [k for k, client in enumerate(ids) if client in at]
    new = [k for k, client in enumerate(ids) if client not in at]
    memory = memory if len(memory) else rows[:0]
    memory[[at[ids[k]] for k in old]] = rows[old]
    return torch.cat([memory, rows[new]])


def global_prototypes(prototypes: Tensor, present: Tensor, cov: Covariance) -> tuple[Tensor, Tensor, Tensor]:
    """From [N, C, F] and what of it exists [N, C]: the prototypes of the classes with three or more, which those are,
    [C], and each client's weights in them: p_G^k = sum_i w_i^k p_i^k (eq. 7)."""
    known = present.sum(0) >= FEWEST
    classes = torch.nonzero(known).flatten()
    clients, _, width = prototypes.shape
    together = max(1, AT_ONCE // (clients * (min(clients, width) + width) + 1))
    found, shares = [prototypes.new_zeros(0, width)], [prototypes.new_zeros(0, clients, dtype=torch.float64)]
    for begin in range(0, len(classes), together):
        some = classes[begin : begin + together]
        rows, has = prototypes[:, some].transpose(0, 1), present[:, some].T
        shares.append(mahalanobis_weights(rows, has, cov))
        weights = shares[-1].to(rows.dtype)
        found.append((weights.unsqueeze(1) @ rows.where(has.unsqueeze(2), 0.0)).squeeze(1))
    return torch.cat(found), known, torch.cat(shares)


def mahalanobis_weights(rows: Tensor, present: Tensor, cov: Covariance) -> Tensor:
    """w_i^k (eqs. 4-6) for classes with two or more prototypes: rows [C, N, F], present [C, N] to [C, N] in float64.

    Each class's weights sum to 1; absent prototypes weigh 0. With `full` and n <= F + 1 all weights are equal."""
    if rows.shape[1] <= rows.shape[2]:
        return _weights(rows, present, cov)
    weights = torch.zeros(present.shape, dtype=torch.float64, device=rows.device)
    for own, has, mine in zip(weights, present, rows, strict=True):  # many clients: each class's own, and no others
        own[has] = _weights(mine[has].unsqueeze(0), has[has].unsqueeze(0), cov)[0]
    return weights


def _weights(rows: Tensor, present: Tensor, cov: Covariance) -> Tensor:
    has = present.double()
    n = has.sum(1, keepdim=True)
    x = rows.double().where(present.unsqueeze(2), 0.0)
    x = (x - x.sum(1, keepdim=True) / n.unsqueeze(2)).where(present.unsqueeze(2), 0.0)  # p - mu (eq. 4)
    if cov == "diag":
        spread = x.square().sum(1, keepdim=True) / (n - 1).unsqueeze(2) + EPS
        squared = (x.square() / spread).sum(2)
    else:
        few, lengths = x.shape[1] <= x.shape[2], x.square().sum(2)
        gram = x @ x.transpose(1, 2) if few else x.transpose(1, 2) @ x
        scale, ridge = 1 / (n - 1), torch.zeros_like(n)
        if cov == "ledoit_wolf":
            scale, ridge = _ledoit_wolf(lengths, gram.square().sum((1, 2)).unsqueeze(1), n, x.shape[2])
        spread = scale * lengths.sum(1, keepdim=True)
        floor = (ridge + EPS).maximum(1e-13 * spread)  # enormous prototypes would swamp EPS and leave nothing to solve
        system = scale.unsqueeze(2) * gram + torch.diag_embed(floor.expand(-1, gram.shape[1]))
        if few:
            squared = torch.linalg.solve(system, gram).diagonal(dim1=1, dim2=2)
        else:
            squared = _lengths_by(system, x.transpose(1, 2))
        squared = squared.clamp(min=0)
    near = has / (squared.sqrt() + EPS)  # 1 / (d + eps), eqs. 5 and 6
    return near / near.sum(1, keepdim=True)


def _lengths_by(system: Tensor, columns: Tensor) -> Tensor:
    """x^T A^-1 x for the columns x: with A = L L^T the squared length of L^-1 x, and by a plain solve where rounding
    has left A not quite positive."""
    factor, failed = torch.linalg.cholesky_ex(system)
    if failed.any():
        solved: Tensor = torch.linalg.solve(system, columns)
        return (solved * columns).sum(1)
    turned: Tensor = torch.linalg.solve_triangular(factor, columns, upper=False)
    return turned.square().sum(1)


def _ledoit_wolf(lengths: Tensor, products: Tensor, n: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(a, c) of Sigma = a X^T X + c I, shrunk to a multiple of the identity (Ledoit & Wolf 2004), from the squared
    lengths of the rows, [C, N], and the sum of squares of X^T X (or of G: it is the same), [C, 1]."""
    mean = lengths.sum(1, keepdim=True) / (n * width)  # average variance of a coordinate
    square = products / n.square()  # ||S||_F^2
    far = (square / width - mean.square()).clamp(min=0)
    noise = ((lengths.square().sum(1, keepdim=True) / n - square) / (n * width)).clamp(min=0)
    shrink = torch.where(far > 0, (noise / far.clamp(min=torch.finfo(far.dtype).tiny)).clamp(max=1), 0.0)
    return (1 - shrink) / n, shrink * mean
