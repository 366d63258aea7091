"""`fedkin compare`: a grid of runs and one table, mean and spread over seeds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedkin.cli.application import TRAIN, Json, Sets, command, everything
from fedkin.cli.console import complain, messages, print_json, screen
from fedkin.cli.extras import Budget, Devices, Jobs, Plugins, SinkFlags, Together, sinks_of, spread, use_plugins
from fedkin.cli.flags import grid_configs
from fedkin.cli.names import methods_and_files
from fedkin.config import POINTS
from fedkin.errors import UsageError, unknown

METRIC_NAMES = "macro, micro, worst-decile, best-macro, best-micro, best-worst-decile"


@command(
    "compare",
    """
    fedkin compare fedavg ditto fedper --data cifar10 --clients 20 --partition pathological:2 --seeds 3
    fedkin compare fedprox ditto --set fedprox.mu=0.1 --grid ditto.lam=0.1,1 --baseline fedprox
    fedkin compare fedavg fedper --attack none,sf,lie:z=0.5 --rule mean,median --malicious 0.3
    fedkin compare fedper ditto --grid lr=0.01,0.1 --grid ditto.lam=0.1,1 --validation-share 0.2 --select val
    fedkin compare sweep.toml --markdown table.md --latex table.tex --csv table.csv
    """,
    TRAIN,
    settings=everything,
)
def compare(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="Methods by name, and TOML files with settings and grids.",
            autocompletion=methods_and_files,
        ),
    ],
    settings: dict[str, Any],
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="N|A,B,...", help="How many seeds, beginning with --seed, or a list of seeds."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="NAME=A,B,...",
            help="Several values of a setting or of a method's option; can be repeated.",
        ),
    ] = None,
    set_: Sets = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="METHOD",
            help="Test every other method against this one (Wilcoxon's signed-rank test).",
        ),
    ] = None,
    metric: Annotated[
        str,
        typer.Option("--metric", metavar="NAME", help=f"What the cells show where conditions vary: {METRIC_NAMES}."),
    ] = "macro",
    select: Annotated[
        str | None,
        typer.Option(
            "--select",
            metavar="val|test",
            help="Show of each method only the cell that is best over the seeds: on validation samples (val; needs "
            "--validation-share), or on test data, which the table then says.",
        ),
    ] = None,
    together: Together = None,
    jobs: Jobs = 1,
    devices: Devices = None,
    budget: Budget = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run everything again, also the runs that are finished.")
    ] = False,
    markdown: Annotated[
        str | None, typer.Option("--markdown", metavar="FILE", help="Write the table as Markdown.")
    ] = None,
    latex: Annotated[
        str | None, typer.Option("--latex", metavar="FILE", help="Write the table as LaTeX (booktabs).")
    ] = None,
    csv: Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write every number as CSV.")] = None,
    sink: SinkFlags = None,
    plugin: Plugins = None,
    json: Json = False,
) -> None:
    """Train several methods under the same conditions, and print one table: the mean ± standard deviation over seeds.

    All methods are evaluated at the same point: with the clients' models as received from the server, unless
    --eval-point says otherwise. With after_local all of them are evaluated after local training; with auto each method
    is evaluated at the point that it names, and every row says which.

    Every run has its folder. Runs that are finished are not done again, and runs that were interrupted continue: after
    Ctrl-C, give the same command again. A run that fails is shown as failed and does not stop the others. A run that
    diverged is marked, with the reason below the table. The exit status is 1 if a run failed, or if one diverged
    without an attack, and 2 if all were refused before anything was trained.

    --devices spreads the runs over several devices, --jobs over several processes on one, and --together says how many
    of them train at once in each process. The results stay the same.

    --set NAME=VALUE reaches every method that has the option; --set METHOD.NAME=VALUE reaches one.

    Here --attack and --rule take several names with commas between, each with its own options. For example, --attack
    none,backdoor:target=1,share=0.5,ipm names three attacks: share=0.5 is an option, as it has no name and colon before
    it. Every method runs under every attack and every rule, with every value of --grid. A setting that would change
    nothing in a run is left out there (a method that does not average by a rule runs once), and a setting that changes
    no run at all is refused.

    A TOML file can say the same in a table \\[grid], and adds single cells with \\[\\[cell]].
    """
    use_plugins(plugin)
    configs = grid_configs(methods, settings, set_ or [], seeds, grid or [], _remark)
    sinks = sinks_of(sink)

    from fedkin.cli.grid import run_grid
    from fedkin.runs.origin import name_of
    from fedkin.sweep.selection import check_way
    from fedkin.sweep.statistics import METRICS

    written = [path for path in (markdown, latex, csv) if path is not None]
    if len(set(written)) < len(written):
        raise UsageError("--markdown, --latex and --csv need files of their own")
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    if baseline is not None and baseline.split()[0] not in {c.method for c in configs}:
        raise unknown("baseline", baseline, {c.method for c in configs})
    check_way(select, configs)
    if begins := ", ".join(dict.fromkeys(filter(None, map(name_of, configs)))):
        messages().print(f"runs begin with {escape(begins)}", soft_wrap=True)
    how = spread(together, jobs, devices, budget, configs[0].device)
    found = run_grid(
        configs, title_of(configs), fresh=fresh, sinks=sinks, baseline=baseline, metric=metric, select=select, **how
    )
    skipped = sum(c.state == "skipped" for c in found.cells)
    if skipped:
        messages().print(
            f"{skipped} of {len(found.cells)} runs were finished before and are only read (--fresh runs them again)",
            soft_wrap=True,
        )
    if found.results:
        _write(found, markdown, latex, csv)
    show(found, json, closing=lambda grid: _next(grid, runs_dir=settings.get("runs_dir")))


NAMED = 4  # runs that are named one by one in a command to copy


def _next(found: Any, runs_dir: str | None) -> list[str]:
    """What to look at now."""
    runs = [c.run for c in found.cells if c.run is not None]
    where = f" --runs-dir {shlex.quote(runs_dir)}" if runs_dir is not None else ""
    which = " ".join(map(shlex.quote, runs)) if len(runs) <= NAMED else "all"
    return [
        f"[dim]next:[/] fedkin report {escape(which + where)}  [dim](figures)[/]\n"
        f"[dim]next:[/] fedkin web{escape(where)}  [dim](all runs in the browser)[/]"
    ]


def _points(configs: Sequence[Any]) -> str:
    words = {**POINTS, "auto": "each method at its own point"}
    return " | ".join(dict.fromkeys(words[c.eval_point] for c in configs))


def _remark(sentence: str) -> None:
    messages().print(f"[yellow]{escape(sentence)}[/]", soft_wrap=True)


def title_of(configs: Sequence[Any]) -> str:
    """What all runs of a grid have in common, and over what they vary."""

    def each(key: str) -> str:
        return " | ".join(dict.fromkeys(str(getattr(c, key)) for c in configs))

    first = configs[0]
    parts = [
        each("data"),
        f"{each('clients').replace('None', 'all')} clients",
        each("partition"),
        f"{each('rounds')} rounds",
        f"evaluated {_points(configs)}",
    ]
    if each("attack") != "none":
        hostile = [c for c in configs if c.attack != "none"]
        shares = dict.fromkeys(f"{100 * c.malicious:g} %" for c in hostile)
        parts += [f"attack {each('attack')}", f"{' | '.join(shares)} malicious"]
    if each("rule") != "mean":
        parts.append(f"rule {each('rule')}")
    return " · ".join([*parts, *([f"lr {each('lr')}"] if len({c.lr for c in configs}) > 1 else [])]) or first.method


def _write(found: Any, markdown: str | None, latex: str | None, csv: str | None) -> None:
    from fedkin.report.comparison import Table

    made = Table(found.groups(), found.baseline, found.metric)
    for path, write in ((markdown, made.to_markdown), (latex, made.to_latex), (csv, made.to_csv)):
        if path is not None:
            write(path)
            messages().print(f"written: {escape(str(Path(path)))}", soft_wrap=True)


def show(
    found: Any,
    json: bool,
    closing: Callable[[Any], list[str]] | None = None,
    go_on: str = "the same command goes on from there",
) -> None:
    """The table (or the JSON), then how it ended; `go_on`: what to do with what was stopped."""
    from fedkin.cli.grid import summary_table

    if json:
        print_json(found.to_dict())
    elif found.results:
        out = screen()
        out.print(summary_table(found))
        for sentence in closing(found) if closing and found.signal is None else []:
            out.print(sentence if sentence.startswith("  ") else f"\n{sentence}", soft_wrap="[dim]next:[/]" in sentence)
    if found.signal is not None:
        left = sum(c.state in ("interrupted", "waiting") for c in found.cells)
        name = "Ctrl-C" if found.signal == 2 else "SIGTERM"
        complain(f"stopped by {name} with {left} of {len(found.cells)} runs to do; {go_on}")
        raise typer.Exit(128 + found.signal)
    waiting = sum(c.state == "waiting" for c in found.cells)
    if waiting:
        messages().print(f"[yellow]the budget is used up; {waiting} runs are left: the same command goes on[/]")
    if found.failed:
        complain(f"{len(found.failed)} of {len(found.cells)} runs failed")
    if found.diverged:
        complain(f"{len(found.diverged)} of {len(found.cells)} runs diverged with everybody honest")
    if found.failed or found.diverged:
        raise typer.Exit(2 if found.refused else 1)
