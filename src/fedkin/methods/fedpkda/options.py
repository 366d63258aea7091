"""What may be set of FedPKDA, besides what its prototypes are made by. The defaults are the paper's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedkin.methods.fedpkda.prototypes import PrototypeOptions
from fedkin.options import option


@dataclass(frozen=True)
class FedPKDAOptions(PrototypeOptions):
    omega_local: float = option(
        0.5, "strength of the pull towards the client's own prototypes, which fades", low=0, search="0..2"
    )
    omega_global: float = option(
        0.9, "strength of the pull towards the global prototypes, which grows", low=0, search="0..2"
    )
    offset: float = option(0.1, "what is added to the strength of both pulls", low=0)
    phi_scale: float = option(1.0, "the argument of the phase function phi in the last round", above=0)
    first_t: int = option(
        1, "t of the first round in phi(t/T); 1: t/T is in (0, 1] (paper); 0: the authors' code", low=0, high=1
    )
    pull: Literal["mean", "class_means", "printed"] = option(
        "mean",
        "mean: squared difference to the prototype of the sample's class, mean over features and batch; class_means: "
        "summed over the batch's classes (authors' code); printed: squared distance to the prototypes of all classes "
        "(eqs. 8, 9)",
    )
    own_clip: bool = option(False, "clip features also for a client's own prototypes (eq. 2)")
    variant: Literal["full", "base", "kda", "cp"] = option(
        "full", "base: no pull; kda: own only; cp: global only, with strength 1"
    )
    align: Literal["loss", "before"] = option(
        "loss", "align as a part of the training loss, or in an epoch before training"
    )
    align_lr: float = option(0.002, "learning rate of the epoch before training, with align=before", above=0)
    share: Literal["body", "model"] = option("body", "the part that is averaged; model: no head is private")
    aggregate: Literal["fisher", "samples"] = option("fisher", "what the weights of the average are made from")
    fim: Literal["batch", "per_sample", "full"] = option("batch", "the gradients of which the Fisher trace is made")
    fim_params: Literal["shared", "all"] = option("shared", "the parameters that the Fisher trace covers")
    fim_norm: Literal["sum", "mean"] = option("sum", "sum or mean over the gradients of the Fisher trace")
    gamma_clip: float | None = option(None, "limit each gamma_i to this many times the median", above=0)
