"""The metric of a run as people read it: its name, how its values are written, and which of two is better."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedkin.options import said


@dataclass(frozen=True)
class ShownMetric:
    """What the numbers of a run are, as its folder says: unless it says otherwise, accuracy in percent."""

    name: str = "accuracy"
    unit: str = "%"
    higher: bool = True

    def facts(self) -> dict[str, Any]:
        """As they stand beside the numbers in `run --json`."""
        return {"metric": self.name, "unit": self.unit, "higher": self.higher}

    def said(self, value: float, signed: bool = False) -> str:
        """One of its values without the unit; `signed`: a difference, with its sign."""
        return f"{'+' if signed and value >= 0 else ''}{said(value, self.unit)}"

    def best(self, values: Iterable[float]) -> float:
        """NaN where none is known."""
        known = [v for v in values if not math.isnan(v)]
        return (max if self.higher else min)(known, default=math.nan)

    def put(self, words: str) -> str:
        """Words about accuracy, said about this metric."""
        return words if self.name == "accuracy" else re.sub("accuracy", lambda _: self.name, words, flags=re.IGNORECASE)

    @property
    def described(self) -> str:
        """With its unit or, where that might surprise, its direction."""
        return f"{self.name}{' in percent' if self.unit == '%' else ''}{'' if self.higher else ', less is better'}"
