"""What may be set of FedCAP. The defaults are the paper's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedkin.options import option


@dataclass(frozen=True)
class FedCAPOptions:
    alpha: float = option(
        10.0, "how strongly similar clients are preferred; 0: all count the same", low=0, search="1..100:log"
    )
    phi: float | Literal["equal"] = option(
        0.3, "a client's weight in its own customised model; equal: 1/n", low=0, high=1
    )
    lam: float = option(
        0.1, "strength of the pull of the personal model towards the customised one", low=0, search="0.01..10:log"
    )
    t_norm: float | Literal["auto"] = option(
        10.0, "longest calibrated update; auto: median + 6 MAD of a round", above=0
    )
    collect: Literal["train", "zero", "last_known"] = option(
        "train", "update of a client that was absent in the last round"
    )
    output: Literal["personalised", "customised"] = option("personalised", "which of its two models a client uses")
    removal: Literal["leave", "flag"] = option("leave", "removed clients leave, or train on without effect")
    eval_customise_all: bool = option(False, "collect from all absent clients after every round")
    ablation: Literal["full", "1", "2", "3", "4"] = option(
        "full",
        "a row of Table IV; 1: customise, 2: personalise, 3: customise, calibrate and detect, 4: 1 and 2 together",
    )
    detect_raw: bool = option(False, "in rows of Table IV that do not calibrate, detect by the raw updates")
