"""What one run gave, in words: the accuracy and whose it is, who attacked, and who was found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import typer
from rich.markup import escape

from fedkin.cli.console import percent, print_json, safe, scores, screen, spent
from fedkin.config import POINTS
from fedkin.core import notes
from fedkin.options import said
from fedkin.rounds import Result
from fedkin.rounds.words import method_of, reached, size, threat, whose
from fedkin.runs.found_out import found_out

MOST_NAMES = 30
CHOSEN = {
    "test": "the best round on test data, by micro accuracy (--validation-share chooses without them)",
    "validation": "the best round on validation samples, by the mean over clients",
}


def not_used(result: Result) -> dict[str, dict[int, tuple[int, int]]]:
    """For each kind of event that notes tell of, and each client that it happened to: in how many rounds, and of how
    many in which it could have."""
    happened: dict[str, set[tuple[int, int]]] = {}
    known: dict[str, set[tuple[int, int]]] = {}
    for note in result.notes:
        kind = notes.kind_of(note.name)
        if kind.event is not None:
            out = {(client, note.round) for client, _, _ in kind.events(note.value)}
            happened.setdefault(kind.event.kind, set()).update(out)
            seen = {(client, note.round) for client, _ in kind.verdicts(note.value)}
            known.setdefault(kind.event.kind, set()).update(out | seen)
    found = {}
    for name in sorted(happened, key=lambda name: [*notes.EVENTS].index(name) if name in notes.EVENTS else -1):
        times, of = (Counter(client for client, _ in by[name]) for by in (happened, known))
        worst = sorted(times.items(), key=lambda t: (-t[1], t[0]))
        found[name] = {client: (count, of[client]) for client, count in worst}
    return found


def run_facts(result: Result) -> dict[str, Any]:
    """A run as `--json` prints it."""
    out = {str(c): {"rounds": n, "of": of} for c, (n, of) in not_used(result).get(notes.WAS_LEFT_OUT.kind, {}).items()}
    return {**result.to_dict(), "attack": result.config.attack, "rule": result.config.rule, "left_out": out}


def present(result: Result, json: bool) -> None:
    """A finished run, for a program or for people; a run that diverged with everybody honest is exit status 1."""
    if json:
        print_json(run_facts(result))
    else:
        summarise(result)
    if result.diverged is not None and result.config.attack == "none":
        raise typer.Exit(1)


def summarise(result: Result) -> None:
    """The numbers of one run, and what they are numbers of."""
    out = screen()
    out.print(
        scores(
            whose(result),
            ((name, (a.macro, a.micro, a.worst_decile, a.std)) for name, a in reached(result)),
            result.accuracy.unit,
        )
    )
    sent, prepared = result.bytes, result.prepared
    facts = {
        "method": escape(method_of(result)),
        "evaluated": f"{_point(result)}; macro: mean over clients, micro: over test samples",
        **_others(result),
        "chosen": CHOSEN[result.best_by],
        **_hostility(result),
        "split": f"{prepared.split_hash}, seed {result.seed}",
        "sent": f"{size(sent['down'])} down, {size(sent['up'])} up",
        "time": f"{spent(result.wall, result.times)}, on {prepared.device} ({prepared.precision})",
        **_memory(result),
        **({"stopped": f"early, after round {result.stopped} of {result.config.rounds}"} if result.stopped else {}),
        **({"folder": escape(result.run)} if result.run else {}),
    }
    for name, value in facts.items():
        out.print(f"[dim]{name:<10}[/] {value}", soft_wrap=True)
    if result.diverged is not None:
        out.print(f"[bold red]{'diverged':<10}[/] {escape(result.diverged)}", soft_wrap=True)
    for remark in (r for r in result.remarks if result.diverged is None or not r.endswith(result.diverged)):
        out.print(f"[yellow]{'note':<10}[/] {escape(remark)}", soft_wrap=True)


def _others(result: Result) -> dict[str, str]:
    """The metrics beside the main one, each the mean over the clients that have it."""
    units = {m.name: m.unit for m in result.prepared.extra}
    found = result.kept.metrics
    shown = [f"{safe(name)} {said(value, units[name])}{' %' if units[name] else ''}" for name, value in found.items()]
    return {"metrics": f"{', '.join(shown)}  [dim](mean over clients)[/]"} if shown else {}


def _point(result: Result) -> str:
    """When models were evaluated, and who chose that."""
    said = POINTS[result.prepared.eval_point]
    return (
        f"{said} (the point that {result.method} names; --eval-point chooses another)"
        if result.config.eval_point == "auto"
        else said
    )


def _memory(result: Result) -> dict[str, str]:
    """The most this process had, which is more than the run's own where it had other work before."""
    host, device = result.memory.get("host_peak"), result.memory.get("device_peak")
    parts = [f"{size(host)}" if host else "", f"{size(device)} on {result.prepared.device}" if device else ""]
    said = ", ".join(part for part in parts if part)
    expected = result.memory.get("host_estimate")
    return {"memory": f"{said} at the most{f', {size(expected)} expected' if expected else ''}"} if said else {}


def _hostility(result: Result) -> dict[str, str]:
    """Who attacked, who was removed, left out or failed, and how well attackers were told from the others."""
    config, bad = result.config, set(result.malicious)
    facts: dict[str, str] = {}
    if config.attack != "none":
        knows = "all updates" if config.knowledge == "full" else "their own updates"
        facts["attack"] = escape(f"{threat(config, len(result.per_client))}; attackers see {knows}")
    if config.rule != "mean":
        facts["rule"] = escape(config.rule)
    if bad:
        facts["malicious"] = f"{_names(result, sorted(bad))}  [dim](marked *)[/]"
    if result.removed:
        by_round: dict[int, list[int]] = {}
        for client, round in sorted(result.removed.items(), key=lambda item: (item[1], item[0])):
            by_round.setdefault(round + 1, []).append(client)
        facts["removed"] = "; ".join(f"round {r}: {_names(result, clients)}" for r, clients in by_round.items())
    for name, out in not_used(result).items():
        if out and name != notes.NOT_EVALUATED.kind:
            by = " [dim](by the method)[/]" if name == notes.WAS_REJECTED.kind else ""
            facts[escape(name.replace("_", " "))] = f"{_names(result, out, out)} rounds{by}"
    if found := result.detection:
        rates, how = found.overall, "found: removed, or left out the last time it took part"
        if config.attackers == "redrawn":
            how = "every verdict against the truth of its round"
        facts["detection"] = f"{found_out(asdict(rates), len(bad), len(result.per_client) - len(bad))}  [dim]({how})[/]"
    if taken := result.backdoor:
        words = {
            "personal": "personal models take {} of the triggered test samples of other classes for the target",
            "global": "the common model {}",
        }
        facts["backdoor"] = ", ".join(words[k].format(_share(v / 100)) for k, v in taken.items() if v is not None)
    partly = [r for r in result.history if not r.covers_all]
    if partly:
        facts["judged"] = _partly(result.history[-1].judged, result.history[-1].judgeable, len(partly))
    if result.failures:
        of_bad = sum(f.client in bad for f in result.failures)
        facts["failures"] = f"{len(result.failures)}" + (f", {of_bad} of them of malicious clients" if bad else "")
    return facts


def _names(result: Result, clients: Iterable[int], counts: Mapping[int, tuple[int, int]] | None = None) -> str:
    """Clients by name, malicious ones marked; with how often, where that is known."""
    listed = list(clients)
    words = []
    for client in listed[:MOST_NAMES]:
        name = escape(result.per_client[client].name)
        word = f"[red]{name}*[/]" if client in result.malicious else name
        words.append(f"{word} {counts[client][0]}/{counts[client][1]}" if counts else word)
    more = len(listed) - len(words)
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


def _partly(judged: int, judgeable: int, rounds: int) -> str:
    return (
        f"{judged} of {judgeable} clients in the last round; in {rounds} rounds not all answered, which are not "
        "compared for the best"
    )


def _share(value: float) -> str:
    return percent(100 * value) + (" %" if value == value else "")
