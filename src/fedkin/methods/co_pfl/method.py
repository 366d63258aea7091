"""CO-PFL. "CO-PFL: Contribution-Oriented Personalized Federated Learning for Heterogeneous Networks",
arXiv 2510.20219, 2025.

Each client makes those weights personal that training moves most (PWPM: mask m_n, rate p, budget gamma). It trains
personal and shared weights separately, with Adam moments u, v for each (MAMO). It also computes a score Gamma_n, which
says how much it contributes that the others do not have (COWA). The server averages the shared weights by these scores
(alpha_n).
Down: the model w, the weight Z behind each coordinate, the client's alpha_n in w (0 if it was not in the last average).
Up: the shared coordinates, the mask as bits, the score.
The method is meant for small learning rates (paper: 1e-4) and local BatchNorm statistics (`--buffers local`).
`departs` says where this differs from the paper.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedkin.compute.layout import Layout
from fedkin.compute.optim import Adam, Moments, Optimiser
from fedkin.core import notes
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Masked, Reply, each
from fedkin.core.store import Keep
from fedkin.methods.base import Method
from fedkin.methods.co_pfl.masks import cosine, grow, learnable, leave_one_out, normalised, shared_mean
from fedkin.methods.co_pfl.options import COPFLOptions
from fedkin.tasks import Task


class PaperCOPFL(Method):
    Options = COPFLOptions
    about = "each client masks weights that are its own; the others are averaged by contribution"
    paper = "arXiv 2510.20219, 2025"
    departs = (
        "A coordinate is averaged over the clients that share it. Algorithm 1 freezes it for all clients once it is "
        "personal to any of them, which is aggregation=or_freeze.",
        "A mask gains the top p of the weights that are still shared in each weight tensor; biases stay shared. Eq. 6 "
        "takes the top p of all weights, which is scope=global.",
        "Changes are ranked by three digits (bfloat16), ties by position, because after few steps of Adam they are "
        "nearly equal and rounding would decide. The paper ranks them as they are, which is ranking=exact.",
        "Adam's bias correction counts the steps that a client has taken with a part's own moments; eq. 5a counts kT + "
        "t, also for rounds in which the client took no step. The second moment decays by beta2; eq. 4b prints beta1.",
        "From the last average, the client's step of the round that made that average is taken out; eq. 8 prints the "
        "step of the present round. A client that was not in the average has nothing to take out; it compares its step "
        "with the change of the model since it last took part.",
    )
    shares = "the weights outside the client's mask, the mask, a score"
    private = "the weights under the mask, both Adam memories"
    profiles = {"paper": {}, "robust": {"pred_clip": 2.0}}
    keeps = {
        "own": Keep("row"),
        "received": Keep("model"),
        "mask": Keep("row", "zeros", torch.bool),
        **{f"{part}_{moment}": Keep("row", "zeros") for part in ("personal", "shared") for moment in ("u", "v")},
        "personal_steps": Keep((), "zeros"),
        "shared_steps": Keep((), "zeros"),
    }

    @classmethod
    def unfit(cls, options: Any, task: Task) -> str | None:
        if options.pred_clip is not None and task.targets != "classes":
            return "pred_clip is in units of ln(classes); leave it out (profile=robust sets it)"
        return super().unfit(options, task)

    @classmethod
    def unused(cls, options: Any) -> dict[str, str]:
        own = f"the method trains by its own option optimiser={options.optimiser}"
        found = {"optimiser": own, "momentum": own}
        return found if options.lr is None else {**found, "lr": f"its own option lr={options.lr:g} is used"}

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        super().start(fed, layout, row)
        self.z = torch.ones_like(self.model, dtype=torch.float32)
        self.alpha = torch.zeros(len(fed.all), device=row.device)  # weight in the last average: nobody is in one yet
        clip = self.options.pred_clip
        self.most = 2 + clip * math.log(layout.outputs) if clip else math.inf

    def round(self, fed: Federation, cohort: Clients) -> None:
        asked = torch.from_numpy(cohort.ids)
        replies = fed.ask(cohort, self.train, model=self.model, z=self.z, alpha=each(self.alpha[asked]))
        if not len(replies):
            self.alpha[asked] = 0  # who trained and was not heard no longer has what is in the average
            return
        rows, shared = replies["model"], ~replies["mask"]
        alpha = normalised(replies["score"].clamp(0, self.most))  # (10)
        mean, z = shared_mean(rows, shared, alpha, self.model)
        self.z = self._behind(z, shared)
        filled = rows.where(shared, mean)  # so that what a client keeps has no say in the average
        self.model = replies.combine(filled, self.model, alpha).where(self.z > 0, self.model)
        self.alpha = torch.zeros_like(self.alpha)  # who is not in this average cannot be taken out of it
        self.alpha[torch.from_numpy(replies.clients.ids)] = alpha
        fed.note(notes.ALPHA, self.alpha.clone())
        personal = (1 - shared.sum(1) / shared.shape[1]).tolist()
        fed.note(notes.MASK, {"clients": list(replies.clients), "share": personal})

    def _behind(self, z: Tensor, shared: Tensor) -> Tensor:
        """Z, the weight behind each coordinate; where it is 0, the model stays as it is."""
        return z

    def train(self, client: Cohort, model: Tensor, z: Tensor, alpha: Tensor) -> Reply:
        o, mask, start = self.options, client["mask"], self.personal(client, model)
        trained = self._mamo(client, start, mask)
        delta = start - trained
        score = self._contribution(client, model, z, alpha, client.model(delta))
        if client.round % o.mask_every == 0:
            exact = o.ranking == "exact"
            client["mask"] = grow(mask, delta.abs(), client.layout, o.p, o.gamma, o.scope, exact)  # (6)
        for m in ("u", "v") if o.transfer_moments else ():
            client[f"personal_{m}"] = client[f"shared_{m}"].where(client["mask"] & ~mask, client[f"personal_{m}"])
        client["own"], client["received"] = trained, model.expand(len(client), -1)
        kept = client.model(client["mask"])
        return {"model": Masked(client.model(trained).masked_fill(kept, 0), ~kept), "mask": kept, "score": score}

    def settle(self, client: Cohort, model: Tensor) -> None:
        """What moves most in a pass over all weights is the client's own, as far as masks may grow; that learns on."""
        o, start, epochs = self.options, client.rows(model=model), client.training.epochs
        moved = (start - self._pass(client, start, ~client["mask"], "shared", epochs)).abs()
        mask = grow(client["mask"], moved, client.layout, o.gamma if o.p else 0.0, o.gamma, o.scope)
        client["own"] = self._pass(client, start, mask, "personal", epochs) if mask.any() else start
        client["mask"], client["received"] = mask, model.expand(len(client), -1)

    def personal(self, client: Cohort, model: Tensor) -> Tensor:
        """w_n: the client's own weights under the mask, the received ones elsewhere (7)."""
        return client["own"].where(client["mask"], client.rows(model=model))

    def after_local(self, client: Cohort, model: Tensor) -> Tensor:
        return client["own"].where(client["shared_steps"][:, None] > 0, self.personal(client, model))

    def _mamo(self, client: Cohort, start: Tensor, mask: Tensor) -> Tensor:
        """Algorithm 2, lines 1-13. The personal pass is left out where it must be empty for everybody."""
        epochs, any_grown = client.training.epochs, self.options.p > 0 and (client.round > 0 or bool(mask.any()))
        mine = self._pass(client, start, mask, "personal", epochs) if any_grown else start
        return mine.where(mask, self._pass(client, start, ~mask, "shared", epochs))

    def _pass(self, client: Cohort, start: Tensor, h: Tensor, part: str, epochs: int) -> Tensor:
        """Train the coordinates under h with this part's moments (3)-(5); who has none takes no steps."""
        opt = self._optimiser(client)
        moments = Moments([client[f"{part}_u"], client[f"{part}_v"]][: opt.buffers], client[f"{part}_steps"])
        rows = client.fit(start, mask=h, epochs=epochs, opt=opt, moments=moments)
        for m, buffer in zip("uv", moments.buffers, strict=False):
            client[f"{part}_{m}"] = buffer
        client[f"{part}_steps"] = moments.steps.where(h.any(1), client[f"{part}_steps"])
        return rows

    def _optimiser(self, client: Cohort) -> Optimiser:
        o, usual = self.options, client.training.opt
        return Adam(lr=o.lr or usual.lr, weight_decay=usual.weight_decay, beta1=o.beta1, beta2=o.beta2)

    def _contribution(self, client: Cohort, model: Tensor, z: Tensor, alpha: Tensor, delta: Tensor) -> Tensor:
        """Gamma_n: how far the step delta_n turns away from the others' (8), plus their loss on its data (9)."""
        if client.round == 0:
            return torch.ones_like(alpha)
        shared = client.model(~client["mask"] & learnable(client.layout, client.device))
        others, known = leave_one_out(model, z, alpha, client.model(client["own"]), shared)  # w_-n
        score = self._turn(client, others, known, delta) + self._loss(client, others)
        return score.nan_to_num(0, 0, 0).clamp(min=0)

    def _turn(self, client: Cohort, others: Tensor, known: Tensor, delta: Tensor) -> Tensor:
        # the others' step, leave-one-out, led from the model received before to w_-n
        return 1 - cosine(delta, client["received"] - others, known)

    def _loss(self, client: Cohort, others: Tensor) -> Tensor:
        clip = self.options.pred_clip
        most = clip * math.log(client.classes) if clip else math.inf
        return client.loss(client.rows(model=others)).nan_to_num(0, 0, 0).clamp(max=most)
