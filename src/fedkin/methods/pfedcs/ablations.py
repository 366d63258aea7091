"""What PFedCS is compared with: collaborators chosen otherwise than by their heads, heads of clients that are away,
heads that differ from the start."""

from __future__ import annotations

import numpy as np
import torch

from fedkin.compute import keys
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Reply
from fedkin.methods.base import METHODS
from fedkin.methods.pfedcs import method
from fedkin.methods.pfedcs.method import PaperPFedCS, classifier
from fedkin.methods.pfedcs.mixture import Bools, Floats

AT_RANDOM = 3  # collaborators of each client, where they are drawn by lot


@METHODS.register("pfedcs")
class PFedCS(PaperPFedCS):
    __doc__ = method.__doc__  # as the paper has it, unless an option says otherwise

    def round(self, fed: Federation, cohort: Clients) -> None:
        if self.options.independent_head_init and fed.round == 0 and self.options.beta > 1:
            self._store(fed.ask(fed.alive, self.draw_head))
        super().round(fed, cohort)

    def draw_head(self, client: Cohort) -> Reply:
        draws = keys.uniform(keys.key(client.seed, "head", client.ids), client.layout.size("head"))
        client["head"] = torch.from_numpy((2 * draws - 1) * classifier(client.layout)[1] ** -0.5).to(client.device)
        return {"head": client["head"]}

    def _pool(self, fed: Federation, cohort: Clients) -> Clients:
        return cohort | (fed.alive & self.known) if self.options.use_stale else cohort

    def _chosen(self, fed: Federation, pool: Clients, distance: Floats) -> Bools | None:
        others = ~np.eye(len(pool), dtype=bool)
        if self.options.selection == "none":
            return np.zeros_like(others)
        if self.options.selection == "all":
            return others
        if self.options.selection == "random":
            draws = keys.uniform(keys.key(fed.seed, "collaborators", fed.round, pool.ids), len(pool))
            first: Bools = np.where(others, draws, 2.0).argsort(1).argsort(1) < AT_RANDOM
            return others & first
        return super()._chosen(fed, pool, distance)
