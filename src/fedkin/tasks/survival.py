"""The time until something happens, which is not always seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkin.compute.forward import Out
from fedkin.compute.losses import Value
from fedkin.tasks.scores import concordance
from fedkin.tasks.task import TASKS, Metric, Task, named


def _cox(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """-log of the probability that of all who are still at risk it is this one, for those whose event was seen; who is
    at risk is looked for in the batch. Events at the same time see each other (Breslow)."""
    risk, time, event = out.logits[..., 0], y[..., 0], y[..., 1]
    there = torch.ones_like(event, dtype=torch.bool) if out.valid is None else out.valid
    at_risk = (time.unsqueeze(1) >= time.unsqueeze(2)) & there.unsqueeze(1)  # [R, i, j]
    at_risk = at_risk | torch.eye(time.shape[1], dtype=torch.bool, device=time.device)
    whole = risk.unsqueeze(1).expand(at_risk.shape).masked_fill(~at_risk, -torch.inf).logsumexp(2)
    return event * (whole - risk)


def _concordance(outputs: Tensor, y: Tensor) -> float:
    return concordance(outputs[:, 0], y[:, 0], y[:, 1])


@TASKS.register("survival")
@dataclass(frozen=True)
class Survival(Task):
    """Cox's partial likelihood of a risk for each sample, the mean over the samples of a mini-batch."""

    name = "survival"
    about = "the time until an event that is not always seen"
    paper = "Cox, J. R. Stat. Soc. B 1972; Harrell et al., JAMA 1982"
    targets = "survival"
    main = "concordance"
    metrics = named(
        [
            Metric(
                "concordance",
                "share of comparable pairs in which who met the event earlier has the higher risk (Harrell's index)",
                _concordance,
                share=True,
                needs="two samples of which one met the event before the other",
            )
        ]
    )
    whole = True

    @property
    def value(self) -> Value:
        return _cox

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0]
