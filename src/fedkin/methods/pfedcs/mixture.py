"""Rows of numbers, each split in a lower and an upper group: how PFedCS tells similar classifiers from others.

The Gaussian mixture is scikit-learn's `GaussianMixture(2)` in one dimension, for all rows at once: the same k-means
start, steps and stopping rule. In one dimension every split that k-means can end in is known beforehand, so the five
best are tried instead of five random restarts, and the answer is always the same.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Component = tuple[Floats, Floats, Floats]  # of each row: weight, mean, variance
Clustering = Literal["gmm", "kmeans", "hierarchical", "fixed"]

FIXED = 0.5  # the threshold that stands in for a clustering
STARTS = 5
FLOOR = 1e-6  # added to every variance (reg_covar)
TOLERANCE, STEPS = 1e-3, 100  # stop when the mean log-likelihood changes by less, or after so many steps
TINY = 10 * np.finfo(np.float64).eps


def distances(heads: Tensor) -> Floats:
    """D: the squared distance of every two heads, every row of it divided by its largest entry."""
    moved = heads - heads[0]  # products of small numbers lose less
    products = moved @ moved.T
    if not products.isfinite().all() and heads.dtype != torch.float64:
        return distances(heads.double())
    gram = products.double().cpu().numpy()
    raw = np.maximum(gram.diagonal()[:, None] + gram.diagonal() - 2 * gram, 0) * ~np.eye(len(gram), dtype=bool)
    normalised: Floats = raw / np.maximum(raw.max(1, keepdims=True), np.finfo(np.float64).tiny)
    return normalised


def lower_group(values: Floats, how: Clustering) -> Bools:
    """Which of each row's values, [K, n], are in its lower group.

    Where there are fewer than four values or three different ones, that is what lies at or below the row's mean;
    where the clustering leaves a group without members, it is everything."""
    if how == "fixed":
        return values <= FIXED
    lower: Bools = values <= values.mean(1, keepdims=True) + 1e-12
    enough = (np.diff(np.sort(values, 1), axis=1) > 0).sum(1) >= 2
    if values.shape[1] >= 4 and enough.any():
        group = {"gmm": gaussian_mixture, "kmeans": two_means, "hierarchical": hierarchy}[how](values[enough])
        lower[enough] = group | group.all(1, keepdims=True) | ~group.any(1, keepdims=True)
    return lower


def two_means(values: Floats) -> Bools:
    """The split with the smallest sum of squares: exact, by trying every cut of the sorted values."""
    ordered, explained, _ = _cuts(values)
    return values <= np.take_along_axis(ordered, explained.argmax(1)[:, None], 1)


def hierarchy(values: Floats) -> Bools:
    """Two groups by Ward's agglomeration. In one dimension the pair that costs least to join are neighbours."""
    total = np.sort(values, 1)
    ordered, size = total.copy(), np.ones_like(total)
    rows = np.arange(len(values))
    while total.shape[1] > 2:
        mean = total / size
        cost = np.diff(mean, axis=1) ** 2 / (1 / size[:, 1:] + 1 / size[:, :-1])
        at = cost.argmin(1)
        stays = np.arange(total.shape[1]) != at[:, None] + 1
        total[rows, at] += total[rows, at + 1]
        size[rows, at] += size[rows, at + 1]
        total, size = total[stays].reshape(len(rows), -1), size[stays].reshape(len(rows), -1)
    return values <= np.take_along_axis(ordered, size[:, :1].astype(np.int64) - 1, 1)


def gaussian_mixture(values: Floats) -> Bools:
    """Members of the component with the smaller mean."""
    return best_mixtures(values)[0]


def best_mixtures(values: Floats) -> tuple[Bools, Floats]:
    """The likeliest of each row's fits from its best k-means splits: its lower component, its likelihood."""
    ordered, explained, stable = _cuts(values)
    best_first = np.argsort(np.where(stable, -explained, 1.0), 1, kind="stable")[:, :STARTS]
    use = np.take_along_axis(stable, best_first, 1)
    use[:, 0] = True  # rounding must not leave a row without a start
    row = np.nonzero(use)[0]
    group, likelihood = fit_mixtures(values[row], values[row] <= ordered[row, best_first[use]][:, None])
    order = np.lexsort((-likelihood, row))  # within each row the likeliest first, of equal ones the better split
    best = order[np.searchsorted(row[order], np.arange(len(values)))]
    return group[best], likelihood[best]


def fit_mixtures(values: Floats, start: Bools) -> tuple[Bools, Floats]:
    """Expectation-maximisation from a split of each row: who is likelier of the lower component, [K, n], and the
    mean log-likelihood reached, [K]. Rows that have converged rest while the others go on."""
    lower, reached = np.empty(values.shape, bool), np.empty(len(values))
    going: NDArray[np.int64] = np.arange(len(values))
    x, last, done = values, np.full(len(values), -np.inf), np.zeros(len(values), bool)
    one, two = _maximise(x, start.astype(np.float64))
    for step in range(STEPS + 1):
        share, likelihood = _expect(x, one, two)
        if done.any():
            one_is_lower = (one[1] <= two[1])[done, None]
            lower[going[done]], reached[going[done]] = (share[done] >= 0.5) == one_is_lower, last[done]
            going = going[~done]
            x, share, likelihood, last = (a[~done] for a in (x, share, likelihood, last))
            if not len(going):
                break
        done = (abs(likelihood - last) < TOLERANCE) | (step == STEPS - 1)
        last = likelihood
        one, two = _maximise(x, share)
    return lower, reached


def _maximise(x: Floats, share: Floats) -> list[Component]:
    """Weights, means and variances of the two components, given the first one's share in every value."""
    parts: list[Component] = []
    for p in (share, 1 - share):
        size = p.sum(1) + TINY
        mean = np.einsum("kn,kn->k", p, x) / size
        off = x - mean[:, None]
        parts.append((size / x.shape[1], mean, np.einsum("kn,kn,kn->k", p, off, off) / size + FLOOR))
    return parts


def _expect(x: Floats, one: Component, two: Component) -> tuple[Floats, Floats]:
    """The first component's share in every value, and the mean log-likelihood of each row."""
    a, b = (
        np.log(weight / np.sqrt(2 * np.pi * variance))[:, None] - (x - mean[:, None]) ** 2 / (2 * variance[:, None])
        for weight, mean, variance in (one, two)
    )
    less = np.exp(-abs(a - b))
    share = np.where(a >= b, 1.0, less) / (1 + less)
    return share, (np.maximum(a, b) + np.log1p(less)).mean(1)


def _cuts(values: Floats) -> tuple[Floats, Floats, Bools]:
    """The sorted rows [K, n]; for each cut of them in two the sum of squares it explains, and whether k-means would
    stay there, [K, n-1] each."""
    ordered = np.sort(values, 1)
    n = values.shape[1]
    size = np.arange(1, n)
    centred = ordered - ordered.mean(1, keepdims=True)
    below = centred.cumsum(1)[:, :-1]  # what is above sums to the opposite
    middle = (below / size - below / (n - size)) / 2
    stable = (centred[:, :-1] <= middle) & (middle < centred[:, 1:])
    return ordered, below**2 * (n / (size * (n - size))), stable
