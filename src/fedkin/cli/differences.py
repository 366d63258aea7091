"""`fedkin diff`: in what two runs differ, a row for each setting and each number, rounds counted from 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedkin.cli.application import RUNS, Json, RunsDir, command
from fedkin.cli.console import print_json, safe, screen, table
from fedkin.cli.runs import Run
from fedkin.rounds.words import seconds, size
from fedkin.runs.catalogue import Catalogue, diff
from fedkin.runs.folder import RunInfo, number
from fedkin.runs.found_out import found_out

ABSENT = "–"
MOST_CLIENTS = 20  # of one round, by name
LONGEST = 200  # characters of a value
Values = tuple[Any, Any]


@command("diff", "fedkin diff fedavg-20261115-171502-a3f9 fedcap-20261115-171730-11c0", RUNS)
def diff_runs(a: Run, b: Run, runs_dir: RunsDir = None, json: Json = False) -> None:
    """Show in what two runs differ: settings, environment, result. With --json rounds count from 0, as in show."""
    catalogue = Catalogue(runs_dir)
    one, two = catalogue.locate(a).info, catalogue.locate(b).info
    found = diff(one, two)
    if json:
        return print_json({"a": one.id, "b": two.id, **found})
    out = screen()
    for part, rows in readable(found, one, two).items():
        if not rows:
            out.print(f"[dim]{part}: the same[/]")
            continue
        made = table(None, part, safe(one.id), safe(two.id))
        for row in rows:
            made.add_row(*map(safe, row))
        out.print(made)


def readable(found: Mapping[str, Mapping[str, Values]], one: RunInfo, two: RunInfo) -> dict[str, list[list[str]]]:
    """What `diff` found, part by part: rows of a name and the two values."""
    runs = (one, two)
    made = {part: [_row(key, values, runs) for key, values in rows.items()] for part, rows in found.items()}
    for row in made.get("result", []):
        row[0] = row[0].removeprefix("accuracy.").replace("_", " ")
    sent = found.get("result", {}).get("bytes")
    if sent is not None:
        place = [*found["result"]].index("bytes")
        made["result"][place : place + 1] = [
            [f"sent {way}", *(_of(v, way, lambda n: size(number(n))) for v in sent)] for way in ("down", "up")
        ]
    return made


def _row(key: str, values: Values, runs: tuple[RunInfo, RunInfo]) -> list[str]:
    return [key, *(_said(key, value, run)[:LONGEST] for value, run in zip(values, runs, strict=True))]


def _said(key: str, value: Any, run: RunInfo) -> str:
    if key == "removed":
        return _removed(value, run)
    if key == "detection":
        bad = len(run.malicious)
        return (found_out(value, bad, len(run.names) - bad) if isinstance(value, Mapping) else "") or ABSENT
    if value is None:
        return ABSENT
    if key.startswith("accuracy."):
        unit = " %" if run.metric.unit else "" if run.metric.name == "accuracy" else f" {run.metric.name}"
        return f"{run.metric.said(number(value))}{unit}"
    if key in ("seconds", "wall"):
        return seconds(number(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _removed(value: Any, run: RunInfo) -> str:
    """Who was removed, round by round."""
    by_round: dict[int, list[str]] = {}
    for client, round in value.items() if isinstance(value, Mapping) else ():
        place = int(client) if str(client).isdecimal() else -1
        name = run.names[place] if 0 <= place < len(run.names) else str(client)
        by_round.setdefault(int(number(round)) + 1 if number(round) >= 0 else 0, []).append(name)
    said = []
    for round, names in sorted(by_round.items()):
        more = f" and {len(names) - MOST_CLIENTS} more" if len(names) > MOST_CLIENTS else ""
        said.append(f"round {round}: {', '.join(names[:MOST_CLIENTS])}{more}")
    return "; ".join(said) or "nobody"


def _of(value: Any, key: str, said: Callable[[Any], str]) -> str:
    return said(value.get(key)) if isinstance(value, Mapping) else ABSENT
