"""What aggregation rules cost on rows as long as a large body."""

from __future__ import annotations

from typing import Any

import torch

from fedkin.bench.stopwatch import memory, timed
from fedkin.robust import RULES, apply, make_rule

RULE_ROWS, RULE_COLUMNS = 100, 873_408  # a hundred bodies of CNN-512
RULE_LIMITS = {"cpu": 1000.0, "cuda": 30.0}  # milliseconds
WRAPPED = ("multi-krum", "krum", "median", "trimmed-mean", "rfa")


def rule_costs(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Every rule on its own (fltrust without the server's training), the best of three; memory beyond the rows
    themselves; and how much longer wrappers take than the rule they wrap."""
    columns = RULE_COLUMNS // 16 if quick else RULE_COLUMNS
    drawn = torch.Generator(device).manual_seed(0)
    start = torch.randn(columns, generator=drawn, device=device)
    rows = torch.randn(RULE_ROWS, columns, generator=drawn, device=device).mul_(0.01).add_(start)
    weights, own = torch.ones(RULE_ROWS, device=device), rows[0] - start
    simple = [name for name in RULES if name not in ("bucketing", "gas")]
    specs: list[tuple[str, str, dict[str, Any]]] = [(n, n, {"update": own} if n == "fltrust" else {}) for n in simple]
    specs += [(f"{wrapper}:base={base}", base, {"base": base}) for wrapper in ("bucketing", "gas") for base in WRAPPED]
    found: dict[str, dict[str, Any]] = {}
    for spec, base, options in specs:
        rule = make_rule(spec.partition(":")[0], options)
        seconds, peaks = [], []
        for _ in range(1 if quick else 3):
            with memory(device) as used:
                seconds.append(timed(lambda rule=rule: apply(rule, rows, weights, start).row, device)[1])  # type: ignore[misc]
            peaks.append(used[0])
        ms, extra = 1e3 * min(seconds), min(peaks) / (rows.numel() * rows.element_size())
        ratio = ms / found[base]["ms"] if base != spec else 1.0
        within = ms < RULE_LIMITS[device.type] and extra < 3 and ratio < 3
        found[spec] = {
            "case": f"rule {spec}",
            "device": str(device),
            "quick": quick,
            "rows": RULE_ROWS,
            "columns": columns,
            "ms": ms,
            "memory_over_input": extra,
            "over_base": ratio,
            "within_limits": within,
        }
    return list(found.values())
