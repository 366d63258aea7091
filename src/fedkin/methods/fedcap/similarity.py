"""FedCAP's arithmetic: how alike updates are, and which are too long (Li et al., ACSAC 2024).

K clients, M clients in the pool of the last round; an update is a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedkin.core.federation import Clients

Phi = float | Literal["equal"] | None


def contributions(updates: Tensor, pool: Tensor, alpha: float, phi: Phi = None) -> Tensor:
    """q_ki, how much each in the pool counts for each client, [K, M]: a softmax (eq. 5) of alpha times the cosine of
    their updates (eq. 4), which is -1 for an update without a direction.

    With phi, the clients are the pool: each counts phi in its own model (equal: 1/M) and the others share the rest."""
    cosine = (updates @ pool.T) / torch.outer(updates.norm(dim=1), pool.norm(dim=1))
    logits = alpha * cosine.nan_to_num(-1.0)
    if phi is None or len(pool) == 1:
        return logits.softmax(1)
    own = 1 / len(pool) if phi == "equal" else phi
    return logits.fill_diagonal_(-torch.inf).softmax(1).mul_(1 - own).fill_diagonal_(own)


def detect(updates: Tensor, ignored: Sequence[bool], t_norm: float | Literal["auto"]) -> tuple[Tensor, Tensor, float]:
    """Whose calibrated update counts (Detection in Fig. 6), bool [K]: not the ignored ones', and of the others those
    not longer than T_norm; auto: than is `usual` among them. Also their lengths, [K], and T_norm."""
    norms = torch.linalg.vector_norm(updates, dim=1)
    counted = norms.clone()
    counted[list(ignored)] = torch.nan
    limit = usual(counted) if t_norm == "auto" else float(t_norm)
    return counted.isfinite() & (counted <= limit), norms, limit


def usual(norms: Tensor) -> float:
    """Median + 6 MAD of what is not NaN; a spread below one percent is taken for one."""
    middle = norms.nanquantile(0.5)
    return float(middle + 6 * (norms - middle).abs().nanquantile(0.5).clamp(min=0.01 * middle))


def rows_of(clients: Clients, known: Mapping[int, Tensor], otherwise: Tensor) -> Tensor:
    """One row for each client, [K, D]: the one known of it, or else the common one."""
    return torch.stack([known.get(c, otherwise) for c in clients]) if len(clients) else otherwise[None][:0]
