"""What may be set of C-PFL. The defaults are the paper's, where it prints them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedkin.options import option


@dataclass(frozen=True)
class CPFLOptions:
    committee: int | None = option(None, "number of members, n (default: a tenth of the clients, at least 3)", low=1)
    committee_data: Literal["holdout", "train"] = option(
        "holdout", "the data that members test bodies on; train: as in eq. 3"
    )
    committee_trains: bool = option(False, "members train as well; no member tests its own body")
    committee_quorum: int | None = option(
        None, "number of members that are drawn to test each body (default: all)", low=1
    )
    score: Literal["accuracy", "balanced"] = option(
        "accuracy", "what a body is scored by; balanced: the mean over classes of the pooled accuracy"
    )
    vote: Literal["mean", "median", "trimmed"] = option(
        "mean", "how the votes on a body are combined; trimmed: mean of the middle third"
    )
    threshold: Literal["ci", "fixed"] = option(
        "ci", "ci: tau rises with the lower bound of the scores; fixed: it stays at tau0"
    )
    tau0: float = option(0.0, "the first value of the threshold tau", low=0, high=1)
    ci_alpha: float = option(0.05, "significance level of the confidence bound", above=0, high=0.5)
    on_empty: Literal["relax", "keep", "top_half"] = option(
        "relax",
        "what happens if no body passes: tau falls to this round's bound, the old body stays, or the better half is "
        "taken",
    )
    alpha: float = option(
        0.5, "share of accuracy in a client's contribution; the rest is data size", low=0, high=1, search="0..1"
    )
    size_norm: Literal["share", "max"] = option(
        "share", "whether data size is relative to the round's sum or to its largest"
    )
    finetune_epochs: int = option(10, "epochs for which each client tunes its head after the last round, F", low=0)
