"""`fedkin reproduce`: a paper's table, run again, its numbers beside ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedkin.cli.application import LOOK, Json, RunsDir, command
from fedkin.cli.console import messages, on_terminal, print_json, screen
from fedkin.cli.console import table as drawn
from fedkin.cli.extras import Budget, Devices, Jobs, Together, spread
from fedkin.cli.flags import seeds_of
from fedkin.cli.waiting import load
from fedkin.errors import UsageError
from fedkin.rounds.words import seconds

if TYPE_CHECKING:
    from rich.console import Console

    from fedkin.config import Config
    from fedkin.papers.plan import Estimate, Plan
    from fedkin.papers.published import Paper, Table
    from fedkin.papers.runner import Ledger, Session
    from fedkin.rounds import Event
    from fedkin.sweep.loaded import Data

MOST_REASONS = 8
TIMING = 15.0  # seconds after which no further kind of run is timed


@command(
    "reproduce",
    """
    fedkin reproduce
    fedkin reproduce fedcap table1 --plan
    fedkin reproduce fedcap table1 --rows CIFAR-10 --seeds 3 --budget 60
    fedkin reproduce c-pfl table6 --rows CIFAR-10 --markdown table6.md --html table6.html
    fedkin reproduce pfedcs --quick
    """,
    LOOK,
)
def reproduce(
    paper: Annotated[
        str | None,
        typer.Argument(metavar="[PAPER]", help="A paper by name, or claims, or natural (default: list them)."),
    ] = None,
    table: Annotated[
        str | None, typer.Argument(metavar="[TABLE,...]", help="One or several of its tables (default: all).")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="A,B,...", help="Only these rows, or groups of rows.")
    ] = None,
    cols: Annotated[
        str | None, typer.Option("--cols", metavar="A,B,...", help="Only these columns, or groups of them.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds", metavar="N|A,B,...", help="How many seeds, or a list of seeds. \\[default: 3; with --quick 1]"
        ),
    ] = None,
    budget: Budget = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say what would be run and how long it would take.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use far fewer rounds and samples; the numbers then mean nothing.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Run cells again that were run before.")] = False,
    together: Together = None,
    jobs: Jobs = 1,
    devices: Devices = None,
    save: Annotated[
        str | None, typer.Option("--save", metavar="DIR", help="Write the numbers to DIR/PAPER/TABLE.json.")
    ] = None,
    render: Annotated[
        bool,
        typer.Option(
            "--render", help="Write RESULTS.md and docs/natural.md from the numbers in results (or in --save DIR)."
        ),
    ] = False,
    markdown: Annotated[
        str | None, typer.Option("--markdown", metavar="FILE", help="Write the tables as Markdown.")
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the tables as one page of HTML.")
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32, tf32, bf16 or auto.")] = "auto",
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="DIR", help="The folder that holds data sets.")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Download data sets that are not here.")] = False,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            "--checkpoint-every",
            metavar="N",
            min=0,
            help="Save what is needed to resume a run every so many rounds, and its models; 0 means never.",
        ),
    ] = 0,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Run the experiments of a paper's table again and print our numbers beside the paper's.

    What was run before is not run again, and what was interrupted continues, so a table can be stopped and continued
    later. For a cell that cannot be run, the reason is printed. Without a paper, the papers and their tables are
    listed.
    """
    if render:
        return _render(save or "results")
    if paper is None:
        return _list(json)

    load()
    from fedkin.cli.paper_tables import show
    from fedkin.papers.plan import make_plan
    from fedkin.papers.runner import Ledger, open_runs
    from fedkin.sweep.loaded import Data

    if quick and save:
        raise UsageError("--quick numbers mean nothing and are not saved: leave out --quick or --save")
    found = _paper(paper)
    tables = [found.table(name) for name in _words(table)] or list(found.tables)
    chosen = _cells(tables, _words(rows), _words(cols))
    data, how = Data(data_dir, download), spread(together, jobs, devices, budget, device)
    where = {
        "checkpoint_every": checkpoint_every,
        "device": device,
        "precision": precision,
        "data_dir": data_dir,
        "runs_dir": runs_dir,
    }
    numbers = seeds_of(seeds or ("1" if quick else "3"), 0)
    made = make_plan(found, chosen, numbers, data, small=quick, settings=_checked(where))
    ledger = Ledger(runs_dir, data)
    todo = open_runs(made, ledger, again)
    estimate = _calibrated(todo, data, ledger, budget)
    facts = _plan_facts(made, todo, estimate, how)
    if not json or not plan:
        _say_plan(screen() if plan else messages(), made, todo, facts, data)
    if plan:
        return print_json({"plan": facts}) if json else None
    session = _run(made, ledger, data, len(todo), again=again, signals=checkpoint_every > 0, **how)
    show(session, facts, json, save, markdown, html)


def _paper(name: str) -> Paper:
    from fedkin.papers.published import load_file, load_paper

    return load_file(name) if name.endswith(".toml") else load_paper(name.lower().replace("_", "-"))


def _words(text: str | None) -> list[str]:
    """`A,B` as two words; a name that holds a comma is meant as a whole if it stands alone."""
    return [w.strip() for w in text.split(",") if w.strip()] if text else []


def _cells(tables: Sequence[Table], rows: list[str], cols: list[str]) -> list[tuple[Table, Any]]:
    """The chosen cells; with several tables, rows and columns need to fit one of them only."""
    chosen, errors = [], []
    for one in tables:
        try:
            chosen += [(one, c) for c in one.select(_whole(rows, one.rows), _whole(cols, one.columns))]
        except UsageError as error:
            errors.append(error)
    if errors and not chosen:
        raise errors[0]
    return chosen


def _whole(words: list[str], lines: Sequence[Any]) -> list[str]:
    joined = [", ".join(words)]
    return joined if words and any(line.matches(joined[0]) for line in lines) else words


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Refuses a device or a precision that is not there before anything is loaded."""
    from fedkin.config import make_config
    from fedkin.rounds import pick_device, pick_precision

    config = make_config(settings)
    pick_precision(config.precision, pick_device(config.device))
    return {k: v for k, v in settings.items() if v is not None}


# ------------------------------------------------------------ what there is


def _list(json: bool) -> None:
    from fedkin.papers.published import NAMES, load_paper

    papers = [load_paper(name) for name in NAMES]
    if json:
        return print_json(
            {
                "papers": [
                    {
                        "name": p.name,
                        "title": p.title,
                        "cite": p.cite,
                        "tables": [
                            {
                                "name": t.name,
                                "title": t.title,
                                "kind": t.kind,
                                "cells": len(t.cells),
                                "runnable": sum(not c.missing for c in t.cells),
                                "missing": dict(Counter(c.missing for c in t.cells if c.missing)),
                            }
                            for t in p.tables
                        ],
                    }
                    for p in papers
                ]
            }
        )
    right = ("cells", "can be run")
    for paper in papers:
        made = drawn(f"{paper.name}: {paper.title} ({paper.cite})", "table", "what it shows", *right, right=right)
        for t in paper.tables:
            able = sum(not c.missing for c in t.cells)
            made.add_row(f"[bold]{t.name}[/]", escape(t.title), str(len(t.cells)), str(able))
        screen().print(made)
    screen().print(
        "[dim]can be run: method, rule and data set are known here; "
        "fedkin reproduce PAPER TABLE --plan: what is missing, and how long it takes[/]"
    )


def _render(folder: str) -> None:
    from fedkin.papers.result_files import refresh
    from fedkin.papers.results_page import write_natural_page, write_results_page

    if not Path(folder).is_dir():
        raise UsageError(f"{folder}: no such folder; results are put there by fedkin reproduce ... --save {folder}")
    paths = refresh(folder)
    beside = Path(folder).resolve().parent
    docs = beside / "docs" if (beside / "docs").is_dir() else beside
    pages = (write_results_page(folder, beside / "RESULTS.md"), write_natural_page(folder, docs / "natural.md"))
    written = " and ".join(escape(str(page)) for page in pages)
    messages().print(f"{len(paths)} files in {escape(folder)} brought up to date, {written} written")


# ------------------------------------------------------------ the plan


def _calibrated(todo: Sequence[Config], data: Data, ledger: Ledger, budget: float | None) -> Estimate:
    from fedkin.papers.plan import calibrate
    from fedkin.papers.runner import device_name
    from fedkin.rounds import pick_device

    out = messages()
    here = device_name(str(pick_device(todo[0].device))) if todo else ""
    known = [o for o in ledger.outcomes if o.device == here]
    limit = TIMING if budget is None else min(TIMING, 6.0 * budget)
    with out.status("timing a round of each kind of run ...") as status:
        return calibrate(todo, data, known, limit, lambda c: status.update(f"timing {escape(_name(c))} ..."))


def _plan_facts(plan: Plan, todo: Sequence[Config], estimate: Estimate, how: Mapping[str, Any]) -> dict[str, Any]:
    """`how`: see `spread`."""
    from fedkin.papers.plan import kind_of
    from fedkin.papers.runner import device_name
    from fedkin.rounds import pick_device
    from fedkin.sweep.trainings import by_training

    trainings = [todo[training[0]] for training in by_training(todo)]
    tables = []
    for one in dict.fromkeys(p.table for p in plan.cells):
        mine = [p for p in plan.cells if p.table is one]
        tables.append(
            {
                "table": one.name,
                "title": one.title,
                "cells": len(mine),
                "runnable": sum(not p.why_not for p in mine),
                "not_runnable": dict(Counter(p.why_not for p in mine if p.why_not).most_common()),
            }
        )
    first = next((c for p in plan.runnable for v in p.runs for c in v), None)
    return {
        "paper": plan.paper.name,
        "quick": plan.quick,
        "seeds": list(plan.seeds),
        "tables": tables,
        "runs": len(plan.runs),
        "run_before": len(plan.runs) - len(todo),
        "trainings": len(trainings),
        "seconds": round(estimate.seconds(trainings), 1),
        **{k: how[k] for k in ("budget", "together", "jobs")},
        "rough": any(kind_of(c) in estimate.rough for c in todo),
        "device": device_name(str(pick_device(first.device))) if first else "",
        "todo": [{"run": _name(c), "identity": c.identity()} for c in todo],
    }


def _say_plan(out: Console, plan: Plan, todo: Sequence[Config], facts: dict[str, Any], data: Data) -> None:
    for one in facts["tables"]:
        out.print(
            f"[bold]{escape(plan.paper.name)} {one['table']}[/]  {escape(one['title'])}: "
            f"{one['runnable']} of {one['cells']} cells can be run"
        )
        reasons = list(one["not_runnable"].items())
        for why, count in reasons[:MOST_REASONS]:
            out.print(f"  [yellow]{count} cannot:[/] {escape(why)}", soft_wrap=True)
        if len(reasons) > MOST_REASONS:
            rest = sum(count for _, count in reasons[MOST_REASONS:])
            out.print(f"  [yellow]{rest} more cannot[/], for {len(reasons) - MOST_REASONS} other reasons")
    for name, why in data.missing.items():
        out.print(
            f"  [dim]{escape(name)}: {escape(why.removeprefix(name + ': '))} (--data-dir, FEDKIN_DATA, --download)[/]",
            soft_wrap=True,
        )
    if plan.quick:
        stand_in = "; digits stand in for data that are not here" if data.missing else ""
        out.print(f"[yellow]quick: far fewer rounds and samples{stand_in}; no number means anything[/]")
    if not todo:
        out.print(f"{facts['runs']} runs, all done before" if facts["runs"] else "nothing can be run")
        return
    before = f", {facts['run_before']} of them done before" if facts["run_before"] else ""
    trained = f" ({facts['trainings']} trainings)" if facts["trainings"] < len(todo) else ""
    guess = ", partly a guess" if facts["rough"] else ""
    shared = [f"{facts['together']} at a time"] * (facts["together"] > 1)
    shared += [f"{facts['jobs']} processes"] * (facts["jobs"] > 1)
    if shared:
        guess += f" one by one; less with {' and '.join(shared)}"
    known = f"about [bold]{seconds(facts['seconds'])}[/] on {escape(facts['device'])}{guess}"
    takes = known if facts["seconds"] else "nothing could be timed"
    out.print(f"{facts['runs']} runs{before}; {len(todo)} to go{trained}: {takes}")
    if facts["budget"] is not None and facts["budget"] < facts["seconds"]:
        out.print(f"[yellow]the budget is {seconds(facts['budget'])}: the rest is left for another time[/]")


def _name(config: Config) -> str:
    attack = "" if config.attack == "none" else f" under {config.attack}"
    rule = "" if config.rule == "mean" else f" by {config.rule}"
    options = "".join(f" {k}={v}" for k, v in config.options.items())
    part = "" if config.participation == 1 else f", participation {config.participation:g}"
    return (
        f"{config.method}{options}{attack}{rule} on {config.data}, {config.partition}{part}, lr {config.lr:g}, "
        f"seed {config.seed}"
    )


# ------------------------------------------------------------ running


def _run(plan: Plan, ledger: Ledger, data: Data, todo: int, **how: Any) -> Session:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from fedkin.papers.measures import Measures
    from fedkin.papers.runner import reproduce as carry_out
    from fedkin.rounds import RoundRecord

    out, count = messages(), 0
    bar = Progress(
        SpinnerColumn(),
        TextColumn("[bold cyan]runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
        console=out,
        transient=True,
        disable=not on_terminal(out) or not todo,
    )
    task = bar.add_task("runs", total=todo, now="")

    def hear(config: Config, event: Event) -> None:
        if isinstance(event, RoundRecord):
            now = f"[dim]{escape(_name(config))}, round {event.round}/{config.rounds}: {event.accuracy.micro:.2f}[/]"
            bar.update(task, now=now)

    def finished(config: Config, found: Measures | Exception) -> None:
        nonlocal count
        count += 1
        if isinstance(found, Measures):
            last = found.points[-1]
            out.print(
                f"[dim]{count}/{todo}[/] {escape(_name(config))}: {last.micro:.2f} in {seconds(found.wall)}",
                soft_wrap=True,
            )
        else:
            out.print(
                f"[dim]{count}/{todo}[/] [bold red]{escape(_name(config))} failed:[/] {escape(str(found))}",
                soft_wrap=True,
            )
        bar.update(task, completed=count)

    def say(line: str) -> None:
        out.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)

    with bar:
        return carry_out(plan, ledger, data, hear=hear, finished=finished, say=say, **how)
