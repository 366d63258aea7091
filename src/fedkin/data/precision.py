"""Numbers that FedKin's 32 bits cannot tell apart: times in seconds since 1970, numbers of patients."""

from __future__ import annotations

from typing import Any

import numpy as np

LOST = 0.01
"""The rounding that is worth a word, as a part of the distance over which half of the values lie."""
LARGE = 1 << 16


def blurred(values: Any, what: str) -> str:
    """In words, that values of one column, [n, ...] as they came, are nearly one number in 32 bits; or nothing."""
    x = np.asarray(values)
    if x.dtype.kind in "OU":  # as they stand in a table
        try:
            x = x.astype(np.float64)
        except (TypeError, ValueError):
            return ""
    if x.dtype.kind not in "iuf" or x.dtype.itemsize < 4 or x.dtype == np.float32 or not x.size:
        return ""
    x = x.reshape(len(x), -1)
    with np.errstate(all="ignore"):
        for column in np.flatnonzero((np.fmax.reduce(x) >= LARGE) | (np.fmin.reduce(x) <= -LARGE)):
            known = x[np.isfinite(x[:, column]), column].astype(np.float64)
            if not known.size or not np.ptp(known):
                continue
            low, high = np.percentile(known, (25, 75))
            off = np.abs(known.astype(np.float32).astype(np.float64) - known).max()
            if off > LOST * ((high - low) or np.ptp(known)):
                whose = f"{what} {column}" if x.shape[1] > 1 else what
                return (
                    f"{whose} runs from {known.min():.15g} to {known.max():.15g}, and in 32 bits its values are "
                    f"rounded by up to {off:.3g}, so that many become one: subtract their mean and divide by their "
                    "spread (for tables, scale='local' or 'federated')"
                )
    return ""
