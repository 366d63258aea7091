"""What may be set of CO-PFL. The defaults are the paper's, but for what `departs` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedkin.options import option


@dataclass(frozen=True)
class COPFLOptions:
    p: float = option(
        0.25,
        "share of the weights that a mask gains at a time; 0: no weight becomes personal",
        low=0,
        high=1,
        search="0..1",
    )
    gamma: float = option(0.5, "largest share of personal weights", low=0, high=1, search="0..1")
    scope: Literal["per_tensor_unmasked", "global"] = option(
        "per_tensor_unmasked",
        "where the top p are taken: among the shared weights of each tensor, or among all weights (eq. 6)",
    )
    ranking: Literal["rounded", "exact"] = option(
        "rounded",
        "rounded: compare changes to three digits, ties by position, so that devices agree; exact: compare as they are",
    )
    mask_every: int = option(1, "rounds between two mask updates", low=1)
    optimiser: Literal["mamo", "adam", "sgd"] = option(
        "mamo", "mamo: two passes under masks; adam, sgd: one joint pass"
    )
    alternation: Literal["jacobi", "gauss_seidel"] = option(
        "jacobi", "whether both passes start from the same model, or take turns in every epoch"
    )
    lr: float | None = option(None, "learning rate (default: the run's)", above=0)
    beta1: float = option(0.9, "decay of Adam's first moment", low=0, high=0.9999)
    beta2: float = option(0.999, "decay of Adam's second moment", low=0, high=0.9999)
    transfer_moments: bool = option(False, "whether a weight that becomes personal keeps its moments")
    cowa: Literal["both", "pred", "grad", "none"] = option(
        "both", "the scores that count; none: all clients weigh the same"
    )
    pred_clip: float | None = option(None, "largest prediction score, in units of ln(classes)", above=0)
    aggregation: Literal["per_coordinate", "or_freeze"] = option(
        "per_coordinate",
        "average a coordinate over the clients that share it, or freeze it once it is personal to any client",
    )
