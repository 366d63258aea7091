"""Runs that were done: list, show, compare, go on with one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from json import loads
from textwrap import wrap
from typing import Annotated, Any, Literal, cast

import typer

from fedkin.cli.application import RUNS, TRAIN, Json, RunsDir, command
from fedkin.cli.console import messages, percent, print_json, safe, scores, screen, spent, table
from fedkin.cli.extras import Plugins, SinkFlags, sinks_of, use_plugins
from fedkin.cli.names import run_names
from fedkin.cli.waiting import load
from fedkin.config import GROUPS, LATER, ONLY_UNDER_ATTACK, POINTS, Config
from fedkin.core import notes
from fedkin.errors import DataError, unknown
from fedkin.options import describe, said
from fedkin.rounds.words import seconds, size
from fedkin.runs.catalogue import Broken, Catalogue
from fedkin.runs.folder import MAX_JSON, SITES, STATUSES, RunFolder, RunInfo, number
from fedkin.runs.reading import read_bytes
from fedkin.sweep.groups import told_apart

COLOURS = {"finished": "green", "running": "cyan", "interrupted": "yellow", "failed": "red"}
SORTS: dict[str, Callable[[RunInfo], Any]] = {
    "created": lambda r: r.created,
    "accuracy": lambda r: _best(r, "macro"),
    "micro": lambda r: _best(r, "micro"),
    "worst-decile": lambda r: _best(r, "worst_decile"),
    "method": lambda r: (r.method, r.created),
    "data": lambda r: (r.data, r.created),
    "rounds": lambda r: r.rounds_done,
    "bytes": lambda r: r.bytes,
    "seconds": lambda r: _low(r.seconds if math.isnan(r.wall) else r.wall),
    "status": lambda r: (r.status, r.created),
}
MOST_CLIENTS = 60
ONLY_WITH = {"severity": "shift", "min_gain": "patience"}  # settings that change nothing without another
MOST_KINDS = 40  # of events and of notes
MOST_TOLD = 60  # characters of what tells runs apart
WIDE = 140  # a screen on which that has a column
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's name or the beginning of it, its folder, or last.", autocompletion=run_names
    ),
]


def _low(value: float) -> float:
    return -math.inf if math.isnan(value) else value


@command(
    "runs",
    """
    fedkin runs
    fedkin runs --method fedcap --status finished --sort accuracy
    """,
    RUNS,
)
def runs(
    method: Annotated[str | None, typer.Option("--method", metavar="NAME", help="Only runs of this method.")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="NAME", help="Only runs on these data.")] = None,
    status: Annotated[
        str | None, typer.Option("--status", metavar="STATUS", help=f"Only {', '.join(STATUSES)} ones.")
    ] = None,
    attack: Annotated[
        str | None, typer.Option("--attack", metavar="NAME", help="Only runs under this attack, or none.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            "--sort", metavar="KEY", help=f"By {', '.join(SORTS)}; accuracies the best first, else the largest last."
        ),
    ] = "created",
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """List the runs: what was run and when, how far it came and how accurate it is."""
    if sort not in SORTS:
        raise unknown("key to sort by", sort, SORTS)
    if status is not None and status not in STATUSES:
        raise unknown("status", status, STATUSES)
    catalogue = Catalogue(runs_dir)
    entries = catalogue.entries()
    wanted: dict[str, Callable[[RunInfo], bool]] = {
        "method": lambda r: method in (None, r.method),
        "data": lambda r: data in (None, r.data),
        "status": lambda r: status in (None, r.status),
        "attack": lambda r: attack in (None, r.attack, r.attack.partition(":")[0]),
    }
    found = [e for e in entries if isinstance(e, RunInfo) and all(fits(e) for fits in wanted.values())]
    found.sort(key=SORTS[sort])
    filtered = any(v is not None for v in (method, data, status, attack))
    broken = [] if filtered else [e for e in entries if isinstance(e, Broken)]
    if json:
        return print_json(
            {"runs_dir": str(catalogue.path), "runs": [r.to_dict() for r in found], "broken": [vars(b) for b in broken]}
        )
    if not found and not broken:
        which = "that fits" if filtered else "yet: start one with fedkin run fedavg"
        return messages().print(f"no run in {safe(str(catalogue.path))} {which}")
    numbers = ("seed", "round", "macro", "worst decile", "sent", "time")
    differs = told_apart(found, beside=("attack", "rounds"))
    wide = screen().width >= WIDE and any(differs)  # else below the name
    made = table(None, "run", "status", "data", "attack", *numbers, *(["differs in"] if wide else []), right=numbers)
    for r, told in zip(found, differs, strict=True):
        status = f"[{COLOURS[r.status]}]{r.status}[/]{', [red]diverged[/]' if r.diverged else ''}"
        told = told if len(told) <= MOST_TOLD else f"{told[: MOST_TOLD - 1]}…"
        below = "" if wide else "".join(f"\n [dim]{safe(line)}[/]" for line in wrap(told, len(r.id) - 1))
        made.add_row(
            f"{safe(r.id)}{below}",
            status,
            safe(_name(r.data)),
            safe(r.attack),
            str(r.seed),
            f"{r.rounds_done}/{r.rounds_total}",
            _figure(r, "macro"),
            _figure(r, "worst_decile"),
            size(r.bytes),
            _time(r),
            *([safe(told)] if wide else []),
        )
    out = screen()
    if found:
        out.print(made)
    for b in broken:
        out.print(f"[dim]{safe(b.name)}: not a run: {safe(b.reason)}[/]", soft_wrap=True)


def _figure(info: RunInfo, kind: str) -> str:
    """One of a run's numbers; another metric than accuracy with its name."""
    metric, value = info.metric, info.accuracy.get(kind, math.nan)
    named = f" {safe(metric.name)}" if metric.name != "accuracy" and not math.isnan(value) else ""
    return f"{said(value, metric.unit)}{named}"


def _best(info: RunInfo, kind: str) -> tuple[bool, float]:
    """Sorts the best first, and runs of other metrics than accuracy behind."""
    value = info.accuracy.get(kind, math.nan)
    return info.metric.name != "accuracy", -_low(value if info.metric.higher else -value)


def _time(info: RunInfo) -> str:
    """The wall clock; of runs of versions that did not measure it, the time of their rounds."""
    if not math.isnan(info.wall):
        return seconds(info.wall)
    return "-" if math.isnan(info.seconds) else f"{seconds(info.seconds)} (rounds)"


def _name(data: str) -> str:
    """Data by name; files and folders without the way to them."""
    return data.rstrip("/").rpartition("/")[2] or data


@command(
    "show",
    """
    fedkin show last
    fedkin show fedcap-20261115-171502-a3f9 --json
    fedkin show last --export csv tables
    """,
    RUNS,
)
def show(
    run: Run,
    export: Annotated[
        tuple[str, str] | None,
        typer.Option("--export", metavar="csv|parquet DIR", help="Write the run's tables as files into a folder."),
    ] = None,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Show what a run was: settings, split, versions, clients that failed or were removed, each client's result."""
    folder = Catalogue(runs_dir).locate(run)
    if export is not None:
        written = folder.export(cast(Literal["csv", "parquet"], export[0]), export[1])
        messages().print(f"{len(written)} tables written to {safe(export[1])}", soft_wrap=True)
    if json:
        print_json(_whole(folder))
    else:
        show_run(folder)


def show_run(folder: RunFolder) -> None:
    """A run on the screen, as `show` and `resume` have it."""
    info, out = folder.info, screen()
    out.print(
        f"[bold]{safe(info.id)}[/]  [{COLOURS[info.status]}]{info.status}[/]  "
        f"round {info.rounds_done} of {info.rounds_total}",
        soft_wrap=True,
    )
    if info.accuracy:
        out.print(_scores(info))
    for name, value in _facts(folder).items():
        if value:
            out.print(f"[dim]{name:<11}[/] {safe(value)}", soft_wrap=True)
    out.print(_clients(folder))


def _scores(info: RunInfo) -> Any:
    best = (info.result or {}).get("best")
    lines: list[tuple[str, Mapping[str, Any]]] = [(_which(info), info.accuracy)]
    if isinstance(best, dict):
        by = ", on validation" if best.get("by") == "validation" else ""
        lines.append((f"best (round {best.get('round')}{by})", best))
    aside = (info.result or {}).get("validation")
    if isinstance(aside, dict):
        lines.append((f"{_which(info)}, validation", aside))
    kinds = ("macro", "micro", "worst_decile", "std")
    whose = f"{safe(info.metric.name)}{' of benign clients' if info.malicious else ''}"
    return scores(whose, ((name, [number(values.get(k)) for k in kinds]) for name, values in lines), info.metric.unit)


def _which(info: RunInfo) -> str:
    """Which models the run's numbers are of."""
    kept = (info.result or {}).get("kept")
    best = isinstance(kept, dict) and kept.get("by") == "best"
    return f"kept (round {kept.get('round')})" if best and isinstance(kept, dict) else "last"


def _facts(folder: RunFolder) -> dict[str, str]:
    info, env = folder.info, folder.info.environment
    git = env.get("git")
    revision = f"{git.get('revision')}{' with changes' if git.get('dirty') else ''}" if isinstance(git, dict) else ""
    versions = ", ".join(f"{k} {env.get(k)}" for k in ("fedkin", "python", "torch", "numpy"))
    return {
        "method": " ".join([info.method, *(f"{k}={v}" for k, v in info.options.items())]),
        "settings": _settings(info),
        "split": f"{info.prepared.get('split_hash')}, seed {info.seed}",
        "diverged": info.diverged or "",
        "evaluated": POINTS.get(str(info.prepared.get("eval_point")), ""),
        "model": f"{info.config.get('model')}, {info.prepared.get('parameters')} parameters",
        "sent": size(info.bytes),
        "time": f"{_time(info) if math.isnan(info.wall) else spent(info.wall, info.times)} on {env.get('device')}",
        "begun": f"{info.created}, last changed {info.updated}",
        "began with": _began(info),
        "more rounds": "; ".join(f"{e['from']} to {e['to']}, on {e['at']}" for e in info.extended),
        "versions": f"{versions}, {env.get('platform')}",
        "source": f"{env.get('source')} (sha256 of FedKin's own modules)" if env.get("source") else "",
        "git": f"{revision} (of the working directory)" if revision else "",
        "malicious": _names(info, info.malicious),
        "judged": _judged(info),
        "removed": _by_round(info, folder.events(notes.WAS_REMOVED.kind)),
        "failures": _failures(info, folder.events(notes.HAS_FAILED.kind)),
        **_other_events(folder),
        "noted": "; ".join(f"{n['name']}: {n['about']}, {n['said']}" for n in _noted(folder)),
        "notes": "; ".join(map(str, (info.result or {}).get("remarks") or [])),
        "error": info.error or "",
        "folder": str(info.path),
    }


def _began(info: RunInfo) -> str:
    """The run that it started from, and what was taken over."""
    start = info.began_with
    if not start:
        return ""
    said = [f"{words}: {'; '.join(start[k])}" for words, k in (("taken over", "taken"), ("not", "left")) if start[k]]
    return ". ".join([f"{start['run']} ({start['method']}, after round {start['round']})", *said, *start["notes"]])


def _settings(info: RunInfo) -> str:
    """What was asked for, then the defaults by what they are about, a line each; not those that change nothing."""
    skipped = {"method", "options", "runs_dir", "checkpoint_every"}
    skipped |= {*ONLY_UNDER_ATTACK} if info.attack == "none" else set()
    skipped |= {name for name, other in ONLY_WITH.items() if info.config.get(other) is None}
    known = {k: v for k, v in info.config.items() if k not in skipped and v is not None}
    asked = [f"{k}={v}" for k, v in known.items() if k in info.asked]
    groups = {d.name: d.group for d in describe(Config)}
    rest = {k: v for k, v in known.items() if k not in info.asked and (k, v) not in LATER.items()}
    by = {group: [f"{k}={v}" for k, v in rest.items() if groups.get(k) == group] for group in GROUPS}
    lines = [f"asked for: {' '.join(asked)}"] if asked else []
    lines += [f"{group[:1].lower()}{group[1:]}: {' '.join(own)}" for group, own in by.items() if own]
    return f"\n{' ' * 12}".join(lines)


def _names(info: RunInfo, clients: list[int]) -> str:
    return ", ".join(info.names[c] for c in clients[:MOST_CLIENTS] if 0 <= c < len(info.names))


def _by_round(info: RunInfo, events: list[dict[str, Any]]) -> str:
    rounds: dict[tuple[int, str], list[int]] = {}
    for event in events:
        why = "" if event["reason"] == f"by {info.method}" else f" ({event['reason']})"
        rounds.setdefault((event["round"], why), []).append(event["client"])
    return "; ".join(f"round {r}: {_names(info, clients)}{why}" for (r, why), clients in rounds.items())


def _judged(info: RunInfo) -> str:
    """Of how many clients the last accuracy is, where not of all."""
    found = info.result or info.progress or {}
    judged, of, partly = (found.get(k) for k in ("judged", "judgeable", "partly_judged"))
    if not isinstance(judged, int) or not isinstance(of, int) or (judged >= of and not partly):
        return ""
    rounds = f"; in {partly} rounds not all answered, which are not compared for the best" if partly else ""
    return f"{judged} of {of} clients when last evaluated{rounds}"


def _failures(info: RunInfo, events: list[dict[str, Any]]) -> str:
    if not events:
        return ""
    first = events[0]
    return (
        f"{len(events)}; the first: {_names(info, [first['client']])} in round {first['round']}, "
        f"{first['phase']}: {first['reason']}"
    )


def _other_events(folder: RunFolder) -> dict[str, str]:
    """Whatever else happened to clients, and in how many rounds."""
    found = folder.table("events", columns=["client", "kind", "round"])
    counts: dict[str, dict[int, set[Any]]] = {}
    for client, kind, round in zip(found["client"], found["kind"], found["round"], strict=True):
        if (
            kind not in (notes.WAS_REMOVED.kind, notes.HAS_FAILED.kind)
            and isinstance(kind, str)
            and isinstance(client, int)
        ):
            counts.setdefault(kind, {}).setdefault(client, set()).add(round)
    out = {}
    for kind, by in list(counts.items())[:MOST_KINDS]:
        worst = sorted(by, key=lambda c: (-len(by[c]), c))
        each = [f"{name} {len(by[c])}" for c in worst[:MOST_CLIENTS] if (name := _names(folder.info, [c]))]
        out[kind.replace("_", " ")[:40]] = f"{', '.join(each)} rounds ({notes.event_of(kind).words})"
    return out


def _noted(folder: RunFolder) -> list[dict[str, Any]]:
    """What the method noted: under which names, in how many rounds, what it means, and a short one's last value."""
    found = folder.table("notes", columns=["round", "name"])
    rounds: dict[str, list[Any]] = {}
    for round, name in zip(found["round"], found["name"], strict=True):
        if isinstance(name, str):
            rounds.setdefault(name, []).append(round)
    out = []
    for name, when in list(rounds.items())[:MOST_KINDS]:
        value = folder.notes(name, when[-1])[-1][2]
        kind, said = notes.kind_of(name, value), f"in {len(set(when))} rounds"
        if kind.shape in ("number", "text") and (last := kind.read(value, len(folder.info.names))) is not None:
            said += f", the last {last:.4g}" if kind.shape == "number" else f", the last {last[:200]}"
        out.append({"name": name[:60], "about": kind.about, "rounds": len(set(when)), "said": said})
    return out


def _whole(folder: RunFolder) -> dict[str, Any]:
    return {**folder.to_dict(), "per_client": _each(folder), "noted": _noted(folder)}


def _each(folder: RunFolder) -> list[dict[str, Any]]:
    """Every client's numbers. The split of a deployment holds no samples: how many a site trains on follows from what
    it told when it joined, and is unknown where that cannot be read."""
    each = folder.per_client()
    if not folder.info.deployed:
        return each
    told = _told(folder)
    return [{**c, "train_samples": told.get(c["name"])} for c in each]


def _told(folder: RunFolder) -> dict[str, int]:
    """Training samples by site."""
    from fedkin.data.clients import split_sizes

    config = folder.info.config
    try:
        shares = float(config["test_share"]), float(config.get("validation_share") or 0.0)
        sites = loads(read_bytes(folder.path / SITES, MAX_JSON))
        return {str(s["site"]): split_sizes(s["samples"], s["tests"], *shares)[0] for s in sites}
    except (DataError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        return {}


def _clients(folder: RunFolder) -> Any:
    each, bad, metric = _each(folder), set(folder.info.malicious), folder.info.metric
    others = list(dict.fromkeys(name for c in each for name in c.get("metrics") or {}))
    numbers = (safe(metric.name), *map(safe, others), "loss", "test samples", "train samples")
    made = table(None, "client", *numbers, right=numbers)
    for c in each[:MOST_CLIENTS]:
        name = safe(str(c["name"]))
        made.add_row(
            f"[red]{name}*[/]" if c["client"] in bad else name,
            said(number(c["accuracy"]), metric.unit),
            *(said(number((c.get("metrics") or {}).get(name)), "") for name in others),
            percent(number(c["loss"])),
            str(c["test_samples"]),
            "?" if c["train_samples"] is None else str(c["train_samples"]),
        )
    more = [f"{len(each) - MOST_CLIENTS} more: --json"] if len(each) > MOST_CLIENTS else []
    made.caption = "; ".join([*(["* malicious"] if bad else []), *more]) or None
    return made


@command(
    "resume",
    """
    fedkin resume last
    fedkin resume fedcap-20261115-171502-a3f9
    fedkin resume last --rounds 200
    """,
    TRAIN,
)
def resume(
    run: Run,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", help="So many rounds in all, also of a finished run.")
    ] = None,
    runs_dir: RunsDir = None,
    sink: SinkFlags = None,
    plugin: Plugins = None,
    json: Json = False,
) -> None:
    """Continue a run after Ctrl-C, a crash or a power cut, or with more rounds.

    The run continues from the newest checkpoint that is undamaged, to the result that it would have had without the
    interruption, or with so many rounds from the start, bit for bit on a CPU. A finished run is only shown, unless it
    is to have more rounds. What follows the number of rounds (a cosine, the pulls of FedPKDA) cannot have more.
    """
    use_plugins(plugin)
    to = sinks_of(sink)
    folder = Catalogue(runs_dir).locate(run)
    if folder.info.status == "finished" and rounds in (None, folder.info.rounds_total):
        messages().print(f"{safe(folder.info.id)} is finished; nothing to do", soft_wrap=True)
        return print_json(_whole(folder)) if json else show_run(folder)

    load()
    from fedkin.cli.live import run_screen
    from fedkin.cli.outcome import present
    from fedkin.runs.sinks import make_sinks
    from fedkin.runs.start import resume as go_on

    with run_screen(messages()) as listener:
        how: dict[str, Any] = {"say": listener.say, "sinks": make_sinks(to), "rounds": rounds}
        result = go_on(folder, on_event=listener, signals=True, **how)
    present(result, json)
