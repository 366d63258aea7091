"""What may be set of PFedCS. Row by row of its ablation: `selection` and `clustering`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedkin.options import option


@dataclass(frozen=True)
class PFedCSOptions:
    lam: float = option(
        0.5, "share of similarity in the weight of a collaborator; the rest is data size", low=0, high=1, search="0..1"
    )
    beta: int = option(100, "the round from which heads stay private, as in FedPer", low=0)
    rho: int = option(1, "epochs for which a client tunes its teacher; 0: it is used as received", low=0)
    teacher_lr: float | None = option(None, "learning rate of that tuning, eta_v (default: the run's)", above=0)
    teacher_gradient: bool = option(False, "the divergence (eq. 12) also passes gradients through the teacher's side")
    bias: bool = option(False, "compare the heads' biases too")
    literal: bool = option(False, "weights by eq. 7 over the collaborators alone, then scaled to sum to 1")
    selection: Literal["adaptive", "none", "all", "random"] = option(
        "adaptive", "the clients whose heads make a teacher"
    )
    clustering: Literal["gmm", "kmeans", "hierarchical", "fixed"] = option("gmm", "how candidates for it are found")
    use_stale: bool = option(False, "also mix in the last heads of clients that are not in this round")
    independent_head_init: bool = option(False, "every client starts with a random head of its own")
