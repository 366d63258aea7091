"""Metrics as functions of scores and targets of one client's samples. NaN: what they need is not there."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BINS = 15  # of the calibration error
PAIRS = 2048  # samples whose pairs with all others are looked at together


def auc(score: Tensor, positive: Tensor) -> float:
    """The share of pairs of a positive and a negative sample in which the positive one has the higher score; equal
    scores count half."""
    ones = int(positive.sum())
    zeros = len(positive) - ones
    if not ones or not zeros:
        return math.nan
    _, place, counts = torch.unique(score.double(), return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    rank = (ends - (counts.double() - 1) / 2)[place]  # ties share their mean rank, counted from 1
    return float((rank[positive.bool()].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def mean_auc(scores: Tensor, positive: Tensor) -> float:
    """The mean of `auc` over those columns in which there are positives and negatives."""
    found = [auc(scores[:, c], positive[:, c]) for c in range(scores.shape[1])]
    known = [v for v in found if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def f1(predicted: Tensor, true: Tensor) -> Tensor:
    """2 TP / (2 TP + FP + FN) of each column; NaN where there is neither a positive nor one predicted."""
    predicted, true = predicted.bool(), true.bool()
    both = 2 * (predicted & true).sum(0).double()
    return both / (predicted.sum(0) + true.sum(0)).double()  # 0 / 0 is NaN


def mean_known(values: Tensor) -> float:
    """Their mean without those that are NaN."""
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else math.nan


def calibration_error(logits: Tensor, y: Tensor) -> float:
    """Guo et al., ICML 2017: |share right - mean confidence|, averaged over bins of confidence by their samples."""
    confidence, answer = logits.double().softmax(1).max(1)
    right = (answer == y).double()
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1  # bins are open at their lower end
    gaps = torch.zeros(BINS, dtype=torch.float64, device=y.device).index_add_(0, place, right - confidence)
    return float(gaps.abs().sum() / len(y))


def concordance(risk: Tensor, time: Tensor, event: Tensor) -> float:
    """Harrell's index: of the pairs in which one is known to have met the event before the other, the share in which it
    has the higher risk; equal risks count half."""
    agree = pairs = 0.0
    for begin in range(0, len(risk), PAIRS):
        some = slice(begin, begin + PAIRS)
        # i met the event at its time; j was then still without it: seen later, or at that very time and censored
        later = (time[some, None] < time[None]) | ((time[some, None] == time[None]) & (event[None] == 0))
        comparable = later & (event[some, None] == 1)
        pairs += float(comparable.sum())
        agree += float((comparable & (risk[some, None] > risk[None])).sum())
        agree += 0.5 * float((comparable & (risk[some, None] == risk[None])).sum())
    return agree / pairs if pairs else math.nan


def r2(outputs: Tensor, y: Tensor) -> float:
    """The mean over targets of 1 - squared error / variance; of targets that are not all the same."""
    error, centred = (outputs - y).double(), (y - y.mean(0)).double()
    varied = (y != y[:1]).any(0)
    each = 1 - error.square().sum(0)[varied] / centred.square().sum(0)[varied]
    return float(each.mean()) if len(each) else math.nan
