"""How well attackers were told from the others, in words: who was found, and who was taken for one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedkin.runs.reading import number


def found_out(rates: Mapping[str, Any], malicious: int, benign: int) -> str:
    """From the rates of a run (`detection` in its result); in shares where others are malicious every round, so that
    nobody is counted as malicious throughout. Empty where the rates say nothing."""
    missed, wrongly = number(rates.get("false_negative")), number(rates.get("false_positive"))
    said = []
    if 0 <= missed <= 1:
        said.append(f"found {_part(1 - missed, malicious)} attackers")
    if 0 <= wrongly <= 1:
        spared = f"{_part(wrongly, benign if malicious else 0)} benign"
        said.append(f"{spared} wrongly" if said else f"took {spared} for attackers")
    return ", ".join(said)


def _part(share: float, of: int) -> str:
    return f"{round(share * of)} of {of}" if of else f"{100 * share:.2f} % of the"
