"""What a report says in words and numbers: of every group, every run and, for a single run, every client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedkin.config import LATER, POINTS
from fedkin.core.notes import event_of
from fedkin.errors import FedKinError
from fedkin.report.gather import RunData
from fedkin.report.several_runs import Group, metrics_of, of_all, split_hash

MOST_CLIENTS = 2000  # in the table


def tables(groups: Sequence[Group]) -> dict[str, Any]:
    runs, metrics = of_all(groups), metrics_of(groups)
    words = "; ".join(metric.described for metric in metrics)
    return {
        "title": _title(runs),
        "scores": f"{words[:1].upper() if metrics[0].name == 'accuracy' else words[:1]}{words[1:]}",
        "metric": metrics[0].name,
        "groups": [_summary(group, len(metrics) > 1) for group in groups],
        "judged": _judged(runs),
        "runs": [_row(run, len(metrics) > 1) for run in runs],
        "older": [run.info.id for group in groups for run in group.older],
        "clients": _clients(runs[0]) if len(runs) == 1 else None,
        "settings": _settings(runs, alike=True),
        "differing": _settings(runs, alike=False),
    }


def _title(runs: Sequence[RunData]) -> str:
    methods, data = (list(dict.fromkeys(getattr(r.info, key)[:60] for r in runs)) for key in ("method", "data"))
    who = ", ".join(methods[:4]) + (f" and {len(methods) - 4} more methods" if len(methods) > 4 else "")
    return f"{who} on {', '.join(data[:3])}"


def text(mean: float, std: float = np.nan, digits: int = 2) -> str:
    if not np.isfinite(mean):
        return "–"
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if np.isfinite(std) else "")


def _score(run: RunData, mean: float, std: float = np.nan, named: bool = False) -> str:
    """Of the run's metric, `named` unless it is accuracy."""
    metric = run.metric
    spread = f" ± {metric.said(std)}" if np.isfinite(std) else ""
    name = f" {metric.name}" if named and metric.name != "accuracy" else ""
    return f"{metric.said(mean)}{spread}{name}" if np.isfinite(mean) else "–"


def _summary(group: Group, named: bool = False) -> dict[str, Any]:
    def cell(value: Callable[[RunData], float], digits: int = 2) -> str:
        return text(**group.over_seeds(value), digits=digits)

    def score(value: Callable[[RunData], float]) -> str:
        return _score(group.members[0], **group.over_seeds(value), named=named)

    points = list(dict.fromkeys(_evaluated(run) for run in group.members))
    unfinished = [run for run in group.members if run.info.status != "finished"]
    return {
        "label": group.row,
        "condition": group.column,
        "seeds": [run.info.seed for run in group.members],
        "macro": score(lambda r: r.last["macro"]),
        "micro": score(lambda r: r.last["micro"]),
        "worst": score(lambda r: r.last["worst_decile"]),
        "std": score(lambda r: r.last["std"]),
        "best": score(lambda r: r.best["micro"]),
        "best_round": ", ".join(f"{text(r.best['round'], digits=0)} ({r.best_by})" for r in group.members[:10]),
        "megabytes": cell(lambda r: (r.last["bytes_down"] + r.last["bytes_up"]) / 1e6, 1),
        "seconds": cell(lambda r: r.last["wall"] if np.isnan(r.info.wall) else r.info.wall, 1),
        "rounds_seconds": cell(lambda r: r.last["seconds"], 1),
        "diverged": [f"seed {r.info.seed}: {r.info.diverged}" for r in group.members if r.info.diverged],
        "evaluated": "; ".join(points),
        "splits": list(dict.fromkeys(split_hash(run)[:10] for run in group.members)),
        "unfinished": len(unfinished),
        "runs": [run.info.id for run in group.members],
    }


def _evaluated(run: RunData) -> str:
    """When a client's model was evaluated, in words."""
    point = str(run.info.prepared.get("eval_point", ""))[:40]
    said = POINTS.get(point, point)
    tuned = " and after the last fine-tuning" if run.last["final"] == 1 else ""
    return f"round {text(run.last['round'], digits=0)}, {said}{tuned}"


def _judged(runs: Sequence[RunData]) -> str:
    """When the clients' models were evaluated, where it is the same for all."""
    points = {str(run.info.prepared.get("eval_point", ""))[:40] for run in runs}
    if len(points) > 1:
        return "Not all models were evaluated at the same point: see the column Evaluated."
    return f"All models were evaluated {''.join(POINTS.get(p, p) for p in points)}."


def _row(run: RunData, named: bool = False) -> dict[str, Any]:
    info, git = run.info, run.info.environment.get("git")
    best = f"round {text(run.best['round'], digits=0)}, chosen on {run.best_by}"
    commit = ""
    if isinstance(git, dict):
        commit = str(git.get("revision") or "")[:12] + (" with changes" if git.get("dirty") else "")
    return {
        "id": info.id,
        "method": info.method,
        "status": info.status,
        "seed": info.seed,
        "created": info.created[:40],
        "rounds": f"{info.rounds_done} of {info.rounds_total}",
        "macro": _score(run, run.last["macro"], named=named),
        "micro": _score(run, run.last["micro"], named=named),
        "worst": _score(run, run.last["worst_decile"], named=named),
        "best": f"{_score(run, run.best['micro'], named=named)} ({best})",
        "split": split_hash(run)[:16],
        "commit": commit or "unknown",
        "fedkin": str(info.environment.get("fedkin", ""))[:20],
        "device": f"{info.prepared.get('device', '')} {info.prepared.get('precision', '')}"[:40],
        "clients": len(info.names),
        "malicious": len(run.malicious),
        "error": (info.error or "")[:2000],
    }


def _clients(run: RunData) -> dict[str, Any] | None:
    if len(run.names) > MOST_CLIENTS:
        return None
    try:
        each, events = run.clients, run.events
    except FedKinError:
        return None
    fates: dict[int, dict[str, list[int]]] = {c: {"malicious": []} for c in run.malicious}
    for number, client, kind, _ in events:
        fates.setdefault(client, {}).setdefault(event_of(kind).words, []).append(number)
    rows = [
        {
            "name": name[:80],
            "accuracy": _score(run, each["accuracy"][c]),
            "loss": text(each["loss"][c], digits=3) if abs(each["loss"][c]) < 1e6 else f"{each['loss'][c]:.4g}",
            "tested": text(each["count"][c], digits=0),
            "fate": "; ".join(_fate(words, when) for words, when in fates.get(c, {}).items()),
        }
        for c, name in enumerate(run.names)
    ]
    return {"run": run.info.id, "rows": rows}


def _fate(words: str, when: Sequence[int]) -> str:
    if len(when) == 1:
        return f"{words} in round {when[0]}"
    return f"{words} {len(when)} times" if when else words


def _settings(runs: Sequence[RunData], alike: bool) -> list[tuple[str, str]]:
    """Settings in which all runs are `alike` (for a single run all of them), or those in which they differ, with every
    value; the seed aside, which tells runs of one group apart."""
    each = [{**LATER, **r.info.config, **{f"options.{k}": v for k, v in r.info.options.items()}} for r in runs]
    keys = [k for k in dict.fromkeys(k for own in each for k in own) if k not in ("options", "runs_dir")]
    found = []
    for key in keys:
        values = list(dict.fromkeys(str(own[key])[:200] if key in own else "–" for own in each))
        if (len(values) == 1) == alike and (alike or key != "seed"):
            found.append((str(key)[:60], " | ".join(values[:20])))
    return found
